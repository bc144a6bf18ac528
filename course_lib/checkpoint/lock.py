"""One run in a folder of checkpoints: a second one is told whose it is, and a folder that cannot take a save is found.

The lock is the system's, so that it goes with the process that holds it, however that ends; beside it stands who that
is. Disks that several machines share keep it as well, unless they were mounted with local locks alone.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock, Timeout

from course_lib.checkpoint.files import complete, everywhere
from course_lib.validate import writable

LOCK, OWNER = ".lock", ".in-use.json"
_WAIT_S = 5.0  # for a run that is just ending


@contextmanager
def one_run(folder: Path, checkpoint_bytes: int, at_once: int, group: dist.ProcessGroup) -> Iterator[None]:
    """Have the folder to this run, from now to the end of the block. All ranks enter; the first one holds the lock.
    checkpoint_bytes   what one checkpoint takes
    at_once            the most that this run has there at a time, with those that are there already
    Raises   ValueError on every rank if another run has the folder, or it cannot be written, or is too full
    """
    first = group.rank() == 0
    lock = FileLock(folder / LOCK)
    everywhere(group, lambda: take(folder, lock, checkpoint_bytes, at_once) if first else None)
    try:
        yield
    finally:
        if first:
            (folder / OWNER).unlink(missing_ok=True)
            lock.release()


def take(folder: Path, lock: FileLock, checkpoint_bytes: int, at_once: int = 1) -> None:
    writable("the folder of checkpoints", folder)
    try:
        lock.acquire(timeout=_WAIT_S)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by another run ({_owner_of(folder)}), and one run writes to a folder; wait until that "
            "has ended, end it, or give another folder"
        ) from None
    owner = {"host": socket.gethostname(), "process": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    free_bytes = shutil.disk_usage(folder).free
    to_come = max(1, at_once - len(complete(folder)))
    if free_bytes < to_come * checkpoint_bytes:
        lock.release()
        raise ValueError(
            f"a checkpoint takes {checkpoint_bytes / 1e6:,.1f} MB, {to_come} more must fit at once, and the disk of "
            f"{folder} has {free_bytes / 1e6:,.1f} MB left; make room, or give a folder on another disk"
        )
    (folder / OWNER).write_text(json.dumps(owner), encoding="utf-8")


def _owner_of(folder: Path) -> str:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']}, started {owner['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "which has not said its process"
