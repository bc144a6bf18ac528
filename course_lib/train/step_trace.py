"""One step of a run under the profiler, on every rank: FOLDER/trace/rank0.json.gz, which Perfetto opens.

`measure.trace.read_traces(FOLDER / "trace")` reads them, and its `seconds_of` adds them up. The step before counts the
collectives, so the first step of a run has no trace. The seconds of the recorded step in the log have the profiler's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from course_lib.measure.trace import calls_of, trace_step
from course_lib.parallel import five_d
from course_lib.train.plan import Logs

Result = TypeVar("Result")


def trace_problem(logs: Logs | None, first_step: int) -> str | None:
    """Why a run that begins with this step cannot record the one that it should; None if it can."""
    if logs is None or logs.trace is None or logs.trace > first_step:
        return None
    return f"step {logs.trace} is not recorded: this run begins at step {first_step}; name a later one"


class StepTrace:
    """Runs the steps of a rank, and records the one that `logs.trace` names."""

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
