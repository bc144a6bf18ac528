"""The smallest whole program of each technique that is right: what the lessons show and run.

data.py        data parallelism: one message per parameter, buckets, overlap with backward
zero.py        ZeRO-1, ZeRO-2 and ZeRO-3
compare.py     one line each: the difference from one process, bytes sent, bytes held, a trace
predict.py     a learner's prediction, kept and compared with the measurement
"""

from course_lib.minimal.compare import (
    compare_with_one_process,
    held_bytes,
    memory_of_a_step,
    sent_bytes,
    sent_messages,
    started_in_backward,
    trace_of_a_step,
)
from course_lib.minimal.predict import predict
