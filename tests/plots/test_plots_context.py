"""Pictures of context parallelism: the numbers that they draw, and that no text lies on another."""

from collections import Counter

import matplotlib
import pytest
from harness import sampled

matplotlib.use("Agg")

from pictures import look

from course_lib.config import preset
from course_lib.hardware import gpu
from course_lib.layout import SEQUENCE_SHARDINGS, Layout
from course_lib.layout.block_pairs import pairs, pairs_of_ranks, share_of_ideal
from course_lib.memory.budget import budgets
from course_lib.memory.ranks import for_length
from course_lib.plots import context
from course_lib.run import Run

LLAMA_8B = preset("llama-3.1-8b")


@pytest.mark.parametrize("sequence_sharding", SEQUENCE_SHARDINGS)
def test_the_coloured_squares_are_the_work_that_was_counted(sequence_sharding):
    table = pairs(sequence_sharding, 24, 4)
    drawn = Counter(rank for row in context.mask_ranks(sequence_sharding, 24, 4) for rank in row)
    assert drawn.pop(None, 0) == 24 * 23 // 2
    assert drawn == dict(enumerate(pairs_of_ranks(table)))


def test_captions_say_whether_work_is_even():
    assert context.mask_caption("zigzag", 16, 4) == "zigzag\n34 pairs each"
    assert context.mask_caption("contiguous", 16, 4) == "contiguous\n10 to 58 pairs a rank"
    table = pairs("contiguous", 4096, 8)
    assert context.work_caption("contiguous", table) == "contiguous: 53.3 % of the ideal speed"


@pytest.mark.parametrize("sequence_sharding", SEQUENCE_SHARDINGS)
def test_bars_fill_the_clock_with_work_and_waiting(sequence_sharding):
    table = pairs(sequence_sharding, 64, 4)
    bars = context.work_bars(table)
    end = max(bar.start + bar.pairs + bar.idle for bar in bars)
    for rank, total in enumerate(pairs_of_ranks(table)):
        mine = [bar for bar in bars if bar.rank == rank]
        assert sum(bar.pairs for bar in mine) == total
        assert sum(bar.pairs + bar.idle for bar in mine) == end
        assert all(a.start + a.pairs + a.idle == b.start for a, b in zip(mine, mine[1:], strict=False))  # noqa: RUF007
    assert sum(pairs_of_ranks(table)) / (4 * end) == pytest.approx(share_of_ideal(table))
    assert any(bar.idle for bar in bars) == (sequence_sharding != "zigzag")


def test_every_block_comes_to_every_rank_from_its_left_neighbour():
    table = context.travel(4, "contiguous")
    for rank, row in enumerate(table):
        assert [held.key_rank for held in row] == [(rank - step) % 4 for step in range(4)]
        assert sorted(held.key_rank for held in row) == [0, 1, 2, 3]
        assert [held.pairs > 0 for held in row] == [step <= rank for step in range(4)]
        for step in range(1, 4):
            assert row[step].key_rank == table[(rank - 1) % 4][step - 1].key_rank
    assert all(held.pairs for row in context.travel(4, "zigzag") for held in row)


def test_lengths_and_labels():
    assert [context.show_length(n) for n in (1000, 16_384, 131_072, 1_048_576, 3 * 2**19)] == [
        "1000", "16k", "128k", "1M", "1536k",
    ]  # fmt: skip
    curve = {16_384: 10.0, 65_536: 40.0, 131_072: 80.0}
    assert context.longest_drawn(curve, 50) == 65_536 and context.longest_drawn(curve, 5) is None
    assert context.line_label("cp 2", curve, 50) == "cp 2: 64k fits, 128k does not"
    assert (context.line_label("cp 2", curve, 5), context.line_label("cp 2", curve, None)) == (
        "cp 2: nothing fits", "cp 2",
    )  # fmt: skip


def test_what_there_is_no_room_for_is_refused():
    with pytest.raises(ValueError, match="1 to 8 ranks"):
        context.show_work(9, 4608)
    with pytest.raises(ValueError, match="room for 64"):
        context.show_mask(4, 128)
    with pytest.raises(ValueError, match="give 1 to 6"):
        context.show_memory_by_length({})


def _curves():
    lengths = [1024 * thousands for thousands in (16, 32, 64, 128, 256, 512, 1024)]
    return {
        f"cp {cp}": {
            s: budgets(Run(for_length(LLAMA_8B, s), Layout(tp=8, sequence_parallel=True, zero_stage=1, cp=cp), s))[
                0
            ].total_bytes
            for s in lengths
        }
        for cp, layout in {
            cp: Layout(tp=8, sequence_parallel=True, zero_stage=1, cp=cp) for cp in (1, 2, 4, 8, 16)
        }.items()
    }


PICTURES = {
    "mask": lambda: context.show_mask(),
    "mask of 8": lambda: context.show_mask(8, 16),
    "work": lambda: context.show_work(),
    "work of 8": lambda: context.show_work(8, 4096),
    "travel": lambda: context.show_travel(),
    "travel of 8": lambda: context.show_travel(8, "zigzag"),
    "memory": lambda: context.show_memory_by_length(_curves(), gpu("h100")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*PICTURES], 3))
def test_a_picture_is_shown_once_with_no_text_on_another(name, monkeypatch):
    look(PICTURES[name], monkeypatch, 80_000)
