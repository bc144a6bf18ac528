"""Pictures of sharding: the numbers that they draw, and that no text lies on another."""

from itertools import pairwise

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from harness import sampled

matplotlib.use("Agg")

from pictures import look, overlapping_texts

from course_lib import model
from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure import KINDS, Timeline
from course_lib.memory.papers import korthikanti_layer_bytes
from course_lib.memory.zero import padded, zero_bytes_per_parameter
from course_lib.parallel import zero
from course_lib.plots import curves, matrices, regions, sharding, tensor_block, timeline, zero_step
from course_lib.run import Run
from course_lib.span import Span
from course_lib.timing import tensor_parallel_layer_spans

BYTES = {"parameters": 2, "gradients": 2, "optimizer": 12}
SHAPE = {"tokens": 6, "d_model": 8, "d_ff": 10}


# ---------------------------------------------------------------- ZeRO


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_pieces_of_a_stage_weigh_what_the_formula_says_and_cover_each_kind(stage):
    pieces = sharding.zero_pieces(stage, 4)
    for rank in range(4):
        assert sharding.held_bytes(pieces, BYTES, rank) == zero_bytes_per_parameter(stage, 4, optimizer_bytes=12)
    for kind in sharding.STATE_KINDS:
        parts = [(p.start, p.stop) for p in pieces if p.kind == kind]
        cut = stage >= sharding.SHARDED_FROM[kind]
        assert parts == ([(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)] if cut else [(0, 1)] * 4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_areas_are_true_to_bytes_and_do_not_overlap(stage):
    areas = sharding.zero_areas(sharding.zero_pieces(stage, 4), BYTES)
    for rank in range(4):
        mine = [(left, width) for piece, left, width in areas if piece.rank == rank]
        assert [width for _, width in mine] == [
            size / (4 if stage >= sharding.SHARDED_FROM[kind] else 1) for kind, size in BYTES.items()
        ]
        assert all(left + width < right for (left, width), (right, _) in pairwise(mine))


def test_a_stage_and_a_number_of_ranks_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="choose 0"):
        sharding.zero_pieces(4, 2)
    with pytest.raises(ValueError, match="room for 16"):
        sharding.show_zero_stages(32)


def test_the_title_of_the_stages_says_what_fits():
    assert (
        sharding.zero_title(BYTES, 4) == "Each stage cuts one more kind into 4: from 16 bytes per parameter down to 4"
    )


def test_flat_pieces_are_the_shards_that_torch_cuts():
    sizes = {"w": 7, "b": 3, "scale": 1}
    pieces = sharding.flat_pieces(sizes, 4)
    flat = torch.cat([torch.full((size,), index) for index, size in enumerate(sizes.values())] + [torch.tensor([-1])])
    names = [*sizes, sharding.PADDING]
    for rank, shard in enumerate(flat.chunk(4)):
        held = [name for p in pieces if p.rank == rank for name in [p.name] * (p.stop - p.start)]
        assert held == [names[index] for index in shard.tolist()]
    assert pieces[-1].stop == padded(11, 4)
    assert sharding.PADDING not in {piece.name for piece in sharding.flat_pieces({"w": 8}, 4)}


def test_two_units_are_whole_at_most_and_the_next_is_the_one_gathered_ahead():
    steps = sharding.gather_steps(4)
    assert [step.computing for step in steps] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [step.alive for step in steps] == [(0, 1), (1, 2), (2, 3), (3,), (2, 3), (1, 2), (0, 1), (0,)]
    assert {len(step.alive) for step in sharding.gather_steps(4, prefetch=False)} == {1}
    units = [100, 70, 70, 90]
    alive_bytes = [sum(2 * units[unit] for unit in step.alive) for step in steps]
    assert max(alive_bytes) == 2 * max(a + b for a, b in pairwise(units))


def _what_is_whole():
    """(phase, unit, units that are whole) as an engine of stage 3 has it, whenever a unit's turn begins."""
    group, seen = torch.distributed.group.WORLD, []
    engine = zero.build(model.build(preset("toy")), group, stage=3)

    def note(phase, unit):
        seen.append((phase, unit, tuple(index for index, flat in enumerate(engine.flats) if flat.is_whole)))

    def enter(unit, enter_backward=engine._before_backward):
        enter_backward(unit)
        note("backward", unit)

    for unit, (_, modules) in enumerate(engine.units):
        modules[0].register_forward_pre_hook(lambda module, args, unit=unit: note("forward", unit))
    engine._before_backward = enter
    x_BS = torch.arange(16).view(1, 16)
    zero.accumulate_gradients(engine, [(x_BS, x_BS + 1)])
    return seen


@pytest.mark.exhaustive
def test_the_drawn_units_are_those_that_are_whole_when_stage_3_runs():
    drawn = sharding.gather_steps(preset("toy").num_layers + 2)
    for seen in launch(_what_is_whole, 2):
        assert seen == [(step.phase, step.computing, step.alive) for step in drawn]


def test_a_flow_has_a_tile_for_every_element_that_a_rank_holds():
    row = zero_step.FlowRow("weights", "parameters", [[1.0, 2.0, None, None], [None, None, 3.0, 4.0]], "all-gather")
    tiles = zero_step.flow_tiles([row, row])
    held = [(tile.rank, tile.x - zero_step.rank_left(tile.rank, 4), tile.text) for tile in tiles if tile.y == 0]
    expected = [(0, 0, "1"), (0, 1, "2"), (0, 2, ""), (0, 3, ""), (1, 0, ""), (1, 1, ""), (1, 2, "3"), (1, 3, "4")]
    assert held == expected
    assert {tile.y for tile in tiles} == {0, zero_step.ROW_HEIGHT}


def test_a_step_of_stage_1_has_each_shard_in_its_place():
    own, mean = [[10.0] * 3, [40.0] * 3], [[25.0, 25.0], [25.0]]
    rows = zero_step.stage_1_rows(own, mean, [[1.0, 2.0], [3.0]], [[1.0, 2.0, 3.0]] * 2)
    assert [row.of_ranks for row in rows] == [
        own,
        [[25.0, 25.0, None], [None, None, 25.0]],
        [[1.0, 2.0, None], [None, None, 3.0]],
        [[1.0, 2.0, 3.0]] * 2,
    ]
    assert [row.then for row in rows] == ["reduce-scatter (mean)", "update of the shard", "all-gather", ""]


def test_every_panel_of_a_step_has_the_same_axis_and_its_own_peak():
    panels = zero_step.step_panels({"a": STEP, "b": STEP})
    assert [panel.title for panel in panels] == ["a\npeak 48.0 B", "b\npeak 48.0 B"]
    assert {panel.limit for panel in panels} == {48 * 1.05}


# ---------------------------------------------------------------- tensor parallel


def test_the_drawn_pieces_multiply_to_the_product():
    X, A, B = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 8), (8, 10), (10, 8)))
    whole = {"X": X, "A": A, "B": B, "Y": X @ A}
    pieces = matrices.linear_pair_pieces(**SHAPE, tp_size=4)
    part = lambda p: whole[p.matrix][slice(*p.rows), slice(*p.columns)]  # noqa: E731
    of = {(p.matrix, p.rank): p for p in pieces}
    total = torch.zeros(6, 8, dtype=torch.float64)
    for rank in range(4):
        y = part(of["X", None]) @ part(of["A", rank])
        torch.testing.assert_close(y, part(of["Y", rank]))
        z = y @ part(of["B", rank])
        assert z.shape == of["Z", rank].shape and of["Z", rank].partial
        total += z
    torch.testing.assert_close(total, X @ A @ B)
    assert not of["Z", None].partial


def test_the_size_below_a_cut_matrix_is_said_to_be_that_of_each_piece():
    figure, axes = plt.subplots()
    matrices.draw_linear_pair(axes, matrices.linear_pair_pieces(6, 8, 12, tp_size=2))
    below = [text.get_text().split("\n") for text in axes.texts if " × " in text.get_text()]
    plt.close(figure)
    assert [lines[-1] == "each" for lines in below] == [False, True, True, True, True, False]
    assert below[1][:2] == ["D × f", "8 × 6"]


def test_uneven_sizes_are_cut_as_torch_chunk_cuts_them():
    for size, ranks in ((10, 4), (8, 4), (7, 2), (5, 4)):
        lengths = [stop - start for start, stop in matrices.chunk_bounds(size, ranks)]
        assert [n for n in lengths if n] == [len(c) for c in torch.arange(size).chunk(ranks)] and sum(lengths) == size


def test_each_rank_holds_the_key_value_heads_that_its_query_heads_read():
    even = matrices.heads_by_rank(8, 4, 2)
    assert [(r.q_heads, r.kv_heads, r.replicas) for r in even] == [((0, 1, 2, 3), (0, 1), 1), ((4, 5, 6, 7), (2, 3), 1)]
    many = matrices.heads_by_rank(8, 2, 4)
    assert [r.kv_heads for r in many] == [(0,), (0,), (1,), (1,)] and many[0].replicas == 2
    assert "held by 2 ranks" in matrices.heads_title(many) and "none held twice" in matrices.heads_title(even)
    with pytest.raises(ValueError, match="choose tp from 1, 2, 3, 6"):
        matrices.heads_by_rank(6, 6, 4)
    with pytest.raises(ValueError, match="or divide it; choose tp from 1, 3, 6, 12"):
        matrices.heads_by_rank(12, 3, 4)


def test_each_token_is_answered_by_one_rank():
    rows = matrices.vocabulary_rows(10, 4, [0, 3, 9])
    assert [(row.start, row.stop) for row in rows] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [sum(row.answers[column] for row in rows) for column in range(3)] == [1, 1, 1]
    assert [row.answers for row in rows] == [
        (True, False, False),
        (False, True, False),
        (False,) * 3,
        (False, False, True),
    ]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        matrices.vocabulary_rows(10, 4, [10])


# ---------------------------------------------------------------- regions


@pytest.mark.parametrize("mode", regions.MODES)
@pytest.mark.parametrize("scores", [True, False])
def test_regions_add_up_to_table_2(mode, scores):
    config = preset("gpt3-175b")
    drawn = regions.block_regions(config, 2, 2048, 8, mode, scores)
    tp = 1 if mode == "none" else 8
    table = korthikanti_layer_bytes(config, 2, 2048, "none" if scores else "selective", tp, mode == "tp+sp")
    assert sum(region.bytes for region in drawn) == pytest.approx(table)


def test_a_rank_holds_a_part_of_one_dimension_at_most_and_the_gathered_input_whole():
    dims = {mode: [r.dims for r in regions.block_regions(preset("gpt2"), 1, 64, 4, mode)] for mode in regions.MODES}
    assert dims["none"] == ["S × D", "S × N H", "S × D", "S × D", "S × F", "S × D"]
    assert dims["tp"] == ["S × D", "S × n H", "S × D", "S × D", "S × f", "S × D"]
    assert dims["tp+sp"] == ["s × D", "S × n H", "s × D", "s × D", "S × f", "s × D"]
    again, kept = (regions.block_regions(preset("gpt2"), 1, 64, 4, regather=r) for r in (True, False))
    sbd = 64 * 768
    assert [k.bytes - a.bytes for a, k in zip(again, kept, strict=True)] == [
        0,
        2 * sbd * 3 / 4,
        0,
        0,
        2 * sbd * 3 / 4,
        0,
    ]
    assert kept[1].bytes_by_held[regions.WHOLE] == 2 * sbd
    with pytest.raises(ValueError, match="choose from none, tp"):
        regions.block_regions(preset("gpt2"), 1, 64, 4, "sp")


def test_borders_of_a_block_mirror_in_backward():
    assert regions.block_borders("none") == []
    assert [(b.index, b.forward, b.backward) for b in regions.block_borders("tp")] == [
        (1, "", "all-reduce"), (2, "all-reduce", ""), (4, "", "all-reduce"), (5, "all-reduce", ""),
    ]  # fmt: skip
    sp = regions.block_borders("tp+sp")
    assert [b.forward for b in sp] == ["all-gather", "reduce-scatter"] * 2
    assert [b.backward for b in sp] == ["reduce-scatter", "all-gather"] * 2
    again = regions.block_borders("tp+sp", regather=True)  # one more all-gather in front of attention and the MLP
    assert sum(b.backward.count("all-gather") for b in again) == sum(b.backward.count("all-gather") for b in sp) + 2
    assert regions.regions_title({"tp": 13.0, "tp+sp": 4.25}, 8).endswith("3.1 times less than TP 8 alone keeps")


def test_numbers_of_points_give_way_to_other_points():
    first = {1: 20.0, 2: 100.0}
    assert curves.value_labels_of([first, {1: 30.0}]) == [(1, 20.0, False), (2, 100.0, True), (1, 30.0, True)]
    assert curves.value_labels_of([first, {1: 60.0}]) == [(1, 20.0, True), (2, 100.0, True), (1, 60.0, False)]
    assert curves.value_labels_of([first, {2: 99.0}]) == [(1, 20.0, True), (2, 100.0, True)]  # one number for both


def test_a_bar_carries_as_much_of_its_name_as_it_has_room_for():
    assert timeline.label_for("attention backward", 0.25) == "attention backward"
    assert timeline.label_for("sum attention", 0.12) == "attention"
    assert timeline.label_for("attention", 0.075) == ""
    assert timeline.label_for("gather 3", 0.02) == "3" and timeline.label_for("forward", 0.02) == ""


def test_a_name_without_room_becomes_a_letter_and_the_letters_are_listed():
    spans = [Span(0, "compute", "forward", 0, 8), Span(0, "communication", "sum", 8, 9), Span(0, "compute", "b", 9, 10)]
    late = [Span(0, "communication", "gather", 0, 0.2), Span(0, "communication", "sum", 1, 1.1)]
    keys = timeline.keys_for([timeline.overlap_picture(each) for each in (spans, late)])
    assert keys == {"gather": "a", "forward": "forward", "sum": "b", "b": "b"}
    many = [Span(0, "compute", f"block {index}", index, index + 1) for index in range(30)]
    with pytest.raises(ValueError, match="30 names have no room in their bars"):
        timeline.keys_for([timeline.overlap_picture(many)])
    assert timeline.wrap_entries(["a: one", "b: two", "c: three"], 15) == ["a: one   b: two", "c: three"]


# ---------------------------------------------------------------- every picture can be drawn, and read

STAGES = {f"stage {s}": {k: 10**10 * n // (4 if s >= sharding.SHARDED_FROM[k] else 1) for k, n in BYTES.items()}
          for s in range(4)}  # fmt: skip
PUBLISHED = {"TP": {2: 13923, 4: 12421, 8: 10903, 16: 6246, 32: 2146},
             "TP + SP": {2: 14167, 4: 13460, 8: 10889, 16: 6159, 32: 3610}}  # fmt: skip
MODELS = {"TP, modelled": {2: 14e3, 8: 12e3, 32: 2e3}, "TP + SP, modelled": {2: 14e3, 8: 12e3, 32: 3e3}}
CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("efa"))
RUN = Run(preset("llama-3.1-8b"), Layout(tp=8), 4096)
LAYERS = {label: tensor_parallel_layer_spans(RUN, CLUSTER, overlap=overlap)
          for label, overlap in (("one by one", False), ("gradient sums behind weight gradients", True))}  # fmt: skip
FLOW = zero_step.FlowRow("gradients", "gradients", [[10.0, None], [None, 40.0]], "reduce-scatter")
STEP = Timeline([0.0, 1.0, 2.0], {kind: [4, 8, 4] for kind in KINDS}, [(1.0, "backward"), (2.0, "optimizer")])
PICTURES = {
    "stages": lambda: sharding.show_zero_stages(4),
    "stages of 16": lambda: sharding.show_zero_stages(16),
    "bytes of stages": lambda: sharding.show_stages(STAGES, [gpu("a100-40"), gpu("h100")]),
    "flat": lambda: sharding.show_flat_shards({"norm": 64, "q": 4096, "k": 2048, "o": 4096, "gate": 11_038}, 4),
    "flat, small": lambda: sharding.show_flat_shards({"w": 7, "b": 3}, 4),
    "gathered": lambda: sharding.show_gathered(["embed", "block 0", "block 1", "block 2", "norm, head"]),
    "flow": lambda: zero_step.show_flow([FLOW, FLOW], "t"),
    "memory of a step": lambda: zero_step.show_step_memory({"stage 0": STEP, "stage 1": STEP}, "t"),
    "linear pair": lambda: matrices.show_linear_pair(),
    "linear pair of 8, uneven": lambda: matrices.show_linear_pair(d_ff=100, tp_size=8),
    "heads": lambda: matrices.show_heads(8, 4, (2, 8)),
    "vocabulary": lambda: matrices.show_vocabulary(),
    "f and g": lambda: tensor_block.show_f_and_g(),
    "f and g on 4 ranks": lambda: tensor_block.show_f_and_g(4),
    "a loss from parts": lambda: tensor_block.show_vocab_loss([1.0, 2.0, 4.0, 1.0], 3, 2),
    "a loss from many parts": lambda: tensor_block.show_vocab_loss([1.25, -2.5, 4.0, 1.0, 7.5, 3.0, 2.0, 1.0], 0, 4),
    "regions": lambda: regions.show_regions(preset("gpt3-175b")),
    "regions of two": lambda: regions.show_regions(preset("gpt2"), 4, 1024, 2, ("tp", "tp+sp")),
    "a layer in time": lambda: timeline.show_overlap(LAYERS, "t"),
    "a layer in time, with letters": lambda: timeline.show_overlap(LAYERS, "t", keys=True),
    "step times": lambda: timeline.show_step_times(
        {"tp 1": (0.5, 0.0), "tp 8": (0.06, 0.03), "tp 32": (0.02, 0.05)}, "t"
    ),
    "throughput": lambda: curves.show_curves(MODELS, PUBLISHED, "t", "GPUs", "tokens per second and GPU"),
}


@pytest.mark.parametrize("name", sampled([*PICTURES], 7))
def test_a_picture_is_shown_once_with_no_text_on_another(name, monkeypatch):
    look(PICTURES[name], monkeypatch, 80_000)


def test_the_eye_for_overlaps_sees_one():
    figure, axes = plt.subplots()
    axes.text(0.5, 0.5, "one")
    axes.text(0.5, 0.51, "other")
    assert overlapping_texts(figure) == [("one", "other")]
    plt.close(figure)
