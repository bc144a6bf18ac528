"""A run's log: a file of JSON lines that outlives the run, and can be read whenever the run was killed.

A step that was repeated, because the run was killed after it and before the next checkpoint, has two lines.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path


def append(path: str | Path, **fields: object) -> None:
    """One line more, in one write: a process killed in between leaves the whole line or none of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # the machine went down in the middle of a line
        os.write(descriptor, b"\n" * torn + json.dumps(fields).encode() + b"\n")
    finally:
        os.close(descriptor)


def read(path: str | Path) -> list[dict]:
    """All whole lines, in order; an empty list if there is no file."""
    path = Path(path)
    return list(_whole_lines(path.read_text(encoding="utf-8"))) if path.exists() else []


def _whole_lines(text: str) -> Iterator[dict]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # torn


def losses_of(path: str | Path) -> dict[int, list[float]]:
    """Step -> its loss, or several where it was repeated."""
    losses: dict[int, list[float]] = {}
    for line in read(path):
        if "loss" in line:
            losses.setdefault(line["step"], []).append(line["loss"])
    return losses
