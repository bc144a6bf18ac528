"""Closed forms: equal to the simulator's clock wherever they are said to hold, refused wherever they do not."""

import pytest
from schedule_cases import sizes

from course_lib.schedules import Costs, bubble, make, peak_live, simulate, stages_per_rank
from course_lib.schedules.bubbles import unmet_conditions

TIMES = [(1, 1, 1), (3, 2, 2), (2, 3, 1), (2, 2, 3), (4, 2, 3), (5, 1, 4)]  # F, I, W of a stage


def clocked(name, pp, m, v, times, pair_s=None):
    return simulate(make(name, pp, m, v), Costs(*times, pair_s=pair_s))


def test_the_bubble_is_the_closed_form_in_both_definitions_with_and_without_a_barrier():
    compared = {}
    for name, pp, m, v in sizes(micro_batches=(1, 2, 4, 5, 7, 8, 9)):
        for times in TIMES:
            pair_s = sum(times) if name == "dualpipe_v" else None
            costs = Costs(*times, pair_s=pair_s)
            if unmet_conditions(name, pp, m, v, costs):
                continue
            simulation = clocked(name, pp, m, v, times, pair_s)
            step, barrier = (bubble(name, pp, m, v, costs, barrier=barrier) for barrier in (False, True))
            case = (name, pp, m, v, times)
            assert simulation.bubble_of_ideal == pytest.approx(barrier.of_ideal), case
            assert simulation.bubble_of_total == pytest.approx(barrier.of_total), case
            assert simulation.bubble_of_ideal_back_to_back == pytest.approx(step.of_ideal), case
            assert simulation.bubble_of_total_back_to_back == pytest.approx(step.of_total), case
            assert max(simulation.busy_s) == pytest.approx(step.ideal_s), case
            compared[name] = compared.get(name, 0) + (pp > 1)
    assert min(compared.values()) >= 10 and len(compared) == 8, compared


@pytest.mark.parametrize(
    ("name", "m", "times", "sentence"),
    [
        ("zb_h1", 3, (1, 1, 1), r"m \(3\) must be 4 or more"),
        ("zb_h1", 8, (2, 3, 3), r"W \(3\) must be no longer than F \(2\)"),
        ("zb_h2", 6, (1, 1, 1), r"m \(6\) must be 7 or more"),
        ("zb_h2", 8, (2, 4, 3), r"W \(3\) must be no longer than F \(2\)"),
        ("zb_h2", 8, (4, 2, 4), r"W \(4\) must be no longer than half of F \+ I \(3\)"),
        ("zbv", 6, (1, 1, 1), r"m \(6\) must be 7 or more"),
        ("zbv", 8, (1, 1, 0.5), r"F, I and W \(1, 1, 0.5\) must take the same time"),
        ("dualpipe_v", 8, (3, 2, 2), r"F \(3\) must be no longer than I \(2\)"),
        ("dualpipe_v", 8, (2, 2, 3), r"W \(3\) must be no longer than I \(2\)"),
    ],
)
def test_a_form_is_refused_where_the_clock_disagrees(name, m, times, sentence):
    """Each condition is needed: with it unmet, the formula's seconds are not those of the clock."""
    f, i, w = times
    formula_s = {"zb_h1": 3 * (f + i - w), "zb_h2": 3 * (f + i - 2 * w), "zbv": 0.0, "dualpipe_v": 3 * (f + 2 * i - w)}[
        name
    ]
    pair_s = sum(times) if name == "dualpipe_v" else None
    with pytest.raises(ValueError, match=f"closed form of '{name}' does not hold: {sentence}; simulate it instead"):
        bubble(name, 4, m, 1, Costs(*times, pair_s=pair_s))
    simulation = clocked(name, 4, m, 1, times, pair_s)
    assert simulation.back_to_back_s - max(simulation.busy_s) > formula_s + 0.1


def test_other_refusals():
    with pytest.raises(ValueError, match="it counts pairs as one: give pair_s"):
        bubble("dualpipe_v", 2, 4)
    with pytest.raises(ValueError, match="pair_s is for dualpipe_v alone"):
        bubble("1f1b", 2, 4, costs=Costs(pair_s=3))
    with pytest.raises(ValueError, match="multiple of pp"):
        bubble("interleaved", 4, 6, 2)
    for unlike in (Costs(forward_s=(1.0, 2.0)), Costs(transfer_s=0.1)):
        with pytest.raises(ValueError, match="stages must be equal, and transfers take no time; simulate it instead"):
            bubble("1f1b", 2, 4, costs=unlike)
    with pytest.raises(ValueError, match="zbv needs m"):
        peak_live("zbv", 4, 6)


def test_what_is_alive_is_the_closed_form():
    for name, pp, m, v in sizes():
        if name != "zbv" or m >= 2 * pp - 1:
            assert clocked(name, pp, m, v, (1, 1, 1)).peak_live == peak_live(name, pp, m, v), (name, pp, m, v)
    assert peak_live("1f1b", 4, 8) == peak_live("zb_h1", 4, 8) == (4, 3, 2, 1)
    assert peak_live("zb_h2", 4, 8) == (7, 5, 3, 1)


def test_zero_bubble_tables_1_and_2():
    """Qi et al. 2024: bubble, and peak memory in M_B, of which M_W is the part that W needs; TB there is I here."""
    tf, tb, tw, p, m = 4, 4, 3, 4, 12
    assert bubble("1f1b", p, m, 1, Costs(tf, tb, tw)).idle_s == (p - 1) * (tf + tb + tw)
    assert bubble("zb_h1", p, m, 1, Costs(tf, tb, tw)).idle_s == (p - 1) * (tf + tb - tw)
    assert bubble("zb_h2", p, m, 1, Costs(tf, tb, tw)).idle_s == (p - 1) * (tf + tb - 2 * tw)
    assert bubble("zbv", p, m, 1, Costs(tf, tf, tf)).idle_s == 0
    for weight_part in (0.0, 0.6, 1.0):
        peaks = {
            name: max(
                clocked(name, p, m, 1, (1, 1, 1)).peak_bytes(
                    1 / stages_per_rank(name), weight_part / stages_per_rank(name)
                )
            )
            for name in ("1f1b", "zb_h1", "zb_h2", "zbv")
        }
        assert peaks == pytest.approx({"1f1b": p, "zb_h1": p, "zb_h2": 2 * p - 1, "zbv": p})


def test_dualpipe_table():
    """DeepSeek-V3, table 2, and DualPipe's README: B there is the whole backward, PP counts stages (2 a device)."""
    f, b, w, f_and_b, pp, m = 4, 9, 3, 11, 8, 20
    devices = pp // 2
    assert bubble("1f1b", pp, m, 1, Costs(f, b - w, w)).idle_s == (pp - 1) * (f + b)
    assert bubble("zb_h1", pp, m, 1, Costs(f, b - w, w)).idle_s == (pp - 1) * (f + b - 2 * w)
    form = bubble("dualpipe_v", devices, m, 1, Costs(f, b - w, w, pair_s=f_and_b))
    assert form.idle_s == (pp / 2 - 1) * (f_and_b + b - 3 * w)
    simulation = clocked("dualpipe_v", devices, m, 1, (f, b - w, w), f_and_b)
    assert simulation.makespan_s == pytest.approx(form.idle_s + form.ideal_s)
    assert simulation.busy_s[-1] == pytest.approx(form.ideal_s)  # the rank with most pairs, and so with least work
    assert max(simulation.peak_live) == pp + 1


# --- claims that circulate


def test_C257_eight_micro_batches_cut_the_ratio_to_an_eighth_and_the_share_of_all_to_less_than_half():
    one, eight = (bubble("1f1b", 4, m) for m in (1, 8))
    assert one.of_ideal / eight.of_ideal == 8 and one.of_total / eight.of_total == pytest.approx(2.75)
