"""The checker: right schedules pass, every other is found, and it is said what, where, and what would be right."""

import random
from collections import Counter
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest
from schedule_cases import schedules

from course_lib.schedules import (
    Costs,
    Instruction,
    Schedule,
    chart_problems,
    from_lists,
    from_text,
    one_f_one_b,
    problems,
    simulate,
    text_chart,
    zbv,
)
from course_lib.schedules.check import check, runnable_order
from course_lib.schedules.instructions import needs, v_placement

COLUMNS = Costs(1, 0.5, 0.5)  # a forward and a whole backward take one column each


def test_every_schedule_is_right():
    for case, schedule in schedules():
        assert problems(schedule) == [], case


# --- the same, decided in another way


def is_right(schedule: Schedule) -> bool:
    """Counts, a topological order of the graph of what follows what, and both ends of each channel."""
    times = Counter(one for row in schedule.instructions for one in row)
    rows = {one: rank for rank, row in enumerate(schedule.instructions) for one in row}
    for stage, rank in enumerate(schedule.rank_of_stage):
        for i in range(schedule.num_micro_batches):
            forward, whole, inputs, weights = (times[Instruction(op, i, stage)] for op in "FBIW")
            if forward != 1 or (whole, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                return False
            if any(rows.get(Instruction(op, i, stage), rank) != rank for op in "FBIW"):
                return False
    if sum(times.values()) != sum(
        times[Instruction(op, i, s)]
        for op in "FBIW"
        for i in range(schedule.num_micro_batches)
        for s in range(schedule.num_stages)
    ):
        return False
    graph = TopologicalSorter()
    for row in schedule.instructions:
        for before, one in zip((None, *row), row, strict=False):  # each beside the one before
            graph.add(one, *needs(one, schedule), *([before] if before else []))
    try:
        graph.prepare()
    except CycleError:
        return False
    for stage, (low, high) in enumerate(
        zip(schedule.rank_of_stage, schedule.rank_of_stage[1:], strict=False)
    ):  # each beside the next
        for ops in ("F", "BI"):
            ends = [
                [one.micro_batch for one in schedule.instructions[rank] if one.stage == s and one.op in ops]
                for rank, s in ((low, stage), (high, stage + 1))
            ]
            if low != high and ends[0] != ends[1]:
                return False
    return True


# --- mutations


def drop(rows, rng):
    row = rng.choice([row for row in rows if row])
    row.pop(rng.randrange(len(row)))


def duplicate(rows, rng):
    row = rng.choice(rows)
    row.insert(rng.randrange(len(row) + 1), rng.choice(row))


def wrong_rank(rows, rng):
    source, target = rng.sample(range(len(rows)), 2)
    one = rows[source].pop(rng.randrange(len(rows[source])))
    rows[target].insert(rng.randrange(len(rows[target]) + 1), one)


def w_before_i(rows, rng):
    row = rng.choice([row for row in rows if any(one.op == "W" for one in row)])
    weights = rng.choice([one for one in row if one.op == "W"])
    row.remove(weights)
    row.insert(rng.randrange(row.index(Instruction("I", *weights[1:])) + 1), weights)


def other_numbers(rows, rng):
    row = rng.choice(rows)
    place = rng.randrange(len(row))
    changes = {"op": rng.choice("FBIW"), "micro_batch": rng.randrange(6), "stage": rng.randrange(7)}
    field = rng.choice(list(changes))
    row[place] = row[place]._replace(**{field: changes[field]})


def swap(rows, rng):
    row = rng.choice(rows)
    a, b = rng.sample(range(len(row)), 2)
    row[a], row[b] = row[b], row[a]


def swap_neighbours(rows, rng):
    row = rng.choice(rows)
    a = rng.randrange(len(row) - 1)
    row[a], row[a + 1] = row[a + 1], row[a]


def move(rows, rng):
    row = rng.choice(rows)
    one = row.pop(rng.randrange(len(row)))
    row.insert(rng.randrange(len(row) + 1), one)


ALWAYS_WRONG = (drop, duplicate, wrong_rank, w_before_i)
MUTATIONS = (*ALWAYS_WRONG, other_numbers, swap, swap_neighbours, move)


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_mutation_is_found_or_harmless(mutate):
    rng, verdicts = random.Random(0), Counter()
    for (name, *_), schedule in schedules(ranks=(2, 3), micro_batches=(2, 4, 6)):
        if mutate is w_before_i and not schedule.splits_backward:
            continue
        for _ in range(8):
            rows = [list(row) for row in schedule.instructions]
            mutate(rows, rng)
            mutant = replace(schedule, instructions=tuple(map(tuple, rows)))
            found = problems(mutant)
            assert (found == []) == is_right(mutant), (name, mutant.instructions, found)
            verdicts[bool(found)] += 1
            if not found:
                assert len(simulate(mutant).spans) == len(schedule.all)
    assert verdicts[True] > 20
    assert (verdicts[False] == 0) if mutate in ALWAYS_WRONG else verdicts[False] > 0, verdicts


# --- what it says


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("F0 F1 B0 B1\nF0 B0 F1", ["rank 1: B1@1 is missing, the backward of micro-batch 1 by stage 1; add it"]),
        ("F0 B0 B1\nF0 B0 F1 B1", ["rank 0: F1@0 is missing, the forward of micro-batch 1 by stage 0; add it"]),
        (
            "F0 B0 B0\nF0 B0",
            [
                "B0@0 is there 2 times (rank 0, place 1 and rank 0, place 2); it must be once: "
                "its gradient would count again"
            ],
        ),
        (
            "F0 I0 F1 I1 W1\nF0 B0 F1 B1",
            ["rank 0: I0@0 has no W0@0: the gradients of the weights are missing; add W0@0 behind it"],
        ),
        ("F0 W0\nF0 B0", ["rank 0: W0@0 has no I0@0: the gradient of the input is missing; add I0@0 before it"]),
        (
            "F0 I0 W0 B0\nF0 B0",
            ["rank 0: B0@0 is the whole backward, so I0@0 repeats a part of it; take out one of the two"],
        ),
        (
            "F0 W0 I0\nF0 B0",
            ["rank 0, place 1: W0@0 stands before I0@0 (place 2), which it needs; move W0@0 behind it"],
        ),
        ("B0 F0\nF0 B0", ["rank 0, place 0: B0@0 stands before F0@0 (place 1), which it needs; move B0@0 behind it"]),
        (
            "F0 F0@1 B0\nB0",
            ["rank 0, place 1: F0@1 is work of stage 1, which is on rank 1; move it to that rank's list"],
        ),
        (
            "F0 B0 F1 B1\nF0 F1 B0 B1",
            [
                "deadlock, nobody in this circle can go on: rank 0 stands at B0@0 (place 1) and waits for B0@1, which "
                "is at place 2 of rank 1; rank 1 stands at F1@1 (place 1) and waits for F1@0, which is at place 2 of "
                "rank 0. Break it: let rank 0 do F1@0 before B0@0, or rank 1 do B0@1 before F1@1"
            ],
        ),
        (
            "F0 F1 B1 B0\nF0 B0 F1 B1",
            [
                "gradients from stage 1 (rank 1) to stage 0 (rank 0) are sent in the order 0 1 but taken in the order "
                "1 0: number 0 to arrive is micro-batch 0, where 1 is expected; use the same order at both ends"
            ],
        ),
    ],
)
def test_it_says_what_is_wrong_and_where(text, sentences):
    assert problems(from_text(text)) == sentences


def test_doing_what_it_says_mends_the_deadlock():
    assert problems(from_text("F0 F1 B0 B1\nF0 F1 B0 B1")) == []
    assert problems(from_text("F0 B0 F1 B1\nF0 B0 F1 B1")) == []


def test_what_cannot_help_is_not_advised():
    """Rank 1 cannot do F0@2 before F0@1, which F0@2 needs."""
    (found,) = problems(from_text("F0@3 F0@0 B0@3 B0@0\nF0@1 F0@2 B0@2 B0@1", rank_of_stage=(0, 1, 1, 0)))
    assert found.endswith("Break it: let rank 0 do F0@0 before F0@3")


def test_only_the_circle_is_named_not_those_that_wait_for_it():
    schedule = from_text("F0 F1 B0 B1\nF0 B0 F1 B1\nF0 F1 B0 B1\nF0 F1 B0 B1")
    (sentence,) = problems(schedule)
    assert "rank 1 stands at B0@1 (place 1)" in sentence and "rank 2 stands at F1@2 (place 1)" in sentence
    assert "rank 0 stands" not in sentence and "rank 3" not in sentence
    assert sentence.endswith("let rank 1 do F1@1 before B0@1, or rank 2 do B0@2 before F1@2")
    assert runnable_order(schedule)[1] == [2, 1, 1, 1]


def test_a_circle_may_have_more_than_two_ranks():
    """Two stages a rank, in loops: rank 2 must go on before rank 0 can."""
    rows = [["F0@0", "F0@3", "B0@3", "B0@0"], ["F0@4", "F0@1", "B0@4", "B0@1"], ["F0@2", "F0@5", "B0@5", "B0@2"]]
    (sentence,) = problems(from_lists(rows))
    assert [sentence.count(f"rank {rank} stands at") for rank in range(3)] == [1, 1, 1]
    assert sentence.endswith("let rank 1 do F0@1 before F0@4")
    rows[1][:2] = ["F0@1", "F0@4"]
    assert problems(from_lists(rows)) == []


def test_a_shape_that_cannot_be_is_said_first():
    two = one_f_one_b(2, 2)
    assert problems(replace(two, pp=3, rank_of_stage=(0, 1))) == [
        "there are 2 lists for pp = 3 ranks; give one a rank",
        "rank 2 has no stage; give every rank at least one, or use fewer ranks",
    ]
    assert problems(replace(two, rank_of_stage=(0, 5)))[0] == "stage 1 is on rank 5, but ranks are 0 to 1"
    assert "names micro-batch 1, but there are 0 to 0" in problems(replace(two, num_micro_batches=1))[0]
    strange = replace(two, instructions=((Instruction("X", 0, 0), *two.instructions[0]), two.instructions[1]))
    assert problems(strange) == ["rank 0, place 0: X0@0 is no work: 'X' is not one of F, B, I, W"]
    beyond = replace(two, instructions=((Instruction("F", 0, 9), *two.instructions[0]), two.instructions[1]))
    assert problems(beyond) == ["rank 0, place 0: F0@9 names stage 9, but stages are 0 to 1"]


def test_check_raises_all_it_found_and_counts_the_rest():
    check(zbv(2, 4))
    with pytest.raises(
        ValueError, match=r"(?s)schedule 'handmade' cannot be run, 1 mistake found:\n- rank 1: B0@1 is missing"
    ):
        check(from_text("F0 B0\nF0"))
    with pytest.raises(ValueError, match=r"60 mistakes found:(.*\n){10}- .*\n- and 50 more$"):
        check(replace(one_f_one_b(3, 12), instructions=(one_f_one_b(3, 12).instructions[0][:12], (), ())))


def test_stages_on_a_v_are_checked_too():
    rows = [["F0@0", "F0@3", "B0@3", "B0@0"], ["F0@1", "F0@2", "B0@2", "B0@1"]]
    assert problems(from_lists(rows, v_placement(2))) == []
    assert len(problems(from_lists(rows))) == 4  # in loops stage 2 is on rank 0, stage 3 on rank 1


# --- charts that cannot happen

AFTER_ITS_OWN_FORWARD = """
    GPU1  F0 F1 F2 B0 F3
    GPU2  .  F0 F1 F2 B1
    GPU3  .  .  F0 F1 F2
    GPU4  .  .  .  F0 F1
"""
ALL_IN_ONE_COLUMN = """
    GPU0: F0 F1 F2 F3 B0 B1 B2 B3
    GPU1: .  F0 F1 F2 B0 F3 B1 B2 B3
    GPU2: .  .  F0 F1 B0 F2 B1 F3 B2 B3
    GPU3: .  .  .  F0 B0 F1 B1 F2 B2 F3 B3
"""


def test_C106_C107_a_backward_before_the_loss_is_found():
    """The gradient of a micro-batch comes from the loss: its backward is first on the last rank, column by column."""
    assert chart_problems(AFTER_ITS_OWN_FORWARD, whole=False) == [
        "column 3: rank 0 runs B0@0, but B0@1 of rank 1 is nowhere before it",
        "column 4: rank 1 runs B1@1, but B1@2 of rank 2 is nowhere before it",
    ]
    possible = simulate(one_f_one_b(4, 8), COLUMNS).rows
    start_of = {span.name: int(span.start_s) for row in possible for span in row}
    assert start_of["F3@0"] == 3  # at t4, counted from 1, the first GPU runs its fourth forward
    assert [start_of[f"B0@{stage}"] + 1 for stage in (3, 2, 1, 0)] == [5, 6, 7, 8]


def test_C142_right_order_but_columns_that_cannot_be():
    found = chart_problems(ALL_IN_ONE_COLUMN)
    assert found[0] == (
        "column 4: rank 0 runs B0@0, which needs B0@1 of rank 1; that is done only after column 4, "
        "so B0@0 can be in column 5 at the earliest"
    )
    schedule = from_text(ALL_IN_ONE_COLUMN)
    assert problems(schedule) == [] and schedule.instructions == one_f_one_b(4, 4).instructions
    simulation = simulate(schedule, COLUMNS)
    assert [row[4 - rank].start_s for rank, row in enumerate(simulation.rows)] == [7, 6, 5, 4]
    assert simulation.makespan_s == 14
    assert chart_problems(text_chart(simulation)) == []


def test_a_chart_of_longer_backwards_is_read_with_its_dashes():
    assert chart_problems("F0 .  . B0 -\n. F0 B0 - .", whole=False)[0].startswith("column 3: rank 0 runs B0@0")
    assert chart_problems("F0 . . . B0 -\n. F0 B0 -") == []
    assert chart_problems("F0 B0\n. F0 B0")[0].startswith("column 1: rank 0 runs B0@0, which needs B0@1 of rank 1")
    told = [problem.partition(":")[0] for problem in chart_problems("F0 B0\nF0 B0", whole=False)]
    assert told == ["column 0", "column 1"]  # in the order of time, not of ranks


def test_a_message_between_ranks_takes_its_columns():
    assert chart_problems("F0 . . . B0\n. F0 B0 - .", message_slots=0) == []
    found = chart_problems("F0 . . . B0\n. F0 B0 - .", message_slots=2)
    assert [problem.partition(":")[0] for problem in found] == ["column 1", "column 4"]
    assert "after column 0, and its message takes 2, so F0@1 can be in column 3 at the earliest" in found[0]
    clocked = simulate(one_f_one_b(3, 4), Costs(transfer_s=2.0))
    assert chart_problems(text_chart(clocked), message_slots=2) == []
    assert len(chart_problems(text_chart(clocked), message_slots=3)) > 10
    assert "is missing" in chart_problems("F0\n. F0 B0")[0]


def test_every_chart_that_the_simulator_draws_can_happen():
    for case, schedule in schedules(ranks=(2, 3), micro_batches=(6,)):
        assert chart_problems(text_chart(simulate(schedule)), schedule.rank_of_stage) == [], case


def test_a_chart_of_ranks_with_unequal_numbers_of_stages_names_them():
    schedule = from_text("F0 B0\nF0@1 F0@2 B0@2 B0@1", rank_of_stage=(0, 1, 1))
    chart = text_chart(simulate(schedule))
    assert "F0@2" in chart and chart_problems(chart, (0, 1, 1)) == []
