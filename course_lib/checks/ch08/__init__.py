"""Graders of chapter 08: pipeline parallel.

pipeline_formulas.py    shares of a bubble, layers kept, layers for each stage
pipeline_schedules.py   1F1B with a limit of memory, a shorter schedule
pipeline_build.py       1F1B on ranks, from an empty cell
pipeline_ranks.py       backward in two halves, messages both ways
nccl_order.py           would messages that ran on gloo also run on NCCL
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch08.broken import check_afab
from course_lib.checks.ch08.pipeline_build import check_pipeline
from course_lib.checks.ch08.pipeline_formulas import check_bubble, check_layers, check_layers_kept
from course_lib.checks.ch08.pipeline_ranks import check_exchange, check_split_backward
from course_lib.checks.ch08.pipeline_schedules import check_limited, check_shorter
