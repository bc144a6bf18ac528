"""Graders of chapter 13: inside a GPU, eight bits.

kernels.py      bytes of a product, what limits a kernel, a norm as a kernel, the order of tiles, FlashAttention
broken.py       a broken program to find the bug of
eight_bits.py   a code for a number, blocks for three products, sums over ranks in 8 bits
saved_scale.py  a second broken program: a saved input, and the scale of another
"""

from course_lib.checks.ch13.broken import check_fused_loss
from course_lib.checks.ch13.eight_bits import check_code, check_reduce_scatter_8, check_three_products
from course_lib.checks.ch13.kernels import check_flash, check_limit, check_order, check_product_bytes, check_rms_norm
from course_lib.checks.ch13.saved_scale import check_eight_bit_layer
