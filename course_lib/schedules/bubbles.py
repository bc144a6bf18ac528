"""Closed forms of pipeline schedules: how long ranks wait, and how many micro-batches they keep.

    bubble("1f1b", pp=4, num_micro_batches=8).of_ideal     # 3 / 8:  (p - 1) / m
    bubble("1f1b", pp=4, num_micro_batches=8).of_total     # 3 / 11: (p - 1) / (m + p - 1)

Two shares of the same seconds, and papers use both: waiting over working, and waiting over all. For small numbers the
second looks better.

A form holds under conditions, and is refused without them (simulator.py then gives the number):

    all             equal stages, transfers that take no time
    interleaved     whole loops: m a multiple of p
    zb_h1           m >= p; W no longer than F
    zb_h2           m >= 2p - 1; W no longer than F, nor than half of F + I
    zbv             m >= 2p - 1; F = I = W
    dualpipe_v      m >= 2p; F and W no longer than I; a pair sends nothing before both of it are done

The papers count from one step to the next, where each rank begins the next step as soon as it is done with this one.
With a barrier between steps, such as the norm of all gradients, it is the same where rank 0, the first to start, is
also the last to be done. It is not for zb_h2 and zbv (nor for zb_h1 if W takes longer than I): the last rank, which
waits (p - 1) F before it starts, is done later than rank 0. So with a barrier no bubble is zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.schedules.builders import check_request, stages_per_rank
from course_lib.schedules.simulator import Costs
from course_lib.validate import Size, checked


@dataclass(frozen=True)
class Bubble:
    """Seconds that a rank waits in one step, beside those that it works."""

    idle_s: float
    ideal_s: float

    @property
    def of_ideal(self) -> float:
        """Waiting over working: how much longer than without a pipeline."""
        return self.idle_s / self.ideal_s

    @property
    def of_total(self) -> float:
        """Waiting over all: the share of time that is lost."""
        return self.idle_s / (self.idle_s + self.ideal_s)


@checked
def bubble(
    name: str, pp: Size, num_micro_batches: Size, v: Size = 1, costs: Costs = Costs(), barrier: bool = False
) -> Bubble:
    """Return the closed form of a schedule, from what one stage takes for one micro-batch.

    From step to step, or, with `barrier`, until the last rank is done. `costs.pair_s`, the time of a forward and a
    backward at once, is for dualpipe_v: F + I + W if they hide nothing.
    Raises   ValueError if the form does not hold, saying which condition fails
    Source   Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Qi et al. 2024 (arXiv:2401.10241), tables 1 and 2
             (their B is I here); DeepSeek-V3 (arXiv:2412.19437), table 2 (its B is I + W; its PP is 2 p)
    """
    if failing := unmet_conditions(name, pp, num_micro_batches, v, costs):
        raise ValueError(f"the closed form of {name!r} does not hold: {'; '.join(failing)}; simulate it instead")
    f, i, w = costs.forward_s, costs.input_backward_s, costs.weight_backward_s
    stage_s, pair_s = f + i + w, costs.pair_s or 0.0
    ideal_s = num_micro_batches * stages_per_rank(name, v) * stage_s
    if name == "dualpipe_v":  # of the rank with most pairs
        ideal_s -= 2 * (num_micro_batches - pp) * (stage_s - pair_s)
    idle_s = (pp - 1) * {
        "naive": num_micro_batches * stage_s,
        "zb_h1": f + i - w,
        "zb_h2": f + i - 2 * w,
        "zbv": 0.0,
        "dualpipe_v": pair_s + i - 2 * w,  # (PP / 2 - 1) (F&B + B - 3 W), where PP = 2 p and B = I + W
    }.get(name, stage_s)
    if barrier and name in ("zb_h1", "zb_h2", "zbv"):  # the last rank starts (p - 1) F after the first
        idle_s = max(idle_s, (pp - 1) * f)
    return Bubble(idle_s, ideal_s)


def unmet_conditions(name: str, pp: Size, num_micro_batches: Size, v: Size = 1, costs: Costs = Costs()) -> list[str]:
    """List what the closed form needs and does not have, as sentences; none if it holds.

    Raises   ValueError if there is no such schedule at all
    """
    check_request(name, pp, num_micro_batches, v)
    costs.check(pp * stages_per_rank(name, v))
    f, i, w, pair_s = costs.forward_s, costs.input_backward_s, costs.weight_backward_s, costs.pair_s
    if any(isinstance(each, Sequence) for each in (f, i, w)) or costs.transfer_s != 0:
        return ["stages must be equal, and transfers take no time"]
    if name == "dualpipe_v":
        conditions = [
            (pair_s is not None, "it counts pairs as one: give pair_s, F + I + W if they hide nothing"),
            (f <= i, f"F ({f:g}) must be no longer than I ({i:g})"),
            (w <= i, f"W ({w:g}) must be no longer than I ({i:g})"),
        ]
    else:
        conditions = [(pair_s is None, "pair_s is for dualpipe_v alone")]
    if name in ("zb_h1", "zb_h2", "zbv") and pp > 1:
        needed = pp if name == "zb_h1" else 2 * pp - 1
        conditions.append((num_micro_batches >= needed, f"m ({num_micro_batches}) must be {needed} or more"))
    if name in ("zb_h1", "zb_h2") and pp > 1:
        conditions.append((w <= f, f"W ({w:g}) must be no longer than F ({f:g})"))
    if name == "zb_h2" and pp > 1:
        conditions.append((2 * w <= f + i, f"W ({w:g}) must be no longer than half of F + I ({(f + i) / 2:g})"))
    if name == "zbv" and pp > 1:
        conditions.append((f == i == w, f"F, I and W ({f:g}, {i:g}, {w:g}) must take the same time"))
    return [sentence for met, sentence in conditions if not met]


@checked
def peak_live(name: str, pp: Size, num_micro_batches: Size, v: Size = 1) -> tuple[int, ...]:
    """Most micro-batches alive on each rank, once a stage: divide by the stages of a rank to count whole ranks.

    Raises   ValueError for zbv below 2 pp - 1 micro-batches, where there is no such form
    """
    check_request(name, pp, num_micro_batches, v)
    m, ranks = num_micro_batches, range(pp)
    if name == "naive":
        return (1,) * pp
    if name == "afab":
        return (m,) * pp
    if name in ("1f1b", "zb_h1") or (name == "interleaved" and v == 1):
        return tuple(min(m, pp - rank) for rank in ranks)
    if name == "interleaved":
        return tuple(min(m * v, (v - 1) * pp + 2 * (pp - rank) - 1) for rank in ranks)
    if name == "zb_h2":
        return tuple(min(m, 2 * (pp - rank) - 1) for rank in ranks)
    if name == "zbv":
        if m < 2 * pp - 1:
            raise ValueError(f"zbv needs m ({m}) of {2 * pp - 1} or more for the closed form; simulate it instead")
        return (2 * pp,) * pp
    return (2 * pp + 1,) * pp


@checked
def interleaving_memory(pp: Size, v: Size) -> float:
    """Activations of the first rank beside those of 1F1B: 1 + (p - 1) / (p v) times as many, given m >= 2p.

    1 for v = 1, which is 1F1B.
    Source   Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.3
    """
    return 1.0 if v == 1 else 1 + (pp - 1) / (pp * v)
