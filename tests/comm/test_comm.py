import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.launch import launch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def _input(rank, rows=12, dtype=torch.float64):
    """Small whole numbers: exact in every dtype, in whatever order they are added."""
    return (torch.arange(rows * 2).view(rows, 2) % 7 + 3 * rank).to(dtype)


def _all_collectives(dtype):
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    x = _input(rank, dtype=dtype)
    results = {
        "sum": comm.all_reduce(x, group),
        "max": comm.all_reduce(x, group, op="max"),
        "min": comm.all_reduce(x, group, op="min"),
        "product": comm.all_reduce(x, group, op="product"),
        "reduce": comm.reduce(x, size - 1, group),
        "reduce_scatter": comm.reduce_scatter(x, group),
        "all_gather": comm.all_gather(x, group),
        "broadcast": comm.broadcast(x, size - 1, group),
        "gather": comm.gather(x, 0, group),
        "scatter": comm.scatter(x, size - 1, group),
        "all_to_all": comm.all_to_all(x, group),
    }
    if dtype.is_floating_point:
        results["mean"] = comm.all_reduce(x, group, op="mean")
        results["mean piece"] = comm.reduce_scatter(x, group, op="mean")
        results["mean on one"] = comm.reduce(x, 0, group, op="mean")
    piece, whole = x.new_empty(12 // size, 2), x.new_empty(12 * size, 2)
    results["reduce_scatter_into"] = piece
    results["all_gather_into"] = whole
    for work in (
        comm.reduce_scatter_into(piece, x, group, async_op=True),
        comm.all_gather_into(whole, x, group, async_op=True),
    ):
        work.wait()
    results["there and back in place"] = there_and_back = x.clone()
    mine = there_and_back.chunk(size)[rank]
    comm.reduce_scatter_into(mine, there_and_back, group)
    comm.all_gather_into(there_and_back, mine, group)
    comm.barrier(group)
    assert torch.equal(x, _input(rank, dtype=dtype)), "a collective changed its input"
    return results


def _every_dtype():
    group, rank = dist.group.WORLD, dist.get_rank()
    collectives = {dtype: _all_collectives(dtype) for dtype in DTYPES}
    in_place = torch.ones(3) * rank
    work = comm.all_reduce_(in_place, group, async_op=True)
    work.wait()
    return collectives, in_place


def _expected(rank, size, dtype):
    inputs = [_input(other, dtype=dtype) for other in range(size)]
    stacked, last, piece = torch.stack(inputs), size - 1, slice(rank * 12 // size, (rank + 1) * 12 // size)
    total = stacked.sum(0).to(dtype)
    product = stacked[0].clone()
    for x in stacked[1:]:
        product = product * x
    expected = {
        "sum": total,
        "max": stacked.amax(0),
        "min": stacked.amin(0),
        "product": product,
        "reduce": total if rank == last else None,
        "reduce_scatter": total[piece],
        "all_gather": torch.cat(inputs),
        "broadcast": inputs[last],
        "gather": torch.cat(inputs) if rank == 0 else None,
        "scatter": inputs[last][piece],
        "all_to_all": torch.cat([x[piece] for x in inputs]),
        "reduce_scatter_into": total[piece],
        "all_gather_into": torch.cat(inputs),
        "there and back in place": total,
    }
    if dtype.is_floating_point:
        mean = total / size
        expected |= {"mean": mean, "mean piece": mean[piece], "mean on one": mean if rank == 0 else None}
    return expected


def _same(got, wanted, exact):
    if got is None or wanted is None:
        return got is wanted
    return torch.equal(got, wanted) if exact else torch.allclose(got, wanted, rtol=2e-2)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_collectives_equal_their_definition(size):
    for rank, (collectives, in_place) in enumerate(launch(_every_dtype, size, backend="gloo")):
        for dtype, results in collectives.items():
            expected = _expected(rank, size, dtype)
            assert results.keys() == expected.keys()
            for name, result in results.items():
                exact = dtype is not torch.bfloat16 or name not in ("product", "mean", "mean piece", "mean on one")
                assert _same(result, expected[name], exact), (name, dtype, rank, result, expected[name])
        assert in_place.tolist() == [sum(range(size))] * 3


def _peers_and_splits():
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.arange(6.0).view(3, 2) + 100 * rank
    if rank == 0:
        comm.send(x, 1, group)
        received = comm.recv(x, 1, group)
    else:
        received = comm.recv(x, 0, group)
        comm.send(x, 0, group)
    uneven = comm.all_to_all(x, group, sent_rows=[[1, 2], [3, 0]][rank], received_rows=[[1, 3], [2, 0]][rank])
    pair = dist.new_group([1, 0])  # sorted by torch: rank 0 of the group is rank 0
    alone = [dist.new_group([other]) for other in (0, 1)][rank]
    in_group = comm.broadcast(x[:1], 1, pair), comm.all_reduce(x[:1], alone)
    return received, uneven, in_group, _mistakes(group, alone, rank)


def _mistakes(group, alone, rank):
    strided, whole = torch.ones(4, 2).t(), torch.ones(4)
    not_mine = dist.GroupMember.NON_GROUP_MEMBER
    calls = {
        "strided": lambda: comm.all_reduce(strided, group),
        "strided ring": lambda: comm.pass_on(strided, strided, group),
        "strided send": lambda: comm.send(strided, 1 - rank, group),
        "no group": lambda: comm.all_reduce(whole, None),
        "not a member": lambda: comm.all_gather(whole, not_mine),
        "rows": lambda: comm.reduce_scatter(torch.ones(3), group),
        "rows of all_to_all": lambda: comm.all_to_all(torch.ones(3), group),
        "scalar": lambda: comm.all_gather(torch.tensor(1.0), group),
        "part of another size": lambda: comm.reduce_scatter_into(torch.ones(3), whole, group),
        "whole of another dtype": lambda: comm.all_gather_into(whole.double(), torch.ones(2), group),
        "strided whole": lambda: comm.all_gather_into(strided, torch.ones(1, 4), group),
        "one list": lambda: comm.all_to_all(whole, group, sent_rows=[1, 3]),
        "lists": lambda: comm.all_to_all(whole, group, sent_rows=[1, 1], received_rows=[1, 1]),
        "op": lambda: comm.all_reduce(whole, group, op="average"),
        "mean of whole numbers": lambda: comm.all_reduce(torch.ones(4, dtype=torch.int64), group, op="mean"),
        "mean later": lambda: comm.all_reduce_(whole, group, op="mean", async_op=True),
        "ring without group": lambda: comm.pass_on(whole, whole, None),
        "to itself": lambda: comm.send(whole, rank, group),
        "beyond": lambda: comm.broadcast(whole, 2, group),
        "GPU by gloo": lambda: comm.check_point_to_point(torch.device("cuda"), group, "a ring"),
    }
    texts = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            texts[name] = str(error)
    return texts, sorted(calls)


def test_peers_uneven_splits_small_groups_and_mistakes():
    results = launch(_peers_and_splits, 2, backend="gloo")
    x = [torch.arange(6.0).view(3, 2) + 100 * rank for rank in (0, 1)]
    wanted_uneven = [torch.cat([x[0][:1], x[1]]), x[0][1:]]
    for rank, (received, uneven, in_group, (texts, calls)) in enumerate(results):
        assert torch.equal(received, x[1 - rank])
        assert torch.equal(uneven, wanted_uneven[rank])
        assert torch.equal(in_group[0], x[1][:1])
        assert torch.equal(in_group[1], x[rank][:1])
        assert sorted(texts) == calls, f"no error for {set(calls) - set(texts)}"
        assert "Call .contiguous() first" in texts["strided"]
        assert "pad dimension 0 to a multiple of 2" in texts["rows"]
        assert "needs a process group" in texts["no group"]
        assert "sum, wait, then divide" in texts["mean later"].replace('use op="sum"', "sum")


def test_the_group_is_never_left_out():
    for function in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.barrier):
        with pytest.raises(TypeError, match="group"):
            function(*([] if function is comm.barrier else [torch.ones(2)]))
