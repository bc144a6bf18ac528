"""Which bytes: every collective that a rank calls in one training step, listed before anything runs.

step.py          calls, sent: everything, by axis; stage_calls: one micro-batch on one stage
data.py          gradients, and parameters with ZeRO
tensor.py        tensor and sequence parallelism
context.py       attention over context-parallel ranks
experts.py       rows to experts, expected or of real choices; odds of uniform ones
routing.py       rows and bytes of one layer with experts, from rank to rank, within and between nodes
collectives.py   the bytes of one collective, and of a list of calls
"""

from course_lib.traffic.collectives import Call, by_collective, call_counts, ring_all_reduce_bytes, sent_bytes
from course_lib.traffic.context import attention_calls
from course_lib.traffic.step import calls, sent, stage_calls
