"""Graders of chapter 04: ZeRO.

zero.py                 bytes held and sent, clipping on shards
zero_build.py           trainers: ZeRO-2 with buckets, ZeRO-3 from an empty cell
zero_units.py           gather, use, free
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch04.broken import check_clipping_zero
from course_lib.checks.ch04.zero import check_clip_shards, check_held_bytes, check_sent_bytes
from course_lib.checks.ch04.zero_build import check_zero2_buckets, check_zero3
from course_lib.checks.ch04.zero_units import check_gather_use_free
