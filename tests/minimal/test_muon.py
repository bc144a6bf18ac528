"""Muon under ZeRO-1: whole matrices equal one process on 2 and 4 ranks; shards of rows do not."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal.muon import gather_first, one_process, orthogonal, shards_of_rows, whole_matrices


def three_steps(update, group=None):
    """The weights after three steps, the bytes sent and the FLOPs; each rank's gradient is its own."""
    generator, size = torch.Generator().manual_seed(0), 4
    w_LDF, momentum_LDF = (
        torch.randn(4, 8, 20, generator=generator, dtype=torch.float64),
        torch.zeros(4, 8, 20).double(),
    )
    with ByteMeter() as meter, FlopCounterMode(display=False) as flops:
        for _ in range(3):
            grads = torch.randn(size, 4, 8, 20, generator=generator, dtype=torch.float64)
            mine = grads.mean(0) if group is None else grads.chunk(group.size())[group.rank()].mean(0)
            update(w_LDF, mine, momentum_LDF, group)
    return w_LDF, meter.sent_bytes, flops.get_total_flops()


def rank_main():
    ways = (shards_of_rows, whole_matrices, gather_first)
    return [three_steps(update, dist.group.WORLD) for update in ways]


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_matrices_are_one_process_and_shards_of_rows_are_not(ranks):
    right, _, all_flops = three_steps(one_process)
    for (rows, *_), (whole, sent, flops), (gathered, sent_2, flops_2) in launch(rank_main, ranks):
        assert (rows - right).abs().max() > 1e-3
        torch.testing.assert_close(whole, right, rtol=0, atol=1e-14)
        torch.testing.assert_close(gathered, right, rtol=0, atol=1e-14)
        assert (flops, flops_2) == (all_flops // ranks, all_flops)
        assert sent == sent_2 == 3 * 2 * (ranks - 1) * right.nbytes // ranks


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (3, 8, 8)])
def test_singular_values_come_near_one(shape):
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1))))
    assert values.min() > 0.4 and values.max() < 1.3  # the coefficients are chosen for speed, not for 1
