"""Graders of chapter 11: finding a configuration.

choose.py   days, GPUs for a deadline, yield of a planner's advice, a margin, a choice under a limit it does not know
broken.py   a broken program to find the bug of
"""

from course_lib.checks.ch11.broken import check_batch_plan
from course_lib.checks.ch11.choose import check_choose, check_deadline, check_estimate, check_margin, check_yield
