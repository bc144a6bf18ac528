"""Graders of chapter 09: expert parallel.

routing.py              router, dispatch, combine, capacity, balance
expert_parallel.py      bytes of a layer, whose gradients are summed
"""

from course_lib.checks.ch09.expert_parallel import check_sent_bytes, check_sum_gradients
from course_lib.checks.ch09.routing import check_bias_step, check_combine, check_dispatch, check_keep, check_route
