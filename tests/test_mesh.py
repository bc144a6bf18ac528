import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch
from course_lib.mesh import AXES, Mesh, make_groups


def test_ranks_and_coordinates_are_each_others_inverse():
    mesh = Mesh(pp=2, dp=3, cp=2, tp=4)
    assert mesh.world_size == 48
    seen = [mesh.rank(**mesh.coordinates(rank)) for rank in range(48)]
    assert seen == list(range(48))


def test_tp_is_innermost_and_pp_outermost():
    mesh = Mesh(pp=2, dp=2, cp=2, tp=2)
    assert mesh.coordinates(1) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert mesh.coordinates(6) == {"pp": 0, "dp": 1, "cp": 1, "tp": 0}
    assert mesh.ranks_along("tp", 6) == [6, 7]
    assert mesh.ranks_along("cp", 6) == [4, 6]
    assert mesh.ranks_along("dp", 6) == [2, 6]
    assert mesh.ranks_along("pp", 6) == [6, 14]


def test_groups_of_an_axis_hold_each_rank_once():
    mesh = Mesh(pp=2, dp=3, tp=2)
    for axis in AXES:
        groups = mesh.all_ranks_along(axis)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(12))
        assert all(ranks == mesh.ranks_along(axis, ranks[-1]) for ranks in groups)


def test_640_gpus_leave_10_or_20_for_data_parallelism():
    assert Mesh(tp=8, pp=8, dp=10).world_size == 640  # claim C193
    assert Mesh(tp=8, pp=4, dp=20).world_size == 640  # claims C194, C195


def test_an_axis_of_one_may_be_left_out():
    assert Mesh(dp=4).rank(dp=3) == 3
    assert Mesh().ranks_along("tp", 0) == [0]


def test_describe_names_the_size_and_every_rank():
    lines = Mesh(dp=2, tp=2).describe().splitlines()
    assert lines[0] == "pp 1 x dp 2 x cp 1 x tp 2 = 4 ranks"
    assert lines[3] == "rank 2: dp 1 with [0, 2]   tp 0 with [2, 3]"
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mesh(dp=0), r"dp \(0\) must be a whole number"),
        (lambda: Mesh(tp=2.0), r"tp \(2.0\) must be a whole number"),
        (lambda: Mesh(dp=2).coordinates(2), r"rank \(2\) must be one of 0..1"),
        (lambda: Mesh(dp=2).rank(), "the index along dp is missing"),
        (lambda: Mesh(dp=2).rank(dp=2), "dp=2 is outside the mesh"),
        (lambda: Mesh(dp=2).rank(ddp=1), "axis 'ddp' is not one of pp, dp, cp, tp"),
        (lambda: Mesh(dp=2).ranks_along("ep", 0), "axis 'ep' is not one of"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def _sum_along_each_axis(mesh):
    sums = {}
    for axis, group in make_groups(mesh).items():
        mine = torch.tensor([10 ** dist.get_rank()])
        dist.all_reduce(mine, group=group)
        sums[axis] = int(mine)
    try:
        make_groups(Mesh(dp=8))
    except ValueError as error:
        sums["error"] = str(error)
    return sums


def test_groups_connect_exactly_the_ranks_along_their_axis():
    mesh = Mesh(pp=2, tp=2)
    for rank, sums in enumerate(launch(_sum_along_each_axis, 4, mesh, backend="gloo")):
        for axis in AXES:
            assert sums[axis] == sum(10**other for other in mesh.ranks_along(axis, rank))
        assert "the world has 4 ranks" in sums["error"]
