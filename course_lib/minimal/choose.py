"""Choosing a layout without options: a ladder of layouts to try in order, and where one may stop.

    job = Job(preset("llama-3.1-70b"), cluster, 64, seq_len=4096, batch_tokens=2**20, recipe="bf16-master-fp32-grads")
    choose(job).option.layout       # the first on the ladder that fits and waits for at most 5 % of the step
    search(job).best.layout         # the fastest of all, from course_lib.plan

Memory and time are what `work_out` says, as the search has them; no formula of either stands here. A layout without a
pipeline that recomputes nothing and waits for 5 % of its step is at most about 5 % slower than others with matrices as
wide and micro-batches as large: none has less to compute. A pipeline may have more, on its slowest stage.
"""

from dataclasses import dataclass
from itertools import chain, product

from course_lib.estimate import Estimate
from course_lib.layout import Layout
from course_lib.plan import work_out
from course_lib.plan.space import LEAST_TOKENS, MOST_SHARDS

MOST_WAITING = 0.05  # of a step: less is not worth another try
COST_OF_RECOMPUTATION = 0.25  # of a step: one forward pass more, beside one forward and two of backward


@dataclass(frozen=True)
class Choice:
    """What was taken, the step of the ladder where it stands, and how many layouts were tried."""

    option: Estimate
    step: str
    num_tried: int


def layout_of(job, tp=1, cp=1, pp=1, micro_batch=1, **choices):
    """Return the layout that gives all other GPUs to dp; None where GPUs or global batch do not divide."""
    dp, left_gpus = divmod(job.num_gpus, tp * cp * pp)
    micro_batches, left_sequences = divmod(job.sequences, max(dp, 1) * micro_batch)
    if left_gpus or left_sequences or (cp > 1 and job.seq_len // cp < LEAST_TOKENS):
        return None
    sizes = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "micro_batch": micro_batch, "micro_batches": micro_batches}
    try:
        layout = Layout(**sizes, sequence_parallel=tp > 1, regather=tp > 1, **choices)
        layout.check_model(job.config, job.seq_len)
    except ValueError:
        return None
    return layout


def option_that_fits(job, layout):
    """Return the layout's memory and time; None where a rank has too little memory."""
    option = work_out(job, layout)
    return option if option.fits else None


def waiting_share(option):
    """Return the share of the step (0 to 1) that is exposed communication and bubble."""
    working = ("compute", "launches", "update")
    return 1 - sum(option.seconds_by_part[part] for part in working) / option.step_s


def in_a_node(job):
    """Yield layouts whose copy of the model lies on 1, 2, 4 or 8 GPUs of a node."""
    sizes, stages = (1, 2, 4, 8), (1, 2, 3) if job.config.moe else (1, 3)  # experts' gradients are large: also ZeRO-2
    for size, tp, zero_stage in product(sizes, sizes, stages):
        name = f"copy on {size} GPU{'s' * (size > 1)}, ZeRO-{zero_stage}"
        cut = {"tp": tp, "cp": size // tp, "zero_stage": zero_stage}
        if tp <= size and zero_stage < 3:
            yield name, cut
        elif tp <= size:
            replicas = sorted({1, max(1, job.num_gpus // tp // MOST_SHARDS)})  # HSDP
            for dp_replicate, micro_batch in product(replicas, sizes):
                yield name, cut | {"dp_replicate": dp_replicate, "micro_batch": micro_batch}


def over_nodes():
    """Yield layouts whose copy of the model lies on several nodes: a pipeline, or a long ring of cp."""
    for pp, tp, cp in product((1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4, 8, 16)):
        name, cut = "copy on several nodes", {"pp": pp, "tp": tp, "cp": cp}
        if pp > 1:
            yield name, cut | {"zero_stage": 1, "schedule": "interleaved", "v": 2}
            yield name, cut | {"zero_stage": 1}
        elif tp * cp > 8:
            yield name, cut | {"zero_stage": 3}


def ladder(job):
    """Yield the steps and what they try, in order: small copies of the model first, recomputation last."""
    experts = (8, 1) if job.config.moe else (1,)
    for recompute in ("none", "full"):
        for (name, cut), ep in product(chain(in_a_node(job), over_nodes()), experts):
            yield name, cut | {"ep": ep, "recompute": recompute}


def choose(job):
    """Return the first of the ladder that fits and waits little; where none does, the fastest one that fits.

    Raises   ValueError if nothing on the ladder fits
    """
    best, step_of_best, num_tried = None, "", 0
    for step, choices in ladder(job):
        is_recomputed = choices["recompute"] == "full"
        if is_recomputed and best and waiting_share(best) < COST_OF_RECOMPUTATION:
            break  # recomputation would cost more than there is to win
        layout = layout_of(job, **choices)
        option = option_that_fits(job, layout) if layout else None
        num_tried += layout is not None
        if option is None:
            continue
        if best is None or option.step_s < best.step_s:
            best, step_of_best = option, step
        if waiting_share(option) <= MOST_WAITING and not is_recomputed:
            break
    if best is None:
        name = f"{job.config.name} on {job.num_gpus} GPUs"
        raise ValueError(f"nothing on the ladder fits {name}; take more or larger GPUs")
    return Choice(best, step_of_best, num_tried)
