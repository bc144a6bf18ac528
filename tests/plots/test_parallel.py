"""Numbers in pictures of ranks: collectives, data parallelism, ZeRO, tensor, sequence and context parallelism."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib import model
from course_lib.config import preset
from course_lib.hardware import GPUS, LINKS, Cluster
from course_lib.launch import launch
from course_lib.layout import SEQUENCE_SHARDINGS, Mesh
from course_lib.layout.block_pairs import pairs, pairs_of_ranks
from course_lib.memory.papers import korthikanti_layer_bytes
from course_lib.memory.zero import padded, zero_bytes_per_parameter
from course_lib.minimal import ring
from course_lib.parallel import engine as engines
from course_lib.parallel import zero
from course_lib.plots import collectives, context, data_parallel, sequence, tensor
from course_lib.plots.tiles import Tile

POWERS = [[10.0**rank] * 4 for rank in range(4)]

# ---------------------------------------------------------------- collectives


def test_tiles_have_the_colour_of_the_rank_that_a_value_came_from():
    assert [collectives.origin_of(v, [[1, 2], [3, 3]]) for v in (1, 3, 6)] == [0, 1, collectives.MIXED]
    assert collectives.origin_of(5, [[5], [5]]) is None
    rows = collectives.collective_rows([[1], [2]], torch.tensor([[1, 2], [1, 2]]))
    tiles = [[tile for tile in row if isinstance(tile, Tile)] for row in rows]
    assert [[tile.text for tile in row] for row in tiles] == [["1", "1", "2"], ["2", "1", "2"]]
    assert tiles[0][0].color == tiles[0][1].color == tiles[1][1].color != tiles[1][0].color == tiles[0][2].color
    with pytest.raises(ValueError, match="one row for each rank"):
        collectives.collective_rows([[1]], [[1], [1]])
    with pytest.raises(ValueError, match="give every rank the same names"):
        collectives.show_collectives([{"gather": ([1], [1])}, {"scatter": ([1], [1])}], "t")


def _states_of_the_ring(values):
    states = [values[dist.get_rank()]]
    x_P = torch.tensor(states[0])
    pieces = x_P.tensor_split(len(x_P))
    for one_step in (ring.reduce_scatter_step, ring.all_gather_step):
        for step in range(len(x_P) - 1):
            one_step(pieces, step, dist.group.WORLD)
            states.append(x_P.tolist())
    return states


def test_the_drawn_ring_is_the_ring_that_runs():
    values = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]]
    steps = collectives.ring_all_reduce_steps(values)
    assert len(steps) == 1 + 2 * 2 and steps[-1].values == [[111, 222, 333]] * 3
    assert [steps[2].summed[rank][rank] for rank in range(3)] == [3, 3, 3]  # rank r is responsible for piece r
    states = launch(_states_of_the_ring, 3, values)
    for index, step in enumerate(steps):
        assert [states[rank][index] for rank in range(3)] == step.values, step.label
    with pytest.raises(ValueError, match="pieces each"):
        collectives.ring_all_reduce_steps([[1, 2, 3], [4, 5, 6]])


def test_each_rank_sends_the_piece_to_which_it_added_last():
    steps = collectives.ring_all_reduce_steps(POWERS)
    assert collectives.pieces_sent(steps, 0) == [3, 0, 1, 2]  # rank r sends piece r - 1 first
    assert collectives.pieces_sent(steps, 3) == [0, 1, 2, 3] and collectives.pieces_sent(steps, 6) == [None] * 4
    assert [steps[3].values[rank][rank] for rank in range(4)] == [1111] * 4
    assert collectives.place_on_circle(0.25) == pytest.approx((collectives.RADIUS, 0))  # the next one is clockwise
    with pytest.raises(ValueError, match="numbers of steps from 0 to 6"):
        collectives.show_ring(POWERS, [7], "t")


def test_a_mesh_has_its_groups_and_a_node_wires_as_wide_as_their_bytes(shown):
    mesh = Mesh(dp=2, tp=2, pp=2)
    assert collectives.groups_along(mesh, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert collectives.groups_along(mesh, "pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    with pytest.raises(ValueError, match="at most 32 ranks"):
        collectives.show_mesh(Mesh(dp=64))
    collectives.show_node(Cluster(GPUS["h100"], LINKS["nvlink4"], LINKS["efa"]), LINKS["pcie5"], "t")
    widths = [box.get_width() for box in shown[0].axes[0].patches[:32:8]]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 63 / 450, 63 / 450, 50 / 450])


# ---------------------------------------------------------------- data parallelism and ZeRO

SIZES = {"embed.weight": 4, "block.weight": 6, "head.weight": 2}
BUCKETS = [["head.weight", "block.weight"], ["embed.weight"]]


def test_parameters_lie_in_model_order_and_know_their_bucket():
    assert [fall[1:] for fall in data_parallel.falls(SIZES, BUCKETS)] == [(0, 4, 1), (4, 6, 0), (10, 2, 0)]
    with pytest.raises(ValueError, match="each parameter once"):
        data_parallel.falls(SIZES, [["embed.weight"]])
    with pytest.raises(ValueError, match="own has 1 gradients for 2 ranks"):
        data_parallel.show_replicas([[1], [2]], [1.0], 1.0, (1, 0))


def test_a_stream_works_in_order_and_the_wait_holds_the_optimizer_not_the_cpu():
    spans = data_parallel.backward_on_streams()
    cpu, compute, communication = ([s for s in spans if s.lane == lane] for lane in data_parallel.STREAM_COLORS)
    for lane in (cpu, compute, communication):
        assert all(before.stop_s <= after.start_s for before, after in pairwise(lane))
    assert all(send.start_s >= compute[index].stop_s for index, send in enumerate(communication))
    assert compute[-1].start_s == communication[-1].stop_s > cpu[-1].stop_s
    assert communication[0].start_s < compute[2].stop_s  # they overlap


def test_at_the_critical_batch_size_steps_and_tokens_are_twice_the_least():
    assert data_parallel.times_the_least(1) == (2, 2) and data_parallel.times_the_least(1 / 64) == (65, 1 + 1 / 64)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_pieces_of_a_stage_weigh_what_the_formula_says_and_cover_each_kind(stage):
    assert data_parallel.held_bytes(stage, 4) == zero_bytes_per_parameter(stage, 4, optimizer_bytes=12)
    for kind in data_parallel.STATE_BYTES:
        parts = [data_parallel.held_part(stage, kind, rank, 4) for rank in range(4)]
        cut = stage >= data_parallel.SHARDED_FROM[kind]
        assert parts == ([(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)] if cut else [(0, 1)] * 4)


def test_flat_pieces_are_the_shards_that_torch_cuts():
    sizes = {"w": 7, "b": 3, "scale": 1}
    pieces = data_parallel.flat_pieces(sizes, 4)
    flat = torch.cat([torch.full((size,), index) for index, size in enumerate(sizes.values())] + [torch.tensor([-1])])
    names = [*sizes, data_parallel.PADDING]
    for rank, shard in enumerate(flat.chunk(4)):
        held = [name for name, of, start, stop in pieces if of == rank for name in [name] * (stop - start)]
        assert held == [names[index] for index in shard.tolist()]
    assert pieces[-1][3] == padded(11, 4)
    assert data_parallel.PADDING not in {piece[0] for piece in data_parallel.flat_pieces({"w": 8}, 4)}


def test_two_units_are_whole_at_most_and_the_next_is_the_one_gathered_ahead():
    steps = data_parallel.gather_steps(4)
    assert [step.computing for step in steps] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [step.alive for step in steps] == [(0, 1), (1, 2), (2, 3), (3,), (2, 3), (1, 2), (0, 1), (0,)]
    assert {len(step.alive) for step in data_parallel.gather_steps(4, prefetch=False)} == {1}


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
    engines.accumulate_gradients(engine, [(x_BS, x_BS + 1)])
    return seen


@pytest.mark.exhaustive
def test_the_drawn_units_are_those_that_are_whole_when_stage_3_runs():
    drawn = data_parallel.gather_steps(preset("toy").num_layers + 2)
    for seen in launch(_what_is_whole, 2):
        assert seen == [(step.phase, step.computing, step.alive) for step in drawn]


def test_a_step_of_stage_1_has_each_shard_in_its_place_and_a_tile_for_every_element():
    own, mean = [[10.0] * 3, [40.0] * 3], [[25.0, 25.0], [25.0]]
    rows = data_parallel.stage_1_rows(own, mean, [[1.0, 2.0], [3.0]], [[1.0, 2.0, 3.0]] * 2)
    assert [row.of_ranks for row in rows] == [
        own,
        [[25.0, 25.0, None], [None, None, 25.0]],
        [[1.0, 2.0, None], [None, None, 3.0]],
        [[1.0, 2.0, 3.0]] * 2,
    ]
    assert [row.then for row in rows] == ["reduce-scatter (mean)", "update of the shard", "all-gather", ""]
    texts = [tile.text for tile in data_parallel.flow_tiles(rows[1]) if isinstance(tile, Tile)]
    assert texts == ["25", "25", "", "", "", "25"]


# ---------------------------------------------------------------- tensor and sequence parallelism


def test_each_rank_holds_the_key_value_heads_that_its_query_heads_read():
    even, many = tensor.heads_by_rank(8, 4, 2), tensor.heads_by_rank(8, 2, 4)
    assert [(r.q_heads, r.kv_heads, r.replicas) for r in even] == [((0, 1, 2, 3), (0, 1), 1), ((4, 5, 6, 7), (2, 3), 1)]
    assert [r.kv_heads for r in many] == [(0,), (0,), (1,), (1,)] and many[0].replicas == 2
    assert "held by 2 ranks" in tensor.heads_title(many) and "none held twice" in tensor.heads_title(even)
    with pytest.raises(ValueError, match="choose tp from 1, 2, 3, 6"):
        tensor.heads_by_rank(6, 6, 4)


def test_sizes_are_cut_as_torch_chunk_cuts_them_and_each_token_is_answered_by_one_rank(shown):
    for size, count in ((10, 4), (8, 4), (7, 2), (5, 4)):
        lengths = [stop - start for start, stop in tensor.piece_bounds(size, count)]
        assert [n for n in lengths if n] == [len(c) for c in torch.arange(size).chunk(count)] and sum(lengths) == size
    tensor.show_vocabulary()
    texts = [text.get_text() for text in shown[0].axes[0].texts]
    assert texts.count("row") == 2 * len(tensor.TOKEN_IDS) and texts.count("0") == 3 * len(tensor.TOKEN_IDS)


def test_a_block_has_two_all_reduces_in_each_direction_between_what_is_cut_and_what_is_not():
    lefts, borders = tensor.block_borders()
    assert [name for name, _ in borders] == ["f", "g", "f", "g"] and lefts == sorted(lefts)
    for (_, f), (_, g) in (borders[:2], borders[2:]):
        inside = [is_cut for left, (_, _, is_cut) in zip(lefts, tensor.REGIONS, strict=True) if f < left < g]
        assert inside == [True] * 3


@pytest.mark.parametrize(("direction", "sending"), [("forward", "g"), ("backward", "f")])
def test_residuals_pass_f_and_g_by_and_end_at_the_sums_forward(direction, sending, axes):
    tensor.draw_block(axes, direction)
    texts = [text.get_text() for text in axes.texts]
    assert (texts.count("all-reduce"), texts.count("nothing"), texts.count("residual")) == (2, 2, 2)
    sent = {axes.texts[index - 1].get_text() for index, text in enumerate(texts) if text == "all-reduce"}
    assert sent == {sending}
    ends = [line.get_xdata()[-1] for line in axes.lines if len(line.get_xdata()) == 3]
    lefts, _ = tensor.block_borders()
    at_sums = [any(lefts[sum_] < x < lefts[sum_] + 0.4 for sum_ in (4, 8)) for x in ends]
    assert at_sums == [direction == "forward"] * 2


@pytest.mark.parametrize(("logits", "target", "tp_size"), [([1.0, 2, 4, 1], 3, 2), ([900.0, -3, 5, 7, 899.5, 0], 4, 3)])
def test_the_three_quantities_give_the_cross_entropy(logits, target, tp_size):
    (largest, exponentials, of_target), loss = tensor.loss_columns(logits, target, tp_size)
    assert loss == pytest.approx(F.cross_entropy(torch.tensor(logits), torch.tensor(target)).item())
    assert largest.result == max(largest.of_ranks) == max(logits)
    assert exponentials.result == pytest.approx(sum(exponentials.of_ranks))
    assert sum(value != 0 for value in of_target.of_ranks) == 1
    with pytest.raises(ValueError, match="choose 0 to"):
        tensor.loss_columns(logits, 6, 2)
    with pytest.raises(ValueError, match="leave a rank of 4 with none"):
        tensor.loss_columns([1.0, 2.0], 0, 4)


def test_by_tokens_a_token_is_on_one_rank_and_by_features_on_all():
    for by_tokens, ranks_of_a_token in ((True, 1), (False, 2)):
        for token in range(sequence.NUM_TOKENS):
            of = {sequence.rank_of(token, feature, by_tokens) for feature in range(sequence.NUM_FEATURES)}
            assert len(of) == ranks_of_a_token


def test_what_is_sent_forward_comes_back_as_its_counterpart():
    enter, leave = sequence.BORDERS.values()
    for (_, forward, backward), (_, out, back) in zip(enter, leave, strict=True):
        assert (forward, backward) == (back, out)
    outside = [index for index, (_, holding) in enumerate(sequence.HALF_BLOCK) if holding is None]
    assert outside == [0, 1, 6, 7]  # inside the borders nothing changes with SP


@pytest.mark.parametrize("holding", [sequence.TOKENS, sequence.FEATURES])
def test_the_parts_of_all_ranks_make_the_tensor(holding):
    parts = [sequence.part_of(holding, rank, 4) for rank in range(4)]
    assert sum(width * height for _, _, width, height in parts) == 1
    assert len({(left, top) for left, top, _, _ in parts}) == 4


@pytest.mark.parametrize("mode", sequence.MODES)
def test_regions_add_up_to_table_2(mode):
    config = preset("gpt3-175b")
    table = korthikanti_layer_bytes(config, 2, 2048, "selective", 1 if mode == "none" else 8, mode == "tp+sp")
    regions = sequence.block_regions(config, 2, 2048, 8, mode)
    assert sum(region.bytes for region in regions) == pytest.approx(table)
    dims = {"none": "S × D, S × N H, S × D, S × D, S × F", "tp": "S × D, S × n H, S × D, S × D, S × f",
            "tp+sp": "s × D, S × n H, s × D, s × D, S × f"}  # fmt: skip
    assert ", ".join(region.dims for region in regions[:5]) == dims[mode]
    with pytest.raises(ValueError, match="choose from none, tp"):
        sequence.block_regions(config, 1, 64, 4, "sp")


# ---------------------------------------------------------------- context parallelism


@pytest.mark.parametrize("sharding", SEQUENCE_SHARDINGS)
def test_squares_and_bars_of_a_rank_are_the_pairs_that_are_counted_elsewhere(sharding, axes):
    of_tokens = context.owners(sharding, 24, 4)
    counted = pairs_of_ranks(pairs(sharding, 24, 4))
    where = [[token for token, rank in enumerate(of_tokens) if rank == mine] for mine in range(4)]
    drawn = Counter(rank for row in context.pair_ranks(where, [24]) for rank in row)
    assert drawn.pop(None) == 24 * 23 // 2 and drawn == dict(enumerate(counted))
    assert [sum(place + 1 for place in mine) for mine in where] == counted
    table = pairs(sharding, 64, 4)
    context.draw_work(axes, table, 10**6)
    bars = [(bar.get_y(), bar.get_width(), bool(bar.get_hatch())) for bar in axes.patches]
    rows = sorted({y for y, _, _ in bars})
    assert [sum(w for y, w, idle in bars if y == row and not idle) for row in rows] == pairs_of_ranks(table)
    assert len({sum(w for y, w, _ in bars if y == row) for row in rows}) == 1  # work and waiting fill the clock
    assert any(w for _, w, idle in bars if idle) == (sharding != "zigzag")


def test_captions_say_whether_work_is_even():
    assert context.mask_caption("zigzag", 16, 4) == "zigzag\n34 pairs each"
    assert context.mask_caption("contiguous", 16, 4) == "contiguous\n10 to 58 pairs a rank"


def test_every_block_comes_to_every_rank_from_its_left_neighbour():
    table = context.travel(4, "contiguous")
    for rank, row in enumerate(table):
        assert [of for of, _ in row] == [(rank - step) % 4 for step in range(4)]
        assert [seen > 0 for _, seen in row] == [step <= rank for step in range(4)]
        assert all(row[step][0] == table[(rank - 1) % 4][step - 1][0] for step in range(1, 4))
    assert all(seen for row in context.travel(4, "zigzag") for _, seen in row)


def test_lengths_and_labels():
    lengths = (1000, 16_384, 131_072, 1_048_576, 3 * 2**19)
    assert [context.show_length(n) for n in lengths] == ["1000", "16k", "128k", "1M", "1536k"]
    curve = {16_384: 10.0, 65_536: 40.0, 131_072: 80.0}
    assert context.line_label("cp 2", curve, 50) == "cp 2: 64k fits, 128k does not"
    assert context.line_label("cp 2", curve, 5) == "cp 2: nothing fits"


def test_documents_do_not_see_each_other_and_a_merged_output_has_the_area_of_its_parts():
    whole = [[0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 23], [*range(6, 18)]]
    cells = context.pair_ranks(whole, [8, 12, 4])
    assert sum(of is not None for row in cells for of in row) == 36 + 78 + 10
    assert cells[8][7] is None and cells[8][8] == 1
    assert context.document_pairs([8, 12, 4], whole) == [54, 70]
    with pytest.raises(ValueError, match="where has 12 tokens; give a rank to each of the 24"):
        context.pair_ranks(whole[:1], [8, 12, 4])
    assert context.merged([12, 30], [2, 6]) == 25.5
    with pytest.raises(ValueError, match="got 2 outputs and 1 weights"):
        context.merged([1, 2], [1])
    for lengths, cuts, told in (([64], {"a": [[*range(64)]]}, "32 tokens"), ([], {}, "0 documents")):
        with pytest.raises(ValueError, match=told):
            context.show_documents(lengths, cuts)
