"""Graders of chapter 05: tensor parallel.

tensor_parallel.py      heads, share of communication, a row layer
tp_gradients.py         gathered features, a column backward, a loss from pieces
tensor_build.py         a tensor-parallel Llama
broken.py               a broken program to find the bug of
"""

from course_lib.checks.ch05.broken import check_lora_tensor
from course_lib.checks.ch05.tensor_build import check_tensor_parallel
from course_lib.checks.ch05.tensor_parallel import check_heads, check_row, check_share
from course_lib.checks.ch05.tp_gradients import check_column_backward, check_gather_features, check_vocab_loss
