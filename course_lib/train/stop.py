"""Asked to stop: a rank notes the signal, all agree on the step after which they stop, the exit code names the signal.

What Slurm and torchrun do with the two signals that are heard here, and how long they wait:

    sbatch --signal=TERM@120    SIGTERM to all processes of a job's steps, 120 s (up to 180 s) before the time limit
    scancel, the time limit     SIGTERM, and SIGKILL after KillWait (30 s unless the cluster sets another)
    SIGTERM to torchrun         passed on to its ranks; SIGKILL for those that are left after 30 s. torch 2.13 can wait
                                longer: --shutdown-timeout, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT. torchrun exits with 1
    SIGUSR1 to torchrun         ends torchrun and leaves its ranks, unless it was started with
                                --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1; then as SIGTERM
                                (it overwrites the variable TORCHELASTIC_SIGNALS_TO_HANDLE with that option)
    SIGTERM to one rank         all ranks stop; a torchrun that was not asked itself takes that for a failure, and
                                starts them again from the new checkpoint as often as --max-restarts says (over gloo
                                on several machines: rendezvous.restart_hint)

    SIGKILL to torchrun         it can pass nothing on: its ranks see that their parent is gone, and end at once

torchrun sends SIGTERM to its other ranks when one is lost, too: they cannot agree without it, and end with an error or
after that time.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

HEARD = (signal.SIGTERM, signal.SIGUSR1)


_PARENT_S = 0.5  # how often a rank looks whether its engine is still there
_LOST_PARENT = 3  # the exit code of a rank whose engine has gone


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does: nobody would end its ranks, or start others."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_S)
        print("the process that started this rank has gone, and the rank ends", file=sys.stderr, flush=True)
        os._exit(_LOST_PARENT)

    threading.Thread(target=watch, args=(os.getppid(),), name="parent", daemon=True).start()


class Stop:
    """Whether this process was asked to stop. `number` is 0, or that of the first signal that asked."""

    def __init__(self):
        self.number = 0

    def listen(self) -> None:
        """From now on the signals of HEARD are noted; until now they end the process. Main thread only.

        To be called when steps begin and not before: Python calls a handler between two of its own instructions, and a
        rank that waits in C++ for others to join would not end.
        """
        for number in HEARD:
            signal.signal(number, self.note)
            signal.siginterrupt(number, False)  # libraries that do not expect a call to break off are not disturbed

    def ignore(self) -> None:
        """From now on they do nothing. Python hands them back as it ends: one more would take the exit code's place."""
        for number in HEARD:
            signal.signal(number, signal.SIG_IGN)

    def note(self, number: int, frame: object) -> None:
        self.number = self.number or number


def agreed(mine: int, device: torch.device) -> int:
    """The highest of all ranks' numbers, on every rank: a signal may reach one rank only, or ranks at two steps.
    Bytes    sent per rank: 2 (world_size - 1) / world_size * 4, an all-reduce of one 32-bit number
    """
    number_1 = torch.tensor([mine], dtype=torch.int32, device=device)  # NCCL takes what is on the GPU
    dist.all_reduce(number_1, dist.ReduceOp.MAX, group=dist.group.WORLD)
    return int(number_1.item())


def stop_text(number: int, done: int, steps: int, folder: str) -> str:
    return (
        f"stopped by {signal.Signals(number).name} after step {done} of {steps}, with a checkpoint in {folder}; "
        "the same command goes on from there"
    )


def exit_code(number: int) -> int:
    """128 + the signal's number, as shells have it, so that nobody takes the run for a finished one; 0 without one."""
    return 128 + number if number else 0
