"""Graders of chapter 13: inside a GPU.

kernels.py      bytes of a product, what limits a kernel, a norm as a kernel, the order of tiles
flash_build.py  FlashAttention's forward pass from an empty cell
broken.py       a broken program to find the bug of
"""

from course_lib.checks.ch13.broken import check_fused_loss
from course_lib.checks.ch13.flash_build import check_flash
from course_lib.checks.ch13.kernels import check_limit, check_order, check_product_bytes, check_rms_norm
