"""Pictures of pipelines: the numbers that they draw, and that no text lies on another."""

from dataclasses import replace

import matplotlib
import pytest
from harness import sampled

matplotlib.use("Agg")

from pictures import look
from test_plots import distance

from course_lib.plots import pipeline, pipeline_trace, stages
from course_lib.schedules import (
    SCHEDULES,
    Costs,
    from_text,
    interleaved_1f1b,
    make,
    one_f_one_b,
    simulate,
    stages_per_rank,
    zb_h1,
    zbv,
)
from course_lib.span import Span

ALL = {name: simulate(make(name, 4, 8, 2 if name == "interleaved" else 1)) for name in SCHEDULES}
HALF = Costs(0.5, 0.5, 0.5)


# ---------------------------------------------------------------- charts


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_chart_has_a_box_for_each_instruction_and_idle_time_between_them(name):
    simulation = ALL[name]
    picture = pipeline.schedule_picture(simulation)
    assert len(picture.boxes) == sum(map(len, simulation.schedule.instructions))
    assert picture.end_s == simulation.makespan_s
    assert picture.bubble_of_ideal == pytest.approx(simulation.bubble_of_ideal, abs=1e-12)
    assert picture.bubble_of_total == pytest.approx(simulation.bubble_of_total, abs=1e-12)
    for rank in range(4):
        idle_s = sum(stop - start for r, start, stop in picture.idle if r == rank)
        assert idle_s == pytest.approx(simulation.idle_s[rank])
        parts = sorted([(b.start_s, b.stop_s) for b in picture.boxes if b.rank == rank]
                       + [(start, stop) for r, start, stop in picture.idle if r == rank])  # fmt: skip
        assert [start for start, _ in parts[1:]] == pytest.approx([stop for _, stop in parts[:-1]])


def test_chunks_are_counted_along_the_model_whatever_the_placement():
    looped = {(b.rank, b.chunk) for b in pipeline.schedule_picture(ALL["interleaved"]).boxes}
    assert looped == {(rank, chunk) for rank in range(4) for chunk in range(2)}
    on_a_v = pipeline.schedule_picture(simulate(zbv(2, 4), HALF))
    (loss,) = [b for b in on_a_v.boxes if (b.rank, b.op, b.micro_batch, b.chunk) == (0, "F", 0, 1)]
    assert loss.start_s == max(b.start_s for b in on_a_v.boxes if (b.op, b.micro_batch) == ("F", 0))


def test_the_two_of_a_pair_that_run_at_once_lie_above_each_other():
    schedule = make("dualpipe_v", 2, 4)
    apart, once = (pipeline.schedule_picture(simulate(schedule, replace(HALF, pair_s=pair))) for pair in (None, 1.0))
    assert {box.half for box in apart.boxes} == {0}
    upper, lower = ([b for b in once.boxes if b.half == half] for half in (-1, 1))
    assert len(upper) == len(lower) == len(schedule.pairs) and {b.op for b in upper} == {"F"}
    for f, b in zip(upper, lower, strict=True):
        assert (f.rank, f.start_s, f.stop_s, b.op) == (b.rank, b.start_s, b.stop_s, "B")
        assert f.stop_s - f.start_s == pytest.approx(1.0)


def test_the_title_says_both_bubbles():
    title = pipeline.chart_title(pipeline.schedule_picture(ALL["1f1b"]))
    assert title == "1F1B, 4 ranks, 8 micro-batches: bubble 37.5 % of ideal time, 27.3 % of total"
    assert pipeline.percent(0) == "0 %" and pipeline.percent(3) == "300 %" and pipeline.percent(0.1234) == "12.3 %"


@pytest.mark.slow
def test_numbers_stay_within_their_boxes_and_are_turned_where_those_are_narrow():
    wide = pipeline.schedule_picture(ALL["1f1b"])
    assert all(label.letter and not label.turned for label in pipeline.labels_of(wide).values())
    dense = pipeline.schedule_picture(simulate(one_f_one_b(8, 32)))
    labels = pipeline.labels_of(dense)
    assert set(labels) == {"F", "B"} and labels["F"].turned and not labels["B"].turned
    for op, label in labels.items():
        points = pipeline.CHART_POINTS / dense.end_s * (1 if op == "F" else 2)
        needed = pipeline.CAPITAL if label.turned else 2 * pipeline.DIGIT
        assert 4.5 <= label.size <= points / needed
    hair = pipeline.schedule_picture(simulate(interleaved_1f1b(8, 32, 4), Costs(0.25, 0.25, 0.25)))
    assert "F" not in pipeline.labels_of(hair)
    assert pipeline.dpi_of([hair], hair.end_s) == pipeline.dpi_of([dense], dense.end_s) == pipeline.DENSE_DPI
    assert pipeline.dpi_of([wide], wide.end_s) is None


def test_operations_differ_for_every_colour_vision_first_chunk_and_last():
    for chunk in (0, 1):
        shades = {op: pipeline.shade(op, chunk, 2) for op in pipeline.OP_COLORS}
        pairs = {(a, b): distance(shades[a], shades[b]) for a in shades for b in shades if a < b}
        assert min(pairs.values()) > 10, pairs
        assert min(distance(color, pipeline.IDLE_COLOR) for color in shades.values()) > 10
    assert pipeline.shade("F", 0, 1) == pipeline.shade("F", 0, 4) == pipeline.OP_COLORS["F"]
    assert [patch.get_label()[0] for patch in pipeline.legend_of([pipeline.schedule_picture(ALL["zbv"])])][:3] == [
        *"FIW"
    ]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="at least one simulate"):
        pipeline.show_schedules([])


# ---------------------------------------------------------------- measured over simulated


def late(rows, seconds):
    return [[replace(s, start_s=s.start_s + seconds, stop_s=s.stop_s + seconds) for s in row] for row in rows]


def test_what_was_measured_starts_at_nought_and_its_order_is_judged():
    simulation = ALL["zb_h1"]
    picture = pipeline_trace.measured_picture(simulation, late(simulation.rows, 1234.0))
    assert picture.in_order and picture.measured.end_s == pytest.approx(simulation.makespan_s)
    assert picture.measured.bubble_of_total == pytest.approx(simulation.bubble_of_total)
    assert pipeline_trace.measured_title(picture).startswith("Executed in the order drawn: 27.0 s measured, 27.0 s sim")
    swapped = [list(row) for row in simulation.rows]
    swapped[2][4], swapped[2][5] = swapped[2][5], swapped[2][4]
    wrong = pipeline_trace.measured_picture(simulation, swapped)
    assert not wrong.in_order and "NOT executed" in pipeline_trace.measured_title(wrong)
    with pytest.raises(ValueError, match="one for each of 4 ranks"):
        pipeline_trace.measured_picture(simulation, simulation.rows[:3])


@pytest.mark.parametrize("name", SCHEDULES)
def test_costs_from_a_trace_clock_the_schedule_as_it_was(name):
    v = stages_per_rank(name, 2)
    schedule = ALL[name].schedule
    forward_s = [0.3 + 0.1 * stage for stage in range(4 * v)]
    whole = all(one.op in "FB" for row in schedule.instructions for one in row)
    traced = simulate(schedule, Costs(forward_s, 0.5, 0.5 if whole else 0.7))
    costs = pipeline_trace.measured_costs(schedule, late(traced.rows, 5.0))
    assert costs.forward_s == pytest.approx(forward_s)
    assert simulate(schedule, costs).makespan_s == pytest.approx(traced.makespan_s)
    with pytest.raises(ValueError, match="no forward or no backward"):
        pipeline_trace.measured_costs(schedule, [[Span(0, "compute", "F0@0", 0.0, 1.0)]])


# ---------------------------------------------------------------- what is kept alive


def test_what_is_alive_is_counted_in_micro_batches_through_all_layers_of_a_rank():
    one, two = stages.live_picture(ALL["1f1b"]), stages.live_picture(ALL["interleaved"])
    assert one.peak_alive == [4, 3, 2, 1] and not any(one.peak_waiting)
    assert two.peak_alive == [5.5, 4.5, 3.5, 2.5]  # 11, 9, 7, 5 chunks of half a rank
    assert stages.live_title(one) == "rank 0 has up to 4 micro-batches in flight, rank 3 at most 1"
    assert stages.live_title(stages.live_picture(ALL["afab"])) == "every rank has up to 8 micro-batches in flight"
    assert stages.peaks_of(ALL["zb_h2"]) == list(ALL["zb_h2"].peak_live)


def test_alive_and_waiting_are_stacked_and_end_at_nothing():
    picture = stages.live_picture(simulate(zb_h1(3, 4)))
    for alive, waiting, peak in zip(picture.alive, picture.waiting, picture.peak_alive, strict=True):
        times, low, high = stages.stacked(alive, waiting, picture.end_s)
        assert times == sorted(times) and max(low) == peak and low[-1] == high[-1] == 0
        assert all(a <= b for a, b in zip(low, high, strict=True))
    assert stages.stacked([(0, 1), (1, 0)], [(1, 1), (3, 0)], 4) == ([0, 1, 3, 4], [1, 0, 0, 0], [1, 1, 0, 0])
    assert [stages.short(value) for value in (4, 4.5, 12.25, 1234)] == ["4", "4.5", "12.2", "1,234"]


# ---------------------------------------------------------------- every picture can be drawn, and read

PICTURES = {
    "1F1B": lambda: pipeline.show_schedule(ALL["1f1b"]),
    "1F1B, turned numbers": lambda: pipeline.show_schedule(simulate(one_f_one_b(3, 36))),
    "a V": lambda: pipeline.show_schedule(simulate(make("dualpipe_v", 4, 10), HALF)),
    "pairs": lambda: pipeline.show_schedule(simulate(make("dualpipe_v", 2, 4), replace(HALF, pair_s=1.0))),
    "stacked": lambda: pipeline.show_schedules([ALL["naive"], ALL["1f1b"], ALL["zb_h2"]]),
    "measured": lambda: pipeline_trace.show_measured(
        simulate(one_f_one_b(4, 8), Costs(4e-3, 4e-3, 4e-3)),
        simulate(one_f_one_b(4, 8), Costs([4e-3, 4e-3, 5e-3, 4e-3], 5e-3, 4e-3, 1e-3)).rows,
    ),
    "alive": lambda: stages.show_live(ALL["zbv"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*PICTURES], 4))
def test_a_picture_is_shown_once_with_no_text_on_another(name, monkeypatch):
    look(PICTURES[name], monkeypatch, 160_000, dpi="figure")


def test_a_schedule_written_by_hand_is_drawn_too():
    handmade = simulate(from_text("F0 F1 B0 B1\nF0 B0 F1 B1"))
    assert pipeline.chart_title(pipeline.schedule_picture(handmade)).startswith("handmade, 2 ranks, 2 micro-batches")
