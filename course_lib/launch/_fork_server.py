"""The process that forks ranks: it imports torch once, and then waits for requests of the notebook.

It must stay fit to be forked: it uses no GPU, computes nothing, and has one thread.
"""

import contextlib
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection

from course_lib.launch import _groups, _network, _rank

# The launcher itself is as it was when the server started; the course's other files are imported again after an edit.
OWN = "course_lib.launch"
# Slow to import. Without torch._dynamo and fsdp each launch with DDP takes 4 s longer.
PRELOAD = (
    "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", OWN,
)  # fmt: skip
EXIT = struct.Struct("qd")  # exit code as in subprocess (negative: signal), time of death on time.monotonic()


def serve(control_fd: int, notebook_pid: int) -> None:
    """Import torch once, then fork ranks on request until the notebook process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    _network.leave_shared_network()
    _groups.adopt_orphans()
    preload(PRELOAD)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that the wake-up pipe is written
    stamps: dict[str, int] = {}
    places: set[str] = set()  # folders of launches, for which the notebook may not live long enough to remove them
    worlds: dict[str, dict[int, int]] = {}  # folder -> {pid of a living rank: where to write its exit}
    try:
        # A fork of the notebook process may hold its end of the socket open, so the parent's pid is watched as well.
        while os.getppid() == notebook_pid:
            ready, _, _ = select.select([control, wake_reader], [], [], 1.0)
            if wake_reader in ready:
                os.read(wake_reader, 4096)
            _reap(worlds)
            if control in ready:
                message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 256)
                if not message:
                    break
                inherited = [control_fd, wake_reader, wake_writer]
                request = pickle.loads(message)
                if request[0] == "prepare":
                    answer = _refresh(request[1], stamps)
                elif request[0] == "end":
                    answer = _end_world(request[1], worlds)
                else:
                    places = {place for place in places if os.path.exists(place)} | {os.path.dirname(request[1])}
                    answer = _start_world(request[1], request[2], descriptors, worlds, inherited)
                control.send(pickle.dumps(answer))
    finally:
        for folder in list(worlds):
            _end_world(folder, worlds)
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        os._exit(0)


def preload(names: Iterable[str]) -> None:
    """Import what is not imported yet; ranks will find it ready."""
    for name in names:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except Exception:  # a teaching module that was edited into an error: the ranks will meet it, and show it
                continue
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that forked ranks share


def _refresh(names: list[str], stamps: dict[str, int]) -> None:
    """Have the modules `names` as their files are now. `stamps` keeps when the course's own files were last changed."""
    if any(_stamp(name) != stamp for name, stamp in stamps.items()):
        for name in stamps:
            package, _, child = name.rpartition(".")
            sys.modules.pop(name, None)
            if package in sys.modules:
                vars(sys.modules[package]).pop(child, None)  # `from package import child` looks here first
        stamps.clear()
    new = [name for name in names if name not in sys.modules]
    if new:
        preload(new)
        teaching = (name for name in sys.modules if name.startswith("course_lib.") and f"{OWN}." not in f"{name}.")
        stamps.update({name: _stamp(name) for name in teaching})


def _stamp(name: str) -> int:
    """When the file of an imported module was last changed, in nanoseconds; 0 if it is gone."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return os.stat(file).st_mtime_ns if file and os.path.exists(file) else 0


def _start_world(folder: str, world_size: int, descriptors: list[int], worlds: dict, inherited: list[int]):
    """Fork the ranks of one launch: the list of their pids, or a text that says what failed."""
    ranks = worlds.setdefault(folder, {})
    try:
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                others = [fd for fd in descriptors if fd != descriptors[rank]]
                _become_rank(rank, folder, descriptors[rank], [*others, *inherited])
            ranks[pid] = descriptors[world_size + rank]
        return list(ranks)
    except OSError as error:
        for descriptor in descriptors[world_size + len(ranks) :]:
            os.close(descriptor)
        _end_world(folder, worlds)
        return f"could not start {world_size} processes ({error}): use fewer ranks"
    finally:
        for descriptor in descriptors[:world_size]:
            os.close(descriptor)


def _become_rank(rank: int, folder: str, descriptor: int, unwanted: list[int]) -> None:
    """In the forked child: forget that this was a server."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in unwanted:
            os.close(other)
        _rank.forget_exit_functions()
        _rank.run_rank(rank, folder, Connection(descriptor))
    finally:
        os._exit(1)


def _reap(worlds: dict[str, dict[int, int]]) -> None:
    """Pass on the exit of every rank that has ended."""
    for ranks in worlds.values():
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _groups.end_groups([pid])  # what the rank started ends with it
                descriptor = ranks.pop(pid)
                _end_orphans(worlds)
                _report_exit(descriptor, status)


def _end_world(folder: str, worlds: dict[str, dict[int, int]]) -> None:
    ranks = worlds.pop(folder, {})
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)  # maybe so young that it has no group yet; not reaped, so the pid is its own
    _groups.end_groups(ranks)
    for pid, descriptor in ranks.items():
        _, status = os.waitpid(pid, 0)
        _report_exit(descriptor, status)
    _end_orphans(worlds)


def _end_orphans(worlds: dict[str, dict[int, int]]) -> None:
    """End what ranks that are gone have left in sessions of their own."""
    _groups.end_orphans(pid for ranks in worlds.values() for pid in ranks)


def _report_exit(descriptor: int, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the notebook has stopped listening to this world
        os.write(descriptor, EXIT.pack(os.waitstatus_to_exitcode(status), time.monotonic()))
    os.close(descriptor)
