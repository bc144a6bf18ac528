"""The layouts that divide: every axis a divisor of the GPUs, every rank with equal work, the batch met exactly.

Left out, as they cost more than they bring: tp over nodes (its sums are on the path of every layer), fewer than 4,096
tokens of a sequence for each rank of cp, more than 4 sequences a micro-batch, and tp without sequence parallelism,
which sends as much and holds more. And, as there must be an end, more than 32 experts on a rank where there are ranks
to share them: with 64, DeepSeek-V3 on 512 H100 is 0.8 % faster (modelled).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from course_lib.layout import Layout
from course_lib.layout.check import SPLIT_BACKWARD
from course_lib.layout.partition import check_heads
from course_lib.plan.job import Job
from course_lib.schedules import check_request, stages_per_rank

LEAST_TOKENS = 4096  # of a sequence, for each rank of cp
MOST_EXPERTS = 32  # on a rank
MICRO_BATCHES = (1, 2, 4)
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb_h1", 1))
RECOMPUTE = ("none", "selective", "full")


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    return [one for one in range(1, number + 1) if number % one == 0]


def shapes(job: Job) -> Iterator[Layout]:
    """Layouts without ZeRO and without recomputation: sizes of axes, schedule, micro-batch, sequence parallelism."""
    sequences, config = job.sequences, job.config
    for tp in _tensor_sizes(job):
        for pp in divisors(job.num_gpus // tp):
            for cp in divisors(job.num_gpus // tp // pp) if pp <= config.num_layers else ():
                dp = job.num_gpus // tp // pp // cp
                if sequences % dp or not _divides(job, cp):
                    continue
                for ep in _expert_sizes(job, dp * cp):
                    for micro_batch in MICRO_BATCHES:
                        if sequences // dp % micro_batch == 0:
                            sizes = {"dp": dp, "cp": cp, "tp": tp, "pp": pp, "ep": ep, "micro_batch": micro_batch}
                            yield from _of_sizes(job, sizes | {"micro_batches": sequences // dp // micro_batch})


def _tensor_sizes(job: Job) -> Iterator[int]:
    for tp in divisors(min(job.num_gpus, job.cluster.gpus_per_node)):
        try:
            check_heads(job.config.num_heads, job.config.num_kv_heads, tp)
        except ValueError:
            continue
        yield tp


def _divides(job: Job, cp: int) -> bool:
    """Whether a ring of cp ranks has equal, long enough pieces of a sequence; zig-zag halves each."""
    return cp == 1 or (job.framework is None and job.seq_len % (2 * cp) == 0 and job.seq_len // cp >= LEAST_TOKENS)


def _expert_sizes(job: Job, data: int) -> list[int]:
    if job.config.moe is None:
        return [1]
    num_experts = job.config.moe.num_experts
    sizes = [ep for ep in divisors(data) if num_experts % ep == 0]
    return [ep for ep in sizes if num_experts // ep <= MOST_EXPERTS] or sizes[-1:]


def _of_sizes(job: Job, sizes: dict[str, int]) -> Iterator[Layout]:
    pp, micro_batches = sizes["pp"], sizes["micro_batches"]
    for schedule, v in SCHEDULES if pp > 1 and job.framework is None else SCHEDULES[:1]:
        try:
            check_request(schedule, pp, micro_batches, v)
        except ValueError:
            continue
        if pp * stages_per_rank(schedule, v) > job.config.num_layers:
            continue
        yield Layout(**sizes, schedule=schedule, v=v, sequence_parallel=sizes["tp"] > 1)


def sharded(job: Job, shape: Layout) -> list[Layout]:
    """A shape under every ZeRO stage, and with stage 3 sharded inside a node and replicated over nodes (HSDP)."""
    if shape.data_size == 1:
        return [shape]
    if job.framework is not None:
        return [replace(shape, zero_stage=stage) for stage in ((0, 1) if job.framework == "nanotron" else (0, 1, 2, 3))]
    stages = (0, 1) if shape.schedule in SPLIT_BACKWARD else (0, 1, 2, 3)
    found = [replace(shape, zero_stage=stage) for stage in stages]
    in_a_node = max(1, job.cluster.gpus_per_node // (shape.tp * shape.cp))
    replicas, left = divmod(shape.dp, in_a_node)
    if 3 in stages and in_a_node > 1 and replicas > 1 and not left and shape.ep == 1:
        found.append(replace(shape, zero_stage=3, dp_replicate=replicas))
    return found


def leaner(layout: Layout) -> list[Layout]:
    """The next steps to fewer activations, each slower than the layout: more recomputation, inputs gathered again."""
    found = _more_recomputed(layout)
    if layout.sequence_parallel and not layout.regather:
        found.append(replace(layout, regather=True))
    return found


def recomputing(job: Job, layout: Layout) -> list[Layout]:
    """The same of a framework's run: more recomputation.

    nanotron's fitted runs have none. With experts there would be too many layouts to work out each one: they are ranked
    without it.
    """
    return [] if job.framework == "nanotron" or job.config.moe is not None else _more_recomputed(layout)


def _more_recomputed(layout: Layout) -> list[Layout]:
    if layout.recompute == RECOMPUTE[-1]:
        return []
    return [replace(layout, recompute=RECOMPUTE[RECOMPUTE.index(layout.recompute) + 1])]
