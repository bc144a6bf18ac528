"""The panel of schedules and the puzzle: what they compute, and what they answer to mistakes."""

import pytest

from course_lib.panels.pipeline import (
    MICRO_BATCHES,
    NAMES,
    PIPELINE,
    PUZZLE,
    RANKS,
    SLOTS,
    cells_of,
    press,
    shown_chart,
)
from course_lib.schedules import SCHEDULES, make, simulate, stages_per_rank
from course_lib.schedules.simulator import Costs, text_chart


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_chart_is_the_clocked_schedule_and_the_work_of_a_rank_is_always_the_same(name):
    v = 2 if name == "interleaved" else 1
    answer, stages = PIPELINE.answer(schedule=name, v=v, forward=2.0), stages_per_rank(name, v)
    simulation = simulate(make(name, 4, 8, v), Costs(2.0 / stages, 1.0 / stages, 1.0 / stages))
    lanes = answer.charts[0].rows
    assert [(box.start, box.stop) for box in lanes["rank 1"]] == list(simulation.times[1])
    assert all(sum(box.stop - box.start for box in row) == pytest.approx(8 * 4.0) for row in lanes.values())
    assert "Ideal 32 (all work, no waiting)" in answer.said and name in NAMES
    assert f"{simulation.bubble_of_ideal:.1%} of the ideal time" in answer.said


def test_both_bubbles_and_what_is_kept_are_said():
    said = lambda **values: PIPELINE.answer(**values).said  # noqa: E731
    assert "simulated 33" in said() and "37.5% of the ideal time, 27.3% of the total time" in said()
    assert "4 micro-batches in 1/4 of the layers, as many bytes as 1 in the whole model." in said()
    assert "Without a barrier" not in said() and "With those that wait" not in said()
    h2 = said(schedule="zb_h2", pp=3, micro_batches=6)
    assert "Without a barrier the next step can follow after 18: then 0.0% and 0.0%." in h2
    assert "With those that wait for weight gradients, at most 5 at once." in h2
    columns = PIPELINE.answer(schedule="zbv", pp=3, micro_batches=3).charts[1].rows
    assert [boxes[-1].stop for boxes in columns.values()] == [2, 2.5, 3]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schedule": "interleaved", "micro_batches": 6, "v": 2}, "choose 4 or 8"),
        ({"v": 2}, "choose interleaved"),
        ({"schedule": "dualpipe_v", "micro_batches": 7}, "choose 8 or more"),
        ({"schedule": "interleaved", "pp": 8, "micro_batches": 32, "v": 4}, "choose fewer micro-batches"),
    ],
)
def test_what_cannot_be_is_explained(values, said):
    answer = PIPELINE.answer(**values)
    assert not answer.possible and said in answer.said


# ---------------------------------------------------------------- the puzzle


def charts_of(name: str, message: int) -> str:
    return text_chart(simulate(make(name, RANKS, MICRO_BATCHES), Costs(1.0, 1.0, 1.0, message)))


@pytest.mark.parametrize("message", [0, 1])
@pytest.mark.parametrize("name", ["afab", "1f1b", "zb_h1", "zb_h2"])
def test_a_schedule_of_the_clock_is_right_and_has_its_slots(name, message):
    clocked = simulate(make(name, RANKS, MICRO_BATCHES), Costs(1.0, 1.0, 1.0, message))
    (lanes, slots), said = shown_chart(text_chart(clocked), message)
    assert said.startswith(f"Complete and right: {clocked.makespan_s:g} slots, ")
    drawn = [[(box.start, box.stop) for box in row] for row in lanes.rows.values()]
    assert drawn == [list(row) for row in clocked.times]
    assert sum(box.stop - box.start for box in slots.rows["yours"]) == clocked.makespan_s


def test_a_message_takes_a_slot_so_that_a_chart_without_messages_is_told_its_first_column():
    said = shown_chart(charts_of("1f1b", 0), 1)[1]
    assert said.startswith(
        "Not possible yet. column 1: rank 1 runs F0@1, which needs F0@0 of rank 0; that is done only"
    )
    assert "after column 0, and its message takes 1, so F0@1 can be in column 2 at the earliest" in said


def test_slots_and_memory_stand_beside_1f1b_and_zb_h1():
    (_, slots), said = shown_chart(charts_of("zb_h2", 1), 1)
    assert list(slots.rows) == ["yours", "1F1B", "ZB-H1"]
    assert "17 slots, a rank keeps 4, 4, 4 micro-batches." in said
    assert "9 fewer than 1F1B, which keeps 3, 2, 1. That is 5 fewer than ZB-H1, which keeps 3, 3, 3." in said
    assert "as many as 1F1B" in shown_chart(charts_of("1f1b", 0), 0)[1]


def test_what_the_lesson_asks_for_can_be_placed():
    """The 22 slots of ZB-H1 with whole backwards, one micro-batch on the last rank: twice the warm-up of 1F1B."""
    chart = (
        "F0 F1 F2 F3 .  .  .  .  .  .  .  B0 -  .  B1 -  .  B2 -  .  B3 -\n"
        ".  .  F0 F1 F2 .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -  .  .  .\n"
        ".  .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .  .  ."
    )
    said = PUZZLE.answer(chart=chart).said
    assert "22 slots, a rank keeps 4, 3, 1 micro-batches" in said and "as many as ZB-H1, which keeps 3, 3, 3" in said


def test_a_beginning_is_no_mistake_and_tells_what_is_left():
    (lanes, _), said = shown_chart("f0 F1\n. . F0 I0\n.", 1)
    assert "column 3: rank 1 runs I0@1, but B0@2 of rank 2 is nowhere before it." in said
    assert [[(b.part[0], b.start) for b in row] for row in lanes.rows.values()] == [
        [("F", 0), ("F", 1)], [("F", 2), ("I", 3)], [],
    ]  # fmt: skip
    said = shown_chart("F0 F1\n. . F0\n. . . . F0 I0", 1)[1]
    assert said.startswith("Good so far. Still to place: rank 0: B0 B1 F2 B2 F3 B3; rank 1: B0 F1")
    assert "rank 2: W0 F1 B1" in said


@pytest.mark.parametrize(
    ("chart", "said"),
    [
        ("F0 F9\n.\n.", "F9@0 names micro-batch 9, but there are 0 to 3"),
        ("F0 F0\n.\n.", "F0@0 is there 2 times"),
        (".\n.\nB0 - F0", "B0@2 stands before F0@2"),
        (".\n.\nF0 B0 - W0", "W0@2 repeats a part of it"),
        (".\n.\nF0 B0 F1", "column 1: on rank 2 B0 takes 2 slots; write B0 -"),
        (".\nF0\n.", "column 0: rank 1 runs F0@1, but F0@0 of rank 0 is nowhere before it"),
    ],
)
def test_a_mistake_is_told_with_its_place(chart, said):
    assert shown_chart(chart, 0)[1].startswith("Not possible yet. ") and said in shown_chart(chart, 0)[1]


def test_what_cannot_be_read_is_told_without_a_picture():
    for chart, said in (
        ("F0 X1\n.\n.", "cannot read 'X1'"),
        ("F0", "write 3, one for each rank"),
        (".\n.\n.", "empty"),
    ):
        answer = PUZZLE.answer(chart=chart)
        assert not answer.possible and said in answer.said


def test_a_press_places_the_next_micro_batch_and_takes_away_what_lies_there():
    chart = press(press("F0\n.\n.", 0, 2, "F"), 0, 5, "B")
    assert cells_of(chart)[0][:8] == ["F0", ".", "F1", ".", ".", "B0", "-", "."]
    assert cells_of(press(chart, 0, 3, "I"))[0][3] == "I1" and cells_of(press(chart, 0, 4, "B"))[0][4:7] == [
        "B1",
        "B0",
        "-",
    ]
    assert cells_of(press(chart, 0, 6, "F"))[0] == ["F0", ".", "F1"] + ["."] * (SLOTS - 3)
