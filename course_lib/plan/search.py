"""The search: layouts in the order of the least time that they could take, until enough that fit are worked out.

What a step takes at least is known from the work of its layers on one stage: a pipeline cannot do it faster than evenly
over its ranks. A search ends when no layout that is left could be faster than the slowest of its list: none that fits
and is faster than that is missing there.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import count
from math import gcd, inf

from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.memory.states import count_parameters, recipe_of
from course_lib.plan.job import Job
from course_lib.plan.option import Option, option_of, work_out
from course_lib.plan.space import leaner, shapes, sharded
from course_lib.run import Run
from course_lib.validate import Size, checked

ENOUGH = 16  # layouts of a list
LEAST_SHARE = 0.5  # of the best throughput: slower ones are of no interest
TOLD_APART = 0.03  # speeds that are nearer to each other are equal for the choice: tests/plan/test_measured.py
OF_LAYERS = ("compute", "launches", "tp", "cp", "ep")  # parts of a step that each layer has for itself


@dataclass(frozen=True)
class Rejected:
    """A layout that lost, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class Plan:
    """What was found.

    best       the choice among those that cannot be told from the fastest: `advised`
    ranked     the fastest that fit, fastest first; a tight one counts as 3 % slower. No faster one is missing
    front      those of them that no other beats in memory and in MFU, fastest first
    rejected   the two layouts nearest to the best that lost, with the reason
    num_tried  layouts of which it is known whether they fit
    """

    job: Job
    best: Option
    ranked: tuple[Option, ...]
    front: tuple[Option, ...]
    rejected: tuple[Rejected, ...]
    num_tried: int


@checked
def search(job: Job, enough: Size = ENOUGH) -> Plan:
    """Find the fastest layouts of a job that fit its GPUs.

    enough   so many are ranked, more where they cannot be told from the fastest
    Raises   ValueError if no layout divides, or none fits
    """
    with _no_collector():
        ranked, lost, num_tried = _fastest_first(job, enough)
    if not num_tried:
        raise ValueError(
            f"no layout of {job.config.name} divides {job.num_gpus} GPUs and {job.sequences} sequences a step; choose "
            "a batch that is a multiple of the GPUs, or fewer GPUs"
        )
    if not ranked:
        raise ValueError(
            f"no layout of {job.config.name} on {job.num_gpus} GPUs fits {job.cluster.gpu.usable_bytes / GB:.1f} GB; "
            "choose more GPUs, a GPU with more memory, or shorter sequences"
        )
    best = advised(ranked)
    return Plan(job, best, ranked, front(ranked), _nearest(best, ranked, lost), num_tried)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Stages of many experts are many small objects without circles; looking for such took a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# ------------------------------------------------------------------------------------ what stands where
def ranked_s(option: Option) -> float:
    """Seconds of a step by which options are ranked: a tight one ranks below those of nearly its speed."""
    return option.step_s / (1 - TOLD_APART if option.verdict == "tight" else 1)


def advised(ranked: Sequence[Option]) -> Option:
    """Choose among the options that cannot be told from the fastest, which stands first: the simplest.

    First those that fit and are not tight, then the largest micro-batch (it is faster than models say), fewer axes, less
    ZeRO, no interleaving, no recomputation.
    """
    near = [option for option in ranked if ranked_s(option) <= ranked_s(ranked[0]) / (1 - TOLD_APART)]
    return min(near, key=_complexity)


def _complexity(option: Option) -> tuple:
    layout = option.layout
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp, layout.dp_replicate))
    extras = (layout.zero_stage, layout.schedule != "1f1b", layout.recompute != "none", layout.regather)
    return (option.verdict == "tight", -layout.micro_batch, axes, *extras, option.step_s)


def front(ranked: tuple[Option, ...]) -> tuple[Option, ...]:
    """Those that no other beats in memory and in MFU, of options that stand fastest first."""
    kept: list[Option] = []
    for option in sorted(ranked, key=lambda option: (option.step_s, option.memory_bytes)):
        if not kept or option.memory_bytes < kept[-1].memory_bytes:
            kept.append(option)
    return tuple(kept)


# ------------------------------------------------------------------------------------ the search
def _fastest_first(job: Job, enough: int) -> tuple[tuple[Option, ...], list[Option], int]:
    """Those that fit, ranked, as far as none is missing; those that were worked out and do not fit; how many tried."""
    found, lost, refused, num_tried, ties, layers_s = [], [], [], 0, count(), cache(_layers_s)
    waiting: list[tuple[float, int, Layout]] = []
    bound_s = 0.0

    def wait(shapes_to_try: Iterable[Layout]) -> None:
        for shape in shapes_to_try:
            try:
                heapq.heappush(waiting, (max(bound_s, least_s(job, shape, layers_s)), next(ties), shape))
            except ValueError as error:  # the engine has no such runs
                refused.append(error)

    wait(shapes(job))
    while waiting:
        bound_s, _, shape = waiting[0]
        found.sort(key=ranked_s)
        if _is_enough([ranked_s(option) for option in found], bound_s, enough):
            break
        heapq.heappop(waiting)
        for layout in sharded(job, shape):
            try:
                if least_states(job, layout) <= job.cluster.gpu.usable_bytes:
                    option = work_out(job, layout)
                    (found if option.fits else lost).append(option)
                num_tried += 1
            except ValueError as error:  # an optimizer, adapters or offload that do not go with it
                refused.append(error)
        wait(leaner(job, shape))
    else:
        bound_s = inf
    if refused and not num_tried:
        raise refused[0]
    ranked = sorted(found, key=lambda option: (ranked_s(option), option.memory_bytes))
    return tuple(option for option in ranked if ranked_s(option) <= bound_s), lost, num_tried


def _is_enough(seconds: list[float], bound_s: float, enough: int) -> bool:
    """Whether none that is missing could be among the first so many, or among those that are as good as the first."""
    if not seconds:
        return False
    if bound_s * LEAST_SHARE > seconds[0]:
        return True
    return bound_s > seconds[0] / (1 - TOLD_APART) and len(seconds) >= enough and bound_s >= seconds[enough - 1]


def least_s(job: Job, layout: Layout, layers_s=None) -> float:
    """Seconds that a step takes at least: the work of all layers, spread over the pipeline's ranks as well as can be.

    Where backward is not split, rank r has m micro-batches to do, and the stages before it one: with c_r for a
    micro-batch on rank r a step takes at least m c_r + c_0 + ... + c_(r-1). The largest of these is least where all are
    equal, and then is the sum of all c over 1 - (1 - 1/m)^pp.
    """
    dp = layout.ep // gcd(layout.ep, layout.cp)
    alike = {"zero_stage": 0, "dp_replicate": 1, "micro_batches": 1, "schedule": "1f1b", "v": 1}
    one_s = (layers_s or _layers_s)(job, replace(layout, pp=1, dp=dp, **alike))
    m = layout.micro_batches
    if layout.schedule == "1f1b":
        return one_s / (1 - (1 - 1 / m) ** layout.pp)
    return m * one_s / layout.pp


def _layers_s(job: Job, layout: Layout) -> float:
    option = option_of(Run(job.config, layout, job.seq_len, job.recipe), job.cluster, job.engine)
    return sum(seconds for part, seconds in option.seconds_by_part.items() if part in OF_LAYERS)


def least_states(job: Job, layout: Layout) -> float:
    """Bytes of states that the fullest rank holds at least: an even share of what the layout divides."""
    if job.lora is not None or job.optimizer != "adamw" or job.offload.optimizer != "device":
        return 0.0
    recipe, config = recipe_of(job.recipe), job.config
    routed = _routed_parameters(config)
    whole = (count_parameters(config) - routed + routed / layout.ep) / (layout.tp * layout.pp)
    shard = count_parameters(config) * layout.dp_replicate / layout.world_size
    held = recipe.param_bytes * (shard if layout.zero_stage == 3 else whole)
    held += min(recipe.grad_bytes, recipe.param_bytes) * (shard if layout.zero_stage > 1 else whole)
    return held + (recipe.master_bytes + recipe.moment_bytes) * (shard if layout.zero_stage else whole)


def _routed_parameters(config) -> int:
    """Of experts that ep spreads."""
    if config.moe is None:
        return 0
    return config.num_moe_layers * config.moe.num_experts * 3 * config.d_model * config.moe.d_expert


# ------------------------------------------------------------------------------------ what was near
def _nearest(best: Option, ranked: tuple[Option, ...], lost: list[Option]) -> tuple[Rejected, ...]:
    """Say of the two that differ in the fewest choices, of those worked out, why they lost."""
    others = [option for option in (*ranked, *lost) if option is not best]
    near = sorted(others, key=lambda option: (differences(best.layout, option.layout), option.memory_bytes))[:2]
    return tuple(Rejected(option.layout, _why(best, option)) for option in near)


def _why(best: Option, option: Option) -> str:
    if not option.fits:
        return f"does not fit: {option.memory_in_words}"
    share = option.step_s / best.step_s - 1
    if share <= 0:
        tight = ", but tight" if option.verdict == "tight" else ""
        return f"{-share:.1%} faster{tight}: less than a model can tell, and the best is simpler"
    more = {part: seconds - best.seconds_by_part.get(part, 0) for part, seconds in option.seconds_by_part.items()}
    part = max(more, key=more.get)
    return f"{share:.1%} slower: {part} takes {more[part]:.3f} s more"


def differences(one: Layout, other: Layout) -> int:
    """In how many choices two layouts differ."""
    return sum(getattr(one, each.name) != getattr(other, each.name) for each in fields(Layout))
