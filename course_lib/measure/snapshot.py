"""Memory snapshots in PyTorch's format, which pytorch.org/memory_viz draws: written on a CPU, read anywhere.

On a GPU PyTorch writes them: torch.cuda.memory._record_memory_history(), then _snapshot() or _dump_snapshot(path).
"""

from collections import Counter

from course_lib.measure.tracker import MemoryTracker

ALLOCATION, RELEASE = "alloc", "free_completed"


def snapshot_of(tracker: MemoryTracker) -> dict:
    """Return what a tracker recorded as a snapshot; the frame of an allocation names its kind.

    What was alive at the start comes first, one allocation for each storage that is released later and one for the
    rest of each kind.
    """
    trace = [
        {
            "action": ALLOCATION if change > 0 else RELEASE,
            "addr": 512 * (number + 1),
            "size": abs(change),
            "stream": 0,
            "frames": [{"name": kind, "filename": "tracker", "line": 0}],
        }
        for number, kind, change in tracker.recorded_changes()
    ]
    return {"segments": [], "device_traces": [trace]}


def peak_of_snapshot(snapshot: dict) -> dict[str, int]:
    """Return the bytes of each first frame at the highest moment of a snapshot's trace, of its first device.

    Raises   ValueError if the snapshot has no such trace
    """
    trace = next(iter(snapshot.get("device_traces", [])), None)
    if not trace:
        raise ValueError("the snapshot has no trace of a device; record the history before the steps")
    names, alive, total, peak, found = {}, Counter(), 0, 0, {}
    for event in trace:
        if event["action"] == ALLOCATION:
            names[event["addr"]] = event["frames"][0]["name"] if event.get("frames") else "unknown"
        elif event["action"] != RELEASE or event["addr"] not in names:
            continue  # segments of the driver, requests to free, what was there before the history
        change = event["size"] if event["action"] == ALLOCATION else -event["size"]
        alive[names[event["addr"]]] += change
        total += change
        if total > peak:
            peak, found = total, dict(alive)
    return {name: nbytes for name, nbytes in found.items() if nbytes}
