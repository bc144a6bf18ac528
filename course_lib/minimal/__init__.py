"""The smallest whole program of each technique that is right: what the lessons show and run.

zero.py        ZeRO-1, ZeRO-2 and ZeRO-3, and the data parallelism that they start from
memory.py      a tracker of storages, what autograd saves, and the formulas that predict both
peaks.py       one line each: the peak of a step by PyTorch's tracker, by kind, and by a profile
compare.py     one line each: the difference from one process, bytes sent, bytes held
predict.py     a learner's prediction, kept and compared with the measurement
"""

from course_lib.minimal.compare import compare_with_one_process, held_bytes, memory_of_a_step, sent_bytes
from course_lib.minimal.predict import predict
