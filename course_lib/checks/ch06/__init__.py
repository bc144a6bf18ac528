"""Graders of chapter 06: sequence parallel.

sequence_parallel.py    shapes of regions, bytes kept, the cheapest way that fits
sp_gradients.py         gather_in backward, the forgotten sum, half a block
sp_build.py             TP + SP of a Llama from an empty cell
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch06.broken import check_hooked_sequence
from course_lib.checks.ch06.sequence_parallel import check_choice, check_kept, check_shape
from course_lib.checks.ch06.sp_build import check_sequence_parallel
from course_lib.checks.ch06.sp_gradients import check_gather_in, check_mlp_block, check_sum_of_my_tokens
