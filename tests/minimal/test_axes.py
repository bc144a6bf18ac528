"""Several axes at once: the package's groups; wrong rules of sums are seen in their kinds."""

import itertools

import pytest

from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_rule_of_sums
from course_lib.launch import RankError
from course_lib.layout import Layout, Mesh
from course_lib.minimal.axes import axes_of, coordinates, group_along

TWO = "dp=2,tp=2,sequence_parallel=true,micro_batches=2"


def over_data(kind, layout):
    return ["expert_dp" if kind == "experts" else "data"]


@pytest.mark.parametrize("order", list(itertools.permutations(("pp", "dp", "cp", "tp"))))
def test_places_and_groups_are_those_of_the_package(order):
    sizes = {"pp": 2, "dp": 3, "cp": 1, "tp": 2}
    sizes, mesh = {axis: sizes[axis] for axis in order}, Mesh(**sizes, order=order)
    for rank in range(12):
        assert coordinates(rank, sizes) == mesh.coordinates(rank)
        assert group_along(["dp", "cp"], rank, sizes) == mesh.data_ranks(rank)
        assert all(group_along([axis], rank, sizes) == mesh.ranks_along(axis, rank) for axis in sizes)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("rule", "layout", "wrong"),
    [
        (over_data, TWO, {"norms"}),
        (lambda kind, layout: ["data"], "dp=2,cp=2,ep=2", {"experts"}),
    ],
)
def test_a_wrong_rule_is_seen_in_its_kinds_alone(rule, layout, wrong):
    run = on_ranks(rule, as_rule_of_sums, Layout.parse(layout).world_size, layout=layout)
    assert {name.split()[0] for name, error in run.errors.items() if error > 1e-9} == wrong


@pytest.mark.launches
def test_what_the_comparison_cannot_do_is_refused():
    with pytest.raises(RankError, match="zero_stage is 1"):
        on_ranks(axes_of, as_rule_of_sums, 2, layout="dp=2,zero_stage=1")
