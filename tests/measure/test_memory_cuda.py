"""What can be said of the CUDA allocator without a GPU; tests/gpu holds the rest to a real one."""

import pytest
import torch

from course_lib.measure import CudaMemory, cuda_memory
from course_lib.measure.cuda import fragment, rounded_bytes, segment_bytes


def test_allocations_are_rounded_up_to_512_bytes():
    assert [rounded_bytes(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_what_is_outside_the_allocator_is_what_the_device_uses_beyond_it():
    look = CudaMemory(3, 10, 25, 100)
    assert (look.cached_bytes, look.outside_allocator_bytes) == (7, 15)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU, and there is one")
def test_without_a_gpu_the_error_says_so():
    for call in (cuda_memory, fragment):
        with pytest.raises(ValueError, match="no CUDA GPU is visible"):
            call()


MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "normal", "expandable"),
    [(1, 2, 2), (MIB, 2, 2), (MIB + 1, 20, 20), (10 * MIB, 10, 20), (33 * MIB, 34, 40), (40 * MIB, 40, 40)],
)
def test_segments_are_2_or_20_mib_or_a_tensor_s_own_and_expandable_ones_grow_by_2_or_20(nbytes, normal, expandable):
    assert (segment_bytes(nbytes), segment_bytes(nbytes, expandable=True)) == (normal * MIB, expandable * MIB)
