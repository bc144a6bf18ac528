"""Things to play with in a notebook. Behind each stands a pure function from choices to a record.

memory_explorer       what training needs, against GPUs; measured on a small model at the press of a button
collective_explorer   modelled time of a collective
precision_explorer    what each number format makes of a weight and its update
dp_explorer           batch, step time and exposed communication of data parallelism
zero_explorer         what each stage of ZeRO leaves on a GPU, what it sends, what offload moves; measured on a toy
context_explorer      context parallelism: memory by length, and one layer's attention by each method
tensor_explorer       tensor and sequence parallelism: memory, and the share of communication; measured on a toy
pipeline_explorer     schedules of a pipeline on the clock: chart, bubble by both definitions, activations kept alive
pipeline_puzzle       place the blocks of a pipeline by hand; a checker answers
expert_explorer       experts, their load and drops, and the bytes within and between nodes
five_d_explorer       a whole layout: who holds what, memory, bytes by axis, modelled step; measured on a toy
"""

try:
    import ipywidgets
except ImportError as error:
    raise ImportError(
        "course_lib.widgets needs ipywidgets, which is not installed; run: pip install 'ipywidgets>=7.7.1,<9' "
        "(everything else of course_lib works without it)"
    ) from error

from course_lib.widgets.collectives import collective_explorer
from course_lib.widgets.context import context_explorer
from course_lib.widgets.data_parallel import dp_explorer
from course_lib.widgets.experts import expert_explorer
from course_lib.widgets.five_d import five_d_explorer
from course_lib.widgets.memory import memory_explorer
from course_lib.widgets.pipeline import pipeline_explorer
from course_lib.widgets.pipeline_puzzle import pipeline_puzzle
from course_lib.widgets.precision import precision_explorer
from course_lib.widgets.tensor import tensor_explorer
from course_lib.widgets.zero import zero_explorer

__all__ = [
    "collective_explorer",
    "context_explorer",
    "dp_explorer",
    "expert_explorer",
    "five_d_explorer",
    "memory_explorer",
    "pipeline_explorer",
    "pipeline_puzzle",
    "precision_explorer",
    "tensor_explorer",
    "zero_explorer",
]
