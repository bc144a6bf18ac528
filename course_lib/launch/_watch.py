"""The notebook's side of one launch: listen to the ranks until all are done, one has failed, or the time is up."""

import collections
import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from course_lib.launch import _failures
from course_lib.launch._bar import open_bar
from course_lib.launch._rank import Failure

_TICK_S = 0.1
_SETTLE_S = 0.1  # after a failure: how long to wait for one that happened even earlier
_ECHO_S = 1.2  # after a "connection closed by peer": how long to wait for the rank that is really to blame
MAX_OUTPUT_BYTES = 64 << 20  # of one rank: what an endless print loop wrote earlier is dropped
_MAX_SHOWN_LINES = 1000
MAX_KEPT_LINES = 100_000  # of one rank
_MAX_SHOWN_CHARS = 2000


class Watch:
    """What is known of each rank of one world, whose files are in `folder`: done, failed, or where it stands."""

    answer_s = 0.3  # for the answer to "where do you stand?"

    def __init__(self, world, world_size: int, output: "Output", folder: Path):
        self.done: dict[int, tuple[float, int]] = {}  # rank -> (seconds, peak bytes)
        self.failures: dict[int, Failure] = {}
        self.places: dict[int, str] = {}  # where the others stood
        self.nodes: dict[int, str] = {}  # where ranks ran; empty on one machine
        self.joined: set[int] = set()  # which have met all others
        self._world = world
        self._world_size = world_size
        self._output = output
        self._folder = folder
        self._bar = open_bar()
        self._step = None  # (description, count, total) of the loop that rank 0 is in
        self._note = ""  # the last number that a rank reported
        self._settled_at = math.inf
        self._asking = False
        self._talking = dict(enumerate(world.connections))
        self._living = dict(enumerate(world.exits))

    def unfinished(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank not in self.done and rank not in self.failures]

    def follow(self, deadline: float, leave_s: float) -> "Watch":
        """Listen until every rank has finished, a failure has settled, or the deadline has passed.

        Then let the ranks leave, in at most `leave_s`, or ask where they stand.
        """
        try:
            while self.unfinished() and (left := min(deadline, self._settled_at) - time.monotonic()) > 0:
                self._listen(min(left, _TICK_S))
                self._output.poll()
                if self._step is None:
                    self._bar.wait(len(self.done), self._world_size)
        finally:
            self._bar.close()
        if self.unfinished() or self.failures:
            self.ask_where()
        else:
            self.let_leave(leave_s)
        return self

    def ask_where(self) -> None:
        """Learn where every rank stands that has neither finished nor failed."""
        asked = self.unfinished()
        self._asking = True
        for rank in asked:
            with contextlib.suppress(OSError):  # it has just died
                self._world.connections[rank].send("where")
        give_up = time.monotonic() + self.answer_s
        while set(asked) - set(self.places) - set(self.failures) and time.monotonic() < give_up:
            self._listen(0.05)
        for rank in asked:
            if rank not in self.places and rank not in self.failures:
                place = _failures.describe_place(self._last_frames(rank))
                self.places[rank] = _failures.STOPPED if self._is_stopped(rank) else place
            if rank in self.places and rank not in self.joined:
                self.places[rank] = f"{_failures.NOT_MET} and {self.places[rank]}"
        for rank in self.done:
            self.places[rank] = "had returned"

    def _is_stopped(self, rank: int) -> bool:
        """Whether a signal or a debugger holds the rank still."""
        try:
            pids = getattr(self._world, "pids", None)  # a rank on another machine has none here
            return pids is not None and psutil.Process(pids[rank]).status() in ("stopped", "tracing-stop")
        except psutil.Error:
            return False

    def let_leave(self, limit_s: float) -> None:
        """Tell all ranks to leave, and wait for them, but no longer than `limit_s`."""
        for connection in self._world.connections:
            with contextlib.suppress(OSError):  # gone already; its result is here
                connection.send("leave")
        give_up = time.monotonic() + limit_s
        while self._living and (left := give_up - time.monotonic()) > 0:
            for handle in wait(list(self._living.values()), timeout=left):
                self._living = {rank: other for rank, other in self._living.items() if other != handle}

    def _listen(self, timeout: float) -> None:
        ranks = {handle: rank for rank, handle in [*self._talking.items(), *self._living.items()]}
        ready = set(wait(list(ranks), timeout=timeout))
        for handle in ready:
            if handle in self._talking.values():
                self._hear(ranks[handle])
        for handle in ready:
            if handle in self._living.values():
                self._bury(ranks[handle])

    def _hear(self, rank: int) -> None:
        """Take every message that rank has sent."""
        try:
            while rank in self._talking and self._talking[rank].poll():
                name, *content = self._talking[rank].recv()
                if name == "joined":
                    self.joined.add(rank)
                elif name == "done":
                    self.done[rank] = tuple(content)
                elif name == "failed" and rank in self.unfinished():
                    self._fail(rank, content[0])
                elif name == "where":
                    self.places[rank] = _failures.describe_place(*content)
                elif name == "progress":
                    self._step = content
                    self._bar.draw(*content, self._note)
                elif name == "report":
                    self._note = "{} {:.4g}".format(*content)
                    self._output.on_report(*content)
                elif name == "node":
                    self.nodes[rank] = content[0]
        except (EOFError, OSError):
            self._talking.pop(rank)  # it is ending; how, its exit will say

    def _bury(self, rank: int) -> None:
        code, when = self._world.exit_of(rank)
        self._living.pop(rank)
        self._hear(rank)
        if rank not in self.done and rank not in self.failures:
            frames = self._last_frames(rank)
            if self._asking and code == -signal.SIGSEGV:
                # Reading the frames of running Python can crash: the question did that, and no fault of the rank.
                self.places[rank] = _failures.describe_place(frames)
            else:
                self._fail(rank, Failure("died", when, [(frames, "")] if frames else [], code))

    def _last_frames(self, rank: int) -> list:
        """What faulthandler wrote of a rank that could say nothing itself."""
        return _failures.frames_in_stack_file(read_text(self._folder / f"{rank}.stack"))

    def _fail(self, rank: int, failure: Failure) -> None:
        self.failures[rank] = failure
        patience = _ECHO_S if _failures.is_secondary(failure) else _SETTLE_S
        self._settled_at = min(self._settled_at, time.monotonic() + patience)


class Output:
    """What the ranks print, each to files of its own, which can be neither blocked nor lost; and what they report."""

    def __init__(self, folder: Path, world_size: int, on_report: Callable | None = None):
        self.on_report = on_report or (lambda name, value: None)
        self._folder = folder
        self._world_size = world_size
        self._dropped = [0] * world_size

    def poll(self) -> None:
        """Keep a rank that prints without end from filling the disk."""
        for rank in range(self._world_size):
            for file in (self._folder / f"{rank}.{stream}" for stream in ("out", "err")):
                if file.exists() and (size := file.stat().st_size) > MAX_OUTPUT_BYTES:
                    os.truncate(file, 0)  # the rank appends, so it goes on at the new end
                    self._dropped[rank] += size

    def lines(self, rank: int, stream: str = "out") -> list[str]:
        lines = read_lines(self._folder / f"{rank}.{stream}")
        if self._dropped[rank] and stream == "out":
            lines.insert(0, f"... {self._dropped[rank]:,} bytes of earlier output dropped")
        return lines

    def show(self) -> None:
        """Print each rank's lines, in rank order; its warnings go to stderr."""
        for rank in range(self._world_size):
            _show_lines(rank, self.lines(rank), sys.stdout)
            _show_lines(rank, self.lines(rank, "err"), sys.stderr)


def read_text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace") if path.exists() else ""


def read_lines(path: Path) -> list[str]:
    """The lines of a file; of very many the first and the last, since a short line takes 30 times its bytes."""
    if not path.exists():
        return []
    half = MAX_KEPT_LINES // 2
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        lines = list(itertools.islice(file, half))
        last = collections.deque(enumerate(file, start=1), maxlen=half)
    if last and (left_out := last[-1][0] - len(last)):
        lines.append(f"... {left_out:,} lines left out")
    return [split_lines(line)[0] for line in [*lines, *(line for _, line in last)]]


def split_lines(text: str) -> list[str]:
    """Lines as a terminal would leave them: of a progress bar drawn over itself only the last state."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def _show_lines(rank: int, lines: list[str], stream) -> None:
    if not lines:
        return
    shown = [line[:_MAX_SHOWN_CHARS] + " ..." * (len(line) > _MAX_SHOWN_CHARS) for line in lines[:_MAX_SHOWN_LINES]]
    if len(lines) > _MAX_SHOWN_LINES:
        shown.append(f"... {len(lines) - _MAX_SHOWN_LINES:,} more lines")
    stream.write("".join(f"[rank {rank}] {line}\n" for line in shown))
    stream.flush()
