"""A measurement as a snapshot has the tracker's peak to the byte, and PyTorch's own page draws it."""

import pytest
import torch
from torch.cuda import _memory_viz

from course_lib.config import preset
from course_lib.measure import MemoryTracker
from course_lib.measure.snapshot import peak_of_snapshot, snapshot_of
from course_lib.model import build
from course_lib.training import loss_of
from course_lib.training.data import batch, tokens


@pytest.fixture(scope="module")
def tracker():
    """One step of a model whose optimizer has its states, and whose gradients are there from the step before."""
    model = build(preset("toy"))
    optimizer = torch.optim.AdamW(model.parameters())
    text_T = tokens(20_000)

    def step(index):
        loss_of(model, *batch(text_T, index, 2, 32)).backward()
        optimizer.step()

    step(0)
    with MemoryTracker(model, optimizer) as tracker:
        step(1)
        optimizer.zero_grad()
    return tracker


def test_the_peak_of_a_snapshot_is_the_tracker_s_by_kind(tracker):
    found = peak_of_snapshot(snapshot_of(tracker))
    assert found == {kind: nbytes for kind, nbytes in tracker.peak_by_kind.items() if nbytes}


def test_what_is_left_is_what_the_tracker_counts_at_the_end(tracker):
    (trace,) = snapshot_of(tracker)["device_traces"]
    sizes = [event["size"] if event["action"] == "alloc" else -event["size"] for event in trace]
    assert sum(sizes) == tracker.total_bytes


def test_pytorch_draws_it(tracker):
    page = _memory_viz.trace_plot(snapshot_of(tracker))
    assert "Active Memory Timeline" in page and len(page) > 10_000


def test_a_release_of_what_was_not_recorded_and_a_segment_count_nothing():
    frames = [{"name": "forward", "filename": "train.py", "line": 3}]
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 2**21, "stream": 0, "frames": []},
        {"action": "free_completed", "addr": 7, "size": 512, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 512, "size": 1024, "stream": 0, "frames": frames},
        {"action": "free_requested", "addr": 512, "size": 1024, "stream": 0, "frames": []},
        {"action": "free_completed", "addr": 512, "size": 1024, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 512, "size": 512, "stream": 0},
    ]
    assert peak_of_snapshot({"device_traces": [trace]}) == {"forward": 1024}


def test_a_snapshot_without_a_history_is_refused():
    with pytest.raises(ValueError, match="record the history"):
        peak_of_snapshot({"device_traces": [[]]})
