"""Graders of chapter 09: expert parallelism.

moe.py           a router, a balancing step, what a capacity drops, bytes of a layer, whose gradients are summed
expert_build.py  a layer of experts on ranks, from an empty cell
broken.py        a broken program to find the bug of
"""

from course_lib.checks.ch09.broken import check_drawn
from course_lib.checks.ch09.expert_build import check_layer
from course_lib.checks.ch09.moe import check_bias_step, check_keep, check_route, check_sent_bytes, check_sum_gradients
