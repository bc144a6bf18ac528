"""Schedules: the order of each against what its paper says, PyTorch's own, and what may not be asked for."""

from types import SimpleNamespace

import pytest
from schedule_cases import schedules
from torch.distributed.pipelining import schedules as torch_schedules

from course_lib.schedules import (
    SCHEDULES,
    Instruction,
    all_forward_all_backward,
    check_request,
    dualpipe_v,
    from_lists,
    from_text,
    interleaved_1f1b,
    make,
    naive,
    one_f_one_b,
    stages_per_rank,
    zb_h1,
    zb_h2,
    zbv,
)
from course_lib.schedules.builders import row_of_rank
from course_lib.schedules.instructions import needs


def words(row):
    return " ".join(f"{one.op}{one.micro_batch}" for one in row)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_row_of_one_rank_is_that_of_the_whole_schedule(name):
    for pp, m, v in ((1, 3, 1), (2, 4, 1), (3, 7, 1), (4, 12, 1), (2, 4, 3), (4, 8, 2)):
        if v == 1 or name == "interleaved":
            m = pp * m if name in ("interleaved", "dualpipe_v") else m
            rows = tuple(row_of_rank(name, pp, m, v, rank) for rank in range(pp))
            assert rows == make(name, pp, m, v).instructions


def test_the_small_schedules_are_these():
    assert str(naive(2, 2)) == "F0@0 B0@0 F1@0 B1@0\nF0@1 B0@1 F1@1 B1@1"
    assert str(all_forward_all_backward(2, 2)) == "F0@0 F1@0 B0@0 B1@0\nF0@1 F1@1 B0@1 B1@1"
    assert [words(row) for row in one_f_one_b(4, 4).instructions] == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert [words(row) for row in zb_h1(3, 4).instructions] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert [words(row) for row in zb_h2(2, 4).instructions] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaving_runs_whole_loops_of_pp_micro_batches():
    """Narayanan et al. 2021, figure 4: four ranks, eight micro-batches, two stages a rank."""
    first, last = interleaved_1f1b(4, 8, 2).instructions[::3]
    assert " ".join(map(str, first[:10])) == "F0@0 F1@0 F2@0 F3@0 F0@4 F1@4 F2@4 F3@4 F4@0 F5@0"  # (v-1) p + 2 (p-1)
    assert " ".join(map(str, first[10:14])) == "F6@0 B0@4 F7@0 B1@4"
    assert " ".join(map(str, last[:6])) == "F0@3 F1@3 F2@3 F3@3 F0@7 B0@7"
    assert interleaved_1f1b(4, 5, 1) == one_f_one_b(4, 5)


def torch_rows(name, pp, m, v):
    """What PyTorch's class of that schedule puts into each rank's list."""
    kind = {
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
        "dualpipe_v": torch_schedules.ScheduleDualPipeV,
    }[name]
    op = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for rank in range(pp):
        sizes = SimpleNamespace(pp_group_size=pp, _n_microbatches=m, rank=rank, num_stages=pp * v, n_local_stages=v)
        sizes.number_of_rounds, sizes.microbatches_per_round = m // pp, pp
        actions = [one for one in kind._calculate_single_rank_operations(sizes, rank) if one is not None]
        flat = [part for one in actions for part in getattr(one, "sub_actions", None) or (one,)]
        row = [Instruction(op[one.computation_type.name], one.microbatch_index, one.stage_index) for one in flat]
        yield tuple(one for one in row if one.micro_batch < m)


@pytest.mark.parametrize(
    ("name", "v", "micro_batches"),
    [("interleaved", 2, (4, 8, 12)), ("interleaved", 3, (4, 12)), ("zbv", 2, (1, 4, 7, 9)), ("dualpipe_v", 2, (8, 13))],
)
def test_the_order_is_that_of_pytorch(name, v, micro_batches):
    for m in micro_batches:
        schedule = make(name, 4, m, v)
        assert schedule.instructions == tuple(torch_rows(name, 4, m, v)), (name, m)


@pytest.mark.slow
def test_every_schedule_has_the_stages_it_says():
    for (name, pp, m, v), schedule in schedules():
        assert (schedule.pp, schedule.num_micro_batches) == (pp, m)
        assert schedule.v == stages_per_rank(name, v) and schedule.num_stages == schedule.v * pp
        assert schedule.splits_backward == (name in ("zb_h1", "zb_h2", "zbv", "dualpipe_v"))
    assert zbv(3, 5).stages_of_rank(0) == (0, 5) and zbv(3, 5).stages_of_rank(2) == (2, 3)
    assert interleaved_1f1b(4, 4, 2).stages_of_rank(1) == (1, 5)


def test_pairs_are_a_forward_and_a_backward_of_the_other_stage():
    schedule = dualpipe_v(3, 7)
    for rank, row in enumerate(schedule.instructions):
        for place, one in enumerate(row):
            if one in schedule.pairs:
                other = row[place + 1]
                assert (one.op, other.op) == ("F", "B") and {one.stage, other.stage} == {rank, 5 - rank}
    assert len(schedule.pairs) == sum(2 * (7 - 6 + rank + 1) + (3 - rank - 1) for rank in range(3))


def test_needs_follow_activations_forward_and_gradients_back():
    whole, split = one_f_one_b(2, 1), zb_h1(2, 1)
    assert needs(Instruction("F", 0, 0), whole) == []
    assert [str(one) for one in needs(Instruction("B", 0, 0), whole)] == ["F0@0", "B0@1"]
    assert [str(one) for one in needs(Instruction("I", 0, 0), split)] == ["F0@0", "I0@1"]
    assert [str(one) for one in needs(Instruction("W", 0, 1), split)] == ["I0@1"]


def test_somebodys_own_schedule_is_read_from_lists_and_text():
    expected = one_f_one_b(2, 2).instructions
    assert from_text("F0 F1 B0 B1\n.  F0 B0 F1 B1").instructions == expected
    assert from_text("rank 0  F0 F1 B0 - B1\nGPU1: . F0 B0 F1 B1").instructions == expected
    made = from_lists([["F0", "F1", None, "B0", "B1"], [("F", 0), ("B", 0), ("F", 1, 1), "B1@1"]])
    assert made.instructions == expected
    for _, schedule in schedules(ranks=(3,), micro_batches=(6,)):
        again = from_text(str(schedule), schedule.rank_of_stage)
        assert (again.instructions, again.num_micro_batches) == (schedule.instructions, 6)
    with pytest.raises(ValueError, match=r"rank 1, place 1: cannot read 'X0'; write F, B, I or W"):
        from_text("F0 B0\nF0 X0")
    with pytest.raises(ValueError, match="empty"):
        from_text(". .")


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (("2f2b", 2, 4), "name is '2f2b'; .*choose from naive, afab"),
        (("interleaved", 4, 6, 2), r"num_micro_batches \(6\) must be a multiple of pp \(4\); choose 4 or 8, or 1f1b"),
        (("interleaved", 4, 3, 2), r"choose 4, or 1f1b"),
        (("zbv", 2, 4, 3), r"has 2 stages a rank, got v=3; leave v out"),
        (("1f1b", 2, 4, 2), r"has 1 stage a rank, got v=2; leave v out, or choose interleaved"),
        (("dualpipe_v", 4, 7), r"num_micro_batches \(7\) of at least 2 \* pp = 8; choose 8 or more, or zbv"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_to_choose(request_of, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_request(*request_of)
    with pytest.raises((TypeError, ValueError), match=message):
        make(*request_of)
