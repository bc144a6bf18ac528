"""The trainer as a script: any layout, on one machine or many, from a checkpoint if there is one.

    torchrun --nproc-per-node 4 -m course_lib.train --layout dp=2,tp=2 --model toy --steps 20 --checkpoint runs/a
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --max-restarts 3 \\
        -m course_lib.train --layout dp=2,tp=2 ...               on each of two machines
    accelerate launch --multi_gpu --num_processes 4 -m course_lib.train --layout dp=2,tp=2 ...
    srun --ntasks 4 --gpus-per-task 1 python -m course_lib.train --layout dp=2,tp=2 ...     without the GPUs: on CPUs
    python -m course_lib.train ...                               one process alone

and in a notebook `launch(train, 4, config, layout, plan)`: every rank calls the same function.

A step sees the same sequences under any layout, and a run that was killed and goes on has bit for bit the losses and
the weights of one that was not: data, learning rate and random numbers follow from the number of the step, and the
rest is in the checkpoint. Asked to stop by SIGTERM or SIGUSR1, a script that keeps checkpoints finishes the step it is
in, saves, and ends with 128 + the signal's number on every rank; before its first step, or without checkpoints, it ends
at once. train_stop.py says who sends these signals, and how long they wait.

Under several agents of torchrun on gloo set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for these: without it restarted ranks
of torch 2.13 look for each other at addresses of those that died.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import checkpoint
from course_lib.checkpoint.files import read_manifest, together
from course_lib.config import ModelConfig
from course_lib.devices import rank_device
from course_lib.launch.rendezvous import Place, join_world, place_of, restart_hint
from course_lib.layout import Layout
from course_lib.parallel import five_d
from course_lib.train import log as train_log
from course_lib.train.options import Options, check_folders, check_world, read
from course_lib.train.plan import Checkpoints, TrainPlan, check_settings, learning_rate_of, seed_step, settings_of
from course_lib.train.stop import Stop, agreed, exit_code, stop_text
from course_lib.training import data, peak_memory_bytes, wait_for

WAIT_FOR_RANK_0_S = 5.0  # an engine ends all ranks when the first one ends: rank 0 must have said why

Optimizer = torch.optim.Optimizer
Say = Callable[[str], None]
print_now = partial(print, flush=True)  # an engine reads a pipe: what is not flushed dies with a rank


class CannotResume(ValueError):
    """What is in the folder of checkpoints does not suit this run; every rank raises the same."""


@dataclass(frozen=True)
class RunRecord:
    """What a run, or its part since the last checkpoint, left on a rank: losses[i] is that of step first_step + i.

    `peak_bytes`: on a GPU the allocator's peak during the run; on a CPU the most memory that this process ever held.
    `stopped_by`: the signal on which all ranks stopped before the last step, or 0.
    """

    first_step: int
    losses: list[float]
    step_s: list[float]
    tokens_per_s: float
    peak_bytes: int
    stopped_by: int


# --- a run, on every rank of a world


def train(
    config: ModelConfig,
    layout: Layout,
    plan: TrainPlan,
    checkpoints: Checkpoints | None = None,
    log: str | Path | None = None,
    say: Say = print_now,
    stop: Stop | None = None,
) -> RunRecord:
    """Trains the model on the standard library's text. Every rank of a world of the layout's size calls it.

    log   a file of JSON lines, one a step, that rank 0 writes; `train_log.losses_of` reads it
    say   what rank 0 does with its lines of text
    stop  listens to signals from the first step on; all ranks save and return after the step in which one came. Not in
          a notebook: its process would keep the handlers. None, or no checkpoints: nothing is listened to

    Bytes    for `stop` an all-reduce of 4 bytes a step
    Raises   ValueError for what cannot be, alike on every rank and before anything is built; FloatingPointError on
             every rank if the loss is no number any more
    """
    check_world(layout, dist.get_world_size(), "launch")
    layout.check_model(config, plan.seq_len)
    is_first, device = dist.get_rank() == 0, rank_device()
    say = say if is_first else ignore
    engine = five_d.build(config, layout, plan.seed, plan.dtypes[0], grad_dtype=plan.dtypes[1])
    optimizer = five_d.make_optimizer(engine, plan.learning_rate, plan.weight_decay)
    first_step = resume(engine, optimizer, checkpoints, plan) if checkpoints else 0
    losses, step_s, text_T, stopped_by = [], [], data.tokens(), 0
    if may_stop := checkpoints is not None and stop is not None:
        group = checkpoint.wait_for_earlier(engine)
        stop.listen()
        dist.barrier(group)  # else a signal to all could end a rank that is late, and with it the others in their step
    say(start_text(engine, plan, first_step))
    for step in range(first_step, plan.steps):
        start_s = time.perf_counter()
        losses.append(train_step(engine, optimizer, plan, step, text_T))
        wait_for(device)
        step_s.append(time.perf_counter() - start_s)
        if log is not None and is_first:
            rate = learning_rate_of(plan, step)
            train_log.append(log, step=step, loss=losses[-1], learning_rate=rate, seconds=step_s[-1])
        check_finite(losses[-1], step)
        done = step + 1
        if may_stop and done < plan.steps:
            stopped_by = agreed(stop.number, device)
        if checkpoints and (done % checkpoints.every == 0 or done == plan.steps or stopped_by):
            save(engine, optimizer, checkpoints, plan, done)
        if done % max(1, plan.steps // 10) == 0 or done == plan.steps:
            say(f"step {done} of {plan.steps}: loss {losses[-1]:.4f}, {step_s[-1]:.2f} s")
        if stopped_by:
            break
    group = checkpoint.wait_for_earlier(engine)
    if stopped_by:
        say(stop_text(stopped_by, done, plan.steps, checkpoints.folder))
        dist.barrier(group)  # an engine may end all ranks when the first one ends
    return record_of(first_step, losses, step_s, layout, plan, device, stopped_by)


def train_step(engine: five_d.FiveD, optimizer: Optimizer, plan: TrainPlan, step: int, text_T: Tensor) -> float:
    """One step; returns the mean loss of all its tokens. Nothing but the weights comes from the steps before."""
    layout, here = engine.layout, engine.groups.coordinates
    x_BS, y_BS = data.batch(
        text_T, step, layout.sequences_per_step, plan.seq_len, here["dp"], layout.dp, seed=plan.seed
    )
    micro_batches = data.micro_batches(x_BS, y_BS, layout.micro_batches)
    seed_step(plan, step, here)
    for options in optimizer.param_groups:
        options["lr"] = learning_rate_of(plan, step)
    return five_d.step(engine, micro_batches, optimizer, plan.clip_norm).item()


def ignore(text: str) -> None:
    """What ranks other than the first say."""


def check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss of step {step} is {loss}; go on from the last checkpoint with a lower learning rate or clipping"
        )


def start_text(engine: five_d.FiveD, plan: TrainPlan, first_step: int) -> str:
    """What rank 0 says first."""
    layout = engine.layout
    begins = f"goes on at step {first_step} from its checkpoint" if first_step else "starts anew"
    return (
        f"{engine.config.name} on {layout.world_size} rank{'s' * (layout.world_size > 1)} ({layout}), "
        f"{layout.sequences_per_step} x {plan.seq_len} tokens a step, {begins}"
    )


def record_of(first_step, losses, step_s, layout, plan, device, stopped_by) -> RunRecord:
    warm_s = step_s[1:] or step_s  # the first step warms up
    tokens_per_s = layout.sequences_per_step * plan.seq_len / median(warm_s) if warm_s else 0.0
    return RunRecord(first_step, losses, step_s, tokens_per_s, peak_memory_bytes(device), stopped_by)


# --- checkpoints


def save(engine: five_d.FiveD, optimizer: Optimizer, checkpoints: Checkpoints, plan: TrainPlan, done: int) -> None:
    """The state after `done` steps, and what the run was asked to do."""
    act = checkpoint.save_async if checkpoints.in_background else checkpoint.save
    about = settings_of(engine.config, engine.layout, plan)
    act(engine, optimizer, checkpoints.folder, done, about=about, keep=checkpoints.keep)


def resume(engine: five_d.FiveD, optimizer: Optimizer, checkpoints: Checkpoints, plan: TrainPlan) -> int:
    """Loads the last complete checkpoint, whatever layout wrote it; returns how many steps it has done, 0 without one.

    Rank 0 looks for it, so that all load the same one.
    Raises   CannotResume if it is torn, of another model, data or optimizer, or should not be there
    """
    settings = settings_of(engine.config, engine.layout, plan)
    try:
        path = together(dist.group.WORLD, lambda: look_for(checkpoints, settings) if dist.get_rank() == 0 else None)[0]
        return checkpoint.load(engine, optimizer, path).step if path else 0
    except ValueError as error:
        raise CannotResume(str(error)) from error


def look_for(checkpoints: Checkpoints, settings: dict) -> Path | None:
    """The last complete checkpoint, if this run may go on from it."""
    path = checkpoint.latest(checkpoints.folder)
    if path is None:
        return None
    if checkpoints.resume == "never":
        raise ValueError(f"{path} is there already; resume='auto' goes on from it, another folder starts anew")
    about = read_manifest(path)
    check_settings(about["about"], settings, str(path))
    if about["step"] > settings["steps"]:
        raise ValueError(f"{path} has done {about['step']} steps, more than steps ({settings['steps']}); give more")
    return path


# --- the script


def main(argv: Sequence[str] | Options | None = None) -> int:
    """One rank of the script. What cannot be is one line from rank 0 and exit code 2, before any rank waits for one."""
    place = Place()
    try:
        place = place_of(os.environ)
        config, layout, plan, checkpoints, options = read(argv, aloud=place.rank == 0)
        check_world(layout, place.world_size, place.engine)
        if place.rank == 0:
            check_folders(options)
        why = join_world(place, options.backend)
    except SystemExit as told:
        return told.code if place.rank == 0 else wait_for_rank_0()
    except ValueError as error:
        return refuse(place, error)
    say = print_now if place.rank == 0 else ignore
    say(f"{why}; started {'alone' if place.engine == 'alone' else f'by {place.engine}'}")
    if why.startswith("gloo") and (hint := restart_hint(os.environ)):
        say(hint)
    stop = Stop()
    try:
        run = train(config, layout, plan, checkpoints, options.log_file, say, stop)
    except CannotResume as error:
        return refuse(place, error)
    dist.destroy_process_group()
    stop.ignore()
    return exit_code(run.stopped_by)


def refuse(place: Place, error: ValueError) -> int:
    """One line on stderr, from rank 0."""
    if place.rank > 0:
        return wait_for_rank_0()
    print(f"train: {error}", file=sys.stderr, flush=True)
    return 2


def wait_for_rank_0() -> int:
    """An engine ends all ranks when one has ended, so the others wait until the first has said why."""
    time.sleep(WAIT_FOR_RANK_0_S)
    return 2
