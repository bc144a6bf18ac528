"""The search: layouts in the order of the least time that they could take, until enough that fit are worked out.

What a step takes at least is known from its stages alone: their computing, what they wait inside a layer, and the
filling of the pipeline. A layout that is leaner takes no less than the one that it comes from, so it is looked at only
where that one does not fit. What is left when the search ends could not have been faster than the best.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.layout.check import SPLIT_BACKWARD
from course_lib.memory.budget import fullest_budget, states_of
from course_lib.memory.flats import placed_by
from course_lib.plan.job import Job
from course_lib.plan.option import Option, held_bytes, memory_in_words, option_of, work_out
from course_lib.plan.space import leaner, recomputing, shapes, sharded
from course_lib.predict import predicted_bytes
from course_lib.predict.frameworks import FRAMEWORKS, least_memory_of
from course_lib.run import Run
from course_lib.schedules import Costs
from course_lib.timing import stage_costs
from course_lib.validate import Size, checked

ENOUGH = 16  # layouts that fit and are worked out
LEAST_SHARE = 0.5  # of the best throughput: slower ones are of no interest
TOLD_APART = 0.05  # fitted rates miss the speed of half of the runs by 4.2 % and more (docs/PREDICTOR.md)


@dataclass(frozen=True)
class Rejected:
    """A layout that lost, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class Plan:
    """What was found.

    best       the fastest that fits; by fitted rates, of those that they cannot tell from it, the one of least memory
    ranked     all that fit and were worked out, fastest first
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
    """Find the fastest layout of a job that fits its GPUs.

    enough   so many layouts that fit are worked out, more only where one could still be the fastest
    Raises   ValueError if no layout divides, or none fits
    """
    with _no_collector():
        found, lost = _all_predicted(job) if job.framework is not None else _fastest_first(job, enough)
    if not found and not lost:
        raise ValueError(
            f"no layout of {job.config.name} divides {job.num_gpus} GPUs and {job.sequences} sequences a step; choose "
            "a batch that is a multiple of the GPUs, or fewer GPUs"
        )
    if not found:
        raise ValueError(
            f"no layout of {job.config.name} on {job.num_gpus} GPUs fits {job.cluster.gpu.usable_bytes / GB:.1f} GB; "
            "choose more GPUs, a GPU with more memory, or shorter sequences"
        )
    ranked = tuple(sorted(found, key=lambda option: (-option.tokens_per_s, option.memory_bytes)))
    best = ranked[0] if job.framework is None else advised(ranked)
    return Plan(job, best, ranked, front(ranked), _nearest(job, best, ranked, lost), len(found) + len(lost))


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


def advised(ranked: Sequence[Option]) -> Option:
    """Of the options within TOLD_APART of the fastest, which stands first, the one that needs the least memory."""
    near = [option for option in ranked if option.tokens_per_s >= (1 - TOLD_APART) * ranked[0].tokens_per_s]
    return min(near, key=lambda option: option.memory_bytes)


def front(ranked: tuple[Option, ...]) -> tuple[Option, ...]:
    """Those that no other beats in memory and in MFU, of options that stand fastest first."""
    kept: list[Option] = []
    for option in ranked:
        if not kept or option.memory_bytes < kept[-1].memory_bytes:
            kept.append(option)
    return tuple(kept)


def _all_predicted(job: Job) -> tuple[list[Option], list[Layout]]:
    """Work out every layout that fits; of those that do not, the next with more recomputation."""
    found, lost = [], []
    for shape in sorted(shapes(job), key=lambda shape: (shape.pp, shape.micro_batches)):  # equal pipelines in a row
        layouts = sharded(job, shape)
        while layouts:
            fit = [layout for layout in layouts if _fits(job, layout)]
            found += [work_out(job, layout) for layout in fit]
            too_large = [layout for layout in layouts if layout not in fit]
            lost += too_large
            layouts = [fewer for layout in too_large for fewer in recomputing(job, layout)]
    return found, lost


def _fits(job: Job, layout: Layout) -> bool:
    usable = job.cluster.gpu.usable_bytes
    if job.framework in FRAMEWORKS and least_memory_of(job.run(layout), FRAMEWORKS[job.framework]) > usable:
        return False
    return sum(_held_bytes(job, layout).values()) <= usable


def _held_bytes(job: Job, layout: Layout) -> dict[str, float]:
    """What the fullest rank holds, by kind."""
    if job.framework is not None:
        return predicted_bytes(job.run(layout), job.cluster, job.framework)
    return held_bytes(fullest_budget(job.run(layout)))


def _fastest_first(job: Job, enough: int) -> tuple[list[Option], list[Layout]]:
    found: list[Option] = []
    lost: list[Layout] = []
    usable, best_s, ties = job.cluster.gpu.usable_bytes, float("inf"), count()
    waiting: list[_Waiting] = []
    run_of = lru_cache(maxsize=None)(job.run)
    seen: set[Layout] = set()  # leaner ones, which come from several

    def wait(bound_s: float, layouts: list[Layout], is_own: bool) -> None:
        """Layouts whose states alone are too many leave at once."""
        small = [layout for layout in layouts if _states_bytes(run_of(layout)) <= usable]
        lost.extend(layout for layout in layouts if layout not in small)
        if small:
            heapq.heappush(waiting, _Waiting(bound_s or least_s(job, small[0]), next(ties), small, is_own))

    def wait_leaner(bound_s: float, too_large: list[Layout]) -> None:
        lost.extend(too_large)
        for layouts in map(list, zip(*map(leaner, too_large), strict=True)):
            if layouts and layouts[0] not in seen:
                seen.add(layouts[0])
                wait(bound_s, layouts, is_own=False)

    for shape in shapes(job):
        wait(0.0, sharded(job, shape), is_own=True)
    while waiting:
        bound_s, _, layouts, is_own = heapq.heappop(waiting)
        if bound_s * LEAST_SHARE > best_s or (len(found) >= enough and bound_s >= best_s):
            break
        may_fit = [layout for layout in layouts if fullest_budget(run_of(layout), usable).total_bytes <= usable]
        wait_leaner(bound_s, [layout for layout in layouts if layout not in may_fit])
        if may_fit and not is_own:
            heapq.heappush(waiting, _Waiting(least_s(job, may_fit[0]), next(ties), may_fit, True))
            continue
        too_large = []
        for layout in reversed(may_fit):  # of equally fast ones that which shards most
            run = run_of(layout)
            fullest = fullest_budget(run, usable)
            if fullest.total_bytes > usable:
                too_large.append(layout)
                continue
            found.append(option_of(job, run, fullest))
            best_s = min(best_s, found[-1].step_s)
        wait_leaner(bound_s, too_large[::-1])
    return found, lost


def _states_bytes(run: Run) -> int:
    """Parameters and optimizer of the first rank, which recomputation does not take away."""
    states = states_of(run)
    return states.parameters + states.optimizer


class _Waiting(NamedTuple):
    """Layouts that differ in ZeRO alone, and what a step of them takes at least: their own bound, or their parent's."""

    bound_s: float
    tie: int
    layouts: list[Layout]
    is_own: bool


def least_s(job: Job, layout: Layout) -> float:
    """Seconds that a step takes at least: the busiest rank's work, and what passes before and behind it."""
    # a rank whose weight gradients wait does them while others are passed on its way back
    whole_backward = layout.schedule not in SPLIT_BACKWARD
    alone = replace(layout, zero_stage=0, dp_replicate=1, micro_batches=2 * layout.pp)
    costs = _stage_costs(job, alone if whole_backward else replace(alone, schedule="1f1b"))
    forward_s, input_s, weight_s = costs.forward_s, costs.input_backward_s, costs.weight_backward_s
    least = passed_s = 0.0
    for rank in range(layout.pp):
        mine = placed_by(layout).stages_of_rank(rank)
        busy_s = layout.micro_batches * sum(forward_s[one] + input_s[one] + weight_s[one] for one in mine)
        least = max(least, busy_s + passed_s)
        passed_s += forward_s[rank] + (input_s[rank] + weight_s[rank] if whole_backward else 0.0)
    return least


@lru_cache(maxsize=1024)
def _stage_costs(job: Job, layout: Layout) -> Costs:
    return stage_costs(job.run(layout), job.cluster)


# ---- what lost


def _nearest(job: Job, best: Option, ranked: tuple[Option, ...], lost: list[Layout]) -> tuple[Rejected, ...]:
    """The two that differ least from the best: first those that would be faster and do not fit, then slower ones."""
    rejected = []
    for layout in _nearest_to_fit(job, best.layout, lost):
        held = memory_in_words(_held_bytes(job, layout), job.cluster.gpu.usable_bytes)
        rejected.append(Rejected(layout, f"does not fit: {held}"))
    slower = [option for option in ranked if option.step_s > best.step_s]
    slower.sort(key=lambda option: (differences(best.layout, option.layout), option.step_s))
    for option in slower[: 2 - len(rejected)]:
        share = 1 - option.tokens_per_s / best.tokens_per_s
        more = {part: seconds - best.seconds_by_part[part] for part, seconds in option.seconds_by_part.items()}
        part = max(more, key=more.get)
        rejected.append(Rejected(option.layout, f"{share:.1%} slower: {part} takes {more[part]:.3f} s more"))
    return tuple(rejected)


def _nearest_to_fit(job: Job, best: Layout, lost: list[Layout]) -> list[Layout]:
    """Two that differ least from the best; of those that differ as much, the ones that need the least memory."""
    ranked = sorted(lost, key=lambda layout: differences(best, layout))
    most = max((differences(best, layout) for layout in ranked[:2]), default=0)
    few = [layout for layout in ranked if differences(best, layout) <= most]
    held = {layout: _least_of(job, layout) for layout in few}
    return sorted(few, key=lambda layout: (differences(best, layout), held[layout]))[:2]


def _least_of(job: Job, layout: Layout) -> float:
    if job.framework is None:
        return fullest_budget(job.run(layout)).total_bytes
    if job.framework in FRAMEWORKS:
        return least_memory_of(job.run(layout), FRAMEWORKS[job.framework])
    return sum(_held_bytes(job, layout).values())


def differences(one: Layout, other: Layout) -> int:
    """In how many choices two layouts differ."""
    return sum(getattr(one, each.name) != getattr(other, each.name) for each in fields(Layout))
