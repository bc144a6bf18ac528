"""A planner: every layout that divides, those that fit, the fastest first; memory and time are `course_lib.plan`'s."""

from dataclasses import replace

from course_lib.layout import Layout
from course_lib.plan import work_out


def cuts(num_gpus):
    """Return every (dp, tp, pp) whose product is the number of GPUs."""
    sizes = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    pairs = [(tp, pp) for tp in sizes for pp in sizes if num_gpus % (tp * pp) == 0]
    return [(num_gpus // (tp * pp), tp, pp) for tp, pp in pairs]


def candidates(job):
    """Return every layout that divides the GPUs, the model and the batch."""
    found = []
    for dp, tp, pp in cuts(job.num_gpus):
        in_a_node = tp <= job.cluster.gpus_per_node
        if not in_a_node or job.config.num_heads % tp or pp > job.config.num_layers:
            continue
        for micro_batch in (1, 2, 4):
            micro_batches, rest = divmod(job.sequences, dp * micro_batch)
            if rest or not micro_batches:
                continue
            sizes = Layout(dp=dp, tp=tp, pp=pp, sequence_parallel=tp > 1)
            batch = {"micro_batch": micro_batch, "micro_batches": micro_batches}
            for zero_stage in (0, 1) if dp > 1 else (0,):
                found.append(replace(sizes, zero_stage=zero_stage, **batch))
    return found


def plan(job):
    """Work out every candidate; keep those that fit, fastest first."""
    options = [work_out(job, layout) for layout in candidates(job)]
    fitting = [option for option in options if option.fits]
    return sorted(fitting, key=lambda one: (-one.tokens_per_s, one.memory_bytes))


def front(ranked):
    """Keep the options that no other beats in memory and in speed."""
    kept = []
    for option in ranked:  # fastest first
        if not kept or option.memory_bytes < kept[-1].memory_bytes:
            kept.append(option)
    return kept
