"""What a rank says of each step: its speed, its memory, and where the seconds of the step went.

    forward_s, backward_s     computing; W of a split backward counts as backward; waits for other ranks are left out
    optimizer_s, data_s       the optimizer's update; making the micro-batches
    communication_s           waits for other ranks, wherever in the step: exposed communication (measure/waits.py)
    seconds                   the whole step; what is missing to it is copying into buckets, clipping, and the rest

Forward, backward and optimizer are what `health.slowest_rank` wants: what a rank does alone.

On a GPU kernels run on after the program has started them, and to wait for each would end the overlap that is to be
seen. There all parts lie between events of the GPU's stream. They are read at the end of the step, where the trainer
waits for the loss anyway: no event costs a wait of its own.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from course_lib.config import ModelConfig
from course_lib.devices import peak_memory_bytes
from course_lib.flops import flops_per_token
from course_lib.hardware import gpu_of_device
from course_lib.measure.storages import replaced
from course_lib.measure.trace import calls_of, trace_step
from course_lib.measure.waits import own_seconds, record_waits
from course_lib.parallel import engine as of_engines
from course_lib.parallel import five_d
from course_lib.parallel.executor import Executor
from course_lib.span import COMPUTE, Span
from course_lib.train.plan import Logs
from course_lib.training import data, wait_for

Result = TypeVar("Result")

_PART_OF = {"F": "forward_s", "B": "backward_s", "I": "backward_s", "W": "backward_s"}  # as schedules name them
_CLOCKED = (  # what is called, and the name of its span
    (Executor, "compute", lambda executor, one, came: str(one)),
    (of_engines, "update", "optimizer"),
    (data, "batch", "data"),
)
PARTS = ("forward_s", "backward_s", "optimizer_s", "data_s", "communication_s")


@contextmanager
def clock_step(device: torch.device, in_parts: bool) -> Iterator[dict[str, float]]:
    """Give a dictionary that has, when the step is done, its `seconds`; with in_parts each of PARTS as well."""
    measured: dict[str, float] = {}
    with record_waits(on_gpu=in_parts and device.type == "cuda") as waits, ExitStack() as stack:
        spans = type(waits)()
        for owner, name, label in _CLOCKED if in_parts else ():
            stack.enter_context(replaced(owner, name, partial(spans.around, COMPUTE, label)))
        start, start_s = spans.now(), time.perf_counter()
        yield measured
        wait_for(device)
        measured["seconds"] = time.perf_counter() - start_s
    if in_parts:
        measured |= parts_of(spans.in_seconds(start), waits.in_seconds(start))


def parts_of(spans: Sequence[Span], waits: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each of PARTS: of computing without the waits in it, and of all waits."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for span in spans:
        seconds[_PART_OF.get(span.name[0], f"{span.name}_s")] += own_seconds(span, waits)
    seconds["communication_s"] = sum(wait.seconds for wait in waits)
    return seconds


def speed_of(config: ModelConfig, seq_len: int, tokens: float, seconds: float, peak: float | None) -> dict:
    """Return the tokens per second of this rank's share of a step, and which share of the peak that is.
    tokens   of a step, divided by the ranks
    peak     in FLOP/s; None where nobody knows it
    """
    tokens_per_s = tokens / seconds
    mfu = flops_per_token(config, seq_len) * tokens_per_s / peak if peak else None
    return {"tokens_per_s_per_rank": tokens_per_s, "mfu": mfu}


def peak_flops_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s that MFU is a share of: the dense peak of this GPU, None of one that is not known or a CPU."""
    known = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known and (known.bf16_flops if dtype == torch.bfloat16 else known.fp32_flops)


def memory_of(device: torch.device) -> dict[str, int]:
    """Return the bytes that are held now, and the most so far: of a GPU's allocator, else of this process."""
    on_gpu = device.type == "cuda"
    held = torch.cuda.memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
    return {"memory_bytes": held, "peak_memory_bytes": peak_memory_bytes(device)}


def trace_problem(logs: Logs | None, first_step: int) -> str | None:
    """Why a run that begins with this step cannot record the one that it should; None if it can."""
    if logs is None or logs.trace is None or logs.trace > first_step:
        return None
    return f"step {logs.trace} is not recorded: this run begins at step {first_step}; name a later one"


class StepTrace:
    """Runs the steps of a rank, and records the one of `logs.trace`: FOLDER/trace/rank0.json.gz, which Perfetto opens.

    `measure.trace.read_traces(FOLDER / "trace")` reads them, and its `seconds_of` adds them up. The step before counts
    the collectives: the first step of a run has no trace. The recorded step's seconds in the log have the profiler's.
    """

    def __init__(self, engine: five_d.FiveD, logs: Logs | None):
        self.step = logs.trace if logs else None
        self.axes, self.calls = engine.axes, None
        if self.step is not None:
            self.path = Path(logs.folder) / "trace" / f"rank{dist.get_rank()}.json.gz"

    def run(self, step: int, work: Callable[[], Result]) -> Result:
        """Do the work of a step and return its result."""
        done: list[Result] = []
        if self.step is not None and step == self.step - 1:
            self.calls = calls_of(lambda: done.append(work()), self.axes)
        elif step == self.step and self.calls is not None:
            trace_step(self.path, lambda: done.append(work()), self.calls)
        return done[0] if done else work()
