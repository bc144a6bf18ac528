"""Graders of chapter 01: memory of a single GPU.

single_gpu_memory.py    the MFU of a log, states, what an MLP saves, a SwiGLU that saves less
fitting.py              what fits into a memory
tracker.py              a memory tracker, held to PyTorch's
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch01.broken import check_logged_run
from course_lib.checks.ch01.fitting import check_first_failure, check_largest_micro_batch
from course_lib.checks.ch01.single_gpu_memory import check_mfu, check_mlp_kept_bytes, check_state_bytes, check_swiglu
from course_lib.checks.ch01.tracker import check_tracker
