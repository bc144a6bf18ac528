"""Graders of chapter 02: techniques on a single GPU.

techniques.py           accumulated gradients, loss scaling, two halves of a softmax
activations.py          recomputation, attention over blocks
ladder.py               its arithmetic
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch02.activations import check_recompute, check_windowed_attention
from course_lib.checks.ch02.broken import check_sometimes_block
from course_lib.checks.ch02.ladder import check_first_fit, check_lora_bytes, check_merged_weight, check_utilisation
from course_lib.checks.ch02.techniques import check_accumulate, check_merge, check_scaled_step
