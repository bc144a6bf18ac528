"""Numbers in pictures over time and of curves: lanes, traces, pipeline schedules, models beside measurements."""

import re
from dataclasses import replace

import pytest

from course_lib.hardware import LINKS, PUBLISHED_BUS_BANDWIDTH
from course_lib.measure.trace import RankTrace
from course_lib.plots import curves, pipeline, rank_traces, timeline
from course_lib.schedules import SCHEDULES, Costs, interleaved_1f1b, make, one_f_one_b, simulate, stages_per_rank
from course_lib.span import Span
from course_lib.timing import dp_spans, exposed_s, fastest

# ---------------------------------------------------------------- lanes


def test_exposed_communication_is_what_no_computation_covers():
    spans = dp_spans(0.01, 0.02, [0.004] * 5)
    picture = timeline.overlap_picture(spans)
    assert picture.exposed_s(0) == pytest.approx(exposed_s(spans))
    assert picture.rows == ["compute", "communication"] and picture.others == "communication"
    picture = timeline.overlap_picture([Span(r, lane, "a", 0, 1) for r in (0, 1) for lane in ("copy", "compute")])
    assert picture.rows == ["rank 0 compute", "rank 0 copy", "rank 1 compute", "rank 1 copy"]
    assert picture.others == "copy"
    early = [Span(0, "comm", "wait", 0, 2), Span(0, "compute", "forward", 1, 3), Span(0, "comm", "again", 1.5, 4)]
    assert timeline.overlap_picture(early).exposed_s(0) == pytest.approx(2.0)  # 0 to 1 and 3 to 4
    twice = [Span(0, "comm", "a", 0, 2), Span(0, "other", "b", 1, 3), Span(0, "compute", "c", 5, 6)]
    assert timeline.overlap_picture(twice).exposed_s(0) == pytest.approx(3.0)  # exposed once
    assert timeline.subtract((0, 10), [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert timeline.subtract((0, 10), [(1, 6), (2, 3)]) == [(0, 1), (6, 10)]  # one inside another
    assert timeline.merge([(2.0, 3.0), (3.05, 4.0), (5.0, 6.0)], 0.1) == [(2.0, 4.0), (5.0, 6.0)]


ONE_STEP = [
    Span(0, "compute", "forward", 0.0, 0.4),
    Span(0, "compute", "backward", 0.4, 2.0),
    Span(0, "all-reduce 0", "all-reduce 0", 0.9, 1.1),
    Span(0, "all-reduce 1", "all-reduce 1", 2.1, 2.5),
    Span(0, "compute", "optimizer", 2.5, 2.6),
]


def test_a_picture_of_the_order_has_a_place_for_each_start_and_stop_and_no_seconds(axes):
    places = [(span.start_s, span.stop_s) for span in timeline.in_order(ONE_STEP)]
    assert places == [(0, 1), (1, 4), (2, 3), (5, 6), (6, 7)]
    slower = [replace(span, start_s=span.start_s**3, stop_s=span.stop_s**3) for span in ONE_STEP]
    assert timeline.in_order(slower) == timeline.in_order(ONE_STEP)
    timeline.draw_overlap(axes, timeline.overlap_picture(timeline.in_order(ONE_STEP)), None, only_order=True)
    drawn = {bar.get_y() + bar.get_height() / 2: (bar.get_x(), bar.get_width()) for bar in axes.patches}
    said = [text.get_text() for text in axes.texts] + [axes.get_xlabel()]
    assert not list(axes.get_xticks()) and not any(re.search(r"\d m?s", text) for text in said)
    assert drawn[1.0] == (2, 1) and drawn[2.0] == (5, 1)


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


def trace(rank: int) -> RankTrace:
    """Compute 0-4 and 6-7; tp 3-6; data 5-9; nothing 9-10."""
    spans = [("compute", 0, 4), ("tp", 3, 6), ("data", 5, 9), ("compute", 6, 7)]
    return RankTrace(rank, tuple(Span(rank, lane, lane, float(a), float(b)) for lane, a, b in spans), 10.0, "cuda")


def test_a_rank_has_the_intervals_known_by_hand_and_bars_that_end_where_the_step_ends(capsys):
    over_time, in_sum = rank_traces.trace_charts([trace(0), trace(1)])
    drawn = {label: [(box.start, box.stop, box.part) for box in boxes] for label, boxes in over_time.rows.items()}
    assert drawn["rank 1 computes"] == [(0, 4, "computing"), (6, 7, "computing")]
    assert drawn["rank 1 sends"] == [(3, 6, "tp"), (5, 9, "data")]
    assert [(box.part, box.stop) for box in in_sum.rows["rank 0"]] == [
        ("computing", 5), ("tp", 7), ("data", 9), ("neither", 10),
    ]  # fmt: skip
    rank_traces.show_rank_traces([trace(0), trace(1)])
    assert "rank 0 10.0 s, 40% exposed; rank 1 10.0 s, 40% exposed." in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="there are no traces to draw"):
        rank_traces.show_rank_traces([])


# ---------------------------------------------------------------- curves


def test_a_way_is_named_where_it_is_the_fastest_and_the_limits_meet_at_the_crossover():
    link = LINKS["nvlink4"]
    crossover = curves.crossover_bytes("all_reduce", 8, link)
    assert crossover == pytest.approx(15e-6 * 480e9 * 8 / 14)  # ring with LL, then the switch
    found = curves.ways("all_reduce", 8, link)
    assert found[0][0] == 1e3 and found[-1][0] == pytest.approx(1e10)
    assert list(dict.fromkeys(name for _, name, _ in found)) == ["ring, LL", "nvls, Simple"]
    for size, name, seconds in found:
        best = fastest("all_reduce", size, 8, link)
        assert name == f"{best.algorithm}, {best.protocol}" and seconds == best.seconds(size)
        assert seconds > max(15e-6, 15e-6 * size / crossover)
    with pytest.raises(ValueError, match="at least 2 ranks"):
        curves.crossover_bytes("all_reduce", 1, link)
    bandwidth = PUBLISHED_BUS_BANDWIDTH["all_reduce"]
    assert bandwidth[1] / bandwidth[64] == pytest.approx(13.2, abs=0.1)  # a thirteenth, as a title says


def test_numbers_of_points_give_way_to_lines():
    crossed = curves.value_labels_of({1: 100.0, 2: 90.0, 3: 90.0}, [{1: 105.0, 2: 80.0, 3: 150.0}])
    assert crossed == [(1, 100.0, False), (2, 90.0, True), (3, 90.0, True)]
    assert curves.value_labels_of({1: 100.0}) == [(1, 100.0, True)] and curves.value_labels_of({}) == []


# ---------------------------------------------------------------- schedules

ALL = {name: simulate(make(name, 4, 8, 2 if name == "interleaved" else 1)) for name in SCHEDULES}


def late(rows, seconds):
    return [[replace(s, start_s=s.start_s + seconds, stop_s=s.stop_s + seconds) for s in row] for row in rows]


def test_what_was_measured_starts_at_nought_and_its_order_is_seen(capsys):
    simulation = ALL["zb_h1"]
    assert pipeline.from_zero(simulation.schedule, late(simulation.rows, 1024.0)) == [list(r) for r in simulation.rows]
    pipeline.show_measured(simulation, late(simulation.rows, 1024.0))
    assert "Executed in the order drawn. measured, 27.0 s. simulated, 27.0 s." in capsys.readouterr().out
    swapped = [list(row) for row in simulation.rows]
    swapped[2][4], swapped[2][5] = swapped[2][5], swapped[2][4]
    assert not pipeline.is_in_order(simulation.schedule, swapped)
    with pytest.raises(ValueError, match="one for each of 4 ranks"):
        pipeline.show_measured(simulation, simulation.rows[:3])


@pytest.mark.parametrize("name", SCHEDULES)
def test_costs_from_a_trace_clock_the_schedule_as_it_was(name):
    v = stages_per_rank(name, 2)
    schedule = ALL[name].schedule
    forward_s = [0.3 + 0.1 * stage for stage in range(4 * v)]
    whole = all(one.op in "FB" for row in schedule.instructions for one in row)
    traced = simulate(schedule, Costs(forward_s, 0.5, 0.5 if whole else 0.7))
    costs = pipeline.measured_costs(schedule, late(traced.rows, 5.0))
    assert costs.forward_s == pytest.approx(forward_s)
    assert simulate(schedule, costs).makespan_s == pytest.approx(traced.makespan_s)
    with pytest.raises(ValueError, match="no forward or no backward"):
        pipeline.measured_costs(schedule, [[Span(0, "compute", "F0@0", 0.0, 1.0)]])


def test_what_is_in_flight_is_counted_in_micro_batches_through_all_layers_of_a_rank(capsys):
    assert pipeline.peaks_of(ALL["1f1b"]) == [4, 3, 2, 1]
    assert pipeline.peaks_of(ALL["interleaved"]) == [5.5, 4.5, 3.5, 2.5]  # 11, 9, 7, 5 chunks of half a rank
    pipeline.show_live(ALL["1f1b"])
    assert "rank 0 peak 4; rank 1 peak 3; rank 2 peak 2; rank 3 peak 1." in " ".join(capsys.readouterr().out.split())


def test_each_cut_has_one_message_a_micro_batch_each_way_and_none_comes_before_it_is_sent():
    arrows = pipeline.message_arrows(simulate(make("1f1b", 3, 4)))
    assert sum(arrow.to_row > arrow.row for arrow in arrows) == sum(arrow.to_row < arrow.row for arrow in arrows) == 8
    assert len(arrows) == 16 and all(arrow.start <= arrow.stop for arrow in arrows)


def test_what_ranks_did_is_drawn_in_its_order_whatever_its_seconds():
    rows = simulate(make("naive", 2, 1)).rows
    slow = [[replace(span, start_s=span.start_s**3, stop_s=span.stop_s**3) for span in row] for row in rows]
    placed = sorted((span.start_s, span.stop_s) for row in pipeline.in_order(slow) for span in row)
    assert placed == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_stages_cover_the_model_once_and_schedules_stand_by_their_bubbles(capsys):
    pipeline.show_stages_of_model([3, 4, 4, 3], [0, 1, 1, 0])
    assert "14 layers in 4 stages on 2 ranks: rank 0 has both ends of the model" in capsys.readouterr().out
    pipeline.show_tradeoff([simulate(make(name, 4, 8)) for name in ("1f1b", "zb_h2", "zbv")])
    said = " ".join(capsys.readouterr().out.split())
    assert "1F1B 38 %, 37.5 % step to step; 4 kept; ZB-H2 12 %, 0 % step to step; 7 kept" in said


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (2, 4, 3), (4, 8, 1)])
def test_forwards_before_the_first_backward_are_megatrons_warm_up_and_one(p, m, v):
    schedule = interleaved_1f1b(p, m, v) if v > 1 else one_f_one_b(p, m)
    before = (v - 1) * p + 2 * (p - 1) if v > 1 else p - 1
    less = 2 if v > 1 else 1  # for each rank behind the first
    assert pipeline.warm_ups(simulate(schedule)) == [before - less * rank + 1 for rank in range(p)]
