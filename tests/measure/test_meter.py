"""The meter against formulas, PyTorch's own parallel code, and the machine's own counter of bytes."""

import copy
import sys
import threading

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from course_lib import comm
from course_lib.comm import make_groups
from course_lib.launch import launch
from course_lib.layout import Mesh
from course_lib.measure import ByteMeter, CommRecord
from course_lib.minimal.ring import ring_all_reduce
from course_lib.traffic.collectives import collective_bytes, ring_all_reduce_bytes

ROWS = 12  # of 5 float32 each, in every plain collective below


def _sent(function, *args, **kwargs):
    with ByteMeter() as meter:
        function(*args, **kwargs)
    return meter.by_collective


def _every_collective():
    group, size = dist.group.WORLD, dist.get_world_size()
    rank, x = dist.get_rank(), torch.ones(ROWS, 5)
    parts = [torch.ones(ROWS, 5) for _ in range(size)]
    sent = [
        _sent(comm.all_reduce, x, group),
        _sent(comm.reduce_scatter, x, group),
        _sent(comm.all_gather, x, group),
        _sent(comm.all_to_all, x, group),
        _sent(comm.broadcast, x, 1, group),
        _sent(comm.reduce, x, 1, group),
        _sent(comm.gather, x, 1, group),
        _sent(comm.scatter, x, 1, group),
        _sent(comm.barrier, group),
        _sent(dist.all_gather, parts, x),
        _sent(dist.reduce_scatter, torch.empty(ROWS, 5), parts),
        _sent(funcol.all_reduce, x, "sum", group),
        _sent(funcol.all_gather_tensor, x, 0, group),
        _sent(funcol.reduce_scatter_tensor, x, "sum", 0, group),
        _sent(funcol.broadcast, x, 1, group),
        _sent(_coalesced, x, group),
    ]
    sent_rows, received_rows = ([9, 1, 1, 1], [9, 1, 1, 1]) if rank == 0 else ([1] * 4, [1] * 4)
    uneven = _sent(comm.all_to_all, torch.ones(sum(sent_rows), 5), group, sent_rows, received_rows)
    odd = [(_sent(comm.all_reduce, x_P, group), _sent(ring_all_reduce, x_P, group)) for x_P in _odd_tensors()]
    return sent, uneven, odd


def _odd_tensors():
    return [torch.ones(length, dtype=dtype) for dtype in (torch.float64, torch.bfloat16) for length in (41, 7, 2)]


def _coalesced(x, group):
    with dist._coalescing_manager(group):
        dist.all_reduce(x, group=group)
        dist.all_reduce(x[:4], group=group)


def test_every_collective_is_counted_as_its_formula_says():
    size, n = 4, ROWS * 5 * 4
    for rank, (sent, uneven, odd) in enumerate(launch(_every_collective, size, backend="gloo")):
        assert sent == [
            {"all_reduce": ring_all_reduce_bytes(n, size)},
            {"reduce_scatter": collective_bytes("reduce_scatter", n, size)},
            {"all_gather": collective_bytes("all_gather", n * size, size)},
            {"all_to_all": collective_bytes("all_to_all", n, size)},
            {"broadcast": 0 if rank == 0 else n},
            {"reduce": 0 if rank == 1 else n},
            {"gather": 0 if rank == 1 else n},
            {"scatter": n - n // size if rank == 1 else 0},
            {"barrier": 0},
            {"all_gather": 3 * n},
            {"reduce_scatter": 3 * n},
            {"all_reduce": ring_all_reduce_bytes(n, size)},
            {"all_gather": 3 * n},
            {"reduce_scatter": collective_bytes("reduce_scatter", n, size)},
            {"broadcast": 0 if rank == 0 else n},
            {"all_reduce": ring_all_reduce_bytes(n, size) + ring_all_reduce_bytes(4 * 5 * 4, size)},
        ]
        assert uneven == {"all_to_all": 3 * 5 * 4}  # rank 0 sends three of its twelve rows, the others three of four
        for x_P, (theirs, by_hand) in zip(_odd_tensors(), odd, strict=True):
            formula = ring_all_reduce_bytes(x_P.nbytes, size, rank, x_P.element_size())
            assert theirs == {"all_reduce": formula}
            assert by_hand == {"send": formula, "recv": 0}


def _data_parallel_and_sharded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
    x, sent = torch.randn(2, 16), {}

    ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.001)
    ddp(x).sum().backward()  # the first step settles DDP's buckets
    loss = ddp(x).sum()
    sent["ddp"] = _sent(loss.backward)
    with ddp.no_sync():
        loss = ddp(x).sum()
        sent["ddp no_sync"] = _sent(loss.backward)

    sharded = copy.deepcopy(model)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))
    with ByteMeter() as meter:
        sharded(x).sum().backward()
    sent["fsdp2"] = meter.by_collective, meter.calls

    tensor_mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    tensor_parallel = parallelize_module(copy.deepcopy(model), tensor_mesh, plan)
    assert isinstance(tensor_parallel[0].weight, DTensor)
    with ByteMeter() as meter:
        tensor_parallel(x.requires_grad_()).sum().backward()
    sent["tensor parallel"] = meter.by_collective
    scattered = distribute_tensor(torch.randn(4, 8), tensor_mesh, [Shard(1)])
    sent["inside an operator"] = _sent(scattered.softmax, 1)  # DTensor itself gathers the row first
    return sent


def test_ddp_fsdp2_and_dtensor_are_counted_from_inside():
    size, weights, activations = 2, 2 * 16 * 32 * 4, 2 * 16 * 4
    for sent in launch(_data_parallel_and_sharded, size, backend="gloo"):
        assert sent["ddp"] == {"all_reduce": ring_all_reduce_bytes(weights, size)}
        assert sent["ddp no_sync"] == {}
        gathered, calls = sent["fsdp2"]
        assert gathered == {  # weights gathered for the forward, again for the backward; gradients scattered
            "all_gather": 2 * collective_bytes("all_gather", weights, size),
            "reduce_scatter": collective_bytes("reduce_scatter", weights, size),
        }
        assert calls == {"all_gather": 4, "reduce_scatter": 2}
        # forward: the row-parallel layer's output; backward: the gradient of the column-parallel layer's input
        assert sent["tensor parallel"] == {"all_reduce": 2 * ring_all_reduce_bytes(activations, size)}
        assert sent["inside an operator"] == {"all_gather": collective_bytes("all_gather", 4 * 8 * 4, size)}


def _axes_records_and_nesting():
    groups = make_groups(Mesh(dp=2, tp=2))
    with ByteMeter(axes=groups) as outer:
        comm.all_reduce(torch.ones(8), groups["dp"])
        with ByteMeter() as inner:
            comm.all_gather(torch.ones(8, dtype=torch.bfloat16), groups["tp"])
            comm.all_reduce(torch.ones(8), groups["pp"])  # a group of one
        dist.barrier()
        dist.all_reduce(torch.ones(8))
    comm.all_reduce(torch.ones(8), groups["dp"])  # closed: not counted
    return outer.by_axis, outer.records, outer.sent_bytes, inner.sent_bytes, inner.by_axis


def test_axes_are_told_apart_and_meters_nest():
    for by_axis, records, sent_bytes, inner_bytes, inner_axes in launch(_axes_records_and_nesting, 4, backend="gloo"):
        assert by_axis == {"dp": 32, "tp": 16, "pp": 0, "other": 48}
        assert sent_bytes == 96 and inner_bytes == 16 and inner_axes == {"other": 16}
        assert records[0] == CommRecord("all_reduce", 32, 2, 32, "dp")
        assert records[1] == CommRecord("all_gather", 32, 2, 16, "tp")
        assert all(type(record.sent_bytes) is int for record in records)


def _pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    layer = nn.Linear(8, 8, bias=False)
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(12, 8), torch.randn(12, 8)

    def step():
        schedule.step(x) if rank == 0 else schedule.step(target=y)

    step()  # the first step also tells the neighbours the shapes
    return _sent(step)


@pytest.mark.skipif(
    not hasattr(dist, "all_gather_single"), reason=f"torch {torch.__version__}: PyTorch's pipelining on gloo needs 2.13"
)
def test_pipeline_parallelism_sends_one_activation_and_one_gradient_a_micro_batch():
    for sent in launch(_pipeline, 2, backend="gloo"):
        assert sent == {"send": 12 * 8 * 4, "recv": 0}


def test_an_unknown_collective_is_refused_not_dropped():
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("made_up(Tensor input, str group_name) -> Tensor")
    library.impl("made_up", lambda input, group_name: input, "CPU")
    with ByteMeter(), pytest.raises(NotImplementedError, match=r"no rule for the operator _c10d_functional\.made_up"):
        torch.ops._c10d_functional.made_up(torch.ones(2), "0")


def test_every_collective_operator_of_this_torch_has_a_rule():
    """A new torch may bring a new operator: then give it a rule, or list it as no communication."""
    from course_lib.measure.meter import _NAMESPACES, _NOT_COMMUNICATION, _RULES

    namespaces = _NAMESPACES - {"symm_mem"}  # GPUs only, refused by the meter
    names = [schema.name.split("::") for schema in torch._C._jit_get_all_schemas()]
    operators = {name for namespace, name in names if namespace in namespaces and name != "made_up"}
    assert len(operators) > 30
    assert operators <= _RULES.keys() | _NOT_COMMUNICATION


def _bytes_through_loopback(payload_bytes, repeats):
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    x_P, group, seen = torch.ones(payload_bytes // 4), dist.group.WORLD, []
    for _ in range(repeats):
        dist.barrier()
        before = psutil.net_io_counters(pernic=True)[loopback].bytes_sent
        dist.barrier()
        with ByteMeter() as meter:
            ring_all_reduce(x_P, group)
        dist.barrier()
        seen.append(psutil.net_io_counters(pernic=True)[loopback].bytes_sent - before)
        dist.barrier()
    return meter.sent_bytes, min(seen)


@pytest.mark.skipif(
    not {"lo", "lo0"} & psutil.net_io_counters(pernic=True).keys(), reason="this machine counts no loopback bytes"
)
def test_the_machine_itself_counts_the_same_bytes_on_its_loopback():
    """The least of several tries: other programs may use the loopback too, but they can only add."""
    sent, on_wire = zip(*launch(_bytes_through_loopback, 4, 4_000_000, 15, backend="gloo"), strict=True)
    assert sum(sent) == 4 * ring_all_reduce_bytes(4_000_000, 4) == 24_000_000
    assert min(on_wire) == pytest.approx(sum(sent), rel=0.1)


def _all_reduce_in_backward_on_a_gpu():
    weight = torch.ones(1000, device="cuda", requires_grad=True)
    threads = []

    def hook(grad):
        threads.append(threading.get_ident())
        dist.all_reduce(grad)

    weight.register_hook(hook)
    loss = (weight * 2).sum()
    sent = _sent(loss.backward)
    return sent, threads[0] != threading.get_ident()


@pytest.mark.gpu
def test_collectives_from_autograds_gpu_threads_are_seen():
    for sent, in_another_thread in launch(_all_reduce_in_backward_on_a_gpu, 2, backend="gloo"):
        assert in_another_thread
        assert sent == {"all_reduce": 4000}
