"""Graders of chapter 12: on a cluster.

ranks.py   the interval between checkpoints, lost work, the batch with fewer ranks, the slow rank found by the ranks
logs.py    what share of a job's time was kept, and where two runs begin to differ
broken.py  a broken program to find the bug of
capstone.py  a killed run taken up by two ranks, and its report
"""

from course_lib.checks.ch12.broken import check_resumable
from course_lib.checks.ch12.capstone import check_capstone
from course_lib.checks.ch12.logs import check_disagreement, check_goodput
from course_lib.checks.ch12.ranks import check_fewer_ranks, check_interval, check_restart, check_slow_rank
