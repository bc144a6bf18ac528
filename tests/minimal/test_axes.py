"""Several axes at once: the package's groups, the gradients of one process and of the engine; wrong rules have not."""

import itertools

import pytest
import torch
from harness import sampled

from course_lib.launch import launch
from course_lib.layout import Layout, Mesh
from course_lib.minimal import compare_layout
from course_lib.minimal.axes import axes_of, coordinates, group_along
from course_lib.minimal.compare_layout import errors_by_kind, losses_under, sent_by_axis
from course_lib.model import build
from course_lib.parallel import five_d, whole

TWO = "dp=2,tp=2,sequence_parallel=true,micro_batches=2"
LAYOUTS = (TWO, "dp=2,tp=2,micro_batches=2", "dp=2,cp=2,ep=2", "pp=2,tp=2,sequence_parallel=true,micro_batches=2")


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
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 2))
def test_gradients_are_those_of_one_process(layout):
    assert max(errors_by_kind(axes_of, layout).values()) < 1e-12


@pytest.mark.launches
@pytest.mark.slow
def test_gradients_of_all_five_axes_are_those_of_one_process():
    five = "pp=2,dp=2,cp=2,tp=2,ep=2,sequence_parallel=true,micro_batches=2"
    assert max(errors_by_kind(axes_of, five).values()) < 1e-12


def engine_and_rule(text):
    """Full gradients by the engine's own sums, and by the rule."""
    layout = Layout.parse(text)
    engine = five_d.build(compare_layout.CONFIG, layout, dtype=torch.float64)
    data = compare_layout._micro_batches(layout, engine.groups.coordinates["dp"])
    five_d.accumulate_gradients(engine, data)
    return whole.full_gradients(engine), compare_layout._gradients(axes_of, text)[0]


@pytest.mark.launches
@pytest.mark.parametrize("layout", sampled(LAYOUTS[:3], 1))
def test_gradients_are_those_of_the_engine(layout):
    for engine, rule in launch(engine_and_rule, 4, layout):
        assert engine.keys() == rule.keys() == dict(build(compare_layout.CONFIG).named_parameters()).keys()
        assert max((engine[name] - rule[name]).abs().max().item() for name in rule) < 1e-12


@pytest.mark.launches
@pytest.mark.parametrize(
    ("rule", "layout", "wrong"),
    [
        (over_data, TWO, {"norms"}),
        (lambda kind, layout: ["world"], TWO, {"matrices", "experts"}),
        (lambda kind, layout: ["data"], LAYOUTS[2], {"experts"}),
        (lambda kind, layout: [*over_data(kind, layout), *(["tp"] if kind == "norms" else [])], LAYOUTS[1], {"norms"}),
    ],
)
def test_a_wrong_rule_is_seen_in_its_kinds_alone(rule, layout, wrong):
    errors = errors_by_kind(rule, layout)
    assert {kind for kind, error in errors.items() if error > 1e-9} == wrong


@pytest.mark.launches
@pytest.mark.exhaustive
def test_the_loss_falls_under_a_wrong_rule_too():
    right, wrong = (losses_under(rule, TWO, steps=8) for rule in (axes_of, over_data))
    assert right[0] == pytest.approx(wrong[0], abs=1e-12) and right[-1] != wrong[-1]
    assert max(right[-1], wrong[-1]) < right[0] - 0.1


@pytest.mark.launches
@pytest.mark.parametrize("layout", [f"{TWO},zero_stage=1", "dp=2,cp=2,ep=2,zero_stage=3"])
def test_bytes_of_each_axis_are_those_of_the_formulas(layout):
    counted, formula = sent_by_axis(layout)
    assert counted == formula and len(counted) > 2


def test_what_the_comparison_cannot_do_is_refused():
    with pytest.raises(ValueError, match="zero_stage is 1"):
        errors_by_kind(axes_of, "dp=2,zero_stage=1")
