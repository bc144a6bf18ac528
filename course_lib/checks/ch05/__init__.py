"""Graders of chapter 05: tensor parallel.

tensor_parallel.py      heads, share of communication, a row layer
tp_gradients.py         a conjugate pair, a column backward, a loss from pieces
"""

from course_lib.checks.ch05.tensor_parallel import check_heads, check_row, check_share
from course_lib.checks.ch05.tp_gradients import check_column_backward, check_copy_in, check_sum_out, check_vocab_loss
