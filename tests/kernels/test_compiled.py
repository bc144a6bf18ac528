"""The kernels compile for an H100 without one, and what the assembler says agrees with the lesson's reasons."""

import pytest

from course_lib.kernels.compiled import FIGURES, PROGRAMS, compiled, compiled_again
from course_lib.kernels.language import HOST
from course_lib.kernels.product import matmul
from course_lib.timing.kernel import occupancy

HALF, FULL = ["*fp16"] * 3 + ["i32"] * 3, ["*fp32"] * 3 + ["i32"] * 3
BIG, SMALL = {"GROUP": 8, "BM": 128, "BN": 128, "BK": 64}, {"GROUP": 8, "BM": 32, "BN": 32, "BK": 32}
pytestmark = pytest.mark.launches  # the assembler is a program
needs_compiler = pytest.mark.skipif(HOST != "gpu", reason="COURSE_KERNELS is not gpu: make test-kernels sets it")


@pytest.mark.skipif(HOST == "gpu", reason="kernels are compiled here")
def test_without_a_compiler_one_sentence_says_what_is_needed():
    with pytest.raises(RuntimeError, match="COURSE_KERNELS=gpu and Triton"):
        compiled(matmul, HALF, **BIG)


@needs_compiler
def test_large_tiles_of_half_precision_use_tensor_cores_and_more_of_a_multiprocessor():
    large, small = compiled(matmul, HALF, warps=8, aligned=True, **BIG), compiled(matmul, HALF, aligned=True, **SMALL)
    assert large.tensor_ops > 0 == small.tensor_ops
    assert compiled(matmul, FULL, aligned=True, **SMALL).tensor_ops == 0
    assert large.registers > small.registers
    assert large.occupancy < small.occupancy
    assert large.occupancy == occupancy(large.registers, large.shared_bytes, 8)
    assert large.spilled == 0


@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_figures_that_the_lesson_shows_are_those_of_the_compiler(name):
    assert compiled_again(name) == FIGURES[name]


@needs_compiler
def test_without_alignment_no_load_is_wide():
    told, silent = compiled(matmul, HALF, warps=8, aligned=True, **BIG), compiled(matmul, HALF, warps=8, **BIG)
    assert silent.wide == 0 < told.wide == told.loads < silent.loads
    assert silent.registers > told.registers
