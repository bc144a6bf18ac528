"""Graders of chapter 13: inside a GPU, eight bits.

eight_bits.py    a code for a number, blocks for three products, sums over ranks in 8 bits
saved_scale.py   a broken program: a saved input and the scale of another
"""

from course_lib.checks.ch13.eight_bits import check_code, check_reduce_scatter_8, check_three_products
from course_lib.checks.ch13.saved_scale import check_eight_bit_layer
