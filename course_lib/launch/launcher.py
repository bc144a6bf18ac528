"""Run a function on real processes from a notebook cell, and get back what each of them returned."""

import contextlib
import dataclasses
import importlib
import linecache
import math
import numbers
import os
import pickle
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import cloudpickle
import torch

from course_lib.devices import choose_backend, pack, unpack
from course_lib.launch import _failures, _processes, _rank, _slurm
from course_lib.launch._bar import open_bar
from course_lib.launch._failures import RankError
from course_lib.launch._slurm import Slurm
from course_lib.launch._turn import MOST_RANKS, take_turn
from course_lib.launch._watch import Output, Watch
from course_lib.launch.limits import usable_cores
from course_lib.validate import instance, number, whole

__all__ = ["RankError", "Results", "Slurm", "launch", "progress", "report"]

MAX_TIMEOUT_S = 1_000_000
_REPORT_S = 0.1  # of a loop's progress, from a rank to the notebook
LEAVE_S = {"gloo": 1.0, "shared-gpu": 1.0, "nccl": 10.0}  # gloo ranks leave at once; NCCL gives its GPU memory back


@dataclasses.dataclass(frozen=True)
class Results(Sequence):
    """What the ranks of one launch returned: `results[rank]`, tensors on the CPU and detached.

    lines         lines[rank]: what that rank printed, line by line
    stderr        stderr[rank]: its warnings
    seconds       of the whole launch, processes included;  rank_seconds[rank]: of the function alone
    peak_bytes    peak_bytes[rank]: most memory of its GPU if it used one, else of the whole process, torch included
    backend, why  "gloo", "nccl" or "shared-gpu", and the reason
    nodes         nodes[rank]: the name of its node in a Slurm job; empty on one machine
    """

    values: list
    lines: list[list[str]]
    stderr: list[list[str]]
    seconds: float
    rank_seconds: list[float]
    peak_bytes: list[int]
    backend: str
    why: str
    nodes: tuple[str, ...] = ()

    @property
    def device_type(self) -> str:
        """Return where the ranks computed: "cuda" or "cpu"."""
        return "cpu" if self.backend == "gloo" else "cuda"

    def __getitem__(self, rank):
        return self.values[rank]

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return repr(self.values)

    def __eq__(self, other) -> bool:
        return self.values == (other.values if isinstance(other, Results) else other)

    __hash__ = None


def launch(
    fn: Callable,
    world_size: int,
    *args,
    timeout: float = 120.0,
    backend: str = "auto",
    threads: int = 1,
    quiet: bool = False,
    where: Slurm | None = None,
    on_report: Callable[[str, float], None] | None = None,
) -> Results:
    """Run `fn(*args)` on `world_size` processes that can talk to each other, and return what each of them returned.

    `fn` may be defined in the cell: it travels with what it uses, and tensors arrive on the rank's device. Imported
    functions are imported again in each rank, from the file as it is now. In a rank torch.distributed is initialised,
    and RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun sets them. What ranks print appears below the cell when all
    have finished, rank by rank. The notebook's own process is never a rank. Keyword arguments: wrap `fn` with
    functools.partial.

    timeout   seconds from the start of the ranks; then they are ended, and the error says where each of them stood
    backend   "auto": NCCL and a GPU for each rank where there are as many, else gloo and the CPU; or "nccl", "gloo", or
              "shared-gpu": ranks share the GPUs that are there, through gloo. `devices.rank_device()` is the rank's
    threads   of each rank, for its matrix multiplications; fewer where ranks of other launches use the cores
    quiet     show no printed lines; they are in `.lines` all the same
    where     Slurm(...): a job there instead of this machine; the wait in its queue is not part of `timeout`, and when
                            cell is interrupted the job is cancelled
    on_report called here, with (name, value), for each `report(name, value)` of a rank, while the ranks run
    Raises    ValueError for arguments that cannot work, or if the machine has no room; RankError if a rank fails,
              naming the first one that did

    It waits, before its clock starts, behind launches of others that leave too little room, and says behind whom.
    """
    if _rank.link is not None:
        raise RuntimeError(
            f"launch was called inside rank {_rank.link.rank}, and a rank cannot start ranks; call it in the notebook"
        )
    _check_arguments(fn, world_size, timeout, threads, where, on_report)
    gpu_count = torch.cuda.device_count() if where is None else where.nodes * where.gpus_per_node
    backend, why = choose_backend(backend, world_size, gpu_count)
    payload = _dump_function(fn, args)
    with _turn(world_size, threads) if where is None else contextlib.nullcontext(threads) as threads:
        start = time.monotonic()
        if where is None:
            _processes.prepare()  # before there is a folder, and a clock that runs
        # Of mode 700: who can write there can run code as its owner.
        folder = Path(tempfile.mkdtemp(prefix="course_launch_", dir=where and where.shared_folder()))
        try:
            ranks = folder / "ranks"
            ranks.mkdir()
            (ranks / "function.pkl").write_bytes(payload)
            settings = _settings(world_size, timeout, backend, threads)
            (ranks / "settings.pkl").write_bytes(pickle.dumps(settings))
            output = Output(ranks, world_size, on_report)
            if where is None:
                watch = _run_processes(folder, settings, output)
            else:
                watch = _slurm.run(where, timeout, folder, settings, output)
            if not quiet:
                output.show()
            _raise_if_failed(world_size, timeout, watch, output)
            values = [_load_result(ranks, rank) for rank in range(world_size)]
            lines, stderr = ([output.lines(rank, name) for rank in range(world_size)] for name in ("out", "err"))
        except _failures.Interrupted:
            raise
        except KeyboardInterrupt:
            raise _failures.Interrupted(_failures.interrupted_text(world_size, {})) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    rank_seconds, peak_bytes = ([watch.done[rank][i] for rank in range(world_size)] for i in (0, 1))
    nodes = tuple(node for _, node in sorted(watch.nodes.items()))
    return Results(values, lines, stderr, time.monotonic() - start, rank_seconds, peak_bytes, backend, why, nodes)


def progress(iterable: Iterable, desc: str | None = None) -> Iterator:
    """Yield from `iterable` with a progress bar in the cell; in a launch rank 0 reports and the notebook draws."""
    if _rank.link is not None and _rank.link.rank != 0:
        yield from iterable
        return
    total = len(iterable) if hasattr(iterable, "__len__") else None
    bar = open_bar() if _rank.link is None else _BarOfRank(_rank.link)
    try:
        bar.draw(desc or "", 0, total)
        for count, item in enumerate(iterable, start=1):
            yield item
            bar.draw(desc or "", count, total)
    finally:
        bar.close()


class _BarOfRank:
    """A bar that the notebook draws: it hears of the first and the last step, and of one every `_REPORT_S` seconds."""

    def __init__(self, link):
        self._link = link
        self._sent_at = -math.inf

    def draw(self, description: str, count: int, total: int | None) -> None:
        self._last = (description, count, total)
        if time.monotonic() - self._sent_at > _REPORT_S:
            self.close()
            self._sent_at = time.monotonic()

    def close(self) -> None:
        self._link.send("progress", *self._last)


def report(name: str, value: float) -> None:
    """In a rank: tell the notebook a number while the ranks run, such as the loss of a step.

    It stands beside the launch's bar, and goes to the `on_report` of the launch. Outside a launch nobody listens.
    """
    instance("name", name, str)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"value must be one number, got {value!r}; of a tensor with one element take .item()")
    if _rank.link is not None:
        _rank.link.send("report", name, float(value))


def _check_arguments(fn, world_size, timeout, threads, where, on_report) -> None:
    if not callable(fn):
        raise ValueError(
            f"fn must be a function, got {fn!r}; pass the function itself and its arguments after world_size"
        )
    whole("world_size", world_size)
    whole("threads", threads)
    number("timeout", timeout, above=0, most=MAX_TIMEOUT_S)
    if where is None and world_size > MOST_RANKS:
        raise ValueError(f"world_size ({world_size}) must be at most {MOST_RANKS} on one machine; use fewer ranks")
    if on_report is not None and not callable(on_report):
        raise ValueError(f"on_report must be a function of (name, value) or None, got {on_report!r}; leave it out")
    if where is not None:
        if not isinstance(where, Slurm):
            raise ValueError(f"where must be None or Slurm(...), got {where!r}; leave it out for this machine")
        where.check_launch(world_size, timeout)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            "the current folder, in which ranks would start, has been removed; os.chdir() to one that is there"
        ) from None


@contextlib.contextmanager
def _turn(world_size: int, threads: int) -> Iterator[int]:
    """Hold a place among this machine's launches; yield how many threads each rank gets beside ranks of others."""
    bar = open_bar()
    with contextlib.ExitStack() as stack:
        try:
            taken = stack.enter_context(take_turn(world_size, bar.say))
        except KeyboardInterrupt:
            raise _failures.Interrupted(f"the launch of {world_size} ranks was interrupted while it waited") from None
        finally:
            bar.close()
        yield min(threads, max(1, (usable_cores() - taken) // world_size)) if taken else threads


class _Pickler(cloudpickle.Pickler):
    """Sends tensors so that they arrive on the rank's device, and modules of a class of their own by name.

    A function that says `dist` and `.config` brings such a module of torch's.
    """

    def reducer_override(self, obj):
        if type(obj) is torch.Tensor and obj.layout == torch.strided and not obj.is_meta:
            return unpack, pack(obj)
        of_own_class = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if of_own_class and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def dump(value: object) -> bytes:
    """Return a value as a rank loads it: functions and classes of a notebook as code, tensors for the rank's device."""
    return _rank.dump(value, _Pickler)


def _dump_function(fn: Callable, args: tuple) -> bytes:
    try:
        return dump((fn, args))
    except Exception as error:  # pickling runs code of any class, which may raise anything
        name = getattr(fn, "__name__", repr(fn))
        raise ValueError(
            f"{name} cannot be sent to the ranks ({type(error).__name__}: {error}). What it uses must be code or data; "
            "create locks, open files, generators and process groups inside the function"
        ) from error


def _run_processes(folder: Path, settings: _rank.Settings, output: Output) -> Watch:
    world = _processes.World(str(folder / "ranks"), settings.world_size)
    watch = Watch(world, settings.world_size, output, folder / "ranks")
    try:
        return watch.follow(settings.deadline, LEAVE_S[settings.backend])
    except KeyboardInterrupt:
        watch.ask_where()
        raise _failures.Interrupted(_failures.interrupted_text(settings.world_size, watch.places)) from None
    finally:
        world.end()


def _raise_if_failed(world_size: int, timeout: float, watch: Watch, output: Output) -> None:
    if watch.failures:
        rank = _failures.first_failure(watch.failures)
        text = _failures.failure_text(rank, world_size, watch, "\n".join(output.lines(rank, "err")))
        raise RankError(text, rank, watch.nodes.get(rank))
    if watch.places:
        raise RankError(_failures.hang_text(world_size, timeout, watch))


def _settings(world_size: int, timeout: float, backend: str, threads: int) -> _rank.Settings:
    """What a rank takes over from this process, as it is now."""
    cells = {file: entry for file, entry in list(linecache.cache.items()) if len(entry) == 4 and entry[1] is None}
    deadline, environment = time.monotonic() + timeout, dict(os.environ)
    return _rank.Settings(world_size, backend, threads, deadline, environment, os.getcwd(), list(sys.path), cells)


def _load_result(folder: Path, rank: int):
    try:
        return cloudpickle.loads((folder / f"{rank}.result").read_bytes())
    except Exception as error:  # unpickling runs code of any class, which may raise anything
        kind = type(error).__name__
        text = f"rank {rank} returned something that cannot be rebuilt in the notebook ({kind}: {error})"
        raise RankError(text + "; return numbers, tensors, or lists, dicts and dataclasses of them", rank) from error
