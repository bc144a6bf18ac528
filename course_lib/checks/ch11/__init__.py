"""Graders of chapter 11: finding a configuration.

estimates.py   tokens per second and days, GPUs for a deadline
choose.py      yield of a planner's advice, a margin for memory, a choice under a limit that the planner does not know
broken.py      a broken program to find the bug of
"""

from course_lib.checks.ch11.broken import check_batch_plan
from course_lib.checks.ch11.choose import check_choose, check_margin, check_yield
from course_lib.checks.ch11.estimates import check_deadline, check_estimate
