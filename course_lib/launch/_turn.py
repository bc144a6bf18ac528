"""A turn for a launch among all launches of this machine, whoever started them: it waits, or is refused in a sentence.

Each launch has a file in one folder: its place in the queue, its ranks, its process, whether it runs. It is locked
(flock) as long as the launch lives, so it is void when its process ends, however it ends; nothing else keeps the list.
Of another user's file four words are read, and the system tells whose it is. A file that says something else, and a
folder that cannot be used, hold up nobody.
"""

import contextlib
import fcntl
import os
import pwd
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib.launch.limits import usable_cores, usable_memory, usable_processes

FOLDER = "COURSE_LAUNCHES"  # where the files are; the same for all who share a machine
LIMIT = "COURSE_MAX_RANKS"  # how many ranks run at once on this machine
MOST_RANKS = 64  # of one launch
RANK_BYTES = 150 << 20  # memory of a rank that does little; torch's own pages are shared between forked ranks
_SHM_BYTES = 1 << 20  # of /dev/shm for each rank: locks and queues of its DataLoader. NCCL says itself what it lacks
_RANK_THREADS = 8  # of a rank that does little: 4 to 6 were counted
_GROW_S = 2.0  # after this a new rank has taken its memory, and the system's free memory tells it
_PATIENCE_S = 600.0  # a launch ends after 120 s unless it asks for more
_AHEAD_NS = 3600 * 10**9  # a place is the time at which it was given, or a little more
_GATE_S = 2.0  # who holds the folder's lock longer is no launch
_POLL_S = 0.02  # for each launch ahead
_SAYS = re.compile(rb"(\d{1,20}) (\d{1,3}) (\d{1,10}) ([wr])\n")  # place, ranks, process; waits or runs

_own: set[str] = set()  # files of this process: a notebook that launches from several threads does not wait for itself


@dataclass(frozen=True)
class Other:
    """A launch of another process: its place in the queue, and what the system and its file say of it."""

    place: int
    ranks: int
    pid: int
    runs: bool
    uid: int
    since: float  # seconds of the epoch

    def __str__(self) -> str:
        try:
            user = pwd.getpwuid(self.uid).pw_name
        except KeyError:  # a user of another container
            user = f"user {self.uid}"
        at = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{user}'s of {count_of(self.ranks)} (process {self.pid}, since {at})"


def count_of(ranks: int) -> str:
    """Return "1 rank" or "4 ranks"."""
    return f"{ranks} rank{'s' * (ranks != 1)}"


def max_ranks() -> int:
    """Return how many ranks may run at once on this machine: COURSE_MAX_RANKS, or four for each core, 64 at least."""
    told = os.environ.get(LIMIT)
    if told is None:
        return max(MOST_RANKS, 4 * usable_cores())
    if not re.fullmatch("0*[1-9][0-9]{0,5}", told):
        raise ValueError(f"{LIMIT} is {told!r}; give a whole number of at least 1")
    return int(told)


@contextlib.contextmanager
def take_turn(ranks: int, tell: Callable[[str], None]) -> Iterator[int]:
    """Wait until `ranks` more ranks may start, hold their place, and yield how many ranks of others run.

    tell     called with a sentence that says behind whom, again and again while it waits
    Raises   ValueError if they are too many for this machine, or if it waits for ten minutes
    """
    limit = max_ranks()
    if ranks > limit:
        raise ValueError(
            f"a launch of {count_of(ranks)} was asked, and at most {limit} run at once on this machine "
            f"({LIMIT}={limit}); use fewer ranks"
        )
    with _own_file(ranks) as file:
        give_up = time.monotonic() + _PATIENCE_S
        while lacks := _lack(ranks, limit, ahead := file.ahead()):
            if not ahead:
                raise ValueError(
                    f"a launch of {count_of(ranks)} was asked, and {lacks}; use fewer ranks, or end what uses it"
                )
            if time.monotonic() > give_up:
                raise ValueError(f"{_waiting(ranks, lacks, ahead)}, for {_PATIENCE_S:.0f} s; launch again")
            tell(_waiting(ranks, lacks, ahead))
            time.sleep(min(0.5, _POLL_S * len(ahead)))
        file.say_it_runs()
        yield sum(other.ranks for other in ahead)


def _lack(ranks: int, limit: int, ahead: Sequence[Other]) -> str:
    """Return what is missing for `ranks` more now, or "" if they may start. The launches ahead are in their order."""
    taken = sum(other.ranks for other in ahead)
    if not all(other.runs for other in ahead) or taken + ranks > limit:
        return f"at most {limit} ranks run at once on this machine, in the order in which they came"
    growing = sum(other.ranks for other in ahead if time.time() - other.since < _GROW_S)
    needed, free = ranks * RANK_BYTES, usable_memory()[1] - growing * RANK_BYTES
    if needed > free:
        return f"{needed >> 20} MiB of memory are needed, {max(free, 0) >> 20} free"
    needed, free = ranks * _SHM_BYTES, _free_shm_bytes()
    if free is not None and needed > free:
        return f"{needed >> 20} MiB of /dev/shm are needed, {free >> 20} free"
    needed, free = ranks * _RANK_THREADS, usable_processes()
    if free is not None and needed > free:
        return f"{needed} processes and threads are needed, {free} more are allowed"
    return ""


def _waiting(ranks: int, lacks: str, ahead: Sequence[Other]) -> str:
    more = len(ahead) - 1
    others = f" and {more} more launch{'es' * (more > 1)}" if more else ""
    return f"this launch of {count_of(ranks)} waits behind {ahead[0]}{others}: {lacks}"


def _free_shm_bytes() -> int | None:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return None  # macOS
    return shm.f_bavail * shm.f_frsize


@dataclass
class _File:
    """The file of a launch, open and locked; without a folder for it nobody is ahead, and nobody asks."""

    folder: Path | None = None
    descriptor: int = -1
    place: int = 0

    def ahead(self) -> list[Other]:
        """Return the launches of other processes that came before, those that run first."""
        others = _others(self.folder) if self.folder else []
        before = (other for other in others if other.place < self.place)
        return sorted(before, key=lambda other: (not other.runs, other.place))

    def say_it_runs(self) -> None:
        """Write that the launch runs, over the one letter that said that it waits."""
        if self.folder:
            os.pwrite(self.descriptor, b"r", os.fstat(self.descriptor).st_size - 2)


@contextlib.contextmanager
def _own_file(ranks: int) -> Iterator[_File]:
    """Give this launch the next place, and take its file away at the end."""
    folder = Path(os.environ.get(FOLDER, "/tmp/course-launches"))
    descriptor, path = _new_file(folder)
    if path is None:
        yield _File()
        return
    try:
        _own.add(path.name)
        with _gate(folder):
            place = max([time.time_ns(), *(other.place + 1 for other in _others(folder))])
            os.write(descriptor, f"{place} {ranks} {os.getpid()} w\n".encode())
            os.fchmod(descriptor, 0o644)
            path = path.rename(folder / path.name.lstrip("."))
            _own.add(path.name)
        yield _File(folder, descriptor, place)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)
        _own.difference_update({path.name, f".{path.name}"})


def _new_file(folder: Path) -> tuple[int, Path | None]:
    """Return a hidden file, locked before anybody else can open it; or no path, where none can be made."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)  # as /tmp: all may add a file, and remove their own
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return -1, None
        descriptor, name = tempfile.mkstemp(prefix=".launch-", dir=folder)
    except OSError:
        return -1, None
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor, Path(name)


@contextlib.contextmanager
def _gate(folder: Path) -> Iterator[None]:
    """Take places one after the other: a lock of the folder itself, which needs no right to write."""
    descriptor, give_up = os.open(folder, os.O_RDONLY), time.monotonic() + _GATE_S
    try:
        while time.monotonic() < give_up:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002)
        yield
    finally:
        os.close(descriptor)


def _others(folder: Path) -> list[Other]:
    """Return the living launches of other processes; what the dead have left is removed where that is allowed."""
    found = []
    for entry in os.scandir(folder):
        if entry.name in _own or not entry.name.startswith("launch-"):
            continue
        with contextlib.suppress(OSError):  # it has just ended, or is no file that can be read
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                found += _read(entry.path, descriptor)
            finally:
                os.close(descriptor)
    return found


def _read(path: str, descriptor: int) -> list[Other]:
    """Return what a file says, or nothing if its process is gone or it is none of ours."""
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        return []
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        said = _SAYS.fullmatch(os.read(descriptor, 64))
        if not said or not 1 <= int(said[2]) <= MOST_RANKS or int(said[1]) > time.time_ns() + _AHEAD_NS:
            return []
        return [Other(int(said[1]), int(said[2]), int(said[3]), said[4] == b"r", about.st_uid, about.st_mtime)]
    os.unlink(path)
    return []
