"""Graders of chapter 07: context parallel.

context_parallel.py     positions, merge of a softmax, a step's tile, bytes
cp_ranks.py             loss of a shard, tokens for heads
ring_build.py           ring attention in four steps
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch07.broken import check_zigzag_step
from course_lib.checks.ch07.context_parallel import check_bytes, check_merge, check_positions, check_tile
from course_lib.checks.ch07.cp_ranks import check_heads_for_tokens, check_loss
from course_lib.checks.ch07.ring_build import check_ring
