"""A run's log: of each rank a file of JSON lines that outlives the run, and can be read whenever the run was killed.

    FOLDER/log/rank0.jsonl      {"event": "start", ...}, {"step": 0, "loss": ..., "seconds": ...}, ..., {"event": "end"}

A step that was repeated, because the run was killed after it and before the next checkpoint, has two lines.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from course_lib.train.plan import Logs
from course_lib.validate import json_lines, show

KINDS = {"step": int, "pid": int, "time": int | float} | dict.fromkeys(("event", "text", "host"), str)


def log_path(folder: str | Path, rank: int = 0) -> Path:
    return Path(folder) / "log" / f"rank{rank}.jsonl"


class CannotLog(RuntimeError):
    """A rank's log could not be written. That rank alone raises it."""


def tell(logs: Logs | None, rank: int, **fields: object) -> None:
    if logs is not None:
        who = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        append(log_path(logs.folder, rank), **fields, **who)


@contextmanager
def open_log(logs: Logs | None, rank: int) -> Iterator[None]:
    """Begin a rank's log with an event "start", and end it with "end", or with "error" and its text."""
    tell(logs, rank, event="start")
    try:
        yield
    except BaseException as error:
        with suppress(CannotLog):  # then the error itself counts
            tell(logs, rank, event="error", text=f"{type(error).__name__}: {error}")
        raise
    tell(logs, rank, event="end")


def append(path: str | Path, **fields: object) -> None:
    """One line more, in one write: a process killed in between leaves the whole line or none of it.
    Raises   CannotLog if the disk does not take it
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"  # the machine went down in mid-line
            file.write(b"\n" * torn + json.dumps(fields).encode() + b"\n")
    except OSError as error:
        raise CannotLog(
            f"{path} could not be written ({error.strerror}); make room on its disk, or give a log_folder on another"
        ) from error


def read(path: str | Path, last_bytes: int | None = None) -> list[dict]:
    """All whole lines, in order, or those in the last bytes of the file; an empty list if there is no file.
    Raises   ValueError if a field of a line is not of the kind that `tell` writes
    """
    path = Path(path)
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(0 if last_bytes is None else max(0, path.stat().st_size - last_bytes))
        lines = json_lines(file.read().decode("utf-8", errors="replace"))
    for name, value in (field for line in lines for field in line.items()):
        if not isinstance(value, KINDS.get(name, int | float | None)):
            raise ValueError(f"{path} has {name} {show(value)} in a line; give a log that the trainer wrote")
    return lines
