"""The roofline and the occupancy of kernels, against numbers that can be worked out by hand."""

import pytest

from course_lib.hardware import AMPERE, HOPPER, gpu
from course_lib.timing.kernel import (
    Roof,
    busy_share,
    flash_bytes,
    occupancy,
    product_bytes,
    three_kernel_bytes,
)


def test_the_roof_of_an_h100():
    small = Roof(gpu("h100"), 2 * 256**3, sum(product_bytes(256, 256, 256, 128, 128)))
    assert small.ridge == pytest.approx(989e12 / 3.35e12, rel=0.01)
    assert small.intensity == pytest.approx(2 * 256**3 / (524_288 + 131_072))
    assert small.bound_by == "memory"
    assert small.seconds == pytest.approx(small.num_bytes / 3.35e12, rel=0.01)
    large = Roof(gpu("h100"), 2 * 8192**3, 3 * 2 * 8192**2)
    assert large.bound_by == "computing"
    assert large.seconds == pytest.approx(2 * 8192**3 / 989e12, rel=0.01)


def test_flash_gains_with_the_length():
    gains = [three_kernel_bytes(2, S, 64, 64) / flash_bytes(2, S, 64, 64) for S in (128, 256, 512)]
    assert gains == sorted(gains)
    assert flash_bytes(2, 512, 64, 64) == 1_445_888
    assert three_kernel_bytes(2, 512, 64, 64) == 7_471_104


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "of", "share"),
    [
        (32, 0, 4, HOPPER, 1.0),  # 16 programs of 128 threads
        (255, 0, 8, HOPPER, 256 / 2048),  # 65,536 registers: one program of 256 threads
        (128, 0, 8, HOPPER, 512 / 2048),
        (32, 100 * 1024, 4, HOPPER, 256 / 2048),  # two times 101 KiB in 228
        (32, 100 * 1024, 4, AMPERE, 128 / 2048),  # one in 164
    ],
)
def test_occupancy_is_what_runs_out_first(registers, shared, warps, of, share):
    assert occupancy(registers, shared, warps, of) == share


def test_a_wave_of_tiles_is_full_or_not():
    assert busy_share(128 * 12, 128 * 11, 128, 128) == 1.0  # 132 tiles on 132 SMs
    assert busy_share(512, 2048, 128, 128) == 64 / 132
    assert busy_share(128 * 133, 128, 128, 128) == 133 / 264  # a second wave for one tile
    assert busy_share(512, 2048, 128, 128, AMPERE) == 64 / 108
