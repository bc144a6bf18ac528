"""Gathers in eight bits on real ranks: one process's numbers."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from course_lib.compare.trials import CONFIG, global_batches, micro_batches_of_rank
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal.eight_bits import E4M3, Zero3In8, all_gather_8, quantized
from course_lib.model import build
from course_lib.training import loss_of


def gathered(gather):
    torch.manual_seed(0)
    group = dist.group.WORLD
    full_P = torch.randn(64) * torch.arange(1, 65)
    with ByteMeter() as meter:
        got = gather(full_P.chunk(group.size())[group.rank()], group)
    return got, full_P, meter.sent_bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gather_in_eight_bits_is_one_process_cast_at_a_byte_each(ranks):
    of_ranks = launch(gathered, ranks, all_gather_8)
    for got, full_P, _ in of_ranks:
        assert torch.equal(got, quantized(full_P[None], E4M3)[0])
    # an all-reduce of one element has no equal pieces: its bytes are those of the formula on average
    assert sum(sent for _, _, sent in of_ranks) == (64 + 8) * (ranks - 1)


def two_steps(trainer):
    made = trainer(build(CONFIG, dtype=torch.float64), partial(torch.optim.SGD, lr=0.1), dist.group.WORLD)
    for step in range(2):
        made.backward(micro_batches_of_rank(step, 1))
        made.update()
    return made.full_parameters()


def one_process_in_8(steps=2):
    """Forward and backward of the rounded blocks; the step is of what was never rounded."""
    model = build(CONFIG, dtype=torch.float64)
    for step in range(steps):
        exact = [param.detach().clone() for param in model.parameters()]
        for block in model.blocks:
            scale = max(param.abs().max() for param in block.parameters()).float() / 448
            for param in block.parameters():
                param.data = ((param.data / scale).to(torch.float8_e4m3fn).float() * scale).double()
        model.zero_grad()
        loss_of(model, *global_batches(steps)[step][0]).backward()
        for param, before in zip(model.parameters(), exact, strict=True):
            param.data = before - 0.1 * param.grad
    return dict(model.named_parameters())


def test_zero_3_in_eight_bits_trains_as_one_process_that_rounds_its_blocks():
    right = one_process_in_8()
    for full in launch(two_steps, 2, Zero3In8):
        assert full.keys() == right.keys()
        for name, param in right.items():
            assert torch.allclose(full[name], param, rtol=1e-9, atol=1e-10), name
