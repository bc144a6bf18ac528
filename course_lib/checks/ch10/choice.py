"""Table of chapter 10, exercise 7: a layout chosen for a job, against memory, the global batch and a search."""

from functools import lru_cache

from course_lib.checks.table import Exercise, Stops
from course_lib.config import preset
from course_lib.estimate import Estimate
from course_lib.hardware import GB, Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.minimal.choose import choose
from course_lib.plan import Job, search, work_out

ENOUGH = 0.93  # of the fastest layout's speed: the flow chart reaches it
CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
JOBS = (  # model, sequences of a step, tokens of one: what a GPU holds decides in each otherwise
    (("llama-3.2-1b", 256, 4096),),
    (("llama-3.1-8b", 256, 4096), ("llama-3.1-8b", 128, 8192)),
    (("llama-3.1-70b", 256, 4096),),
    (("mixtral-8x7b", 256, 4096),),
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


def _layout(job, tp=1, micro_batch=1, **choices):
    dp = job.num_gpus // tp
    sizes = {"dp": dp, "tp": tp, "micro_batch": micro_batch, "micro_batches": job.sequences // dp // micro_batch}
    return Layout(**sizes, sequence_parallel=tp > 1, regather=tp > 1, **choices)


def jobs(rng):
    """Four jobs, one with experts, each with the fastest layout of the search."""
    drawn = zip(JOBS, (rng.choice([8, 16]), rng.choice([16, 32]), 64, 32), strict=True)
    for known, num_gpus in drawn:
        model, sequences, seq_len = rng.choice(known)
        job = Job(preset(model), CLUSTER, num_gpus, seq_len, sequences * seq_len, "bf16-master-fp32-grads")
        yield job, _fastest(job)


@lru_cache
def _fastest(job: Job) -> Estimate:
    return search(job, enough=1).fastest


def watch(answer, job: Job, fastest: Estimate) -> dict:
    """Whether the layout divides, meets the global batch, fits, and is nearly as fast as the search's fastest."""
    layout = answer(job)
    where = f"{job.config.name} on {job.num_gpus} GPUs, {job.sequences} sequences of {job.seq_len} tokens"
    if not isinstance(layout, Layout):
        return {"error": f"no layout\n{where}: return a Layout; it is {layout!r}"}
    try:
        option = work_out(job, layout)
    except ValueError as error:
        return {"error": f"impossible\n{where}: {error}"}
    room, share = (option.usable_bytes - option.memory_bytes) / GB, fastest.step_s / option.step_s
    if not option.fits:
        return {"error": f"too large\n{where}: {layout} does not fit by {-room:.1f} GB; {option.memory_in_words}"}
    if share < ENOUGH:
        slower = f"it is {1 - share:.0%} slower than the fastest of the search, because {_why(option, fastest)}"
        return {"error": f"too slow\n{where}: {layout} fits, with {room:.1f} GB left; {slower}"}
    return {}


def _why(option: Estimate, fastest: Estimate) -> str:
    if option.layout.ep < fastest.layout.ep:
        return "every rank gathers experts that ep would leave to other ranks"
    more = {part: s - fastest.seconds_by_part.get(part, 0.0) for part, s in option.seconds_by_part.items()}
    return _BECAUSE.get(max(more, key=more.get), "experts' rows travel too far")


WRONG = {
    "return a Layout": Stops(lambda job: "dp=8"),
    "ep and SP need no ranks": Stops(lambda job: Layout(dp=2 * job.num_gpus)),
    "the job's global batch": Stops(lambda job: Layout(dp=job.num_gpus, zero_stage=3)),
    "does not fit by": Stops(lambda job: _layout(job, zero_stage=1)),
    "it computes more": Stops(lambda job: _layout(job, zero_stage=3, recompute="full")),
    "its kernels are short": Stops(lambda job: _layout(job, 8, zero_stage=1)),
    "leave to other ranks": Stops(
        lambda job: _layout(job, 2, 2, zero_stage=3) if job.config.moe else choose(job).option.layout
    ),
    "more tokens per GPU": Stops(
        lambda job: _layout(job, 8, zero_stage=3) if job.config.num_layers == 80 else choose(job).option.layout
    ),
}
check_choice = Exercise(lambda job: choose(job).option.layout, jobs, WRONG, watch)
