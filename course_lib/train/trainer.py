"""The trainer as a script: any layout, on one machine or many, from a checkpoint if there is one.

    torchrun --nproc-per-node 4 -m course_lib.train --layout dp=2,tp=2 --model toy --steps 20 --checkpoint runs/a
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id RUN --rdzv-backend c10d --rdzv-conf store_type=file \\
        --rdzv-endpoint FILE-ON-A-SHARED-DISK --max-restarts 3 \\
        -m course_lib.train --layout dp=2,tp=2 ...               on each of two machines
    torchrun --nnodes 1:2 ... -m course_lib.train --layout dp=auto,tp=2 --batch 8 ...    goes on if one of them is lost
    accelerate launch --multi_gpu --num_processes 4 --main_process_port 0 -m course_lib.train --layout dp=2,tp=2 ...
    srun --ntasks 4 --gpus-per-task 1 python -m course_lib.train --layout dp=2,tp=2 ...     without the GPUs: on CPUs
    python -m course_lib.train ...                               one process alone

and in a notebook `launch(train, 4, config, layout, plan)`: every rank calls the same function.

A step sees the same sequences under any layout, and a run that was killed and goes on has bit for bit the losses and
the weights of one that was not: data, learning rate and random numbers follow from the number of the step, and the
rest is in the checkpoint. With other ranks than before, as dp=auto allows, they are the same up to rounding. Asked to
stop by SIGTERM or SIGUSR1, a script that keeps checkpoints finishes the step it is in, saves, and ends with 128 + the
signal's number on every rank; before its first step, or without checkpoints, it ends at once. stop.py says who
sends these signals, and how long they wait.

Under several agents of torchrun on gloo set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for these: without it restarted ranks
of torch 2.13 look for each other at addresses of those that died.
"""

import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import checkpoint, comm
from course_lib.checkpoint.files import read_manifest, together
from course_lib.config import ModelConfig, require_bytes
from course_lib.devices import peak_memory_bytes, rank_device
from course_lib.launch.limits import usable_memory
from course_lib.launch.rendezvous import Place, join_world, place_of, restart_hint
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.run import FP64, Run
from course_lib.train import log as train_log
from course_lib.train.health import compare_ranks, not_finite_on
from course_lib.train.options import Options, check_folders, check_world, read
from course_lib.train.plan import (
    Checkpoints,
    Logs,
    TrainPlan,
    check_ranks,
    check_settings,
    learning_rate_of,
    seed_step,
    settings_of,
)
from course_lib.train.start import is_trained, load_trained, tokens_of
from course_lib.train.step_clock import StepTrace, clock_step, memory_of, peak_flops_of, speed_of, trace_problem
from course_lib.train.stop import Stop, agreed, end_with_parent, exit_code, stop_text
from course_lib.training import data

GB = 10**9
WAIT_FOR_RANK_0_S = 5.0  # an engine ends all ranks when the first one ends: rank 0 must have said why

Optimizer = torch.optim.Optimizer
Say = Callable[[str], None]
_print_now = partial(print, flush=True)  # an engine reads a pipe: what is not flushed dies with a rank


class Refused(ValueError):
    """This run cannot be: ranks differ, memory or disk is too small, checkpoints are another's. On every rank."""


@contextmanager
def refusal() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


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


def train(
    config: ModelConfig,
    layout: Layout,
    plan: TrainPlan,
    checkpoints: Checkpoints | None = None,
    logs: Logs | None = None,
    say: Say = _print_now,
    stop: Stop | None = None,
) -> RunRecord:
    """Trains the model on the text that start.py has for it. Every rank of a world of the layout's size calls it.
    logs  where each rank writes a line for each step, which `course watch` reads
    say   what rank 0 does with its lines of text
    stop  listens to signals from the first step on; all ranks save and return after the step in which one came. Not in
          a notebook: its process would keep the handlers. None, or no checkpoints: nothing is listened to
    Bytes    for `stop` an all-reduce of 4 bytes a step
    Raises   ValueError for what cannot be, alike on every rank and before anything is built; on every rank
             FloatingPointError if the loss is no number any more, and RanksDisagree, every plan.compare_every steps,
             if one holds other numbers than it should
    """
    check_world(layout, dist.get_world_size(), "launch")
    require_bytes(config)
    layout.check_model(config, plan.seq_len)
    say = say if dist.get_rank() == 0 else ignore
    settings = agree(config, layout, plan)
    check_memory(config, layout, plan)
    engine = five_d.build(config, layout, plan.seed, plan.dtypes[0], grad_dtype=plan.dtypes[1])
    engine.loss_chunks = plan.loss_chunks
    load_trained(engine)
    optimizer = engines.make_optimizer(engine, plan.learning_rate, plan.weight_decay)
    with _folder_for(engine, optimizer, plan, checkpoints), train_log.open_log(logs, dist.get_rank()):
        return run_steps(engine, optimizer, plan, settings, checkpoints, logs, say, stop)


def run_steps(
    engine: five_d.FiveD,
    optimizer: Optimizer,
    plan: TrainPlan,
    settings: dict,
    checkpoints: Checkpoints | None,
    logs: Logs | None,
    say: Say,
    stop: Stop | None,
) -> RunRecord:
    """Trains from the last checkpoint on until all steps are done or all ranks were asked to stop; saves."""
    layout, device = engine.layout, rank_device()
    first_step = resume(engine, optimizer, checkpoints, settings) if checkpoints else 0
    losses, step_s, text_T, stopped_by = [], [], tokens_of(engine.config), 0
    if may_stop := checkpoints is not None and stop is not None:
        group = checkpoint.wait_for_earlier(engine)
        stop.listen()
        dist.barrier(group)  # else a signal to all could end a rank that is late, and with it the others in their step
    say(_start_text(engine, plan, first_step))
    if why_not := trace_problem(logs, first_step):
        say(why_not)
    trace = StepTrace(engine, logs)
    for step in range(first_step, plan.steps):
        with clock_step(device, in_parts=logs is not None) as seconds:
            micro_batches = batch_of(engine, plan, step, text_T)
            do_step = partial(train_step, engine, optimizer, plan, step, micro_batches)
            numbers = trace.run(step, do_step)
            losses.append(numbers.loss.item())
        step_s.append(seconds["seconds"])
        if logs is not None:
            train_log.tell(logs, dist.get_rank(), **line_of(engine, plan, step, numbers, seconds))
        _check_finite(numbers, step)
        done = step + 1
        if plan.compare_every and done % plan.compare_every == 0:
            compare_ranks(engine, step, numbers, micro_batches)  # before it is saved
        if may_stop and done < plan.steps:
            stopped_by = agreed(stop.number, device)
        if checkpoints and (done % checkpoints.every == 0 or done == plan.steps or stopped_by):
            save(engine, optimizer, checkpoints, settings, done)
        if done % max(1, plan.steps // 10) == 0 or done == plan.steps:
            say(f"step {done} of {plan.steps}: loss {losses[-1]:.4f}, {step_s[-1]:.2f} s")
        if stopped_by:
            break
    group = checkpoint.wait_for_earlier(engine)
    if stopped_by:
        say(stop_text(stopped_by, done, plan.steps, checkpoints.folder))
        dist.barrier(group)  # an engine may end all ranks when the first one ends
    warm_s = step_s[1:] or step_s  # the first step warms up
    tokens_per_s = layout.sequences_per_step * plan.seq_len / median(warm_s) if warm_s else 0.0
    peak_bytes = peak_memory_bytes(device)
    return RunRecord(first_step, losses, step_s, tokens_per_s, peak_bytes, stopped_by)


def agree(config: ModelConfig, layout: Layout, plan: TrainPlan) -> dict:
    """What decides this run's numbers, once it is found to be the same on all ranks.
    Raises   Refused on every rank if one has other options, another text or other versions
    """
    settings = settings_of(config, layout, plan)
    of_ranks = comm.all_gather_json(settings | {"layout": layout.to_dict()}, dist.group.WORLD)
    with refusal():
        check_ranks(of_ranks)
    return settings


def check_memory(config: ModelConfig, layout: Layout, plan: TrainPlan) -> None:
    """Compare what the ranks of a machine need with its free memory.

    A GPU's memory is not compared: where it ends, its allocator says so with both numbers.
    Raises   Refused on every rank
    """
    rank, recipe = dist.get_rank(), FP64 if plan.precision == "fp64" else plan.precision
    run = Run(config, layout, plan.seq_len, recipe, device="cpu", loss_chunks=plan.loss_chunks)
    budget = budgets(run)[layout.mesh.coordinates(rank)["pp"]]
    needs = budget.peak_bytes if rank_device().type == "cpu" else 0
    mine = {"host": socket.gethostname(), "needs": needs, "free": usable_memory()[1]}
    of_ranks = comm.all_gather_json(mine, dist.group.WORLD)
    needed, ranks = Counter(), Counter(one["host"] for one in of_ranks)
    for one in of_ranks:
        needed[one["host"]] += one["needs"]
    for host, free in ((one["host"], one["free"]) for one in of_ranks):
        if needed[host] > free:
            raise Refused(
                f"{config.name} with sequences of {plan.seq_len} tokens takes {needed[host] / GB:,.2f} GB of memory "
                f"for {ranks[host]} rank{'s' * (ranks[host] > 1)} on {host}, and {free / GB:,.2f} GB are free there; "
                "choose a smaller model or micro_batch, or more machines"
            )


def batch_of(engine: five_d.FiveD, plan: TrainPlan, index: int, text_T: Tensor) -> five_d.MicroBatches:
    layout, dp_rank = engine.layout, engine.groups.coordinates["dp"]
    x_BS, y_BS = data.batch(text_T, index, layout.sequences_per_step, plan.seq_len, dp_rank, layout.dp, seed=plan.seed)
    return data.micro_batches(x_BS, y_BS, layout.micro_batches)


def train_step(
    engine: five_d.FiveD, optimizer: Optimizer, plan: TrainPlan, step: int, micro_batches: five_d.MicroBatches
) -> engines.StepNumbers:
    """One step; returns its loss and gradient norm. Nothing but the weights comes from the steps before."""
    seed_step(plan, step, engine.groups.coordinates)
    for options in optimizer.param_groups:
        options["lr"] = learning_rate_of(plan, step)
    return engines.measured_step(engine, micro_batches, optimizer, plan.clip_norm)


def line_of(
    engine: five_d.FiveD, plan: TrainPlan, step: int, numbers: engines.StepNumbers, seconds: dict
) -> dict[str, object]:
    layout, device = engine.layout, rank_device()
    share = layout.sequences_per_step * plan.seq_len / layout.world_size
    peak_flops = peak_flops_of(device, plan.dtypes[0])
    return {
        "step": step,
        "loss": numbers.loss.item(),
        "learning_rate": learning_rate_of(plan, step),
        "grad_norm": numbers.norm.item(),
        **seconds,
        **speed_of(engine.config, plan.seq_len, share, seconds["seconds"], peak_flops),
        **memory_of(device),
    }


def ignore(text: str) -> None:
    """What ranks other than the first say."""


def _check_finite(numbers: engines.StepNumbers, step: int) -> None:
    loss = numbers.loss.item()
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss of step {step} is {loss}{not_finite_on(numbers)}; go on from the last checkpoint with a lower "
            "learning rate or clipping"
        )


def _start_text(engine: five_d.FiveD, plan: TrainPlan, first_step: int) -> str:
    layout = engine.layout
    anew = "starts from its trained weights" if is_trained(engine.config) else "starts anew"
    begins = f"goes on at step {first_step} from its checkpoint" if first_step else anew
    return (
        f"{engine.config.name} on {layout.world_size} rank{'s' * (layout.world_size > 1)} ({layout}), "
        f"{layout.sequences_per_step} x {plan.seq_len} tokens a step, {begins}"
    )


def save(engine: five_d.FiveD, optimizer: Optimizer, checkpoints: Checkpoints, settings: dict, done: int) -> None:
    act = checkpoint.save_async if checkpoints.in_background else checkpoint.save
    act(engine, optimizer, checkpoints.folder, done, about=settings, keep=checkpoints.keep)


@contextmanager
def _folder_for(
    engine: five_d.FiveD, optimizer: Optimizer, plan: TrainPlan, checkpoints: Checkpoints | None
) -> Iterator[None]:
    """Has the folder of checkpoints to this run. Raises Refused if it is another's, not writable or too full."""
    with ExitStack() as held:
        if checkpoints is not None:
            group = checkpoint.wait_for_earlier(engine)
            size_bytes = checkpoint.size_bytes(engine, optimizer)
            at_once = checkpoints.most_at_once(plan.steps)
            with refusal():
                held.enter_context(checkpoint.one_run(Path(checkpoints.folder), size_bytes, at_once, group))
        yield


def resume(engine: five_d.FiveD, optimizer: Optimizer, checkpoints: Checkpoints, settings: dict) -> int:
    """Loads the last complete checkpoint, whatever layout wrote it; returns the steps it has done, 0 without one.

    Rank 0 looks for it, so that all load the same one.
    Raises   Refused if it is torn, of another model, data or optimizer
    """
    with refusal():
        path = together(dist.group.WORLD, lambda: _look_for(checkpoints, settings) if dist.get_rank() == 0 else None)[0]
        return checkpoint.load(engine, optimizer, path).step if path else 0


def _look_for(checkpoints: Checkpoints, settings: dict) -> str | None:
    """The last complete checkpoint, if this run may go on from it."""
    path = checkpoint.latest(checkpoints.folder)
    if path is None:
        return None
    about = read_manifest(path)
    check_settings(about["about"], settings, str(path))
    if about["step"] > settings["steps"]:
        raise ValueError(f"{path} has done {about['step']} steps, more than steps ({settings['steps']}); give more")
    return str(path)


def main(argv: Sequence[str] | Options | None = None) -> int:
    """One rank of the script. What cannot be is one line from rank 0 and exit code 2, before any rank waits for one."""
    place = Place()
    try:
        place = place_of(os.environ)
        config, layout, plan, checkpoints, options = read(argv, place.rank == 0, place.world_size)
        check_world(layout, place.world_size, place.engine)
        if place.rank == 0:
            check_folders(options)
        why = join_world(place, options.backend)
        if place.engine in ("torchrun", "accelerate"):  # Slurm ends its tasks itself
            end_with_parent()
    except SystemExit as told:
        return told.code if place.rank == 0 else _wait_for_rank_0()
    except ValueError as error:
        return refuse(place, error)
    say = _print_now if place.rank == 0 else ignore
    say(f"{why}; started {'alone' if place.engine == 'alone' else f'by {place.engine}'}")
    if why.startswith("gloo") and (hint := restart_hint(os.environ)):
        say(hint)
    stop = Stop()
    try:
        run = train(config, layout, plan, checkpoints, options.logs, say, stop)
    except (Refused, checkpoint.CannotWrite) as error:
        return refuse(place, error)
    except train_log.CannotLog as error:  # of this rank alone
        print(f"train: rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return 2
    dist.destroy_process_group()
    stop.ignore()
    return exit_code(run.stopped_by)


def refuse(place: Place, error: Exception) -> int:
    if place.rank > 0:
        return _wait_for_rank_0()
    print(f"train: {error}", file=sys.stderr, flush=True)
    return 2


def _wait_for_rank_0() -> int:
    """An engine ends all ranks when one has ended, so the others wait until the first has said why."""
    time.sleep(WAIT_FOR_RANK_0_S)
    return 2
