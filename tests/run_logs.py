"""Logs of a run as a test wants them: written line by line, at times and by processes of its choice."""

import os
import socket
import time
from pathlib import Path

from course_lib.train import log as train_log

STEP_S = 0.5


def line(rank: int, step: int, own_s: float = 0.2, **changes) -> dict:
    """A step of a rank: what it does not compute it waits, but for a tenth of a second."""
    forward_s = own_s / 4
    numbers = {
        "loss": 5.0 - step / 10,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "seconds": STEP_S,
        "forward_s": forward_s,
        "backward_s": own_s - forward_s - 0.01,
        "optimizer_s": 0.01,
        "data_s": 0.001,
        "communication_s": STEP_S - 0.1 - own_s,
        "tokens_per_s_per_rank": 100.0 + rank,
        "mfu": None,
        "memory_bytes": 200_000_000 + rank,
        "peak_memory_bytes": 300_000_000,
    }
    return {"step": step} | numbers | changes


def write(folder: Path, rank: int, lines: list[dict], age_s: float = 0.0, pid: int | None = None) -> None:
    """A rank's log: of this process, or one with another number; lines that are old are another machine's."""
    place = {
        "time": time.time() - age_s,
        "host": "elsewhere" if age_s else socket.gethostname(),
        "pid": pid or os.getpid(),
    }
    for one in lines:
        train_log.append(train_log.log_path(folder, rank), **one, **place)


def steps(rank: int, number: int, own_s: float = 0.2) -> list[dict]:
    return [line(rank, step, own_s) for step in range(number)]


def losses_of(path: Path) -> dict[int, list[float]]:
    """Step -> its loss, or several where it was repeated."""
    losses: dict[int, list[float]] = {}
    for said in train_log.read(path):
        if "loss" in said:
            losses.setdefault(said["step"], []).append(said["loss"])
    return losses
