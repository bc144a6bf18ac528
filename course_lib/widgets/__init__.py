"""Things to play with in a notebook. Behind each stands a pure function from choices to a record.

parts.py            the pieces that every explorer is made of
collectives.py      message, ranks, link, and the time they take
memory.py           a model, how it is trained, and the GPUs that hold it
precision.py        what a format makes of a weight and of an update
data_parallel.py    batch, step time, and communication left uncovered
zero.py             stages, offload and precision: what a GPU holds and sends
tensor.py           tp, SP and links: memory, and the share of communication
context.py          sequence, cp and placement: memory, and one layer's attention by each method
pipeline.py         schedule, ranks, micro-batches, times: the chart, its bubble, what is kept alive
pipeline_puzzle.py  place the blocks of a pipeline by hand; a checker answers
experts.py          experts, skew and nodes: load, drops, bytes within and between nodes
plan.py             a job: ranked layouts, their memory and speed, the best one as a file
watch.py            a run watched from its logs, while it trains and after it
five_d.py           a whole layout: who holds what, memory, bytes by axis, modelled step; a toy measured
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
from course_lib.widgets.plan import plan_explorer
from course_lib.widgets.precision import precision_explorer
from course_lib.widgets.tensor import tensor_explorer
from course_lib.widgets.watch import watch
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
    "plan_explorer",
    "precision_explorer",
    "tensor_explorer",
    "watch",
    "zero_explorer",
]  # fmt: skip
