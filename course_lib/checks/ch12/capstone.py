"""Table of chapter 12, exercise 8, the capstone: two ranks go on with a run of four that was killed, and report it.

No number of a report is trusted. The reference goes on with the same run on the same ranks, and its numbers count.
"""

import os
import shutil
import signal
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch.distributed as dist

from course_lib import checkpoint, comm
from course_lib.checks import Exercise, fresh_seed
from course_lib.config import preset
from course_lib.launch import RankError, launch
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.memory.budget import states_of
from course_lib.model import build
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.run import FP64, Run
from course_lib.traffic import sent
from course_lib.train import Checkpoints, Logs, TrainPlan, trainer
from course_lib.train.log import log_path, read
from course_lib.train.options import layout_for
from course_lib.train.start import tokens_of
from course_lib.training.text import speak
from course_lib.weights.base import load_base, load_tokenizer

CONFIG = preset("speaks")
PROMPT, NUM_TOKENS, KINDS = "Q: What does", 20, ("parameters", "gradients", "optimizer")
LAYOUTS = ("dp=auto,tp=2,zero_stage=1", "dp=auto,zero_stage=1", "dp=auto,zero_stage=3")
FIELDS = ("first_step", "losses", "tokens", "tokens_lost", "states_bytes", "sent_bytes", "text")


@dataclass(frozen=True)
class CapstoneJob:
    """What was asked of the run: a layout with dp=auto, sequences of a step, steps between checkpoints.

    killed   after so many steps rank 0 of the four died
    folder   has its checkpoints, and its log
    """

    folder: str
    layout: str = "dp=auto,tp=2,zero_stage=1"
    batch: int = 8
    every: int = 2
    killed: int = 3
    plan: TrainPlan = TrainPlan(steps=6, seq_len=32, learning_rate=3e-4, precision="fp64")  # noqa: RUF009


def killed_run(job: CapstoneJob) -> str:
    """Train from the base that speaks on four ranks, until one is killed; say which. Checkpoints and logs remain."""
    layout, saved = layout_for(job.layout, job.batch, 4), Checkpoints(job.folder, every=job.every)
    say = partial(_die_after, job.killed)
    try:
        launch(trainer.train, 4, CONFIG, layout, job.plan, saved, Logs(job.folder), say, quiet=True, backend="gloo")
    except RankError as error:
        return str(error).partition(";")[0]
    return "no rank was killed"


def _die_after(done: int, text: str) -> None:
    if text.startswith(f"step {done} "):
        os.kill(os.getpid(), signal.SIGKILL)


def say(engine: five_d.FiveD) -> str:
    """What the trained model says; all ranks call it."""
    model = build(CONFIG)
    model.load_state_dict(engines.full_parameters(engine), strict=False)  # a tied head has no weight of its own
    return speak(model, load_tokenizer(), PROMPT, NUM_TOKENS, temperature=0.5)


# ------------------------------------------------------------------------------------ the reference
def go_on(job: CapstoneJob, group: dist.ProcessGroup, count=lambda right, job, rank: {}, **mistake) -> dict:
    """Train the rest of a run on the ranks that are left, and report the whole. A mistake: see `_trained`.

    count   fields of the report that are counted otherwise, from the right report, the job and the rank
    """
    key = (replace(job, folder=""), *mistake.items())
    if key not in _KNOWN:  # all ranks have it, or none
        _KNOWN[key] = _trained(job, group, **mistake)
    return _KNOWN[key] | count(_KNOWN[key], job, group.rank())


_KNOWN: dict[tuple, dict] = {}


def _trained(job, group, halved=False, optimizer_too=True, first_rows_again=False) -> dict:
    """A report. Mistakes: half the batch; an optimizer that was not loaded; rows from the first step's on."""
    plan, layout = job.plan, layout_for(job.layout, job.batch // (1 + halved), group.size())
    engine = five_d.build(CONFIG, layout, plan.seed, plan.dtypes[0])
    optimizer = engines.make_optimizer(engine, plan.learning_rate, plan.weight_decay)
    first_step = checkpoint.load(engine, optimizer if optimizer_too else None, job.folder).step
    lines, text_T = losses_told(job.folder), tokens_of(CONFIG)

    def step(number: int) -> float:
        micro_batches = trainer.batch_of(engine, plan, number - first_rows_again * first_step, text_T)
        return trainer.train_step(engine, optimizer, plan, number, micro_batches).loss.item()

    with MemoryTracker(engine, optimizer) as tracker:  # each sees every operator, so they do not share a step
        losses = [step(first_step)]
    with ByteMeter() as meter:
        losses.append(step(first_step + 1))
    losses += [step(number) for number in range(first_step + 2, plan.steps)]
    run, of_kind = Run(CONFIG, layout, plan.seq_len, FP64, device="cpu"), tracker.timeline.bytes_by_kind
    return {
        "first_step": first_step,
        "losses": [loss for number, loss in lines if number < first_step] + losses,
        "tokens": plan.steps * layout.sequences_per_step * plan.seq_len,
        "tokens_lost": (len(lines) - first_step) * layout.sequences_per_step * plan.seq_len,
        "states_bytes": (states_bytes(run, group.rank()), sum(max(of_kind[kind]) for kind in KINDS)),
        "sent_bytes": (sum(sent(run, group.rank(), clip=True).values()), meter.sent_bytes),
        "text": say(engine),
    }


def losses_told(folder: str) -> list[tuple[int, float]]:
    """(step, loss) of each step in the log of rank 0."""
    return [(line["step"], line["loss"]) for line in read(log_path(folder)) if "loss" in line]


def states_bytes(run: Run, rank: int) -> int:
    """Bytes of parameters, gradients and optimizer states that a rank holds, by the formula."""
    place = run.layout.mesh.coordinates(rank)
    return states_of(run, place["pp"], place["tp"]).total


# ------------------------------------------------------------------------------------ the table
def jobs(rng):
    """One job, with a killed run of its own."""
    killed, every = rng.choice([(3, 2), (5, 2), (5, 3)])
    plan = replace(CapstoneJob.plan, steps=killed + 2, seed=fresh_seed(rng), warmup=killed)
    job = CapstoneJob("", rng.choice(LAYOUTS), 8, every, killed, plan)
    return [(2, replace(job, folder=_killed(job).name))]


@lru_cache
def _killed(job: CapstoneJob) -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="capstone_")
    killed_run(replace(job, folder=folder.name))
    return folder


def watch(answer, job: CapstoneJob) -> dict:
    """The report, field by field, made of a copy of the killed run: an answer may write into it."""
    copy = None
    if dist.get_rank() == 0:
        copy = shutil.copytree(job.folder, Path(tempfile.mkdtemp(prefix="capstone_")) / "run").as_posix()
    [mine, *_] = comm.all_gather_json(copy, dist.group.WORLD)
    report = answer(replace(job, folder=mine), dist.group.WORLD)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(mine).parent, ignore_errors=True)
    if not isinstance(report, dict) or set(report) != set(FIELDS):
        return {"error": f"no report\nreturn a dict with {', '.join(FIELDS)}; it is {report!r:.80}"}
    return {name: report[name] for name in FIELDS}


def _predicted(right, job, rank, ranks=2, recipe=FP64, clip=True):
    """Bytes predicted for so many ranks, in another precision, or without the norm of the gradients."""
    run = Run(CONFIG, layout_for(job.layout, job.batch, ranks), job.plan.seq_len, recipe, device="cpu")
    if clip:
        return {"states_bytes": (states_bytes(run, rank), right["states_bytes"][1])}
    return {"sent_bytes": (sum(sent(run, rank, clip).values()), right["sent_bytes"][1])}


WRONG = {
    "the run goes on from the last checkpoint, not from the step in which the rank died": {
        "count": lambda right, job, rank: {"first_step": job.killed}
    },
    "a step has half its sequences: with half the ranks of dp, each needs twice the micro-batches": {"halved": True},
    "the optimizer's moments were not loaded: give them to `load` too, before the first step": {"optimizer_too": False},
    "the rows begin again with those of step 0: a batch has the number of its step in the whole run": {
        "first_rows_again": True
    },
    "steps that were lost have two losses; the one that counts is of the run that went on": {
        "count": lambda right, job, rank: {
            "losses": [loss for _, loss in losses_told(job.folder)] + right["losses"][right["first_step"] :]
        }
    },
    "tokens of lost steps count once: the model kept nothing of their first time": {
        "count": lambda right, job, rank: {"tokens": right["tokens"] + right["tokens_lost"]}
    },
    "these are the tokens of the steps after the restart; the report is of the whole run": {
        "count": lambda right, job, rank: {
            "tokens": right["tokens"] // job.plan.steps * (job.plan.steps - right["first_step"])
        }
    },
    "the states are predicted for the layout of the four ranks, and two hold the shards of four": {
        "count": partial(_predicted, ranks=4)
    },
    "the states are predicted in another precision than that of the plan: fp64 has 8 bytes an element": {
        "count": partial(_predicted, recipe="fp32")
    },
    "the bytes sent leave out the norm of the gradients, which every step sums: `sent(..., clip=True)`": {
        "count": partial(_predicted, clip=False)
    },
    "the text is the base's, before it was trained": {
        "count": lambda right, job, rank: {"text": speak(*load_base(), PROMPT, NUM_TOKENS, temperature=0.5)}
    },
}
check_capstone = Exercise(
    go_on, jobs, WRONG, watch, ranks="Call load, save and train_step on both ranks.", seconds=30.0, backend="gloo"
)
