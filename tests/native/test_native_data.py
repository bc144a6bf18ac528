"""DDP's options and Accelerate, beside the from-scratch engine. (Gradients and bytes of DDP: test_parallel_data.py.)"""

import copy

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from course_lib import model
from course_lib.config import PRESETS
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.native import data as native
from course_lib.parallel import data as parallel
from course_lib.traffic import ring_all_reduce_bytes
from course_lib.training import data, loss_of

SMALL_BUCKETS = 100_000  # bytes
TEXT_T = torch.randint(256, (2_000,), generator=torch.Generator().manual_seed(0))


def toy(dtype=torch.float64):
    return model.build(PRESETS["toy"], dtype=dtype)


def micro_batches(step, count):
    share = data.batch(TEXT_T, step, 8, seq_len=8, dp_rank=dist.get_rank(), dp_size=dist.get_world_size())
    return data.micro_batches(*share, count)


def gradient_P(engine):
    return torch.cat([param.grad.flatten() for _, param in parallel.trainable(engine)])


def from_scratch_P(step=0, count=2):
    engine = parallel.build(toy(), dist.group.WORLD)
    parallel.accumulate_gradients(engine, micro_batches(step, count))
    return gradient_P(engine)


def metered_steps(engine, steps=4, count=2):
    """Traffic of each step, and the gradient of the last."""
    meters = []
    for step in range(steps):
        engine.zero_grad()
        with ByteMeter() as meter:
            engine.run(micro_batches(step, count))
        meters.append((meter.calls, meter.by_collective))
    return meters, (gradient_P(engine) - from_scratch_P(steps - 1, count)).abs().max().item()


def without_no_sync():
    engine = native.build(toy(), dist.group.WORLD)
    for _ in range(2):  # the first step also rebuilds the buckets
        engine.zero_grad()
        with ByteMeter() as meter:
            for x_BS, y_BS in micro_batches(0, 2):
                (loss_of(engine, x_BS, y_BS) / 2).backward()
    return meter.sent_bytes, (gradient_P(engine) - from_scratch_P()).abs().max().item()


class TwoHeads(nn.Module):
    """Each rank uses the head with its own number; nobody uses the third."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 256) for _ in range(3))

    def forward(self, x_BS):
        return self.heads[dist.get_rank()](self.embed(x_BS))


def unused_parameters():
    torch.manual_seed(0)
    start = TwoHeads().double()
    gradients = []
    for module in (parallel, native):
        engine = module.build(copy.deepcopy(start), dist.group.WORLD, allow_unused=True)
        module.accumulate_gradients(engine, micro_batches(0, 1))
        gradients.append([param.grad for param in engine.parameters()])
    same_nones = [g is None for g in gradients[0]] == [g is None for g in gradients[1]]
    return same_nones, max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True) if a is not None)


def bfloat16_on_the_wire():
    engine = native.build(toy(torch.float32), dist.group.WORLD, wire_dtype=torch.bfloat16)
    metered_steps(engine, steps=2)  # buckets are rebuilt in the second
    engine.zero_grad()
    with ByteMeter() as meter:
        engine.run(micro_batches(0, 2))
    error_P = gradient_P(engine) - from_scratch_P()
    return meter.sent_bytes, (error_P.norm() / gradient_P(engine).norm()).item()


def views_of_buckets():
    """Bytes that gradients own: with gradient_as_bucket_view they share the storages of the few buckets."""
    engine = native.build(toy(), dist.group.WORLD, SMALL_BUCKETS)
    metered_steps(engine, steps=2)
    return len({param.grad.untyped_storage().data_ptr() for param in engine.parameters()})


def static_graph_that_begins_with_no_sync():
    engine = native.build(toy(), dist.group.WORLD, static_graph=True)
    try:
        native.accumulate_gradients(engine, micro_batches(0, 2))
    except RuntimeError as error:
        return str(error)
    return "no error"


def default_bucket_bytes():
    engine = nn.parallel.DistributedDataParallel(toy())
    return dist._DEFAULT_FIRST_BUCKET_BYTES, engine.bucket_bytes_cap


def on_two_ranks():
    return {
        "default buckets": default_bucket_bytes(),
        "default": metered_steps(native.build(toy(), dist.group.WORLD, SMALL_BUCKETS)),
        "static graph": metered_steps(native.build(toy(), dist.group.WORLD, SMALL_BUCKETS, static_graph=True), count=1),
        "static graph, accumulating": static_graph_that_begins_with_no_sync(),
        "without no_sync": without_no_sync(),
        "unused": unused_parameters(),
        "bfloat16": bfloat16_on_the_wire(),
        "storages": views_of_buckets(),
    }


@pytest.fixture(scope="module")
def two_ranks():
    return launch(on_two_ranks, 2)


@pytest.fixture(scope="module")
def parameters():
    return parallel.trainable(toy())


def step_bytes(parameters, itemsize=8):
    payloads = [param.numel() * itemsize for _, param in parameters]
    return ring_all_reduce_bytes(sum(payloads), 2, itemsize=itemsize)


@pytest.mark.parametrize("options", ["default", "static graph"])
def test_ddp_reduces_once_a_bucket_and_its_first_step_is_different(two_ranks, parameters, options):
    (first, second, _, last), difference = two_ranks[0][options]
    assert difference < 1e-12
    if (
        options == "default"
    ):  # everything in one bucket before DDP knows the order of gradients, which it then broadcasts
        assert first[0] == {"all_reduce": 1} and second[0]["broadcast"] == 2
    assert first[0]["all_reduce"] <= 2  # a static graph adds its map of used parameters
    num_buckets = len(parallel.assign_buckets(parameters, SMALL_BUCKETS))
    assert num_buckets > 5
    assert last == ({"all_reduce": num_buckets}, {"all_reduce": step_bytes(parameters)})


def test_a_static_graph_that_begins_with_no_sync_stops_at_an_assertion(two_ranks):
    assert "expect_autograd_hooks_" in two_ranks[0]["static graph, accumulating"]


def test_ddp_without_no_sync_sends_as_often_as_there_are_micro_batches(two_ranks, parameters):
    sent_bytes, difference = two_ranks[0]["without no_sync"]
    assert sent_bytes == 2 * step_bytes(parameters)
    assert difference < 1e-12


def test_find_unused_parameters_and_allow_unused_leave_the_same_gradients(two_ranks):
    for same_nones, difference in (rank["unused"] for rank in two_ranks):
        assert same_nones and difference < 1e-12


def test_the_bfloat16_hook_halves_the_bytes_and_costs_some_precision(two_ranks, parameters):
    sent_bytes, error = two_ranks[0]["bfloat16"]
    assert sent_bytes == step_bytes(parameters, itemsize=2)
    assert 1e-5 < error < 1e-2


def test_the_defaults_of_buckets_are_ddps(two_ranks):
    first_bytes, bucket_bytes = two_ranks[0]["default buckets"]
    assert (first_bytes, bucket_bytes) == (parallel.FIRST_BUCKET_BYTES, parallel.BUCKET_BYTES)
    assert bucket_bytes == 25 * 2**20  # claim C176: MiB


def test_gradients_are_views_of_the_buckets(two_ranks, parameters):
    assert two_ranks[0]["storages"] == len(parallel.assign_buckets(parameters, SMALL_BUCKETS))


# --- Accelerate


def accelerated():
    llama = toy()
    optimizer = torch.optim.SGD(llama.parameters(), lr=1.0)
    before_P = torch.cat([param.detach().flatten() for param in llama.parameters()])
    accelerator, engine, optimizer = native.build_accelerated(llama, optimizer, num_micro_batches=2)
    loss = native.accelerated_step(accelerator, engine, micro_batches(0, 2), optimizer)
    after_P = torch.cat([param.detach().flatten() for param in llama.parameters()])
    scratch = parallel.build(toy(), dist.group.WORLD)
    scratch_loss = parallel.accumulate_gradients(scratch, micro_batches(0, 2))
    step_P = before_P - after_P  # of SGD with lr 1: the gradient
    difference = (step_P - gradient_P(scratch)).abs().max().item()
    return accelerator.num_processes, difference, (loss - scratch_loss).abs().item()


def accelerated_after_the_mistake():
    alone = Accelerator().num_processes
    llama = toy()
    try:
        native.build_accelerated(llama, torch.optim.SGD(llama.parameters(), lr=1.0), num_micro_batches=1)
    except RuntimeError as error:
        return alone, str(error)
    return alone, "no error"


@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerate_takes_the_same_step(world_size):
    for num_processes, difference, loss_difference in launch(accelerated, world_size):
        assert num_processes == world_size
        assert difference < 1e-12 and loss_difference < 1e-12


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trap is on machines without a GPU")
def test_an_accelerator_without_cpu_true_trains_alone_and_is_refused():
    for alone, message in launch(accelerated_after_the_mistake, 2):
        assert alone == 1
        assert "cpu=True" in message
