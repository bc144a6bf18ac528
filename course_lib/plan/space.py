"""The layouts that divide: every axis a divisor of the GPUs, every rank with equal work, the batch met exactly.

What the configuration file of the job's engine cannot say is no layout of the job (course_lib/engines.py).

Left out, as they cost more than they bring: tp over nodes (its sums are on the path of every layer), fewer than 2,048
tokens of a sequence for each rank of cp, more than 8 sequences a micro-batch, and tp without sequence parallelism,
which sends as much and holds more. And, as there must be an end, more than 32 experts on a rank where there are ranks
to share them: with 64, DeepSeek-V3 on 512 H100 is 0.8 % faster (modelled).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from course_lib.layout import Layout
from course_lib.layout.check import SPLIT_BACKWARD
from course_lib.plan.job import Job
from course_lib.schedules import check_request, stages_per_rank

LEAST_TOKENS = 2048  # of a sequence, for each rank of cp
_MOST_EXPERTS = 32  # on a rank
MOST_SHARDS = 128  # ranks of a ring; more are cut into replicas (HSDP)
MICRO_BATCHES = (1, 2, 4, 8)
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb_h1", 1))


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    return [one for one in range(1, number + 1) if number % one == 0]


def shapes(job: Job) -> Iterator[Layout]:
    """Layouts without ZeRO and without recomputation."""
    for tp, pp, cp in product(*(_sizes(job, axis) for axis in ("tp", "pp", "cp"))):
        dp, left = divmod(job.num_gpus, tp * pp * cp)
        alone = dp * cp == 1 and tp * pp > 1
        uneven = cp > 1 and (job.seq_len % (2 * cp) or job.seq_len // cp < LEAST_TOKENS)  # zig-zag halves each piece
        if left or job.sequences % dp or uneven or (alone and job.facts.file.data_needed):
            continue
        for (ep, expert_tp), micro_batch in product(_expert_sizes(job, dp, cp, tp), MICRO_BATCHES):
            micro_batches, left = divmod(job.sequences // dp, micro_batch)
            if not left:
                sizes = {"dp": dp, "cp": cp, "tp": tp, "pp": pp, "ep": ep, "expert_tp": expert_tp}
                yield from _of_sizes(job, sizes | {"micro_batch": micro_batch, "micro_batches": micro_batches})


def _sizes(job: Job, axis: str) -> list[int]:
    """Divisors of the GPUs if the job's engine has the axis; of tp those within a node that suit the heads."""
    N, K = job.config.num_heads, job.config.num_kv_heads
    sizes = divisors(job.num_gpus) if axis in job.facts.file.axes else [1]
    if axis != "tp":
        return sizes
    return [tp for tp in sizes if job.cluster.gpus_per_node % tp == N % tp == 0 and (K % tp == 0 or tp % K == 0)]


def _expert_sizes(job: Job, dp: int, cp: int, tp: int) -> list[tuple[int, int | None]]:
    """(ep, expert_tp): over dp and cp with matrices cut over tp (None), and whole experts over tp's ranks too (1)."""
    file = job.facts.file
    if job.config.moe is None or "ep" not in file.axes:
        return [(1, None)]
    num_experts = job.config.moe.num_experts
    sizes = [(ep, None) for ep in divisors(dp * cp) if num_experts % ep == 0]
    if tp > 1 and job.seq_len // cp % tp == 0:
        whole = [ep for ep in divisors(dp * cp * tp) if num_experts % ep == 0 and ep > 1]
        sizes += [(ep, 1) for ep in whole if ep % (cp * tp) == 0 or not file.folds_all]
    return [one for one in sizes if num_experts // one[0] <= _MOST_EXPERTS] or [max(sizes, key=lambda one: one[0])]


def _of_sizes(job: Job, sizes: dict[str, int]) -> Iterator[Layout]:
    tp, pp, micro_batches = (sizes[name] for name in ("tp", "pp", "micro_batches"))
    layers, file = job.config.num_layers, job.facts.file
    for schedule, v in SCHEDULES if pp > 1 else SCHEDULES[:1]:
        stages = pp * stages_per_rank(schedule, v)
        if stages > layers or (pp > 1 and schedule not in file.schedules) or (file.even_stages and layers % stages):
            continue
        try:
            check_request(schedule, pp, micro_batches, v)
        except ValueError:
            continue
        yield Layout(**sizes, schedule=schedule, v=v, sequence_parallel=tp > 1, regather=tp > 1 and job.facts.regathers)


def sharded(job: Job, shape: Layout) -> list[Layout]:
    """A shape under every ZeRO stage; with stage 3 also replicas of shards, inside a node or of 128 ranks (HSDP)."""
    file = job.facts.file
    if shape.data_size == 1:  # nobody to shard over; parameters that wait on the host come layer by layer
        return [shape if job.offload.parameters == "device" else replace(shape, zero_stage=3)]
    stages = file.pipeline_zero if shape.pp > 1 else file.zero_stages
    if shape.schedule in SPLIT_BACKWARD:
        stages = [stage for stage in stages if stage < 2]
    if file.zero_0_alone and shape.dp < job.num_gpus:
        stages = [stage for stage in stages if stage]
    found = [replace(shape, zero_stage=stage) for stage in stages]
    in_a_node = max(1, job.cluster.gpus_per_node // (shape.tp * shape.cp))
    for replicas in sorted({shape.dp // in_a_node, shape.data_size // MOST_SHARDS}):
        if 3 in stages and file.replicas and 1 < replicas < shape.dp and shape.dp % replicas == 0:
            try:
                found.append(replace(shape, zero_stage=3, dp_replicate=replicas))
            except ValueError:  # replicas that cut through groups of experts
                continue
    return found


def leaner(job: Job, layout: Layout) -> Iterator[Layout]:
    """The next steps to fewer activations, each slower: more recomputation, or inputs gathered again."""
    if layout.regather and not job.facts.regathers:
        return
    words = job.facts.file.recomputes
    for recompute in words[words.index(layout.recompute) + 1 :][:1]:
        yield replace(layout, recompute=recompute)
    # others gather again or not, a fact of the engine; with full recomputation a layer is whole at the peak either way
    if layout.sequence_parallel and job.engine == "course" and layout.recompute != "full":
        yield replace(layout, regather=True)
