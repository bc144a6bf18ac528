"""The panel of schedules and the puzzle: what they compute, and what they answer to mistakes."""

import pytest

from course_lib.panels.pipeline import NAMES, PIPELINE, PUZZLE, as_typed, best_known, left_of, read_schedule, show_rows
from course_lib.schedules import SCHEDULES, make, simulate, stages_per_rank
from course_lib.schedules.simulator import Costs


def rows_of(schedule) -> list[str]:
    return [as_typed(row) for row in schedule.instructions]


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


def test_every_schedule_with_one_stage_a_rank_solves_the_puzzle():
    for name in SCHEDULES:
        if stages_per_rank(name) == 1:
            (form,), said = show_rows(rows_of(make(name, 3, 4)))
            assert said.startswith("Complete and right.") and form.stop == simulate(make(name, 3, 4)).makespan_s, name


def test_nothing_and_a_beginning_are_no_mistakes():
    assert PUZZLE.answer().said.startswith("Good so far. Still to place: rank 0: F0 B0 F1")
    begun = ["f0, F1 B0", "F0 I0", ""]
    (form,), said = show_rows(begun, 2)
    assert "rank 0: B1; rank 1: W0 F1 B1; rank 2: F0 B0 F1 B1." in said
    assert [[(b.part[0], b.start) for b in row] for row in form.rows.values()] == [
        [("F", 0), ("F", 1)],
        [("F", 1)],
        [],
    ]
    assert left_of(read_schedule(begun, 2).instructions[1], 2) == ["W0", "F1", "B1"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["F0 F2", ""], "rank 0, place 1: F2@0 names micro-batch 2, but there are 0 to 1"),
        (["F0 F0", ""], "F0@0 is there 2 times"),
        (["", "B0 F0"], "B0@1 stands before F0@1"),
        (["", "F0 W0 I0"], "W0@1 stands before I0@1"),
        (["", "F0 B0 W0"], "W0@1 repeats a part of it"),
        (["F0@1", ""], "F0@1 is work of stage 1, which is on rank 1"),
        (["F0 B0 F1", "F1 F0 B0"], "rank 0 stands at B0@0 (place 1) and waits for B0@1"),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], "sent in the order 0 1 but taken in the order 1 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(rows, said):
    assert show_rows(rows, 2)[1].startswith("Not possible yet. ") and said in show_rows(rows, 2)[1]


def test_a_word_that_cannot_be_read_is_told_without_a_chart():
    answer = PUZZLE.answer(rank0="F0 X1")
    assert not answer.possible and "rank 0, place 1: cannot read 'X1'" in answer.said


def test_work_that_stands_twice_is_drawn_as_far_as_it_runs():
    (chart,), said = show_rows(["F0 B0 F0", "F0 B0"], 1)
    assert "F0@0 is there 2 times" in said
    assert [[(b.part[0], b.start) for b in row] for row in chart.rows.values()] == [
        [("F", 0), ("B", 4), ("F", 6)],
        [("F", 1), ("B", 2)],
    ]


@pytest.mark.parametrize(("pp", "m"), [(2, 1), (2, 4), (3, 4), (4, 8)])
def test_the_best_known_reaches_the_bounds(pp, m):
    whole, split = best_known(pp, m, False), best_known(pp, m, True)
    assert whole.makespan_s == 3 * (m + pp - 1)  # nothing with whole backwards is shorter
    assert pp - 1 + 3 * m <= split.makespan_s <= whole.makespan_s
    assert whole.peak_live == tuple(min(m, pp - rank) for rank in range(pp))


def test_the_score_says_how_far_from_the_best():
    said = {name: show_rows(rows_of(make(name, 3, 4)))[1] for name in ("naive", "afab", "1f1b")}
    assert "The best known with whole backwards, 1F1B, takes 18: 18 less." in said["naive"]
    assert "1F1B has fewer in flight: 3, 2, 1." in said["afab"] and "by rank: 4, 4, 4" in said["afab"]
    assert "is shorter or has fewer in flight. With B split into I and W, ZB-H1 takes 14: try it." in said["1f1b"]
    split = "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
    third = "F0 I0 F1 I1 F2 I2 F3 W0 I3 W1 W2 W3"
    assert "ZB-H1, takes 14: 1 less." in show_rows([*split, third])[1]
    assert PUZZLE.answer(**PUZZLE.presets["a solution"][0]).said.startswith("Complete and right.")
