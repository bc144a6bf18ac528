"""FSDP2, ZeroRedundancyOptimizer, Accelerate: gradients against one process, bytes sent and held against formulas."""

import dataclasses
import functools
import math

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from harness import EXHAUSTIVE, LaunchedBySize, message_of
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from course_lib import model
from course_lib.comm import make_groups
from course_lib.config import PRESETS
from course_lib.launch import launch
from course_lib.layout import Mesh
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.native import zero
from course_lib.parallel import zero as parallel
from course_lib.traffic import ring_all_reduce_bytes
from course_lib.training import data, loss_of

# Nothing here divides by 4; the embedding is tied, one block is frozen, and half of the other.
ODD = dataclasses.replace(
    PRESETS["toy"], tied=True, num_layers=2, d_model=30, num_heads=5, num_kv_heads=1, d_ff=49, vocab_size=251
)
UNTIED = dataclasses.replace(ODD, tied=False)
TEXT_T = torch.randint(251, (2_000,), generator=torch.Generator().manual_seed(0))
ITEMSIZE = 8  # float64


def odd_llama(device="cpu"):
    llama = model.build(ODD, dtype=torch.float64, device=device)
    llama.blocks[0].requires_grad_(False)
    llama.blocks[1].mlp.requires_grad_(False)
    return llama


def share(index=0, count=1):
    """This rank's micro-batches of step `index`; the last has fewer tokens than the others."""
    x_BS, y_BS = data.batch(TEXT_T, index, 12, 8, dp_rank=dist.get_rank(), dp_size=dist.get_world_size())
    if count == 1:
        return [(x_BS, y_BS)]
    return [(x_BS[:-1], y_BS[:-1]), (x_BS[-1:], y_BS[-1:])]


@functools.cache
def one_process():
    llama = odd_llama()
    loss_of(llama, *data.batch(TEXT_T, 0, 12, 8)).backward()
    return llama


def engines(size):
    """Name -> options of `build`; None stands for DDP with ZeroRedundancyOptimizer."""
    return {
        "stage 1": {"stage": 1},
        "stage 2": {"stage": 2},
        "stage 3": {},
        "hybrid": {"shard_size": size // 2},
        "resharded to half": {"reshard_after_forward": size // 2, "prefetch": False},
        "ddp": None,
    }


CLIPPED = ["stage 3", "hybrid", "ddp"]
HELD = ["stage 1", "stage 2", "stage 3", "ddp"]


def make(options, llama):
    group = dist.group.WORLD
    return zero.build_ddp(llama, group) if options is None else zero.build(llama, group, **options)


def difference(got, expected):
    """The worst one, and infinity where names differ."""
    expected = {name: param.grad for name, param in expected.named_parameters() if param.grad is not None}
    if set(got) != set(expected):
        return math.inf
    return max((got[name] - expected[name]).abs().max().item() for name in expected)


def measure(options, count):
    engine = make(options, odd_llama())
    optimizer = zero.make_optimizer(engine)
    with ByteMeter() as gradients:
        loss = zero.accumulate_gradients(engine, share(count=count))
    with ByteMeter() as update:
        optimizer.step()
    return {
        "difference": difference(zero.full_gradients(engine), one_process()),
        "loss": loss.item(),
        "gradients": gradients.by_collective,
        "update": update.by_collective,
        "local": {} if options is None else {name: tuple(p.to_local().shape) for name, p in engine.named_parameters()},
        "whole": zero.unsharded_parameters(engine),
    }


def sums_instead_of_mean():
    engine = zero.build(odd_llama(), dist.group.WORLD)
    for module in engine.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    zero.accumulate_gradients(engine, share())
    return difference(zero.full_gradients(engine), one_process())


def steps_with_clipping(options):
    """Two steps with SGD, which shows the length of a gradient as Adam does not, beside one process."""
    engine, reference = make(options, odd_llama()), odd_llama()
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5) for m in (engine, reference)]
    for index in range(2):
        zero.step(engine, share(index, count=2), optimizers[0], clip_norm=0.05)
        loss_of(reference, *data.batch(TEXT_T, index, 12, 8)).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizers[1].step()
        optimizers[1].zero_grad()
    got = zero.full_parameters(engine)
    return norm.item(), max((got[name] - p).abs().max().item() for name, p in reference.named_parameters())


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_bytes(options):
    """Largest number of bytes by kind in a second step, and what the optimizer's states then have on this rank."""
    engine = make(options, model.build(UNTIED, dtype=torch.float64))
    optimizer = zero.make_optimizer(engine)
    zero.step(engine, share(0, count=2), optimizer)
    with MemoryTracker(engine, optimizer if options is not None else None) as tracker:
        zero.step(engine, share(1, count=2), optimizer)
    states = optimizer.state if options is not None else optimizer.optim.state
    moments = sum(local(m).numel() for state in states.values() for m in (state["exp_avg"], state["exp_avg_sq"]))
    largest = {kind: max(column) for kind, column in tracker.timeline.bytes_by_kind.items()}
    return largest | {"moments": moments * ITEMSIZE, "states": len(states)}


def from_meta():
    reference = odd_llama()
    engine = zero.build(odd_llama(device="meta"), dist.group.WORLD)
    zero.fill(engine, reference.state_dict().__getitem__)
    zero.accumulate_gradients(engine, share())
    tied = engine.module.head.weight is engine.module.embed.weight
    return tied, difference(zero.full_gradients(engine), one_process())


def bfloat16():
    """FP32 shards, gathered as bfloat16 and reduced as float32."""
    llama = model.build(ODD)
    engine = zero.build(llama, dist.group.WORLD, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with ByteMeter() as meter:
        zero.accumulate_gradients(engine, share())
    dtypes = {p.dtype for p in engine.parameters()} | {p.grad.dtype for p in engine.parameters()}
    reference = model.build(ODD)
    loss_of(reference, *data.batch(TEXT_T, 0, 12, 8)).backward()
    got, expected = (
        torch.cat([g.flatten() for g in gradients])
        for gradients in (zero.full_gradients(engine).values(), [p.grad for p in reference.parameters()])
    )
    return meter.by_collective, dtypes, ((got - expected).norm() / expected.norm()).item()


def refusals():
    group = dist.group.WORLD
    return {
        "stage": message_of(zero.build, odd_llama(), group, stage=4),
        "shard size": message_of(zero.build, odd_llama(), group, shard_size=3),
        "ddp": message_of(zero.check_sharded, zero.build_ddp(odd_llama(), group)),
    }


def on_every_rank():
    size = dist.get_world_size()
    results = {(name, count): measure(options, count) for name, options in engines(size).items() for count in (1, 2)}
    results["clipping"] = {name: steps_with_clipping(engines(size)[name]) for name in CLIPPED}
    results["held"] = {name: held_bytes(engines(size)[name]) for name in HELD}
    results["bfloat16"] = bfloat16()
    results["meta"] = from_meta()
    results["sums"] = sums_instead_of_mean()
    results["refusals"] = refusals()
    return results


@pytest.fixture(scope="module")
def results():
    return LaunchedBySize(on_every_rank)


SIZES = pytest.mark.parametrize("size", [2, pytest.param(4, marks=EXHAUSTIVE)])
NAMES = list(engines(4))


# --- gradients


@SIZES
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_one_process_with_the_whole_batch(results, size, name):
    for of_rank in results[size]:
        assert of_rank[name, 1]["difference"] < 1e-10 and of_rank[name, 2]["difference"] < 1e-10
    with torch.no_grad():
        expected = loss_of(odd_llama(), *data.batch(TEXT_T, 0, 12, 8)).item()
    for of_rank in results[size]:
        assert [of_rank[name, count]["loss"] for count in (1, 2)] == pytest.approx([expected] * 2, abs=1e-12)


@SIZES
def test_a_sum_instead_of_the_mean_is_found(results, size):
    assert results[size][0]["sums"] > 1e-3


@SIZES
@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_looks_at_the_norm_of_all_shards(results, size, name):
    norm, difference = results[size][0]["clipping"][name]
    assert norm > 0.1  # so that clipping at 0.05 did something
    assert difference < 1e-12


@SIZES
def test_a_model_built_on_the_meta_device_is_filled_shard_by_shard(results, size):
    for tied, difference in (of_rank["meta"] for of_rank in results[size]):
        assert tied and difference < 1e-10


# --- really sharded, and how many bytes that sends


def padded(parameters, size):
    """Numbers in a unit's message: each parameter's rows rounded up to a multiple of size."""
    return sum(math.ceil(p.shape[0] / size) * size * p[0].numel() for p in parameters)


def loss_bytes(size, rank):
    """What the mean of one loss over all ranks costs."""
    return ring_all_reduce_bytes(ITEMSIZE, size, rank, ITEMSIZE)


def expected_bytes(name, size, rank, count):
    """What a rank sends in a step of `count` micro-batches."""
    of_loss = {"all_reduce": loss_bytes(size, rank)}
    llama = odd_llama()
    shard_size = size // 2 if name == "hybrid" else size
    P = padded(llama.parameters(), shard_size) * ITEMSIZE
    trained = [p for p in llama.parameters() if p.requires_grad]
    G = padded(trained, shard_size) * ITEMSIZE
    gather, reduce = P * (shard_size - 1) // shard_size, G * (shard_size - 1) // shard_size
    if name == "stage 1":
        return {"all_gather": gather, "reduce_scatter": reduce} | of_loss
    if name == "stage 2":
        return {"all_gather": gather, "reduce_scatter": reduce * count} | of_loss
    if name == "resharded to half":
        inside = size // 2
        again = P * (inside - 1) // inside
        return {"all_gather": (gather + again) * count, "reduce_scatter": reduce * count} | of_loss
    sent = {"all_gather": 2 * gather * count, "reduce_scatter": reduce * count} | of_loss
    if name == "hybrid":
        trained_units = [[p for m in unit for p in m.parameters() if p.requires_grad] for unit in zero.units(llama)]
        shards = [padded(set(unit), shard_size) * ITEMSIZE // shard_size for unit in trained_units]
        copy_rank = rank // shard_size
        sums = [ring_all_reduce_bytes(shard, size // shard_size, copy_rank, ITEMSIZE) for shard in shards]
        sent["all_reduce"] += sum(sums) * count
    return {collective: sent_bytes for collective, sent_bytes in sent.items() if sent_bytes}


@SIZES
@pytest.mark.parametrize("name", NAMES[:-1])
def test_fsdp_sends_what_the_stage_costs(results, size, name):
    for rank, of_rank in enumerate(results[size]):
        for count in (1, 2):
            assert of_rank[name, count]["gradients"] == expected_bytes(name, size, rank, count), (rank, count)
            assert of_rank[name, count]["update"] == {}


@SIZES
@pytest.mark.parametrize("name", NAMES[:-1])
def test_every_parameter_is_a_shard_of_its_rows(results, size, name):
    shard_size = size // 2 if name == "hybrid" else size
    for rank, of_rank in enumerate(results[size]):
        assert of_rank[name, 1]["whole"] == []
        for parameter, param in odd_llama().named_parameters():
            part = math.ceil(param.shape[0] / shard_size)
            rows = max(0, min(part, param.shape[0] - part * (rank % shard_size)))
            assert of_rank[name, 1]["local"][parameter] == (rows, *param.shape[1:])


@SIZES
def test_zero_redundancy_optimizer_sends_half_as_much_again_as_stage_1(results, size):
    parameters = [p for p in odd_llama().parameters() if p.requires_grad]
    P = sum(p.numel() for p in parameters) * ITEMSIZE
    for count in (1, 2):
        of_ranks = [of_rank["ddp", count] for of_rank in results[size]]
        reduced = [sent["gradients"] for sent in of_ranks]
        expected = [ring_all_reduce_bytes(P, size, rank, ITEMSIZE) + loss_bytes(size, rank) for rank in range(size)]
        assert reduced == [{"all_reduce": sent} for sent in expected]
        assert all(set(sent["update"]) == {"broadcast"} for sent in of_ranks)
        total = sum(sum(sent["gradients"].values()) + sum(sent["update"].values()) for sent in of_ranks)
        losses = sum(loss_bytes(size, rank) for rank in range(size))
        assert total - losses == 3 * (size - 1) * P  # claim C129; stage 1: 2 (N - 1) P
    assert of_ranks[0]["whole"] != []


# --- bytes held


def local_numbers(size, rank):
    """What a rank holds, padded rows included."""
    llama = model.build(UNTIED)
    return sum(math.ceil(p.shape[0] / size) * p[0].numel() for p in llama.parameters())


def rows_of_rank(size, rank):
    return sum(
        max(0, min(part, p.shape[0] - part * rank)) * p[0].numel()
        for p in model.build(UNTIED).parameters()
        for part in [math.ceil(p.shape[0] / size)]
    )


@SIZES
@pytest.mark.parametrize("name", HELD[:-1])
def test_bytes_held_are_the_shards_and_what_is_gathered(results, size, name):
    llama = model.build(UNTIED)
    for rank, of_rank in enumerate(results[size]):
        held = of_rank["held"][name]
        assert held["parameters"] == local_numbers(size, rank) * ITEMSIZE
        assert held["gradients"] == held["parameters"]
        assert held["moments"] == 2 * rows_of_rank(size, rank) * ITEMSIZE  # the optimizer leaves padding out
        assert held["optimizer"] == held["moments"] + 4 * held["states"]  # and counts a parameter's steps in float32
        sizes = [padded([p for m in unit for p in m.parameters()], size) * ITEMSIZE for unit in zero.units(llama)]
        assert held["gathered"] == (max(sizes) if name == "stage 3" else sum(sizes))


@SIZES
def test_stage_1_keeps_whole_gradients_and_stage_2_does_not(results, size):
    whole = sum(p.numel() for p in model.build(UNTIED).parameters()) * ITEMSIZE
    held = results[size][0]["held"]
    assert held["stage 1"]["temporary"] >= whole > held["stage 2"]["temporary"]


@SIZES
def test_zero_redundancy_optimizer_shares_out_whole_parameters(results, size):
    llama = model.build(UNTIED)
    P = sum(p.numel() for p in llama.parameters()) * ITEMSIZE
    moments = [of_rank["held"]["ddp"]["moments"] for of_rank in results[size]]
    assert sum(moments) == 2 * P
    assert size == 2 or len(set(moments)) > 1  # two ranks share these evenly, four do not
    assert sum(of_rank["held"]["ddp"]["states"] for of_rank in results[size]) == len(list(llama.parameters()))
    assert all(of_rank["held"]["ddp"]["parameters"] == P for of_rank in results[size])


# --- mixed precision, groups, errors


@SIZES
def test_bfloat16_is_gathered_and_float32_kept_and_reduced(results, size):
    sent, dtypes, error = results[size][0]["bfloat16"]
    P = padded(model.build(ODD).parameters(), size)
    of_loss = ring_all_reduce_bytes(4, size, 0, 4)
    shards = {"all_gather": 2 * 2 * P * (size - 1) // size, "reduce_scatter": 4 * P * (size - 1) // size}
    assert sent == shards | {"all_reduce": of_loss}
    assert dtypes == {torch.float32}
    assert 1e-5 < error < 2e-2


@SIZES
def test_errors_say_what_to_choose(results, size):
    refusals = results[size][0]["refusals"]
    assert "choose from (1, 2, 3)" in refusals["stage"]
    assert f"must divide the group's {size} ranks; choose from" in refusals["shard size"]
    assert "parameters are whole on this rank" in refusals["ddp"]


def over_one_axis():
    groups = make_groups(Mesh(dp=2, tp=2))
    engine = zero.build(odd_llama(), groups["dp"])
    with ByteMeter(axes=groups) as meter:
        zero.accumulate_gradients(engine, share())
    message = message_of(zero.build, odd_llama(), groups["dp"], shard_size=1)
    return list(meter.by_axis), {p.device_mesh.size() for p in engine.parameters()}, message


def test_only_the_ranks_of_the_group_share_a_model():
    for axes, sizes, message in launch(over_one_axis, 4):
        assert axes == ["dp"] and sizes == {2}
        assert "leave shard_size out" in message


# --- beside the from-scratch engines


def both(stage):
    """One clipped step of each side on a model whose sizes divide: gradients, weights, and all bytes sent."""
    seen = []
    for module in (parallel, zero):
        engine = module.build(plain_llama(), dist.group.WORLD, stage=stage)
        optimizer = module.make_optimizer(engine, lr=0.01)
        with ByteMeter() as meter:
            module.step(engine, share(count=2), optimizer)
        engine.zero_grad()
        module.accumulate_gradients(engine, share(1, count=2))
        seen.append((module.full_gradients(engine), module.full_parameters(engine), meter.by_collective))
    (gradients, weights, sent), (native_gradients, native_weights, native_sent) = seen
    assert set(gradients) == set(native_gradients) and set(weights) == set(native_weights)
    differences = [(a - native_gradients[name]).abs().max().item() for name, a in gradients.items()]
    differences += [(a - native_weights[name]).abs().max().item() for name, a in weights.items()]
    return max(differences), sent, native_sent


def all_stages():
    return {stage: both(stage) for stage in (zero.STAGES if dist.get_world_size() == 2 else (3,))}


@SIZES
def test_both_sides_have_the_same_gradients_weights_and_bytes(size):
    for of_rank in launch(all_stages, size):
        for difference, sent, native_sent in of_rank.values():
            assert difference < 1e-10
            assert sent == native_sent


# --- Accelerate


def plain_llama():
    return model.build(dataclasses.replace(PRESETS["toy"], num_layers=2), dtype=torch.float64)


def accelerated():
    llama, reference = plain_llama(), plain_llama()
    optimizer = torch.optim.SGD(llama.parameters(), lr=1.0)
    accelerator, engine, optimizer = zero.build_accelerated(llama, optimizer, num_micro_batches=2)
    shares = data.micro_batches(*data.batch(TEXT_T, 0, 8, 8, dp_rank=dist.get_rank(), dp_size=dist.get_world_size()), 2)
    with ByteMeter() as meter:
        zero.accelerated_step(accelerator, engine, shares, optimizer, clip_norm=0.05)
    loss_of(reference, *data.batch(TEXT_T, 0, 8, 8)).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    after = {name: param.full_tensor() for name, param in engine.named_parameters()}
    differences = [(after[n] - (p - p.grad)).abs().max().item() for n, p in reference.named_parameters()]
    owned = sum(p.to_local().numel() for p in engine.parameters())
    return accelerator.num_processes, max(differences), set(meter.calls), owned


def test_accelerates_fsdp2_plugin_shards_on_a_cpu_as_well():
    whole = sum(p.numel() for p in plain_llama().parameters())
    for num_processes, difference, collectives, owned in launch(accelerated, 2):
        assert num_processes == 2 and difference < 1e-12
        assert {"all_gather", "reduce_scatter"} <= collectives
        assert owned == whole // 2


def plugin_alone():
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    engine = accelerator.prepare(plain_llama())
    return type(engine).__name__, message_of(zero.check_sharded, engine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trap is on machines without a GPU")
def test_the_plugin_alone_is_silently_ddp_on_a_cpu_and_is_found_out():
    for name, message in launch(plugin_alone, 2):
        assert name == "DistributedDataParallel"
        assert "whole on this rank" in message and "build_accelerated" in message
