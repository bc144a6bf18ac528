"""Folders of checkpoints: complete or not there, and found to be whole before they are read.

    checkpoints/step-00000120            a complete checkpoint: it got this name by one rename, when all stood in it
        __0_0.distcp, __1_0.distcp ...   what each rank wrote
        manifest.json                    what is in them, and of each file its bytes and checksum
        .metadata                        the same for PyTorch's own tools: a pickle, which this course never opens
    checkpoints/step-00000140.partial    under way, or what a killed save has left

One run writes to a folder: its next save removes what is partial there. A second one is told whose it is.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from filelock import FileLock, Timeout

from course_lib.checkpoint.manifest import wrong_field
from course_lib.comm import all_gather_json
from course_lib.validate import writable

_FORMAT = 1
MANIFEST, PARTIAL = "manifest.json", ".partial"
LOCK, OWNER = ".lock", ".in-use.json"
_WAIT_S = 5.0  # for a run that is just ending

Result = TypeVar("Result")


class CannotWrite(RuntimeError):
    """A checkpoint could not be written. Every rank raises it, whichever of them met the disk's error."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell what keeps that checkpoint from being written, and what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CannotWrite(
            f"{path} could not be written ({error}); the checkpoints before are as they were. Make room on its disk, "
            "or give a folder on another; the same run then goes on from the last of them"
        ) from error


def together(group: dist.ProcessGroup, act: Callable[[], Result]) -> list[Result]:
    """Calls act on each rank; gives every rank what all returned, or raises on every rank if it failed on one.

    What act returns is of JSON's kinds: it travels as text, and nothing that arrives can run code.
    """
    mine, results, failures = outcomes(group, act)
    if mine is not None:
        raise mine
    for rank, (is_value_error, text) in failures.items():
        raise (ValueError if is_value_error else RuntimeError)(f"rank {rank}: {text}")
    return results


def outcomes(group: dist.ProcessGroup, act: Callable[[], Result]) -> tuple[Exception | None, list[Result], dict]:
    """Calls act on each rank: this rank's error, what all returned, of each rank that failed (a ValueError?, why)."""
    result, failure, error = None, None, None
    try:
        result = act()
    except Exception as caught:
        failure, error = (isinstance(caught, ValueError), f"{type(caught).__name__}: {caught}"), caught
    told = all_gather_json([result, failure], group)
    return error, [result for result, _ in told], {rank: why for rank, (_, why) in enumerate(told) if why is not None}


def everywhere(group: dist.ProcessGroup, act: Callable[[], Result]) -> Result:
    """Calls act on each rank and returns what it returned here; raises on every rank if it failed on one."""
    kept: list[Result] = []
    together(group, lambda: kept.append(act()))  # which returns None
    return kept[0]


def name_of(step: int) -> str:
    """What the folder of that step is called: sorted by name is sorted by step."""
    return f"step-{step:08d}"


def complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first. What has another name, or is partial, is none."""
    folder = Path(folder)
    return sorted(filter(_is_name, folder.iterdir()), key=step_of) if folder.is_dir() else []


def _is_name(path: Path) -> bool:
    return re.fullmatch(r"step-\d{8,}", path.name) is not None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def latest(folder: str | Path) -> Path | None:
    """The last complete checkpoint in a folder, whatever a killed save has left there; None if there is none."""
    return next(reversed(complete(folder)), None)


def find(folder: Path) -> Path:
    """The folder itself, if it is a checkpoint, or the last complete one in it."""
    if (folder / MANIFEST).is_file() or _is_name(folder):
        return folder
    found = latest(folder)
    if found is None:
        raise ValueError(f"{folder} holds no complete checkpoint; save one first, or give the folder that has them")
    return found


def partial_of(final: Path) -> Path:
    return final.with_name(final.name + PARTIAL)


def clear_way(final: Path) -> None:
    """Removes what killed saves have left, and makes the new partial folder.
    Raises   ValueError if the folder has this step or a later one, which a restart would take for the last
    """
    last = latest(final.parent)
    if last is not None and step_of(last) >= step_of(final):
        raise ValueError(
            f"{final.parent} has {last.name} already, and {final.name} is not after it; save into another folder, or "
            "remove those that are no longer to be the last"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    for path in final.parent.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path)
    partial_of(final).mkdir()


def put_in_place(final: Path, partial: Path, about: dict, files: dict, tensors: dict, keep: int | None) -> None:
    """The end of a save, on one rank: the manifest, the rename that makes it complete, and the old ones go.
    Raises   ValueError if this rank does not see what all have written
    """
    for name, entry in files.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != entry["bytes"]:
            raise ValueError(
                f"{name} was written, but not to {partial} as the first rank sees it; all ranks must save the same "
                "step to one folder, on a disk that all machines share. The checkpoints before are as they were"
            )
    manifest = about | {"format": _FORMAT, "files": files, "tensors": tensors}
    manifest = json.loads(json.dumps(manifest))  # as it will be read: keys that are numbers become text, and sort so
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest | {"sha256": digest(manifest)}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    os.rename(partial, final)
    sync_folder(final.parent)
    for old in complete(final.parent)[: -keep if keep else 0]:
        os.rename(old, partial_of(old))  # so that what a killed removal leaves is not taken for complete
        shutil.rmtree(partial_of(old))


def sync_folder(folder: Path) -> None:
    """Makes sure that names of files, not only what they hold, survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(manifest: dict) -> str:
    """Checksum of a manifest without its checksum, however it is spaced."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_entry(path: Path) -> dict:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(checkpoint: Path) -> dict:
    """What a checkpoint says of itself.
    Raises   ValueError if it is no checkpoint, or torn: which file, and what to do
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise ValueError(f"{checkpoint} has no {MANIFEST}, so it is no complete checkpoint. {advice(checkpoint)}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        written = manifest.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error!r}). {advice(checkpoint)}") from error
    if digest(manifest) != written:
        raise ValueError(f"{path} is damaged: its checksum is not that of what it says. {advice(checkpoint)}")
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')}; this version of the course reads {_FORMAT}")
    if (wrong := wrong_field(manifest)) is not None:
        raise ValueError(f"{path} is damaged: {wrong} is not as a save writes it. {advice(checkpoint)}")
    if outside := [name for name in manifest["files"] if Path(name).name != name]:
        raise ValueError(f"{path} names files that are not in its folder: {outside}. {advice(checkpoint)}")
    return manifest


def verify(checkpoint: Path, manifest: dict, part: int = 0, parts: int = 1) -> None:
    """Checks the size of every file, and the checksum of each `parts`-th one.
    Bytes    read: 1 / parts of the checkpoint
    Raises   ValueError if a file is missing, cut off or changed: which, and what to do
    """
    for index, (name, entry) in enumerate(manifest["files"].items()):
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{path} is missing. {advice(checkpoint)}")
        if path.stat().st_size != entry["bytes"]:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, {MANIFEST} says {entry['bytes']}: torn. {advice(checkpoint)}"
            )
        if index % parts == part and file_entry(path) != entry:
            raise ValueError(f"{path} is damaged: its checksum is not that in {MANIFEST}. {advice(checkpoint)}")


def advice(checkpoint: Path) -> str:
    """What to do about a torn checkpoint: which one to load instead."""
    others = [path for path in complete(checkpoint.parent) if path != checkpoint and (path / MANIFEST).is_file()]
    instead = f"load {others[-1]}" if others else "there is no other checkpoint beside it: start anew"
    return f"Copy it again from where it came, or remove {checkpoint} and {instead}"


@contextmanager
def one_run(folder: Path, checkpoint_bytes: int, at_once: int, group: dist.ProcessGroup) -> Iterator[None]:
    """Have the folder to this run, from now to the end of the block. All ranks enter; the first one holds the lock.

    It is the system's, so that it goes with the process that holds it, however that ends; beside it stands who that is.
    Disks that several machines share keep it as well, unless they were mounted with local locks alone.
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
