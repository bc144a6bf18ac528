"""Graders of chapter 10: all at once.

five_d.py               groups, whose gradient, a pipeline or ZeRO-3, what fits
five_d_ranks.py         a combination fixed, the norm of a gradient
choice.py               a layout chosen for a job, against a search
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch10.broken import check_data_and_tensor
from course_lib.checks.ch10.choice import check_choice
from course_lib.checks.ch10.five_d import check_groups, check_pp_and_zero3, check_smallest_cut, check_summed_over
from course_lib.checks.ch10.five_d_ranks import check_combined_sums, check_norm
