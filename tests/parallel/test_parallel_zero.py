"""ZeRO from scratch: gradients and parameters against one process, bytes sent and held against the formulas."""

import copy
import dataclasses
import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from harness import EXHAUSTIVE, VOCAB, Branches, LaunchedBySize, OddModel, largest_difference, message_of, some_batches
from torch import nn

from course_lib import model
from course_lib.config import PRESETS, ModelConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.memory.flats import layer_units
from course_lib.parallel import engine as engines
from course_lib.parallel import shards, zero
from course_lib.training import data, loss_of

SMALL_BUCKETS = 3000  # bytes: several buckets for the tiny models below
MICRO_BATCHES = {2: 3, 3: 1, 4: 2}  # by number of ranks; a rank has 3 rows: in 2 parts they are 2 and 1
CLIP = 0.05  # the gradients below are longer: clipping acts
TINY = ModelConfig("tiny", 3, 12, num_heads=3, num_kv_heads=1, d_ff=17, vocab_size=VOCAB, max_seq_len=8)
TINY_GPT = ModelConfig("tiny gpt", 2, 6, 2, 2, d_ff=25, vocab_size=VOCAB, max_seq_len=8, family="gpt", tied=True)


# --- models


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


MODELS = (odd, llama, partly_frozen, top_trained, recomputed, gpt)


def up(numel, size):
    return math.ceil(numel / size) * size


# --- against one process


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one rank saw of two steps: worst differences from one process, and bytes sent for gradients."""

    gradients: float
    parameters: float
    norm: float
    sent_bytes: int


def measure(make_model, stage, micro_batches):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    reference = make_model(0)
    engine = zero.build(make_model(rank), group, stage, SMALL_BUCKETS)  # ranks begin with different parameters
    optimizer = engines.make_optimizer(engine, lr=0.01)
    trained = [p for p in reference.parameters() if p.requires_grad]
    plain = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    text_T = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(0))
    worst = {"gradients": [], "parameters": [], "norm": []}
    for index in range(2):
        share = data.batch(text_T, index, 3 * size, seq_len=5, dp_rank=rank, dp_size=size)
        with ByteMeter() as meter:
            engine.run(data.micro_batches(*share, micro_batches))
            engine.finish()
        loss_of(reference, *data.batch(text_T, index, 3 * size, seq_len=5)).backward()
        worst["gradients"].append(largest_difference(engines.full_gradients(engine), grads_of(reference)))
        norm = engines.clip_gradients(engine, CLIP)
        worst["norm"].append(abs(norm - nn.utils.clip_grad_norm_(trained, CLIP)).item())
        optimizer.step()
        plain.step()
        engine.share_update()
        engine.zero_grad()
        plain.zero_grad()
        worst["parameters"].append(
            largest_difference(engines.full_parameters(engine), dict(reference.named_parameters()))
        )
    return Measured(*(max(of) for of in worst.values()), meter.sent_bytes)


def grads_of(module):
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def measure_all():
    return {
        (make_model.__name__, stage): measure(make_model, stage, MICRO_BATCHES[dist.get_world_size()])
        for make_model in MODELS[:: dist.get_world_size() // 2]  # on four ranks every second
        for stage in (1, 2, 3)
    }


@pytest.fixture(scope="module")
def right():
    return LaunchedBySize(measure_all)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=EXHAUSTIVE) for size in (3, 4))])
def test_gradients_norm_and_parameters_after_adamw_equal_one_process(right, size):
    for of_rank in right[size]:
        for key, measured in of_rank.items():
            assert max(measured.gradients, measured.norm, measured.parameters) < 1e-10, (key, measured)


# --- bytes held

TOY = PRESETS["toy"]


def held_parameters():
    """Bytes of parameters, gathered ones too, at the end of a second step of stage 3."""
    engine = zero.build(model.build(TOY), dist.group.WORLD, 3)
    optimizer = engines.make_optimizer(engine)
    batches = [(torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64))] * 2
    engines.step(engine, batches, optimizer)
    with MemoryTracker(engine, optimizer) as tracker:
        engines.accumulate_gradients(engine, batches)
        held = tracker.current_by_kind()
    return held["parameters"] + held["gathered"]


# --- wrong engines: each must be found out


@contextmanager
def planted(owner, name, wrong):
    """Replaces one step of the algorithm by a wrong one, in this rank."""
    right = getattr(owner, name)
    setattr(owner, name, wrong(right))
    try:
        yield
    finally:
        setattr(owner, name, right)


def forgets_to_divide(collect):
    def wrong(flat, param):
        param.grad.mul_(flat.group.size())
        collect(flat, param)

    return wrong


def never_frees(hold):
    def wrong(engine, now, following=(), name=None):
        for flat in now:
            flat.start_gather()
            flat.wait_for_gather()

    return wrong


BUGS = {  # owner, name, wrong version, stage that has it
    "forgets to divide": (shards.FlatShard, "collect", forgets_to_divide, 2),
    "never frees": (zero.ZeroUnits, "_hold", never_frees, 3),
}


def plant_bugs():
    found = {"right": measure(llama, 3, micro_batches=2)}
    for bug, (owner, name, wrong, stage) in BUGS.items():
        with planted(owner, name, wrong):
            found[bug] = measure(odd if stage == 2 else llama, stage, micro_batches=2)
    with planted(zero.ZeroUnits, "_hold", never_frees):
        return found, held_parameters()


@pytest.fixture(scope="module")
def wrong():
    return launch(plant_bugs, 2)[0]


def test_wrong_averages_are_found_in_the_gradients(wrong):
    assert wrong[0]["forgets to divide"].gradients > 1e-3


def test_a_stage_3_that_never_frees_is_found_in_the_bytes_held_and_sent(wrong):
    assert wrong[0]["never frees"].sent_bytes < wrong[0]["right"].sent_bytes
    assert wrong[1] == (4 + 2) * sum(up(unit, 2) for unit in layer_units(TOY))  # beside the shards


# --- what else a learner or a model may do


def unused_parameters(stage):
    """Ranks use different layers; the mean over ranks counts what a rank did not use as zeros."""
    group, rank = dist.group.WORLD, dist.get_rank()
    refused = message_of(engines.accumulate_gradients, zero.build(Branches(), group, stage, 300), some_batches(1))
    branches = Branches().double()
    engine = zero.build(branches, group, stage, 300, allow_unused=True)
    reference = copy.deepcopy(Branches().double())
    reference.load_state_dict(engines.full_parameters(engine))
    branches.layer = rank
    engines.accumulate_gradients(engine, some_batches(1, seed=rank))
    for other in range(2):
        reference.layer = other
        (loss_of(reference, *some_batches(1, seed=other)[0]) / 2).backward()
    gradients = engines.full_gradients(engine)
    unused = gradients["layers.2.weight"].abs().max().item()
    return refused, unused, max((gradients[n] - g).abs().max().item() for n, g in grads_of(reference).items())


def backward_twice(stage):
    engine = zero.build(llama(0), dist.group.WORLD, stage, SMALL_BUCKETS)
    for batch in some_batches(2):
        loss_of(engine, *batch).backward()


def evaluation():
    """Under no_grad before, between and after training: the right logits, nothing left gathered."""
    reference = llama(0)
    engine = zero.build(llama(0), dist.group.WORLD, 3)
    x_BS, y_BS = some_batches(1)[0]
    found = []
    for _ in range(2):
        with torch.no_grad():
            found.append((engine(x_BS) - reference(x_BS)).abs().max().item())
        found.append(sum(flat.whole_P.untyped_storage().nbytes() for flat in engine.flats))
        engines.accumulate_gradients(engine, [(x_BS, y_BS)])
        found.append(sum(flat.whole_P.untyped_storage().nbytes() for flat in engine.flats))
    loss_of(reference, x_BS, y_BS).backward()
    twice = {name: 2 * grad for name, grad in grads_of(reference).items()}
    return max(found), largest_difference(engines.full_gradients(engine), twice)


def begun_again(stage):
    """A backward pass that fails in the middle, zero_grad, and the same pass again."""
    engine, reference = zero.build(llama(0), dist.group.WORLD, stage, SMALL_BUCKETS), llama(0)

    def fail(module, grads):
        raise FloatingPointError

    hook = engine.module.blocks[1].mlp.down.register_full_backward_pre_hook(fail)
    with pytest.raises(FloatingPointError):
        engines.accumulate_gradients(engine, some_batches(1))
    hook.remove()
    engine.zero_grad()
    whole = sum(flat.whole_P.untyped_storage().nbytes() for flat in engine.flats) if stage == 3 else 0
    engines.accumulate_gradients(engine, some_batches(1))
    loss_of(reference, *some_batches(1)[0]).backward()
    return largest_difference(engines.full_gradients(engine), grads_of(reference)), whole


def mistakes():
    group, built = dist.group.WORLD, llama(0)
    calls = {
        "stage": lambda: zero.build(built, group, stage=4),
        "group": lambda: zero.build(built, None),
        "meta": lambda: zero.build(model.build(TINY, device="meta"), group),
        "frozen": lambda: zero.build(llama(0).requires_grad_(False), group),
        "again": lambda: zero.build(zero.build(llama(0), group, stage=3).module, group, stage=3),
        "again 1": lambda: zero.build(zero.build(llama(0), group, stage=1).module, group, stage=1),
        "again 2": lambda: zero.build(zero.build(llama(0), group, stage=2).module, group, stage=3),
    }
    return {name: message_of(call) for name, call in calls.items()}


def the_rest():
    return {
        "unused": {stage: unused_parameters(stage) for stage in (1, 2, 3)},
        "twice": {stage: message_of(backward_twice, stage) for stage in (1, 2, 3)},
        "evaluation": evaluation(),
        "begun again": [begun_again(stage) for stage in (1, 2, 3)],
        "mistakes": mistakes(),
    }


@pytest.fixture(scope="module")
def rest():
    return launch(the_rest, 2)


def test_a_parameter_without_gradient_is_an_error_or_counts_as_zeros(rest):
    for of_rank in rest:
        for refused, unused, worst in of_rank["unused"].values():
            assert "layers.2.weight" in refused and "allow_unused=True" in refused
            assert unused == 0.0 and worst < 1e-10


def test_a_second_backward_pass_before_finish_is_refused(rest):
    for of_rank in rest:
        assert all("arrived a second time before finish()" in text for text in of_rank["twice"].values())


def test_evaluation_gathers_and_frees_and_leaves_training_alone(rest):
    for of_rank in rest:
        assert max(of_rank["evaluation"]) < 1e-10


def test_a_pass_that_failed_leaves_nothing_behind_once_gradients_are_zeroed(rest):
    for of_rank in rest:
        assert all(worst < 1e-10 and whole == 0 for worst, whole in of_rank["begun again"]), of_rank["begun again"]


def test_errors_say_what_to_do(rest):
    texts = rest[0]["mistakes"]
    assert "stage is 4; choose 1, 2 or 3 (stage 0" in texts["stage"]
    assert "dist.group.WORLD" in texts["group"]
    assert "sharded this model already" in texts["again"]
    assert "an engine has this model already" in texts["again 1"] and "build it anew" in texts["again 2"]
    assert "meta device" in texts["meta"] and "unfreeze" in texts["frozen"]


def test_units_are_what_runs_one_after_the_other():
    labels = [label for label, _ in shards.units_of(model.build(TINY_GPT, device="meta"))]
    assert labels == ["embed + positions + dropout", "blocks.0", "blocks.1", "norm + head"]
    members = {label: [name for name, _ in of] for label, of in shards.unit_parameters(recomputed(0))}
    assert members["embed"] == ["embed.weight"] and members["norm + head"] == ["norm.weight"]
