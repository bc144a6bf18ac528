"""Where ranks come from: a fork server.

The fork server is a second process that has imported torch, has touched no GPU and has started no thread. For every
launch it forks one child per rank, which takes milliseconds. The notebook's own process is never forked: once it has
used a GPU or OpenMP, its copies hang.
"""

import atexit
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import IO

from course_lib.launch._fork_server import EXIT

_PRELOAD_IF_USED = ("accelerate", "nbformat", "pytest", "transformers")  # slow too, but few notebooks use them
_NOT_FOR_RANKS = tuple(f"course_lib.{name}" for name in ("plots", "widgets", "checks", "authoring", "cli"))
START_LIMIT_S = 120.0


def prepare() -> None:
    """Have the fork server ready: only the first launch of a notebook waits here."""
    teaching = [name for name in sys.modules if name.startswith("course_lib.") and not name.startswith(_NOT_FOR_RANKS)]
    used = [name for name in _PRELOAD_IF_USED if name in sys.modules]
    _server_of_this_process().request(("prepare", used + teaching), [])


class World:
    """Ranks forked by this kernel's fork server."""

    def __init__(self, folder: str, world_size: int):
        pairs, pipes = _make_pairs(world_size)
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
        record = os.read(self.exits[rank], EXIT.size)
        return EXIT.unpack(record) if record else (None, time.monotonic())

    def end(self) -> None:
        """End every rank that is left, with the processes it started, and wait until they are gone."""
        try:
            # If the fork server has died, the ranks end themselves when their connections close.
            with contextlib.suppress(RuntimeError):
                if self._server.alive():
                    self._server.request(("end", self._folder), [])
        finally:
            self._close()

    def _close(self) -> None:
        for connection in self.connections:
            connection.close()  # a rank that is still there sees this and ends itself
        for reader in self.exits:
            os.close(reader)


def _make_pairs(world_size: int) -> tuple[list[tuple], list[tuple[int, int]]]:
    """A connection and a pipe for each rank, or none at all where this process has too many files open."""
    pairs, pipes = [], []
    try:
        for _ in range(world_size):
            pairs.append(socket.socketpair())
            pipes.append(os.pipe())
    except OSError as error:
        for end in itertools.chain(*pairs):
            end.close()
        for descriptor in itertools.chain(*pipes):
            os.close(descriptor)
        raise RuntimeError(
            f"{world_size} ranks need {4 * world_size} more open files than this process may have ({error.strerror}); "
            "close files, raise the limit (ulimit -n), or use fewer ranks"
        ) from error
    return pairs, pipes


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold an interrupt back until the block is done: an answer that nobody took would belong to the next question."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        raise KeyboardInterrupt


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


def start_server(control_fd: int, errors: IO[bytes]) -> subprocess.Popen:
    """Start the second process: a new Python that serves at `control_fd` and writes what goes wrong to `errors`."""
    code = (
        f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
        f"from course_lib.launch._fork_server import serve; serve({control_fd}, {os.getpid()})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[control_fd],
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        start_new_session=True,  # the interrupt button signals the kernel's whole process group
        env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # numpy would start threads, which do not survive a fork
    )


class ForkServer:
    """Handle on the second process. Requests are answered one at a time, so launches may come from several threads."""

    def __init__(self):
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._last_words = ""
        self._answered = False  # whether it has said anything yet
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server, to tell why it failed
        self._socket, theirs = socket.socketpair()
        self._process = start_server(theirs.fileno(), self._errors)
        theirs.close()
        atexit.register(self.close)

    def alive(self) -> bool:
        """Whether requests can be sent. A forked copy of the notebook process must not use its parent's server."""
        return self._owner == os.getpid() and self._socket.fileno() >= 0 and self._process.poll() is None

    def request(self, message: tuple, descriptors: list[int]):
        """Send one request and wait for its answer."""
        # The first one may take long, while the server imports torch: that one can be interrupted.
        with _interrupts_later() if self._answered else contextlib.nullcontext():
            return self._request(message, descriptors)

    def _request(self, message: tuple, descriptors: list[int]):
        try:
            with self._lock:
                self._socket.settimeout(START_LIMIT_S)
                socket.send_fds(self._socket, [pickle.dumps(message)], descriptors)
                reply = self._socket.recv(1 << 16)
                self._answered = True
        except ConnectionError:
            reply = b""  # the server has just died
        except BaseException:
            self.close()  # interrupted between question and answer: the next answer would belong to the wrong question
            raise
        if not reply:
            self.close()
            raise RuntimeError(
                f"the process that starts ranks has ended; launch again for a new one. {self._last_words}"
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
        if not self._errors.closed:
            self._errors.seek(0)
            self._last_words = self._errors.read().decode(errors="replace")[-2000:].strip()
            self._errors.close()
