import random
import time
from itertools import permutations, product

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from course_lib.comm import make_all_groups, make_groups
from course_lib.launch import launch
from course_lib.layout import ALL_AXES, AXES, AxisLinks, Mesh, links_of_axes

ORDERS = list(permutations(AXES))


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


def test_an_axis_of_one_may_be_left_out():
    assert Mesh(dp=4).rank(dp=3) == 3
    assert Mesh().ranks_along("tp", 0) == [0]


# --- any order of the axes, and what data is made of and cut into


def some_meshes() -> list[tuple[Mesh, int]]:
    """Meshes of up to 81 ranks in any order, each with an ep that divides its data."""
    rng, found = random.Random(1), []
    while len(found) < 40:
        mesh = Mesh(**{axis: rng.choice([1, 2, 3]) for axis in AXES}, order=rng.choice(ORDERS))
        data = mesh.dp * mesh.cp
        found.append((mesh, rng.choice([ep for ep in range(1, data + 1) if data % ep == 0])))
    return found


def members_by_search(mesh: Mesh, ep_size: int, folded: bool) -> dict[str, list[list[int]]]:
    """The groups of each axis from the coordinates alone: those who differ in it only."""
    where = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    groups = {}
    experts_over = ("dp", "cp", "tp") if folded else ("dp", "cp")
    for axis, own in {**{axis: (axis,) for axis in AXES}, "data": ("dp", "cp"), "experts": experts_over}.items():
        together: dict[tuple, list[int]] = {}
        for rank, at in enumerate(where):
            together.setdefault(tuple(at[other] for other in AXES if other not in own), []).append(rank)
        groups[axis] = list(together.values())
    parts = [[ranks[i : i + ep_size] for i in range(0, len(ranks), ep_size)] for ranks in groups.pop("experts")]
    groups["ep"] = [run for runs in parts for run in runs]
    groups["expert_dp"] = [list(column) for runs in parts for column in zip(*runs, strict=True)]
    return groups


def test_the_order_says_which_axis_is_innermost():
    mesh = Mesh(pp=2, dp=2, tp=2, order=("tp", "pp", "cp", "dp"))
    assert mesh.strides == {"tp": 4, "pp": 2, "cp": 2, "dp": 1}
    assert (mesh.ranks_along("dp", 6), mesh.ranks_along("tp", 6)) == ([6, 7], [2, 6])
    for order in ORDERS:
        mesh = Mesh(pp=2, dp=3, cp=2, tp=4, order=order)
        assert [mesh.rank(**mesh.coordinates(rank)) for rank in range(48)] == list(range(48))


def test_members_of_every_group_are_those_who_differ_along_its_axes_only():
    for (mesh, ep_size), folded in product(some_meshes(), (False, True)):
        groups = members_by_search(mesh, ep_size, folded)
        for rank in range(mesh.world_size):
            found = {axis: [ranks for ranks in groups[axis] if rank in ranks] for axis in ALL_AXES}
            assert {axis: [ranks] for axis, ranks in mesh.members(rank, ep_size, folded=folded).items()} == found


def test_replicas_cut_data_into_equal_runs_with_all_experts_in_each():
    mesh = Mesh(dp=4, cp=2, tp=2)
    for rank in range(mesh.world_size):
        groups = mesh.members(rank, 2, 2)
        shard, replicate = groups["shard"], groups["replicate"]
        assert len(shard) == 4 and len(replicate) == 2 and set(shard) & set(replicate) == {rank}
        assert set(groups["ep"]) <= set(shard) <= set(groups["data"])
        assert groups["expert_shard"] == [other for other in groups["expert_dp"] if other in shard]
        assert groups["expert_replicate"] == [other for other in groups["expert_dp"] if other in replicate]
    assert mesh.members(0, 8, 1).keys() == set(ALL_AXES)
    with pytest.raises(ValueError, match=r"dp_replicate \(4\) must divide dp x cp / ep = 4 x 2 / 4 = 2"):
        mesh.members(0, 4, 4)


def test_links_are_those_that_a_look_at_every_rank_finds():
    for (mesh, ep_size), folded in product(some_meshes(), (False, True)):
        for ranks_per_node in (1, 2, 3, 4, 8):
            links = links_of_axes(mesh, ranks_per_node, ep_size, folded)
            for axis, groups in members_by_search(mesh, ep_size, folded).items():
                nodes = [[rank // ranks_per_node for rank in ranks] for ranks in groups]
                shared = [of_group.count(node) for of_group in nodes for node in of_group]
                spread = max(len(set(of_group)) for of_group in nodes)
                kind = "network" if max(shared) == 1 else "node" if spread == 1 else "both"
                kind = "none" if len(groups[0]) == 1 else kind
                assert links[axis] == AxisLinks(spread, kind)


def test_links_of_16384_ranks_are_found_without_going_through_pairs_of_ranks():
    llama = links_of_axes(Mesh(pp=16, dp=8, cp=16, tp=8), 8)  # Llama Team 2024 (arXiv:2407.21783), table 4
    assert {axis: link.kind for axis, link in llama.items() if link.kind != "network"} == {"tp": "node", "ep": "none"}
    deepseek = links_of_axes(Mesh(pp=16, dp=128), 8, ep_size=64)  # DeepSeek-V3: experts over 8 nodes of 8
    assert (deepseek["ep"], deepseek["expert_dp"].kind) == (AxisLinks(8, "both"), "network")
    seconds = []
    for _ in range(5):
        start = time.process_time()
        links_of_axes(Mesh(dp=16_384), 8, ep_size=64)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5  # 0.02 to 0.05 on machines that are busy with other things; pairs would take minutes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mesh(order=("pp", "dp")), "order is .*; name each of pp, dp, cp, tp once"),
        (lambda: Mesh(dp=4, cp=3).members(0, ep_size=5), r"ep \(5\) must divide dp x cp = 4 x 3 = 12: "),
        (lambda: Mesh(dp=2).coordinates(2), r"rank \(2\) must be one of 0..1"),
        (lambda: Mesh(dp=2).rank(), "the index along dp is missing"),
        (lambda: Mesh(dp=2).rank(dp=2), "dp=2 is outside the mesh"),
        (lambda: Mesh(dp=2).rank(ddp=1), "axis is 'ddp'; did you mean 'dp'\\? choose from pp, dp, cp, tp"),
        (lambda: Mesh(dp=2).ranks_along("ep", 0), "axis is 'ep'; .*choose from pp, dp, cp, tp"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
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


def _ranks_met_along_each_axis(cases):
    """For each case what an all-gather along each axis brings, and who the groups say that I am."""
    met = []
    for mesh, ep_size, *others in cases:
        groups = make_all_groups(mesh, ep_size, **dict(zip(("local_only", "folded"), others, strict=True)))
        ranks = {}
        for axis, group in groups.by_axis.items():
            pieces = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(pieces, torch.tensor([dist.get_rank()]), group=group)
            ranks[axis] = [int(piece) for piece in pieces]
        met.append((ranks, groups.coordinates, len({group.group_name for group in groups.by_axis.values()})))
    return met


def test_all_groups_of_8_ranks_connect_their_members_in_any_order_and_for_any_ep():
    orders = [AXES, ("tp", "dp", "pp", "cp")]
    meshes = [Mesh(dp=2, cp=2, tp=2, order=order) for order in orders]
    cases = [(mesh, ep, ep == 2, folded) for mesh in meshes for ep, folded in ((1, False), (2, True), (4, False))]
    cases.append((meshes[0], 8, False, True))
    for rank, met in enumerate(launch(_ranks_met_along_each_axis, 8, cases, backend="gloo")):
        for (mesh, ep_size, _, folded), (ranks, coordinates, num_names) in zip(cases, met, strict=True):
            assert ranks == mesh.members(rank, ep_size, folded=folded) | {"world": list(range(8))}
            assert (coordinates, num_names) == (mesh.coordinates(rank), 8)  # a name each, so a meter tells them apart


def test_one_rank_of_16384_makes_its_own_groups_without_the_others():
    dist.init_process_group("fake", store=FakeStore(), rank=9001, world_size=16_384)
    try:
        mesh = Mesh(pp=16, dp=64, cp=2, tp=8)
        groups = make_all_groups(mesh, ep_size=32, local_only=True)
        for axis, ranks in mesh.members(9001, 32).items():
            assert dist.get_process_group_ranks(getattr(groups, axis)) == ranks
        with pytest.raises(ValueError, match="the world has 16384 ranks, the mesh pp 1 x dp 4"):
            make_all_groups(Mesh(dp=4), local_only=True)
    finally:
        dist.destroy_process_group()


def test_C271_tp_8_pp_8_dp_16_are_128_nodes_of_8():
    assert Mesh(tp=8, pp=8, dp=16).world_size == 1024 == 128 * 8
