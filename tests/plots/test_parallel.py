"""Numbers in pictures of ranks: collectives, data parallelism, ZeRO, tensor, sequence and context parallelism."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch
from course_lib.layout import SEQUENCE_SHARDINGS
from course_lib.layout.sequence_sharding import pairs, pairs_of_ranks
from course_lib.minimal import ring
from course_lib.panels.ring import ring_states
from course_lib.parallel.positions import positions
from course_lib.plots import collectives, context, data_parallel
from course_lib.plots.tiles import Tile

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
    steps = ring_states(values)
    assert len(steps) == 1 + 2 * 2 and steps[-1].values == [[111, 222, 333]] * 3
    assert [steps[2].summed[rank][rank] for rank in range(3)] == [3, 3, 3]  # rank r is responsible for piece r
    states = launch(_states_of_the_ring, 3, values)
    for index, step in enumerate(steps):
        assert [states[rank][index] for rank in range(3)] == step.values, step.label
    with pytest.raises(ValueError, match="pieces each"):
        ring_states([[1, 2, 3], [4, 5, 6]])


# ---------------------------------------------------------------- data parallelism and ZeRO

SIZES = {"embed.weight": 4, "block.weight": 6, "head.weight": 2}
BUCKETS = [["head.weight", "block.weight"], ["embed.weight"]]


def test_parameters_lie_in_model_order_and_know_their_bucket():
    assert [fall[1:] for fall in data_parallel.falls(SIZES, BUCKETS)] == [(0, 4, 1), (4, 6, 0), (10, 2, 0)]
    with pytest.raises(ValueError, match="each parameter once"):
        data_parallel.falls(SIZES, [["embed.weight"]])
    with pytest.raises(ValueError, match="own has 1 gradients for 2 ranks"):
        data_parallel.show_replicas([[1], [2]], [1.0], 1.0, (1, 0))


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


# ---------------------------------------------------------------- context parallelism


@pytest.mark.parametrize("sharding", SEQUENCE_SHARDINGS)
def test_squares_and_bars_of_a_rank_are_the_pairs_that_are_counted_elsewhere(sharding, axes):
    counted = pairs_of_ranks(pairs(sharding, 24, 4))
    where = [positions(sharding, 24, 4, rank).tolist() for rank in range(4)]
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


def test_lengths_and_labels():
    lengths = (1000, 16_384, 131_072, 1_048_576, 3 * 2**19)
    assert [context.show_length(n) for n in lengths] == ["1000", "16k", "128k", "1M", "1536k"]
    curve = {16_384: 10.0, 65_536: 40.0, 131_072: 80.0}
    assert context.line_label("cp 2", curve, 50) == "cp 2: 64k fits, 128k does not"
    assert context.line_label("cp 2", curve, 5) == "cp 2: nothing fits"


def test_documents_do_not_see_each_other():
    whole = [[0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 23], [*range(6, 18)]]
    cells = context.pair_ranks(whole, [8, 12, 4])
    assert sum(of is not None for row in cells for of in row) == 36 + 78 + 10
    assert cells[8][7] is None and cells[8][8] == 1
    assert context.document_pairs([8, 12, 4], whole) == [54, 70]
    with pytest.raises(ValueError, match="where has 12 tokens; give a rank to each of the 24"):
        context.pair_ranks(whole[:1], [8, 12, 4])
    for lengths, cuts, told in (([64], {"a": [[*range(64)]]}, "32 tokens"), ([], {}, "0 documents")):
        with pytest.raises(ValueError, match=told):
            context.show_documents(lengths, cuts)
