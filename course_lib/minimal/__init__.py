"""The smallest whole program of each technique that is right: what the lessons show and run.

precision.py   FP32 master weights, loss scaling, stochastic rounding
lora.py        a frozen linear layer and two thin matrices beside it
quantize.py    8-bit moments of Adam, and frozen weights in 4 bits, in blocks
zero.py        ZeRO-1, ZeRO-2 and ZeRO-3, and the data parallelism that they start from
compare.py     one line each: the difference from one process, bytes sent, bytes held
tiny_training.py   one line each, on one device: what a trainer moves, holds and learns
predict.py     a learner's prediction, kept and compared with the measurement
"""

from course_lib.minimal.compare import compare_with_one_process, held_bytes, memory_of_a_step, sent_bytes
from course_lib.minimal.predict import predict
