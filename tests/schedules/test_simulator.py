"""The clock: against longest paths, uneven stages, transfers; what is kept meanwhile; charts as text."""

import random
import re
import time
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from schedule_cases import schedules

from course_lib.schedules import (
    Costs,
    all_forward_all_backward,
    dualpipe_v,
    from_text,
    make,
    one_f_one_b,
    simulate,
    text_chart,
    zb_h1,
    zbv,
)
from course_lib.schedules.instructions import needs


def longest_paths(schedule, costs):
    """When each instruction starts, by a topological order of the graph of what follows what."""
    before = {one: set(needs(one, schedule)) for one in schedule.all}
    for row in schedule.instructions:
        for left, right in pairwise(row):
            before[right].add(left)
    start_s = {}
    for one in TopologicalSorter(before).static_order():
        ready = [0.0]
        for other in before[one]:
            same = schedule.rank_of_stage[other.stage] == schedule.rank_of_stage[one.stage]
            way_s = 0.0 if same else costs.transfer_s[min(other.stage, one.stage)]
            ready.append(start_s[other] + costs.seconds(other) + way_s)
        start_s[one] = max(ready)
    return start_s


def test_every_start_is_the_longest_path_with_uneven_stages_and_transfers():
    rng = random.Random(1)
    for case, schedule in schedules(ranks=(1, 2, 3, 4), micro_batches=(1, 4, 8)):
        uneven = [[rng.randrange(1, 9) for _ in range(schedule.num_stages)] for _ in range(4)]
        costs = Costs(*uneven[:3], transfer_s=uneven[3][1:])
        simulation, expected = simulate(schedule, costs), longest_paths(schedule, costs)
        assert len(simulation.spans) == len(schedule.all)
        for rank, row in enumerate(simulation.timed):
            for one, span in row:
                assert (span.rank, span.name, span.start_s) == (rank, str(one), expected[one]), case
                assert span.seconds == costs.seconds(one)
        stops = [expected[one] + costs.seconds(one) for one in schedule.all]
        assert simulation.makespan_s == max(stops)
        for busy_s, idle_s in zip(simulation.busy_s, simulation.idle_s, strict=True):
            assert busy_s + idle_s == simulation.makespan_s


def test_both_bubbles_of_uneven_stages_count_all_idle_time():
    """One layer more on the first of two stages: the other waits for it with every micro-batch."""
    simulation = simulate(
        all_forward_all_backward(2, 4), Costs(forward_s=[3, 2], input_backward_s=[3, 2], weight_backward_s=0)
    )
    assert simulation.busy_s == (24, 16) and simulation.makespan_s == 28
    assert simulation.bubble_of_ideal == (4 + 12) / 40 and simulation.bubble_of_total == (4 + 12) / 56


def test_a_transfer_delays_what_crosses_ranks_and_nothing_else():
    assert simulate(one_f_one_b(2, 1), Costs(transfer_s=0.5)).makespan_s == 6 + 2 * 0.5
    assert simulate(zbv(1, 4), Costs(transfer_s=0.5)).makespan_s == 24
    on_a_v = simulate(zbv(2, 1), Costs(transfer_s=[1, 9, 2]))  # stages 1 and 2 are on one rank: nothing crosses there
    assert on_a_v.makespan_s == 4 + 4 + 2 + 2 * (1 + 2)  # each F, each I, two Ws that stand before something, four ways
    slow, fast = (simulate(one_f_one_b(4, 8), Costs(transfer_s=s)) for s in (0.5, 0.0))
    assert slow.makespan_s > fast.makespan_s and slow.busy_s == fast.busy_s


def test_a_pair_takes_pair_s_and_sends_when_both_are_done():
    schedule = dualpipe_v(2, 4)
    apart, together, hidden = (simulate(schedule, Costs(1, 1, 1, pair_s=s)) for s in (None, 3.0, 2.0))
    assert together.makespan_s > apart.makespan_s > hidden.makespan_s
    assert together.busy_s == apart.busy_s
    pairs_of_rank = [sum(one in schedule.pairs for one in row) for row in schedule.instructions]
    assert [a - h for a, h in zip(together.busy_s, hidden.busy_s, strict=True)] == pytest.approx(pairs_of_rank)
    for row in hidden.timed:
        for (one, span), (_, after) in pairwise(row):
            if one in schedule.pairs:
                assert span.stop_s == after.start_s and after.stop_s - span.start_s == pytest.approx(2.0)
    forward = from_text("F1@0").instructions[0]
    paired = replace(from_text("F0 F1 B0 B1\nF0 B0 F1 B1"), pairs=frozenset(forward))
    assert simulate(paired, Costs(pair_s=3.0)).rows[1][2].start_s == 4 + 3  # not 4 + 1: the forward waits for its pair
    assert simulate(one_f_one_b(2, 4), Costs(pair_s=0.1)).rows == simulate(one_f_one_b(2, 4)).rows


def test_a_pair_whose_halves_wait_for_each_other_is_refused():
    own = from_text("F0 B0 F1 B1\nF0 B0 F1 B1")
    for pairs, named in (([0], "rank 0: F0@0 with B0@0;"), ([2], "rank 0: F1@0 with B1@0;")):
        paired = replace(own, pairs=frozenset(own.instructions[0][place] for place in pairs))
        assert simulate(paired).makespan_s == simulate(own).makespan_s
        with pytest.raises(ValueError, match=re.escape(named)):
            simulate(paired, Costs(pair_s=2.0))
    last = replace(own, pairs=frozenset(own.instructions[1]))  # the last stage's own forward: nothing travels between
    assert simulate(last, Costs(pair_s=3.0)).makespan_s == simulate(own).makespan_s


def test_what_is_alive_is_what_has_gone_forward_and_not_yet_back():
    for case, schedule in schedules(ranks=(1, 3), micro_batches=(6,)):
        simulation = simulate(schedule, Costs(2, 3, 1))
        for rank, row in enumerate(simulation.timed):
            for counts, peak, begin, end in (
                (simulation.live, simulation.peak_live, "F", "BI"),
                (simulation.waiting, simulation.peak_waiting, "I", "W"),
            ):
                begins = [span.start_s if begin == "F" else span.stop_s for one, span in row if one.op in begin]
                ends = [span.stop_s for one, span in row if one.op in end]
                middles = [(span.start_s + span.stop_s) / 2 for _, span in row]
                expected = [sum(b < t for b in begins) - sum(e < t for e in ends) for t in middles]
                if begin == "I":
                    expected = [max(0, count) for count in expected]
                counted = [([0] + [count for second, count in counts[rank] if second < t])[-1] for t in middles]
                assert (begin == "I" and not begins) or counted == expected, case
                assert peak[rank] == max(counted), case


def test_memory_is_live_and_waiting_micro_batches_in_bytes_stage_by_stage():
    simulation = simulate(zb_h1(3, 6))
    assert simulation.peak_live == (3, 2, 1) and simulation.peak_waiting == (1, 2, 3)
    assert simulation.peak_bytes(10) == [30, 20, 10]
    assert simulation.peak_bytes(10, 10) == [30, 30, 30]  # ranks that keep fewer alive let more wait
    assert simulation.peak_bytes([10, 20, 70], [0, 0, 5]) == [30, 40, 70 + 2 * 5]
    seconds, held = zip(*simulation.memory(10, 4)[1], strict=True)
    assert held[-1] == 0 and list(seconds) == sorted(seconds)
    stages = simulate(zbv(2, 6))
    assert stages.peak_live == (4, 4) and stages.peak_bytes([1, 0, 0, 0]) == [4, 0]
    assert stages.peak_bytes([1, 1, 1, 10]) == [13, 4]  # three of stage 0 beside one of stage 3


def test_what_cannot_be_clocked_is_refused():
    with pytest.raises(ValueError, match=r"rank 1: B0@1 is missing"):
        simulate(from_text("F0 B0\nF0"))
    with pytest.raises(ValueError, match=r"forward_s has 3 values, but 2 are needed; give those, or one number"):
        simulate(one_f_one_b(2, 2), Costs(forward_s=[1, 2, 3]))
    with pytest.raises(ValueError, match=r"transfer_s has 2 values, but 1 are needed"):
        simulate(one_f_one_b(2, 2), Costs(transfer_s=[1, 2]))
    with pytest.raises(ValueError, match=r"are all 0; give one more than 0"):
        simulate(one_f_one_b(2, 2), Costs(0, [0, 0], 0))


def test_the_chart_shows_idle_slots():
    one_column_each = Costs(1, 0.5, 0.5)
    assert text_chart(simulate(one_f_one_b(4, 4), one_column_each), slot_s=1) == (
        "rank 0  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3\n"
        "rank 1  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .\n"
        "rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .\n"
        "rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  ."
    )
    assert text_chart(simulate(zbv(1, 1))) == "rank 0  F0@0 F0@1 I0@1 W0@1 I0@0 W0@0"
    drawn = text_chart(simulate(one_f_one_b(2, 1), Costs(1, 2, 0)))
    assert drawn == "rank 0  F0 .  .  .  B0 -\nrank 1  .  F0 B0 -  .  ."
    halves = text_chart(simulate(make("afab", 1, 2), Costs(1.0, 1.5, 0)))  # rounded to columns, none is lost
    assert halves.split()[2:] == ["F0", "F1", "B0", "-", "B1"]
    assert text_chart(simulate(make("zb_h1", 1, 1), Costs(1, 1, 0))) == "rank 0  F0 I0"
    with pytest.raises(ValueError, match=r"300 slots of 1 s are more than 200; choose slot_s of at least 1.5"):
        text_chart(simulate(make("1f1b", 1, 100)))


def test_sixteen_ranks_and_128_micro_batches_are_clocked_in_a_moment():
    seconds = []
    while len(seconds) < 4 and min(seconds, default=1.0) > 0.5:  # CPU seconds; machines differ threefold
        start = time.process_time()
        simulation = simulate(make("zbv", 16, 128))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.0, seconds
    assert simulation.peak_live == (32,) * 16 and simulation.bubble_of_ideal_back_to_back == pytest.approx(0)
