"""LoRA's budget and bytes against simulated ranks of data parallelism: adapters beside frozen weights."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import sampled
from random_layouts import MODELS, SEQ_LEN

from course_lib.layout import Layout
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.measure.storages import replaced
from course_lib.memory.budget import budgets
from course_lib.minimal.lora import add_lora
from course_lib.model import build, moe
from course_lib.parallel.data import BucketedDP, Sharing
from course_lib.parallel.engine import ModelEngine, make_optimizer, step
from course_lib.run import Run
from course_lib.simulate.cluster import STATES, plan_assignments, start_optimizer
from course_lib.simulate.fake_world import fake_world
from course_lib.tensors import LoRA
from course_lib.traffic import ring_all_reduce_bytes, sent
from course_lib.training import make_optimizer as optimizer_of_one_device
from course_lib.training import train_step
from course_lib.training.precision import engine_dtypes

CASES = [
    ("llama", ("q", "v"), "dp=1,micro_batch=2,recompute=full", "bf16-master"),
    ("llama", ("q", "k", "v", "o", "gate", "up", "down"), "dp=2,micro_batches=2", "fp32"),
    ("llama", ("head",), "dp=2,micro_batches=2", "bf16-master"),
    ("gpt", ("o", "down"), "dp=4,recompute=selective", "bf16-master"),
    ("experts", ("q", "v"), "dp=2,micro_batch=2", "bf16-master"),
    ("experts", ("gate", "down"), "dp=2,micro_batch=2", "fp32"),
    ("latent", ("q_up", "kv_down", "o"), "dp=4,micro_batches=2", "bf16-master"),
]
PEAK_ERROR = 0.04


def simulated(run, rank):
    """What one rank holds at its peak and of each state, and the bytes that it sends, in the midst of training."""
    layout, (dtype, _) = run.layout, engine_dtypes(run.recipe)
    with fake_world(rank, layout.world_size), replaced(moe, "choose", plan_assignments):
        model = build(run.config, dtype=dtype, recompute=layout.recompute)
        add_lora(model, run.lora.rank, 16, run.lora.targets)
        world = dist.group.WORLD
        engine = BucketedDP(model, world, sharing=Sharing.over(world)) if layout.dp > 1 else ModelEngine(model)
        optimizer = make_optimizer(engine)
        start_optimizer(optimizer)
        tokens_BS = torch.zeros(layout.micro_batch, run.seq_len, dtype=torch.int64)
        with MemoryTracker(engine, optimizer) as tracker, ByteMeter() as meter:
            step(engine, [(tokens_BS, tokens_BS)] * layout.micro_batches, optimizer, clip_norm=1.0)
    timeline = tracker.timeline
    return timeline.peak_bytes, {kind: max(timeline.bytes_by_kind[kind]) for kind in STATES}, meter.sent_bytes


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("name", "targets", "text", "recipe"), sampled(CASES, 1))
def test_adapters_take_and_send_what_the_formulas_say(name, targets, text, recipe):
    run = Run(MODELS[name], Layout.parse(text), SEQ_LEN, recipe, device="cpu", lora=LoRA(8, targets))
    rank = run.layout.world_size - 1
    (predicted,) = budgets(run)
    peak_bytes, states, measured_bytes = simulated(run, rank)
    assert {kind: getattr(predicted, kind) for kind in STATES} == states
    assert predicted.peak_bytes == pytest.approx(peak_bytes, rel=PEAK_ERROR)
    of_loss = ring_all_reduce_bytes(4, run.layout.dp, rank, 4)
    assert sum(size for axis, size in sent(run, rank).items() if axis != "world") + of_loss == measured_bytes


AUTOCAST = [
    ("llama", ("q", "v"), "none", "fused"),
    ("llama", ("q", "k", "v", "o", "gate", "up", "down"), "none", "standard"),
    ("llama", ("head",), "full", "fused"),
    ("gpt", ("o", "down"), "selective", "fused"),
    ("experts", ("gate", "down"), "none", "fused"),
    ("latent", ("q_up", "kv_down", "o"), "none", "fused"),
]


@pytest.mark.parametrize(("name", "targets", "recompute", "attention"), AUTOCAST)
def test_under_autocast_adapters_and_casts_of_frozen_matrices_are_counted(name, targets, recompute, attention):
    layout = Layout(micro_batch=2, recompute=recompute)
    config = replace(MODELS[name], num_layers=4)
    run = Run(config, layout, 64, "autocast", attention, "cpu", lora=LoRA(8, targets))
    model = build(config, attention=attention, recompute=recompute)
    add_lora(model, 8, 16, targets)
    optimizer = optimizer_of_one_device(model, "autocast")
    tokens_BS = torch.zeros(2, 64, dtype=torch.int64)
    with MemoryTracker(model, optimizer) as tracker:
        for _ in range(2):
            train_step(model, optimizer, tokens_BS, tokens_BS, precision="autocast")
    (predicted,) = budgets(run)
    timeline = tracker.timeline
    assert {kind: predicted.by_kind[kind] for kind in STATES} == {k: max(timeline.bytes_by_kind[k]) for k in STATES}
    assert predicted.peak_bytes == pytest.approx(timeline.peak_bytes, rel=PEAK_ERROR)
