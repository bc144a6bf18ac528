"""Graders of chapter 03: data parallel.

data_parallel.py        sizes, averages, buckets
dp_hooks.py             hooks, accumulation under DDP
ddp_build.py            DDP from an empty cell
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch03.broken import check_row_trainer
from course_lib.checks.ch03.data_parallel import (
    check_accumulation,
    check_average_and_clip,
    check_average_by_tokens,
    check_buckets,
)
from course_lib.checks.ch03.ddp_build import check_ddp
from course_lib.checks.ch03.dp_hooks import check_accumulate, check_overlap
