"""Where ranks come from: a fork server on Linux and macOS, `spawn` on Windows.

The fork server is a second process that has imported torch, has touched no GPU and has started no thread. For every
launch it forks one child per rank, which takes milliseconds. The notebook's own process is never forked: once it has
used a GPU or OpenMP, its copies hang.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection

from course_lib import _rank

# Stable, and slow to import. Without torch._dynamo and fsdp each launch with DDP takes 4 s longer. The course's own
# teaching modules are left out: ranks import them anew at each launch, so an edited file takes effect.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)
START_LIMIT_S = 60.0
_EXIT = struct.Struct("qd")  # exit code as in subprocess (negative: signal), time of death on time.monotonic()


def start_method(platform: str) -> str:
    """How ranks are started on `sys.platform`: Windows cannot fork."""
    return "spawn" if platform == "win32" else "forkserver"


def start_world(folder: str, world_size: int, method: str) -> "ForkedWorld | SpawnedWorld":
    """Start `world_size` ranks on the launch described in `folder`."""
    return SpawnedWorld(folder, world_size) if method == "spawn" else ForkedWorld(folder, world_size)


class ForkedWorld:
    """Ranks forked by this kernel's fork server."""

    def __init__(self, folder: str, world_size: int):
        pairs = [socket.socketpair() for _ in range(world_size)]
        pipes = [os.pipe() for _ in range(world_size)]
        self.connections = [Connection(ours.detach()) for ours, _ in pairs]
        self.exits = [reader for reader, _ in pipes]
        self._folder = folder
        self._server = _server_of_this_process()
        try:
            descriptors = [theirs.fileno() for _, theirs in pairs] + [writer for _, writer in pipes]
            self.pids = self._server.request(("start", folder, world_size), descriptors)
        except BaseException:
            self._close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
            for _, writer in pipes:
                os.close(writer)

    def exit_of(self, rank: int) -> tuple[int | None, float]:
        """Exit code and time of a rank whose `exits` entry is ready; code None if the fork server itself is gone."""
        record = os.read(self.exits[rank], _EXIT.size)
        return _EXIT.unpack(record) if record else (None, time.monotonic())

    def end(self) -> None:
        """End every rank that is left, with the processes it started, and wait until they are gone."""
        try:
            if self._server.alive():
                self._server.request(("end", self._folder), [])
        finally:
            self._close()

    def _close(self) -> None:
        for connection in self.connections:
            connection.close()  # a rank that is still there sees this and ends itself
        for reader in self.exits:
            os.close(reader)


class SpawnedWorld:
    """Ranks as fresh interpreters: slower (seconds), but it works where there is no fork."""

    def __init__(self, folder: str, world_size: int):
        context = multiprocessing.get_context("spawn")
        self.connections, self._processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank.run_rank, args=(rank, folder, theirs), daemon=True)
                self.connections.append(ours)
                process.start()
                self._processes.append(process)
                theirs.close()
        except BaseException:
            self.end()
            raise
        self.exits = [process.sentinel for process in self._processes]
        self.pids = [process.pid for process in self._processes]

    def exit_of(self, rank: int) -> tuple[int | None, float]:
        self._processes[rank].join()
        return self._processes[rank].exitcode, time.monotonic()

    def end(self) -> None:
        for process in self._processes:
            if hasattr(os, "killpg"):
                _kill_group(process.pid)
            process.kill()
        for process in self._processes:
            process.join(5)
        for connection in self.connections:
            connection.close()


# --- the notebook's side of the fork server

_server: "ForkServer | None" = None
_server_lock = threading.Lock()


def _server_of_this_process() -> "ForkServer":
    """The one fork server of this kernel, started at the first launch, or again if it was lost."""
    global _server
    with _server_lock:
        if _server is None or not _server.alive():
            _server = ForkServer()
        return _server


class ForkServer:
    """Handle on the second process. Requests are answered one at a time, so launches may come from several threads."""

    def __init__(self):
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server, to tell why it failed
        self._socket, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from course_lib._processes import serve; serve({theirs.fileno()}, {os.getpid()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,  # the interrupt button signals the kernel's whole process group
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # numpy would start threads, which do not survive a fork
        )
        theirs.close()
        atexit.register(self.close)

    def alive(self) -> bool:
        """Whether requests can be sent. A forked copy of the notebook process must not use its parent's server."""
        return self._owner == os.getpid() and self._socket.fileno() >= 0 and self._process.poll() is None

    def request(self, message: tuple, descriptors: list[int]):
        """Send one request and wait for its answer."""
        try:
            with self._lock:
                self._socket.settimeout(START_LIMIT_S)
                socket.send_fds(self._socket, [pickle.dumps(message)], descriptors)
                reply = self._socket.recv(1 << 16)
        except BaseException:
            self.close()  # interrupted between question and answer: the next answer would belong to the wrong question
            raise
        if not reply:
            self.close()
            self._errors.seek(0)
            raise RuntimeError(
                "the process that starts ranks ended: " + self._errors.read().decode(errors="replace")[-2000:]
            )
        answer = pickle.loads(reply)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """End the server; it ends every rank it has started."""
        atexit.unregister(self.close)
        self._socket.close()
        if self._owner == os.getpid():
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


# --- the fork server's own process


def serve(control_fd: int, notebook_pid: int) -> None:
    """Import torch once, then fork ranks on request until the notebook process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that forked ranks share
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that the wake-up pipe is written
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
                control.send(pickle.dumps(_answer(pickle.loads(message), descriptors, worlds, inherited)))
    finally:
        for folder in list(worlds):
            _end_world(folder, worlds)
            shutil.rmtree(os.path.dirname(folder), ignore_errors=True)
        os._exit(0)


def _answer(message: tuple, descriptors: list[int], worlds: dict, inherited: list[int]):
    """Carry out one request: the pids of the started ranks, a text that says what failed, or True."""
    if message[0] == "end":
        _end_world(message[1], worlds)
        return True
    _, folder, world_size = message
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
        _rank.run_rank(rank, folder, Connection(descriptor))
    finally:
        os._exit(1)


def _reap(worlds: dict[str, dict[int, int]]) -> None:
    """Pass on the exit of every rank that has ended."""
    for ranks in worlds.values():
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill_group(pid)  # what the rank started ends with it
                _report_exit(ranks.pop(pid), status)


def _end_world(folder: str, worlds: dict[str, dict[int, int]]) -> None:
    ranks = worlds.pop(folder, {})
    for pid in ranks:
        _kill_group(pid)
        os.kill(
            pid, signal.SIGKILL
        )  # a rank so young that it has no group yet; not reaped, so the pid is still its own
    for pid, descriptor in ranks.items():
        _, status = os.waitpid(pid, 0)
        _report_exit(descriptor, status)


def _report_exit(descriptor: int, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the notebook has stopped listening to this world
        os.write(descriptor, _EXIT.pack(os.waitstatus_to_exitcode(status), time.monotonic()))
    os.close(descriptor)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # empty group; macOS says EPERM for a group of zombies
        os.killpg(pid, signal.SIGKILL)
