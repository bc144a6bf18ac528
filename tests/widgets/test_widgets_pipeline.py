"""The explorer of schedules and the puzzle: what they compute, what they answer to mistakes, and their wiring."""

import ipywidgets
import matplotlib.pyplot as plt
import pytest
from widget_tree import all_of, control, shown, texts

from course_lib.plots.pipeline import draw_chart, percent
from course_lib.schedules import SCHEDULES, make, simulate, stages_per_rank
from course_lib.widgets import pipeline_explorer, pipeline_puzzle
from course_lib.widgets.pipeline import NAMES, PipelineChoice, explore_pipeline
from course_lib.widgets.pipeline_puzzle import best_known, check_puzzle, describe_puzzle


def rows_of(schedule) -> list[str]:
    return [" ".join(f"{one.op}{one.micro_batch}" for one in row) for row in schedule.instructions]


# ---------------------------------------------------------------- the explorer's function


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_work_of_a_rank_is_the_same_under_every_schedule(name):
    view = explore_pipeline(PipelineChoice(name, v=2 if name == "interleaved" else 1, forward_s=2.0))
    assert view.simulation.busy_s == pytest.approx([8 * 4.0] * 4)  # 8 micro-batches, F 2, I 1, W 1
    assert "Ideal 32 (all work, no waiting)" in view.text and name in NAMES
    assert f"{percent(view.simulation.bubble_of_ideal)} of the ideal time" in view.text


def test_the_view_says_both_bubbles_and_what_is_kept():
    view = explore_pipeline(PipelineChoice())
    assert (view.chart.bubble_of_ideal, view.simulation.makespan_s) == (0.375, 33)
    assert "37.5 % of the ideal time, 27.3 % of the total time" in view.text
    assert "4 micro-batches in 1/4 of the layers, as many bytes as 1 in the whole model." in view.text
    assert "Without a barrier" not in view.text
    h2 = explore_pipeline(PipelineChoice("zb_h2", 3, 6))
    assert "Without a barrier the next step can follow after 18: then 0 % and 0 %." in h2.text
    assert "With those that wait for weight gradients, at most 5 on every rank at once." in h2.text
    assert "With those that wait" not in view.text
    assert "at most 2, 2.5, 3 on ranks 0 to 2 at once" in explore_pipeline(PipelineChoice("zbv", 3, 3)).text
    assert explore_pipeline(PipelineChoice(transfer_s=0.5)).simulation.makespan_s > 33


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (PipelineChoice("interleaved", 4, 6, 2), "choose 4 or 8"),
        (PipelineChoice("1f1b", v=2), "choose interleaved"),
        (PipelineChoice("dualpipe_v", 4, 7), "choose 8 or more"),
        (PipelineChoice("interleaved", 8, 40, 4), "choose fewer micro-batches"),
    ],
)
def test_what_cannot_be_is_explained(choice, said):
    with pytest.raises(ValueError, match=said):
        explore_pipeline(choice)


def test_a_large_chart_is_few_things_to_draw():
    """Half a second after a slider: boxes are collections, and the layout does not measure their numbers."""
    figure, axes = plt.subplots()
    draw_chart(axes, explore_pipeline(PipelineChoice("1f1b", 8, 32)).chart)
    assert len(axes.patches) == 0 and len(axes.collections) == 3  # idle, F, B
    assert len(axes.texts) == 512 and not any(text.get_in_layout() for text in axes.texts)
    plt.close(figure)


# ---------------------------------------------------------------- the checker


def test_every_schedule_with_one_stage_a_rank_solves_the_puzzle():
    for name in SCHEDULES:
        if stages_per_rank(name) == 1:
            answer = check_puzzle(rows_of(make(name, 3, 4)), 4)
            assert answer.solved and not answer.wrong and not any(answer.left), name
            assert answer.simulation.makespan_s == simulate(make(name, 3, 4)).makespan_s == answer.chart.end_s


def test_nothing_and_a_beginning_are_no_mistakes():
    nothing = check_puzzle(["", "", ""], 4)
    assert not nothing.wrong and nothing.chart is None and nothing.left[0][:4] == ["F0", "B0", "F1", "B1"]
    begun = check_puzzle(["f0, F1 B0", "F0 I0", ""], 2)
    assert not begun.wrong and not begun.solved and begun.left == [["B1"], ["W0", "F1", "B1"], ["F0", "B0", "F1", "B1"]]
    assert begun.waits == [
        "Rank 0 waits at B0 for I0 of rank 1, which is placed, but waits itself.",
        "Rank 1 waits at I0 for B0 or I0 of rank 2, which is not placed yet.",
    ]
    assert [(b.rank, b.op, b.start_s) for b in begun.chart.boxes] == [(0, "F", 0), (0, "F", 1), (1, "F", 1)]
    assert "Good so far" in describe_puzzle(begun) and "rank 1: W0 F1 B1" in describe_puzzle(begun)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["F0 X1", ""], "rank 0, place 1: cannot read 'X1'"),
        (["F0 F2", ""], "Rank 0, place 1: there is no micro-batch 2; they are 0 to 1."),
        (["F0 F0", ""], "Rank 0, place 0: F0 stands here 2 times"),
        (["", "B0 F0"], "Rank 1, place 0: B0 stands before F0, which it needs."),
        (["", "F0 W0 I0"], "W0 stands before I0"),
        (["", "F0 B0 W0"], "W0 is a part of B0"),
        (["F0@1", ""], "F0@1 is work of rank 1"),
        (["F0 B0 F1", "F1 F0 B0"], "rank 0 waits at B0 for B0 of rank 1, rank 1 waits at F1 for F1 of rank 0"),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], "sent in the order 0 1 but taken in the order 1 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(rows, said):
    answer = check_puzzle(rows, 2)
    assert not answer.solved and any(said in text for text in answer.wrong), answer.wrong
    assert "Not possible yet" in describe_puzzle(answer)


@pytest.mark.parametrize(("pp", "m"), [(2, 1), (2, 4), (3, 4), (4, 8)])
def test_the_best_known_reaches_the_bounds(pp, m):
    whole, split = best_known(pp, m, False), best_known(pp, m, True)
    assert whole.makespan_s == 3 * (m + pp - 1)  # nothing with whole backwards is shorter
    assert split.makespan_s <= whole.makespan_s and split.makespan_s >= pp - 1 + 3 * m
    assert whole.peaks == tuple(min(m, pp - rank) for rank in range(pp))


def test_the_score_says_how_far_from_the_best():
    said = {name: describe_puzzle(check_puzzle(rows_of(make(name, 3, 4)), 4)) for name in ("naive", "afab", "1f1b")}
    assert "The best known with whole backwards, 1F1B, takes 18: 18 less." in said["naive"]
    assert "1F1B has fewer in flight: 3, 2, 1." in said["afab"] and "by rank: 4, 4, 4" in said["afab"]
    assert "is shorter or has fewer in flight. With B split into I and W, ZB-H1 takes 14: try it." in said["1f1b"]
    assert "50 % of ideal time, 33.3 % of total" in said["1f1b"]
    split = "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
    third = "F0 I0 F1 I1 F2 I2 F3 W0 I3 W1 W2 W3"
    assert "ZB-H1, takes 14: 1 less." in describe_puzzle(check_puzzle([*split, third], 4))


# ---------------------------------------------------------------- the wiring


@pytest.mark.slow
def test_a_slider_replaces_the_chart_and_an_impossible_choice_is_told():
    box = pipeline_explorer()
    before, said = shown(box), texts(box)
    control(box, "micro-batches").value = 12
    assert len(before) == len(shown(box)) == 1 and shown(box) != before and texts(box) != said
    control(box, "stages a rank").value = 2
    assert "Not possible" in texts(box) and shown(box) == []
    control(box, "schedule").value = "interleaved"
    assert "Not possible" not in texts(box) and len(shown(box)) == 1 and plt.get_fignums() == []


def test_the_puzzle_is_solved_with_the_keyboard():
    box = pipeline_puzzle(2, 2)
    assert shown(box) == [] and "Still to place" in texts(box)
    for rank, row in enumerate(rows_of(make("1f1b", 2, 2))):
        control(box, f"rank {rank}").value = row
    assert "Complete and right" in texts(box) and len(shown(box)) == 1
    control(box, "rank 0").value = "F0 <b>"
    assert "Not possible yet" in texts(box) and "&lt;" in texts(box) and "<b>'" not in texts(box)


@pytest.mark.slow
def test_the_puzzle_is_solved_with_buttons():
    box = pipeline_puzzle(2, 1)
    for word in ("F0", "B0"):
        control(box, word).click()
    assert control(box, "rank 0").value == "F0 B0"
    assert control(box, "F0").disabled and control(box, "I0").disabled and control(box, "W0").disabled
    control(box, "Take back").click()
    assert control(box, "rank 0").value == "F0" and not control(box, "I0").disabled and control(box, "F0").disabled
    control(box, "place on").value = 1
    assert not control(box, "F0").disabled
    control(box, "Show a solution").click()
    assert [field.value for field in all_of(box, ipywidgets.Text)] == ["F0 B0", "F0 B0"]
    assert "Complete and right" in texts(box)
    control(box, "Clear all").click()
    assert not any(field.value for field in all_of(box, ipywidgets.Text)) and shown(box) == []


def test_a_puzzle_without_room_is_refused():
    with pytest.raises(ValueError, match="choose pp from 2 to 8"):
        pipeline_puzzle(1, 4)
