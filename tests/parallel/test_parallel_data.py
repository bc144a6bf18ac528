"""Data parallelism from scratch: gradients against one process, bytes against formulas."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness import EXHAUSTIVE, VOCAB, Branches, LaunchedBySize, OddModel, message_of, some_batches

from course_lib import model
from course_lib.config import PRESETS
from course_lib.launch import launch
from course_lib.parallel import data as parallel
from course_lib.parallel import engine as engines
from course_lib.training import data, loss_of

SMALL_BUCKETS = 300  # bytes: several buckets for the tiny models below
STEPS = 3


def odd_model():
    return OddModel().double()


def tied_llama():
    config = dataclasses.replace(PRESETS["toy"], tied=True, num_layers=2)
    return model.build(config, seed=dist.get_rank(), dtype=torch.float64, recompute="full")


# --- wrong engines: each must be found out


class DividesEveryMicroBatch(parallel.BucketedDP):
    def _ready(self, param):
        if not self.syncing:
            param.grad.div_(self.group.size())
        super()._ready(param)


class NeverFlushesLastBucket(parallel.BucketedDP):
    def finish(self):
        last = self.buckets.pop()
        local_P = last.flat_P.clone()
        last.wait()
        last.flat_P.copy_(local_P)
        for bucket in self.buckets:
            bucket.wait()
        self.buckets.append(last)
        self.num_started = 0


def bucketed(module, group):
    return parallel.build(module, group, SMALL_BUCKETS)


ENGINES = {
    "bucketed": (bucketed, odd_model),
    "one bucket": (parallel.build, odd_model),
    "bucketed llama": (bucketed, tied_llama),
}
WRONG = {
    "divides every micro-batch": (lambda m, g: DividesEveryMicroBatch(m, g, SMALL_BUCKETS), odd_model),
    "never flushes the last bucket": (lambda m, g: NeverFlushesLastBucket(m, g, SMALL_BUCKETS), odd_model),
}


def measure(build, make_model, micro_batches):
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(rank)  # ranks begin with different parameters
    engine = build(make_model(), group)
    reference = copy.deepcopy(engine.module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (engine.module, reference)]
    text_T = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(0))
    differences = []
    for index in range(STEPS):
        share = data.batch(text_T, index, 4 * group.size(), seq_len=5, dp_rank=rank, dp_size=group.size())
        engine.run(data.micro_batches(*share, micro_batches))
        engine.finish()
        loss_of(reference, *data.batch(text_T, index, 4 * group.size(), seq_len=5)).backward()
        pairs = zip(engine.module.parameters(), reference.parameters(), strict=True)
        differences += [(p.grad - q.grad).abs().max().item() for p, q in pairs if p.requires_grad]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(differences)


def measure_all(table):
    return {
        (name, micro_batches): measure(build, make_model, micro_batches)
        for name, (build, make_model) in table.items()
        for micro_batches in (1, 3)
    }


@pytest.fixture(scope="module")
def right():
    return LaunchedBySize(measure_all, ENGINES)


@pytest.fixture(scope="module")
def wrong():
    return launch(measure_all, 2, WRONG)[0]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=EXHAUSTIVE), 2, 4])
def test_gradients_equal_one_process_with_the_whole_batch(right, world_size):
    worst = {key: max(rank[key] for rank in right[world_size]) for key in right[world_size][0]}
    assert max(worst.values()) < 1e-10, worst


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_wrong_average_is_found_in_the_gradients(wrong, micro_batches):
    assert wrong["never flushes the last bucket", micro_batches] > 1e-3


def test_dividing_in_every_micro_batch_is_found_under_accumulation_only(wrong):
    assert wrong["divides every micro-batch", 1] < 1e-10
    assert wrong["divides every micro-batch", 3] > 1e-3


# --- what else a learner or a model may do


def unused_parameters():
    group, rank = dist.group.WORLD, dist.get_rank()
    refused = message_of(engines.accumulate_gradients, bucketed(Branches(), group), some_batches(1))
    branches = Branches().double()
    engine = parallel.build(branches, group, SMALL_BUCKETS, allow_unused=True)
    reference = copy.deepcopy(branches)
    for turn in (1, 0):  # ranks use different layers, then change them, so that a buffer holds an old gradient
        for each in (branches, reference):
            each.zero_grad()
        branches.layer = (rank + turn) % 2
        engines.accumulate_gradients(engine, some_batches(1, seed=rank))
        for other in range(2):
            reference.layer = (other + turn) % 2
            (loss_of(reference, *some_batches(1, seed=other)[0]) / 2).backward()
    pairs = list(zip(branches.parameters(), reference.parameters(), strict=True))
    same_nones = all((p.grad is None) == (q.grad is None) for p, q in pairs)
    difference = max((p.grad - q.grad).abs().max().item() for p, q in pairs if q.grad is not None)
    return refused, same_nones, branches.layers["2"].weight.grad is None, difference


def used_in_an_early_micro_batch_only():
    """Layer 1 is used in the first of two micro-batches: its bucket never fills, and must be sent all the same."""
    group = dist.group.WORLD
    engine = parallel.build(Branches().double(), group, SMALL_BUCKETS, allow_unused=True)
    branches, batches = engine.module, some_batches(2, seed=dist.get_rank())
    with engine.no_sync():
        branches.layer = 1
        loss_of(engine, *batches[0]).backward()
    branches.layer = 0
    loss_of(engine, *batches[1]).backward()
    engine.finish()
    averaged = branches.layers["1"].weight.grad.clone()
    branches.zero_grad()
    branches.layer = 1
    local = torch.autograd.grad(loss_of(branches, *batches[0]), branches.layers["1"].weight)[0]
    dist.all_reduce(local)
    return (averaged - local / 2).abs().max().item()


def backward_twice():
    engine = bucketed(odd_model(), dist.group.WORLD)
    for batch in some_batches(2):
        loss_of(engine, *batch).backward()


def gradients_in_buckets():
    engine = bucketed(odd_model(), dist.group.WORLD)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    inside = []
    for set_to_none in (True, False):
        engines.accumulate_gradients(engine, some_batches(2))
        buffers = {bucket.flat_P.untyped_storage().data_ptr() for bucket in engine.buckets}
        inside.append({p.grad.untyped_storage().data_ptr() for _, p in parallel.trainable(engine)} == buffers)
        optimizer.zero_grad(set_to_none)
    for handle in engine.handles:
        handle.remove()
    loss_of(engine, *some_batches(1)[0]).backward()
    return inside, engine.buckets[0].work is None


def losses():
    """How far the loss that comes back is from the mean over both ranks' batches."""
    engine = bucketed(odd_model(), dist.group.WORLD)
    with torch.no_grad():
        of_ranks = [loss_of(engine.module, *some_batches(1, seed=rank)[0]) for rank in range(2)]
    loss = engines.accumulate_gradients(engine, some_batches(1, seed=dist.get_rank()))
    assert of_ranks[0] != of_ranks[1]
    return abs(loss - sum(of_ranks) / 2).item()


def on_two_ranks():
    return {
        "losses": losses(),
        "unused": unused_parameters(),
        "early": used_in_an_early_micro_batch_only(),
        "twice": message_of(backward_twice),
        "inside": gradients_in_buckets(),
    }


@pytest.fixture(scope="module")
def two_ranks():
    return launch(on_two_ranks, 2)


def test_the_loss_is_the_mean_over_the_batches_of_all_ranks(two_ranks):
    assert max(of_rank["losses"] for of_rank in two_ranks) < 1e-12


def test_unused_parameters_are_an_error_that_names_them_unless_allowed(two_ranks):
    for refused, *_ in (rank["unused"] for rank in two_ranks):
        assert "'layers.1.weight', 'layers.1.bias', 'layers.2.weight'" in refused and "allow_unused=True" in refused


def test_ranks_that_use_different_layers_get_the_gradients_of_one_process(two_ranks):
    for _, same_nones, unused_by_all_is_none, difference in (rank["unused"] for rank in two_ranks):
        assert same_nones and unused_by_all_is_none and difference < 1e-12


def test_a_parameter_used_in_an_early_micro_batch_only_is_averaged_too(two_ranks):
    assert max(rank["early"] for rank in two_ranks) < 1e-12


def test_a_second_backward_before_finish_is_refused(two_ranks):
    assert "no_sync()" in two_ranks[0]["twice"] and "finish()" in two_ranks[0]["twice"]


def test_gradients_live_inside_the_buckets_however_they_are_cleared(two_ranks):
    inside, removed_hooks_start_nothing = two_ranks[0]["inside"]
    assert inside == [True, True] and removed_hooks_start_nothing
