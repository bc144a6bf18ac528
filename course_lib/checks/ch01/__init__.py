"""Graders of chapter 01: memory of a single GPU.

single_gpu_memory.py    values, messages, ranks
fitting.py              what fits into a memory
"""

from course_lib.checks.ch01.fitting import check_first_failure, check_largest_micro_batch
from course_lib.checks.ch01.single_gpu_memory import (
    check_count_parameters,
    check_mlp_kept_bytes,
    check_state_bytes,
    check_swiglu,
)
