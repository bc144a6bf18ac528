"""One line each: the largest number of bytes alive in a step, as PyTorch counts it, and what it is made of.

`step` is a function without arguments that trains once; it may run more than once.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker  # not public yet: its place may change
from torch.profiler import profile

from course_lib.config import preset
from course_lib.measure import MemoryTracker
from course_lib.validate import checked

CONFIG = replace(preset("mini"), name="small", d_model=128, num_heads=4, num_kv_heads=2, d_ff=320)


@checked
def peak_by_torch(step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Run a step under PyTorch's own tracker and return its peak in bytes, on the model's device."""
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    device = next(model.parameters()).device
    return tracker.get_tracker_snapshot("peak")[device]["Total"]


@checked
def kinds_at_peak(step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Run a step and return the bytes of each kind at its peak, without those that are zero."""
    with MemoryTracker(model, optimizer) as tracker:
        step()
    return {kind: nbytes for kind, nbytes in tracker.peak_by_kind.items() if nbytes}


@checked
def peak_of_trace(trace: profile) -> int:
    """Return the largest sum of allocations and releases on the CPU that a profile recorded, from its start on.

    Raises   ValueError if the profile recorded no memory
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=_moment) if event["name"] == "[memory]"]
    if not changes:
        raise ValueError("the profile has no memory events; record it with profile(..., profile_memory=True)")
    return max(accumulate(changes))


def _moment(event: dict) -> float:
    return event.get("ts", 0)
