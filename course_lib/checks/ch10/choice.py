"""Grader of chapter 10, exercise 7: a layout chosen for a job, against memory, the global batch and a search."""

from functools import lru_cache

from course_lib.checks.core import fail, grader
from course_lib.config import preset
from course_lib.hardware import GB, Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plan import Job, Option, search, work_out

ENOUGH = 0.93  # of the best speed: the flow chart reaches it
CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
JOBS = (  # model, sequences of a step, tokens of one: what a GPU holds decides in each otherwise
    (("llama-3.2-1b", 256, 4096),),
    (("llama-3.1-8b", 256, 4096), ("llama-3.1-8b", 128, 8192)),
    (("llama-3.1-70b", 256, 4096),),
)
_BECAUSE = {
    "compute": "it computes more: recomputation, or a pipeline whose last stage has the head",
    "launches": "its kernels are short: launches take longer than they do, and a smaller tp has larger ones",
    "tp": "tp waits in every layer: a smaller tp waits less",
    "cp": "a ring of short blocks does not hide its messages",
    "bubble": "the pipeline waits: it has too few micro-batches for its stages",
    "transfer": "messages between stages take time",
    "waiting": "ranks wait for each other's messages",
    "update": "every rank updates all parameters: ZeRO shares the optimizer's work",
    "data": "gathers and sums over data are exposed: more tokens per GPU in a micro-batch hide ZeRO-3",
}


@grader
def check_choice(answer, rng):
    """A layout for three jobs: it divides, meets the global batch, fits, and is nearly as fast as the search's best."""
    gpus = (rng.choice([8, 16]), rng.choice([16, 32]), 64)
    for known, num_gpus in zip(JOBS, gpus, strict=True):
        model, sequences, seq_len = rng.choice(known)
        _check_job(
            answer, Job(preset(model), CLUSTER, num_gpus, seq_len, sequences * seq_len, "bf16-master-fp32-grads")
        )


def _check_job(answer, job: Job) -> None:
    layout = answer(job)
    where = f"{job.config.name} on {job.num_gpus} GPUs, {job.sequences} sequences of {job.seq_len} tokens"
    if not isinstance(layout, Layout):
        fail(f"{where}: return a Layout; it is {layout!r}")
    try:
        option = work_out(job, layout)
    except ValueError as error:
        fail(f"{where}: {error}")
    if not option.fits:
        over = (option.memory_bytes - option.usable_bytes) / GB
        fail(f"{where}: {layout} does not fit by {over:.1f} GB; {option.memory_in_words}")
    best = _best(job)
    share = best.step_s / option.step_s
    if share < ENOUGH:
        room = (option.usable_bytes - option.memory_bytes) / GB
        fail(
            f"{where}: {layout} fits, with {room:.1f} GB left; it is {1 - share:.0%} slower than the best of the "
            f"search, because {_why(option, best)}"
        )


@lru_cache
def _best(job: Job) -> Option:
    return search(job, enough=1).best


def _why(option: Option, best: Option) -> str:
    more = {part: s - best.seconds_by_part.get(part, 0.0) for part, s in option.seconds_by_part.items()}
    return _BECAUSE.get(max(more, key=more.get), "experts' rows travel too far")
