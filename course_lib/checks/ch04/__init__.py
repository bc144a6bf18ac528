"""Graders of chapter 04: ZeRO.

zero.py                 shards, stage 1, bytes held and sent
zero_units.py           gather, use, free
"""

from course_lib.checks.ch04.zero import (
    check_clip_shards,
    check_flat_shard,
    check_held_bytes,
    check_sent_bytes,
    check_zero1_step,
)
from course_lib.checks.ch04.zero_units import check_gather_use_free
