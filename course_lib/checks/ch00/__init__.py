"""Graders of chapter 00: ranks and collectives.

ranks.py                values, messages, ranks
ring_build.py           latency or bandwidth; a ring all-reduce from an empty cell
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch00.broken import check_summary
from course_lib.checks.ch00.ranks import (
    check_all_reduce_by_doubling,
    check_all_reduce_in_two_levels,
    check_mean_of_unequal_shares,
    check_ring_all_gather,
    check_shift,
    check_tree_broadcast,
)
from course_lib.checks.ch00.ring_build import check_crossover_bytes, check_faster_all_reduce, check_ring_all_reduce
