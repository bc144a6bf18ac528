"""What happens inside one rank: prepare the process, call the learner's function, tell the notebook how it went.

A rank talks to the notebook through one connection. It says `joined`, `done`, `failed`, `where` (an answer), `progress`
and `report`; it hears `where` (the question) and `leave`. Results and printed lines can be large: they go through files
in the launch's own folder, where no reader can block the rank and no death can lose them.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import io
import linecache
import multiprocessing.resource_tracker
import os
import pickle
import resource
import signal
import stat
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course_lib.devices import BACKENDS, device_for, peak_memory_bytes, set_rank_device
from course_lib.launch import _groups, _network

_MAX_MESSAGE_CHARS = 4000  # of an exception; a learner who raises ValueError(tensor) should still see the traceback
_MAX_FRAMES = 40
_DUMP_S = 0.15  # after the time limit a rank that has not answered writes its stack; one that answers is ended before
_FINISH_S = 0.8  # for a rank's exit functions: less than the notebook waits before it ends the rank

link = None  # this process's Link to the notebook while it is a rank; None everywhere else

Frame = tuple[str, int, str]  # file, line, function: all that the notebook needs to show a line of source


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything a rank takes over from the notebook process, so that code behaves there as it does in the cell."""

    world_size: int
    backend: str  # of devices.BACKENDS
    threads: int
    deadline: float  # on time.monotonic(), which all processes of a machine share
    environment: dict[str, str]
    directory: str
    sys_path: list[str]
    cell_sources: dict[str, tuple]  # linecache entries of notebook cells, which are in no file
    variables: dict[str, str] | None = None  # of a rank on a node of its own; None: rank_environment's
    store: dist.Store | None = None  # through which ranks on several nodes meet; None: a file does on one machine


@dataclasses.dataclass(frozen=True)
class Failure:
    """How a rank failed. Plain text and numbers: an exception object may not survive pickling."""

    kind: str  # start | load | exception | exit | result | died
    when: float
    chain: list[tuple[list[Frame], str]]  # (frames, "ValueError: text"), the cause first and the exception itself last
    exit_code: int | None = None


class Link:
    """This rank's end of the connection; a thread listens, so that a rank stuck in a collective still answers."""

    def __init__(self, rank: int, connection: Connection):
        self.rank = rank
        self.leave = threading.Event()
        self.connection = connection
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, args=(threading.get_ident(),), name="course-link", daemon=True).start()

    def send(self, *message) -> None:
        with self._lock:
            self.connection.send(message)

    def _listen(self, main_thread_id: int) -> None:
        try:
            while True:
                question = self.connection.recv()
                if question == "leave":
                    self.leave.set()
                else:
                    stack = list(traceback.walk_stack(sys._current_frames()[main_thread_id]))
                    self.send("where", frames_of(stack)[::-1], tensors_in(stack))
        except (EOFError, OSError):
            _groups.end_own_group()  # the notebook process is gone, and nobody waits for this rank any more


def run_rank(rank: int, folder: str, connection: Connection) -> None:
    """Be rank `rank` of the launch described in `folder`. Never returns."""
    os.setsid()  # a session of its own: Ctrl-C in a terminal does not reach it, and it is ended with its children
    _groups.adopt_orphans()
    to_notebook = Link(rank, connection)
    be_rank(to_notebook, Path(folder), lambda settings: settings, to_notebook.leave.wait)


def be_rank(to_notebook, folder: Path, here: Callable[[Settings], Settings], wait_to_leave: Callable) -> NoReturn:
    """Prepare this process, call the function, tell how it went, and leave when all do.

    here            completes the notebook's settings by what only this process knows
    wait_to_leave   ranks leave together: one that left early would break peers that are still talking to it
    """
    global link
    link = to_notebook
    try:
        settings = here(pickle.loads((folder / "settings.pkl").read_bytes()))
        _prepare_process(link.rank, settings, folder)
        message = call(link.rank, settings, folder, link.send)
    except BaseException as error:
        message = ("failed", describe(error, "start"))
    _flush_output()
    link.send(*message)
    wait_to_leave()
    if message[0] == "done" and settings.backend == "nccl":
        dist.destroy_process_group()  # NCCL holds GPU memory; gloo only sockets, which end with the process
    finish()
    os._exit(0)  # no interpreter shutdown: a forgotten thread cannot hold the rank back


def call(rank: int, settings: Settings, folder: Path, tell: Callable[..., None]) -> tuple:
    """Join the world, call the function, write its result; the message for the notebook says how it went."""
    kind = "start"
    try:
        store = settings.store or dist.FileStore(str(folder / "store"), settings.world_size)  # a file: no port
        # Later than the launch's own limit, which can say where every rank stood.
        limit = timedelta(seconds=max(settings.deadline - time.monotonic(), 0) + 60)
        join_world(settings.backend, store, rank, settings.world_size, int(os.environ["LOCAL_RANK"]), limit)
        tell("joined")
        kind = "load"
        function, args = cloudpickle.loads((folder / "function.pkl").read_bytes())
        _fill_main_module([function, *args])
        kind = "exception"
        start = time.perf_counter()
        value = function(*args)
        seconds = time.perf_counter() - start
        kind = "result"
        (folder / f"{rank}.result").write_bytes(dump(value, ResultPickler))
        return "done", seconds, peak_memory_bytes("cuda" if torch.cuda.is_initialized() else "cpu")
    except SystemExit as error:
        return "failed", describe(error, "exit" if kind == "exception" else kind)
    except BaseException as error:
        return "failed", describe(error, kind)


def _prepare_process(rank: int, settings: Settings, folder: Path) -> None:
    """Make this process look like the cell's: its environment, folder and import path; its output goes to files."""
    os.environ.clear()
    os.environ.update(settings.environment)
    os.environ.update(settings.variables or _rank_environment(str(rank), str(settings.world_size), settings.threads))
    if os.path.isdir(settings.directory):
        os.chdir(settings.directory)
    dist.set_debug_level_from_env()  # torch has read TORCH_DISTRIBUTED_DEBUG at its import, maybe before it was set
    sys.path[:] = settings.sys_path
    linecache.cache.update(settings.cell_sources)
    _redirect_output(rank, folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stack_file = open(folder / f"{rank}.stack", "w")  # noqa: SIM115 - faulthandler needs it open until the process ends
    faulthandler.enable(stack_file)  # SIGSEGV, SIGABRT: the Python lines that led there
    dump_s = max(settings.deadline - time.monotonic(), 0) + _DUMP_S
    faulthandler.dump_traceback_later(dump_s, file=stack_file)
    # A crash is reported in the cell; a core file of gigabytes would only slow it down.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    torch.set_num_threads(settings.threads)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # forked ranks would all draw the same "random" numbers


def _rank_environment(rank: str, world_size: str, threads: int) -> dict[str, str]:
    """The variables that torchrun sets too, and loopback as the only network. A rank has no cell to draw in."""
    loopback = loopback_interface(sys.platform)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    network = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "MASTER_ADDR": "127.0.0.1"}
    return {**places, **network, "OMP_NUM_THREADS": str(threads), "MPLBACKEND": "Agg"}


def loopback_interface(platform: str) -> str:
    """Name of the loopback network interface on `sys.platform`."""
    return "lo0" if platform == "darwin" else "lo"


def _redirect_output(rank: int, folder: Path) -> None:
    """Send file descriptors 1 and 2 to files, so that prints of C++ and of child processes are caught too."""
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    as_text = partial(open, mode="w", buffering=1, closefd=False, encoding="utf-8", errors="replace")
    sys.stdout, sys.stderr = as_text(1), as_text(2)


def _flush_output() -> None:
    """Write what the function has printed, and what stands in the buffers of files that it has left open."""
    for stream in (sys.stdout, sys.stderr, *open_files(io.TextIOWrapper), *open_files(io.BufferedWriter)):
        try:
            stream.flush()
        except (ValueError, OSError, AttributeError):
            continue  # the function closed or replaced its stdout: nothing is left to flush


def open_files(kind: type) -> list:
    """Regular files that this process has open for writing; a pipe's reader could block a flush."""
    found = []
    for obj in gc.get_objects():
        with contextlib.suppress(ValueError, OSError, AttributeError):
            if type(obj) is kind and obj.writable() and stat.S_ISREG(os.fstat(obj.fileno()).st_mode):
                found.append(obj)
    return found


def forget_exit_functions() -> None:
    """In a forked rank: what the fork server was to do at its end is not for its copies."""
    atexit._clear()
    weakref.finalize._registry.clear()
    atexit.register(weakref.finalize._exitfunc)  # such as a TemporaryDirectory of the function's


def finish() -> None:
    """Do what Python does at its end and os._exit does not, within a limit: one may wait for what never comes."""
    timer = threading.Timer(_FINISH_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
    atexit._run_exitfuncs()
    _flush_output()
    tracker = multiprocessing.resource_tracker._resource_tracker
    if getattr(tracker, "_fd", None) is not None:  # it removes shared memory that nobody has removed
        tracker._stop()


def join_world(
    backend: str, store: dist.Store, rank: int, world_size: int, local_rank: int, timeout: timedelta
) -> None:
    """Initialise torch.distributed through a store.

    A rank with a GPU makes new tensors there, and with NCCL those on the CPU travel through gloo.
    """
    device = device_for(backend, local_rank)
    set_rank_device(device)
    device_id = device if backend == "nccl" else None
    dist.init_process_group(
        BACKENDS[backend], store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )


def _fill_main_module(objects: list) -> None:
    """Give this process the notebook's names as `__main__`: plain pickle (all_gather_object) looks classes up there."""
    main = types.ModuleType("__main__")
    for obj in objects:
        obj = getattr(obj, "func", obj)  # inside functools.partial
        if getattr(obj, "__module__", None) == "__main__":
            main.__dict__.update(getattr(obj, "__globals__", {type(obj).__name__: type(obj)}))
    sys.modules["__main__"] = main


class ResultPickler(cloudpickle.Pickler):
    """cloudpickle, with every tensor as a plain one on the CPU that holds its own elements and no more."""

    def reducer_override(self, obj):
        if isinstance(obj, torch.Tensor) and obj.device.type != "meta":
            plain = _plain_tensor(obj)
            if isinstance(obj, torch.nn.Parameter):
                return torch.nn.Parameter, (plain, obj.requires_grad)
            return plain.__reduce_ex__(2)
        return super().reducer_override(obj)


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, on the CPU; of a DTensor the local shard."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = torch.Tensor.cpu(tensor).as_subclass(torch.Tensor)
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()  # a view would carry the whole storage with it
    return tensor


def dump(value: object, pickler: type[cloudpickle.Pickler]) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return buffer.getvalue()


def describe(error: BaseException, kind: str) -> Failure:
    """Turn an exception and its causes into plain text and frames; at the end what to do, where that is known."""
    chain, seen, hint = [], set(), _network.hint_for(error)
    while error is not None and id(error) not in seen and len(chain) < 4:
        seen.add(id(error))
        chain.insert(0, (frames_of(traceback.walk_tb(error.__traceback__)), message_of(error)))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if hint:
        chain.append(([], hint))
    return Failure(kind, time.monotonic(), chain)


def message_of(error: BaseException) -> str:
    """`ValueError: text` as Python prints it, cut to a readable length; safe for exceptions whose own str() fails."""
    lines = traceback.TracebackException(type(error), error, None).format_exception_only()
    text = "".join(lines).rstrip("\n")
    if len(text) > _MAX_MESSAGE_CHARS:
        text = f"{text[:_MAX_MESSAGE_CHARS]} ... ({len(text):,} characters in all)"
    return text


def frames_of(walk) -> list[Frame]:
    """Frames outermost first, without this file's own; of an endless recursion the two ends."""
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk]
    frames = [frame for frame in frames if frame[0] != __file__]
    if len(frames) > _MAX_FRAMES:
        frames = frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]
    return frames


def tensors_in(stack: list[tuple[types.FrameType, int]]) -> str:
    """What the call of torch.distributed that a stack stands in was given: `float32[2, 16]`; "" without such a call."""
    calls = [frame for frame, _ in stack if frame.f_code.co_filename == distributed_c10d.__file__]
    if not calls:
        return ""
    outermost = calls[-1]
    given = [outermost.f_locals.get(name) for name in outermost.f_code.co_varnames[: outermost.f_code.co_argcount]]
    return ", ".join(filter(None, map(tensor_text, given)))


def tensor_text(given: object) -> str:
    """Dtype and shape of a tensor or of each tensor in a list; "" for anything else."""
    if isinstance(given, list | tuple):
        texts = [tensor_text(one) for one in given]
        return f"{len(texts)} x {texts[0]}" if len(set(texts)) == 1 and texts[0] else ", ".join(filter(None, texts))
    if not isinstance(given, torch.Tensor):
        return ""
    return f"{str(given.dtype).removeprefix('torch.')}{list(given.shape)}"
