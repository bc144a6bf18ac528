"""The search: layouts in the order of the least time that they could take, until enough that fit are worked out.

What a step takes at least is known from the work of its layers on one stage: a pipeline cannot do it faster than evenly
over its ranks. A search ends when no layout that is left could be faster than the slowest of its list: none that fits
and is faster than that is missing there. Of a layout that does not fit, the bytes that it holds at least mostly say so.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from heapq import heappop, heappush, nsmallest
from itertools import count
from math import gcd, inf

from course_lib.estimate import Estimate, nearest
from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.memory.activations import Part, part_of
from course_lib.memory.budget import overheads_of
from course_lib.memory.peak import most_saved, stage_of
from course_lib.plan.job import Job, work_out
from course_lib.plan.space import leaner, shapes, sharded
from course_lib.run import recipe_of
from course_lib.timing.data import numel_of_rank
from course_lib.timing.layer import stages_of
from course_lib.timing.step import StepTime, least_waiting_slots, step_time
from course_lib.validate import Size, checked

ENOUGH = 16  # layouts of a list
_LEAST_SHARE = 0.5  # of the best throughput: slower ones are of no interest
TOLD_APART = 0.03  # speeds that are nearer to each other are equal for the choice: tests/plan/test_measured.py
OF_LAYERS = ("compute", "launches", "tp", "cp", "ep")  # parts of a step that each layer has for itself


@dataclass(frozen=True)
class Plan:
    """What was found."""

    job: Job
    best: Estimate  # the choice among those that cannot be told from the fastest: `advised`
    ranked: tuple[Estimate, ...]  # fitting, fastest first; a tight one counts as 3 % slower. No faster is missing
    front: tuple[Estimate, ...]  # those of them that no other beats in memory and in MFU, fastest first
    rejected: tuple[tuple[Layout, str], ...]  # the two layouts nearest to the best that lost, each with the reason
    num_tried: int  # layouts of which it is known whether they fit

    @property
    def fastest(self) -> Estimate:
        """The shortest step of all that were searched and fit. It may be tight, and `best` up to 3 % slower."""
        return min(self.ranked, key=lambda option: option.step_s)


@checked
def search(job: Job, enough: Size = ENOUGH) -> Plan:
    """Find the fastest layouts of a job that fit: `enough`, more where they cannot be told from the fastest."""
    ranked, lost, num_tried = _fastest_first(job, enough)
    if not num_tried:
        raise ValueError(
            f"no layout of {job.config.name} divides {job.num_gpus} GPUs and {job.sequences} sequences a step; choose "
            "a batch that is a multiple of the GPUs, or fewer GPUs"
        )
    if not ranked:
        raise ValueError(_nothing_fits(job, lost))
    best = advised(ranked)
    return Plan(job, best, ranked, front(ranked), tuple(_nearest(job, best, ranked, lost)), num_tried)


def ranked_s(option: Estimate) -> float:
    """Seconds of a step by which options are ranked: a tight one ranks below those of nearly its speed."""
    return option.step_s / (1 - TOLD_APART if option.room == "tight" else 1)


def advised(ranked: Sequence[Estimate]) -> Estimate:
    """Choose among the options that cannot be told from the fastest, which stands first: the simplest.

    First those that fit and are not tight, where all are tight those with the least memory, to a hundredth of what
    there is; then the most tokens of a micro-batch for each GPU, fewer axes, less ZeRO, no interleaving, no
    recomputation.
    """
    near = [option for option in ranked if ranked_s(option) <= ranked_s(ranked[0]) / (1 - TOLD_APART)]
    return min(near, key=_complexity)


def _complexity(option: Estimate) -> tuple:
    layout = option.layout
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp, layout.dp_replicate))
    extras = (layout.zero_stage, layout.schedule != "1f1b", layout.recompute != "none")
    rows = layout.micro_batch / (layout.tp * layout.cp)
    return (_tight_share(option), -rows, axes, *extras, option.step_s)


def _tight_share(option: Estimate) -> float:
    """The share of the memory that a tight option needs, to a hundredth; 0 of others."""
    return round(option.memory_bytes / option.usable_bytes, 2) if option.room == "tight" else 0.0


def one_of_each_kind(options: Sequence[Estimate]) -> list[Estimate]:
    """The first of those that differ in nothing but how inputs are gathered and how shards are replicated."""
    firsts: dict[Layout, Estimate] = {}
    for option in options:
        firsts.setdefault(replace(option.layout, regather=False, dp_replicate=1), option)
    return list(firsts.values())


def front(ranked: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
    """Those that no other beats in memory and in MFU, of options that stand fastest first."""
    kept: list[Estimate] = []
    for option in sorted(ranked, key=lambda option: (option.step_s, option.memory_bytes)):
        if not kept or option.memory_bytes < kept[-1].memory_bytes:
            kept.append(option)
    return tuple(kept)


def _fastest_first(job: Job, enough: int) -> tuple[tuple[Estimate, ...], list[Layout], int]:
    """Those that fit, ranked, as far as none is missing; those that do not fit; how many both are. A shape waits with
    the least seconds that it could take, a layout with the seconds that it takes. Whatever is next is the fastest that
    is left: a shape becomes layouts, of a layout it is asked whether it fits."""
    found, lost, refused, ties, usable = [], [], [], count(), job.cluster.gpu.usable_bytes
    waiting: list[tuple[float, int, Layout, bool]] = []
    next_s = 0.0

    def wait(layouts: Iterable[Layout], seconds: Callable[[Layout], float], is_shape: bool) -> None:
        for layout in layouts:
            try:
                if not is_shape and least_of_ranks(job, layout, usable) > usable:
                    lost.append(layout)
                else:
                    heappush(waiting, (max(next_s, seconds(layout)), next(ties), layout, is_shape))
            except ValueError as error:  # an engine without such runs; an optimizer, adapters that do not go with it
                refused.append(error)

    least = partial(least_s, job)
    wait(shapes(job), least, is_shape=True)
    while waiting:
        next_s, _, layout, is_shape = waiting[0]
        if _is_enough(sorted(map(ranked_s, found)), next_s, enough):
            break
        heappop(waiting)
        if is_shape:
            wait(sharded(job, layout), lambda one: _step_time(job, one).total_s, is_shape=False)
            wait(leaner(job, layout), least, is_shape=True)
        elif (option := work_out(job, layout)).fits:
            found.append(option)
        else:
            lost.append(layout)
    else:
        next_s = inf
    if refused and not (found or lost):
        raise refused[0]
    ranked = sorted(found, key=lambda option: (ranked_s(option), option.memory_bytes))
    return tuple(option for option in ranked if ranked_s(option) <= next_s), lost, len(found) + len(lost)


def _is_enough(seconds: list[float], bound_s: float, enough: int) -> bool:
    """Whether none that is missing could be among the first so many, or among those that are as good as the first."""
    if not seconds or bound_s * _LEAST_SHARE > seconds[0]:
        return bool(seconds)
    return bound_s > seconds[0] / (1 - TOLD_APART) and len(seconds) >= enough and bound_s >= seconds[enough - 1]


def least_s(job: Job, layout: Layout) -> float:
    """Seconds that a step takes at least: the work of all layers, spread over the pipeline's ranks as well as can be.

    Of 1F1B rank r has m micro-batches to do, and the stages before it one: with c_r for a micro-batch on rank r a step
    takes at least m c_r + c_0 + ... + c_(r-1). The largest of these is least where all are equal, and then is the sum
    of all c over 1 - (1 - 1/m)^pp. Of other schedules the waits of equal stages are known.
    """
    dp = layout.ep // gcd(layout.ep, layout.cp * layout.fold)
    alike = {"zero_stage": _least_zero(job), "dp_replicate": 1, "micro_batches": 1, "schedule": "1f1b", "v": 1}
    one_s, m = _layers_s(job, replace(layout, pp=1, dp=dp, **alike)), layout.micro_batches
    if layout.schedule == "1f1b":
        return one_s / (1 - (1 - 1 / m) ** layout.pp)
    return (m + least_waiting_slots(layout.schedule, layout.pp, layout.v)) * one_s / layout.pp


@lru_cache(maxsize=1024)
def _layers_s(job: Job, alone: Layout) -> float:
    """Seconds of all layers on one stage, for one micro-batch: of layouts that differ in nothing else."""
    return sum(seconds for part, seconds in _step_time(job, alone).parts.items() if part in OF_LAYERS)


def _step_time(job: Job, layout: Layout) -> StepTime:
    return step_time(job.run(layout), job.cluster, job.engine)


def least_of_ranks(job: Job, layout: Layout, enough: float = inf) -> float:
    """The most that a rank holds at least: of a pipeline's first, second and last, of the first if a log is of it."""
    last = 0 if job.facts.log_first else layout.pp - 1
    return max(least_bytes(job, layout, rank, enough) for rank in dict.fromkeys((0, min(1, last), last)))


def least_bytes(job: Job, layout: Layout, rank: int, enough: float = inf) -> float:
    """Bytes that a rank holds at least: of matrices, and where these are not `enough`, what micro-batches saved."""
    recipe, offload, zero = recipe_of(job.recipe), job.offload, layout.zero_stage
    param_bytes = recipe.param_bytes * (offload.parameters == "device")
    is_plain = job.optimizer == "adamw" and offload.optimizer == "device"
    optimizer_bytes = (recipe.master_bytes + recipe.moment_bytes) * is_plain
    shape, states, gradients = _unsharded(job, layout), 0.0, 0.0
    sizes = zip(_numel(job, shape, rank), (layout.shard_size, layout.expert_shard_size), strict=True)
    for numel, ranks in () if job.lora else sizes:
        of_stage = [numel / (ranks if zero >= stage else 1) for stage in (1, 2, 3)]
        states += optimizer_bytes * of_stage[0] + param_bytes * of_stage[2]
        gradients += min(recipe.grad_bytes, recipe.param_bytes) * of_stage[1]
    if states + gradients > enough or job.facts.log_first:
        return states + gradients
    return states + max(gradients, _saved_bytes(job, shape, rank)) + sum(overheads_of(_part(job, shape).run).values())


@lru_cache(maxsize=16)
def _unsharded(job: Job, layout: Layout) -> Layout:
    return replace(layout, zero_stage=_least_zero(job), dp_replicate=1)


@lru_cache(maxsize=1024)
def _part(job: Job, shape: Layout) -> Part:
    return part_of(job.run(shape), engine=job.facts)


@lru_cache(maxsize=4096)
def _numel(job: Job, shape: Layout, rank: int) -> tuple[float, float]:
    return numel_of_rank(_part(job, shape).run, stages_of(_part(job, shape).run, job.facts), rank)


@lru_cache(maxsize=4096)
def _saved_bytes(job: Job, shape: Layout, rank: int) -> int:
    """What all micro-batches in flight saved for their backward, where it begins."""
    return most_saved(
        shape, rank, {stage: stage_of(_part(job, shape), stage).total for stage in shape.stages_of_rank(rank)}
    )


def _least_zero(job: Job) -> int:
    """The stage of a shape: parameters that wait on the host come layer by layer."""
    return 0 if job.offload.parameters == "device" else 3


def _nothing_fits(job: Job, lost: list[Layout]) -> str:
    """How much is missing where it is least, and what would fit, each worked out."""
    usable = job.cluster.gpu.usable_bytes
    leanest = _leanest(job, lost)
    ways = []
    for change, one in nearest(leanest.run, job.cluster, job.engine).items():
        memory, speed = f"{one.memory_bytes / GB:.1f} of {usable / GB:.1f} GB", f"{one.tokens_per_s_per_gpu:,.0f}"
        ways.append(f"{change}: {one.room}, {memory}, {speed} tokens/s/GPU")
    return (
        f"no layout of {job.config.name} on {job.num_gpus} GPUs fits {usable / GB:.1f} GB; {leanest.layout} is nearest "
        f"and needs {leanest.memory_bytes / GB:.1f} GB, {(leanest.memory_bytes - usable) / GB:.1f} too many; "
        + ("this would fit: " + "; ".join(ways) if ways else "choose more GPUs, or a GPU with more memory")
    )


def _leanest(job: Job, lost: list[Layout]) -> Estimate:
    """The layout with the least memory: none whose bound is above what was found is worked out."""
    leanest = None
    bounds = ((least_of_ranks(job, layout), layout) for layout in lost)
    for least, layout in sorted(bounds, key=lambda one: one[0]):
        if leanest is not None and least >= leanest.memory_bytes:
            break
        leanest = min(filter(None, (leanest, work_out(job, layout))), key=lambda option: option.memory_bytes)
    return leanest


def _nearest(job: Job, best: Estimate, ranked: Sequence[Estimate], lost: Sequence[Layout]) -> list[tuple[Layout, str]]:
    """Say of the two that differ in the fewest choices, and of these need least memory, why they lost."""
    layouts = (layout for layout in (*(option.layout for option in ranked), *lost) if layout != best.layout)
    apart = {layout: differences(best.layout, layout) for layout in layouts}
    most = max(nsmallest(2, apart.values()), default=0)
    near = [work_out(job, layout) for layout, num_choices in apart.items() if num_choices <= most]
    near.sort(key=lambda option: (apart[option.layout], option.memory_bytes))
    return [(option.layout, _why(best, option)) for option in near[:2]]


def _why(best: Estimate, option: Estimate) -> str:
    if not option.fits:
        return f"does not fit: {option.memory_in_words}"
    share = option.step_s / best.step_s - 1
    if share < 0.0005:
        faster = f"{-share:.1%} faster" if share < -0.0005 else "as fast"
        if best.room == "tight" and _tight_share(option) > _tight_share(best):
            return f"{faster}: less than a model can tell, and the best needs less memory"
        speed = f"{faster}, but tight" if option.room == "tight" != best.room else faster
        return f"{speed}: less than a model can tell, and the best is simpler"
    more = {part: seconds - best.seconds_by_part.get(part, 0) for part, seconds in option.seconds_by_part.items()}
    part = max(more, key=more.get)
    return f"{share:.1%} slower: {part} takes {more[part]:.3f} s more"


def differences(one: Layout, other: Layout) -> int:
    """In how many choices two layouts differ."""
    return sum(getattr(one, each.name) != getattr(other, each.name) for each in fields(Layout))
