"""PyTorch's own engines, as `make bench` times them: clipped steps of each equal those of one process."""

import copy
import importlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import largest_difference

from course_lib import model
from course_lib.compare.bench import TECHNIQUES
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.model import with_moe
from course_lib.parallel import engine as engines
from course_lib.training import data, loss_of

pytestmark = pytest.mark.launches

RANKS = 2
CUTS_THE_BATCH = ("data", "zero", "expert")  # the other techniques bring the same tokens on all ranks
TOY = replace(preset("toy"), num_layers=2)
CONFIGS = {"expert": with_moe(replace(preset("toy-moe"), num_layers=2), balancing="none")}
TEXT_T = data.tokens(10_000)


def micro_batches(name, step):
    cut = {"dp_rank": dist.get_rank(), "dp_size": RANKS} if name in CUTS_THE_BATCH else {}
    return data.micro_batches(*data.batch(TEXT_T, step, 8, 16, **cut), 2)


def differences(name):
    """Of the losses and of the parameters after two clipped steps of AdamW, from one process with the whole batch."""
    whole = model.build(CONFIGS.get(name, TOY), dtype=torch.float64)
    engine = importlib.import_module(f"course_lib.native.{name}").build(copy.deepcopy(whole), dist.group.WORLD)
    ours = engines.make_optimizer(engine, lr=0.01)
    reference = torch.optim.AdamW(whole.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    for step in range(2):
        loss = loss_of(whole, *data.batch(TEXT_T, step, 8, 16))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
        losses.append(abs(engines.step(engine, micro_batches(name, step), ours, clip_norm=0.1) - loss).item())
    params = {key: param.detach() for key, param in whole.named_parameters()}
    return max(losses), largest_difference(engines.full_parameters(engine), params)


def all_differences():
    return {name: differences(name) for name in TECHNIQUES}


def test_clipped_steps_of_every_technique_equal_one_process():
    for of_rank in launch(all_differences, RANKS, quiet=True):
        for name, (loss, params) in of_rank.items():
            assert loss < 1e-6 and params < 1e-6, name  # a loss in float32 where PyTorch has no other
