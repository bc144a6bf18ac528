"""ZeRO from scratch: gradients and parameters against one process, bytes sent and held against the formulas."""

import copy
import dataclasses
import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import data, model
from course_lib.config import PRESETS, ModelConfig
from course_lib.launch import RankError, launch
from course_lib.memory.tracker import MemoryTracker
from course_lib.memory.zero import zero_gathered_bytes, zero_state_bytes, zero_units
from course_lib.meter import ByteMeter
from course_lib.parallel import data as stage_0
from course_lib.parallel import shards, zero
from course_lib.training import loss_of

SMALL_BUCKETS = 3000  # bytes: several buckets for the tiny models below
WORLDS = (2, 3, 4)
CLIP = 0.05  # the gradients below are longer: clipping acts
VOCAB = 11
TINY = ModelConfig("tiny", 3, 12, num_heads=3, num_kv_heads=1, d_ff=17, vocab_size=VOCAB, max_seq_len=8)
TINY_GPT = ModelConfig("tiny gpt", 2, 6, 2, 2, d_ff=25, vocab_size=VOCAB, max_seq_len=8, family="gpt", tied=True)


# --- models


class OddModel(nn.Module):
    """One unit: sizes that no number of ranks divides, a tied head, a frozen layer, a strided parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.up = nn.Linear(7, 13)
        self.up.weight = nn.Parameter(torch.randn(7, 13).t())
        self.frozen = nn.Linear(13, 7).requires_grad_(False)
        self.head = nn.Linear(7, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x_BS):
        return self.head(self.frozen(torch.tanh(self.up(self.embed(x_BS)))))


def odd(seed):
    torch.manual_seed(seed)
    return OddModel().double()


def llama(seed):
    return model.build(TINY, seed, torch.float64)


def recomputed(seed):
    """Tied: the embedding's unit is used at both ends."""
    return model.build(dataclasses.replace(TINY, tied=True), seed, torch.float64, recompute="full")


def partly_frozen(seed):
    """A whole block, and a matrix beside trained ones."""
    built = model.build(TINY, seed, torch.float64, recompute="selective")
    built.blocks[1].requires_grad_(False)
    built.blocks[0].mlp.up.requires_grad_(False)
    return built


def top_trained(seed):
    """Frozen up to the last block: backward never comes to the embedding and the first block."""
    built = model.build(TINY, seed, torch.float64)
    for frozen in (built.embed, built.blocks[0], built.blocks[1].attention_norm):
        frozen.requires_grad_(False)
    return built


def gpt(seed):
    return model.build(TINY_GPT, seed, torch.float64)


MODELS = (odd, llama, recomputed, partly_frozen, top_trained, gpt)


def padded_sizes(built, stage, size):
    """(trained, frozen) numbers of every flat, by the parameters' names alone."""
    if stage < 3:
        plan = stage_0.assign_buckets(stage_0.trainable(built), SMALL_BUCKETS, SMALL_BUCKETS)
        return {"trained": [up(sum(p.numel() for _, p in members), size) for members in plan], "frozen": []}
    units = {"trained": {}, "frozen": {}}
    for name, param in built.named_parameters():
        start = ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]
        unit = "start" if start in ("embed", "positions", "up", "frozen") else "end" if start == "norm" else start
        kind = units["trained" if param.requires_grad else "frozen"]
        kind["end" if unit == "head" else unit] = kind.get("end" if unit == "head" else unit, 0) + param.numel()
    return {kind: [up(numel, size) for numel in sizes.values()] for kind, sizes in units.items()}


def up(numel, size):
    return math.ceil(numel / size) * size


def expected_bytes(built, stage, size, micro_batches):
    """What one rank sends in accumulate_gradients, and after the optimizer's step."""
    sizes = padded_sizes(built, stage, size)
    trained, frozen = 8 * sum(sizes["trained"]), 8 * sum(sizes["frozen"])
    if stage < 3:
        sent = (trained * (1 if stage == 1 else micro_batches), trained)
    else:
        below = [built.embed, built.blocks[0]] if not next(built.parameters()).requires_grad else []
        skipped = 8 * sum(up(sum(p.numel() for p in unit.parameters()), size) for unit in below)
        sent = (micro_batches * (2 * (trained + frozen) - skipped + trained), 0)
    return tuple(payload * (size - 1) // size for payload in sent)


# --- against one process


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one rank saw of two steps: worst differences from one process, and bytes sent beside expected ones."""

    gradients: float
    parameters: float
    norm: float
    sent_bytes: tuple
    expected_bytes: tuple
    shapes: bool


def measure(make_model, stage, micro_batches):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    reference = make_model(0)
    expected = expected_bytes(reference, stage, size, micro_batches)
    wanted_shapes = [(numel // size,) for sizes in padded_sizes(reference, stage, size).values() for numel in sizes]
    engine = zero.build(make_model(rank), group, stage, SMALL_BUCKETS)  # ranks begin with different parameters
    optimizer = zero.make_optimizer(engine, lr=0.01)
    trained = [p for p in reference.parameters() if p.requires_grad]
    plain = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    text_T = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(0))
    worst = {"gradients": [], "parameters": [], "norm": []}
    for index in range(2):
        share = data.batch(text_T, index, 3 * size, seq_len=5, dp_rank=rank, dp_size=size)
        with ByteMeter() as gradient_meter:
            zero.accumulate_gradients(engine, data.micro_batches(*share, micro_batches))
        loss_of(reference, *data.batch(text_T, index, 3 * size, seq_len=5)).backward()
        worst["gradients"].append(difference(zero.full_gradients(engine), grads_of(reference)))
        norm = zero.clip_gradients(engine, CLIP)
        worst["norm"].append(abs(norm - nn.utils.clip_grad_norm_(trained, CLIP)).item())
        optimizer.step()
        plain.step()
        with ByteMeter() as update_meter:
            engine.share_update()
        engine.zero_grad()
        plain.zero_grad()
        worst["parameters"].append(difference(zero.full_parameters(engine), dict(reference.named_parameters())))
    shapes = sorted(tuple(shard.shape) for shard in engine.shards) == sorted(wanted_shapes)
    sent = (gradient_meter.sent_bytes, update_meter.sent_bytes)
    return Measured(*(max(of) for of in worst.values()), sent, expected, shapes)


def grads_of(module):
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def difference(found, wanted):
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def measure_all():
    return {
        (make_model.__name__, stage, micro_batches): measure(make_model, stage, micro_batches)
        for make_model in MODELS
        for stage in (1, 2, 3)
        for micro_batches in (1, 3)
    }


@pytest.fixture(scope="module")
def right():
    return {size: launch(measure_all, size) for size in WORLDS}


@pytest.mark.parametrize("size", WORLDS)
def test_gradients_norm_and_parameters_after_adamw_equal_one_process(right, size):
    for of_rank in right[size]:
        for key, measured in of_rank.items():
            assert max(measured.gradients, measured.norm, measured.parameters) < 1e-10, (key, measured)


@pytest.mark.parametrize("size", WORLDS)
def test_bytes_sent_are_those_of_the_stage_with_and_without_accumulation(right, size):
    for of_rank in right[size]:
        for key, measured in of_rank.items():
            assert measured.sent_bytes == measured.expected_bytes, key
            assert measured.shapes, key


@pytest.mark.parametrize("size", WORLDS)
def test_the_stages_send_2_2_and_3_times_the_padded_parameters(right, size):
    for name in ("llama", "recomputed", "gpt"):
        built = globals()[name](0)
        for stage, times in ((1, 2), (2, 2), (3, 3)):
            payload = 8 * sum(padded_sizes(built, stage, size)["trained"])
            assert sum(right[size][0][name, stage, 1].sent_bytes) == times * payload * (size - 1) // size
    assert sum(right[size][0]["llama", 2, 3].sent_bytes) == 2 * sum(right[size][0]["llama", 1, 3].sent_bytes)


# --- bytes held


def memory(recipe, stage, prefetch=True, engine_class=None):
    """Bytes by kind before gradients are dropped, and the most gathered ones, of two steps with two micro-batches."""
    dtype, grad_dtype = {
        "fp32": (torch.float32, None),
        "bf16-master": (torch.bfloat16, None),
        "bf16-master-fp32-grads": (torch.bfloat16, torch.float32),
    }[recipe]
    group = dist.group.WORLD
    built = model.build(dataclasses.replace(PRESETS["toy"], vocab_size=259), dtype=dtype)
    options = {"prefetch": prefetch, "grad_dtype": grad_dtype}
    if engine_class is None:
        engine = zero.build(built, group, stage, 100_000, **options)
    else:
        engine = engine_class(built, group, **options)
    optimizer = zero.make_optimizer(engine)
    batches = [(torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64))] * 2
    zero.step(engine, batches, optimizer)
    with MemoryTracker(engine, optimizer) as tracker:
        zero.accumulate_gradients(engine, batches)
        optimizer.step()
        engine.share_update()
        held = tracker.current_by_kind()
        engine.zero_grad()
        gradients_after = tracker.current("gradients")
        peaks = {kind: max(values, default=0) for kind, values in tracker.timeline.bytes_by_kind.items()}
    return held, peaks, gradients_after


def memory_all():
    recipes = ("fp32", "bf16-master", "bf16-master-fp32-grads")
    found = {(recipe, stage): memory(recipe, stage) for recipe in recipes for stage in (1, 2, 3)}
    return found | {"no prefetch": memory("fp32", 3, prefetch=False)}


@pytest.fixture(scope="module")
def memories():
    return {size: launch(memory_all, size) for size in (2, 3)}


TOY = dataclasses.replace(PRESETS["toy"], vocab_size=259)


def toy_units(recipe, stage, size):
    itemsize = 4 if recipe == "fp32" else 2
    if stage == 3:
        return zero_units(TOY, 3)
    built = model.build(TOY, dtype=torch.float32 if itemsize == 4 else torch.bfloat16, device="meta")
    plan = stage_0.assign_buckets(stage_0.trainable(built), 100_000, 100_000)
    return [sum(param.numel() for _, param in members) for members in plan]


@pytest.mark.parametrize("size", [2, 3])
def test_each_kind_of_bytes_held_equals_the_formula_to_the_byte(memories, size):
    for of_rank in memories[size]:
        for recipe, stage in set(of_rank) - {"no prefetch"}:
            held, _, gradients_after = of_rank[recipe, stage]
            predicted = zero_state_bytes(toy_units(recipe, stage, size), stage, size, recipe)
            assert {kind: held[kind] for kind in ("parameters", "gradients", "optimizer", "gathered")} == {
                "parameters": predicted.parameters,
                "gradients": predicted.gradients,
                "optimizer": predicted.optimizer,
                "gathered": 0,
            }, (recipe, stage)
            assert gradients_after == 0


@pytest.mark.parametrize("size", [2, 3])
def test_gathered_parameters_peak_at_two_units_and_without_prefetch_at_one(memories, size):
    for of_rank in memories[size]:
        for recipe in ("fp32", "bf16-master"):
            peak = of_rank[recipe, 3][1]["gathered"]
            assert peak == zero_gathered_bytes(zero_units(TOY, 3), 3, size, recipe)
        alone = of_rank["no prefetch"][1]["gathered"]
        assert alone == zero_gathered_bytes(zero_units(TOY, 3), 3, size, "fp32", prefetch=False) < peak * 2
        assert of_rank["fp32", 2][1]["gathered"] == 0


@pytest.mark.parametrize("size", [2, 3])
def test_stage_2_never_holds_more_than_two_whole_buckets_of_gradients(memories, size):
    for of_rank in memories[size]:
        units = [4 * up(unit, size) for unit in toy_units("fp32", 2, size)]
        assert len(units) > 6
        assert of_rank["fp32", 2][1]["temporary"] < 3 * max(units) < sum(units)
