"""The kernels compile for an H100 without one, and what the assembler says agrees with the lesson's reasons."""

import pytest

from course_lib.kernels.compiled import FIGURES, PROGRAMS, compiled
from course_lib.kernels.language import HOST
from course_lib.kernels.rows import softmax_fused

pytestmark = pytest.mark.launches  # the assembler is a program


@pytest.mark.skipif(HOST == "gpu", reason="kernels are compiled here")
def test_without_a_compiler_one_sentence_says_what_is_needed():
    with pytest.raises(RuntimeError, match="COURSE_KERNELS=gpu and Triton"):
        compiled(softmax_fused, ["*fp32", "*fp32", "i32"], BLOCK=1024)


@pytest.mark.skipif(HOST != "gpu", reason="COURSE_KERNELS is not gpu: make test-kernels sets it")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_figures_that_the_lesson_shows_are_those_of_the_compiler(name):
    kernel, types, how = PROGRAMS[name]
    assert compiled(kernel, types, **how) == FIGURES[name]


def test_large_tiles_of_half_precision_use_tensor_cores_and_aligned_loads_are_wide():
    names = "product, tile 32 x 32", "product, tile 128 x 128", "the same, not aligned", "product in FP32, 128 x 128"
    small, large, unaligned, full = (FIGURES[name] for name in names)
    assert large.tensor_ops > 0 == small.tensor_ops == full.tensor_ops == large.spilled
    assert large.registers > small.registers and large.occupancy < small.occupancy
    assert unaligned.wide == 0 < large.wide == large.loads < unaligned.loads
    assert unaligned.registers > large.registers
