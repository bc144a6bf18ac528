"""A step of each rank under torch.profiler, as Chrome traces, and the seconds in them: computing, sending, waiting.

    calls = calls_of(step, engine.axes)                # which axis each collective belongs to: a step of its own
    trace_step(folder / "rank0.json.gz", step, calls)  # one step more, recorded; Perfetto and chrome://tracing open it
    trace = read_trace(folder / "rank0.json.gz")       # JSON alone: nothing in the file is run
    seconds = seconds_of(trace)                        # computing, and communication with its exposed part by axis

A profiler knows operators and kernels, and no mesh. On a GPU a NCCL kernel carries the name of its process group.
Gloo's records carry none: there the k-th collective of the trace is the k-th that the meter saw in a step before, which
a training step repeats in the same order. Both are in the trace under "course".

    on a GPU     compute: kernels and copies; communication: NCCL's kernels, on streams of their own
    on a CPU     compute: operators of the threads that train; communication: from a call until gloo has done it

Communication is exposed while nothing computes on the same rank. A rank that waits for a slower one communicates, too:
the collective of the fast rank lasts longer, and its exposed seconds say how much. On a CPU gloo's threads and the
operators share the cores: what runs at the same time is hidden, and still slows down the computation. There the time
that Python needs between two operators is exposed while a collective is under way, and otherwise "neither".
"""

import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from course_lib.measure.meter import OTHER_AXIS, ByteMeter
from course_lib.span import COMPUTE, Span, busy
from course_lib.validate import checked

STEP = "course: step"  # the name of the recorded step
_OPERATORS, _GLOO = ("c10d::", "_c10d_functional::"), "gloo:"
_WRAPPERS = (*_OPERATORS, "autograd::", "torch::autograd::", "profiler::")  # they contain Python, or wait
_ONE_TO_ONE = ("gloo:send", "gloo:recv")  # recorded by the thread that calls; collectives by a thread of gloo's
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_US = 1e-6  # Chrome's traces count microseconds


@dataclass(frozen=True)
class RankTrace:
    """What a rank was busy with in a step; times count from its begin. A lane is "compute", or an axis."""

    rank: int
    spans: tuple[Span, ...]
    step_s: float
    device: str

    @property
    def axes(self) -> list[str]:
        """Axes with communication, in the order of their first collective."""
        return list(dict.fromkeys(span.lane for span in self.spans if span.lane != COMPUTE))

    def lane(self, *lanes: str) -> list[Span]:
        return [span for span in self.spans if span.lane in lanes]


@dataclass(frozen=True)
class RankSeconds:
    """The seconds of a rank's step: compute_s + all of exposed_s + neither_s = step_s.

    communication_s   by axis, hidden or not
    exposed_s         by axis: nothing computes meanwhile. While two axes wait, the one that sends first in the step
    """

    rank: int
    step_s: float
    compute_s: float
    communication_s: dict[str, float]
    exposed_s: dict[str, float]
    neither_s: float


# --- record
def calls_of(step: Callable[[], object], axes: Mapping[str, Sequence[dist.ProcessGroup]]) -> dict:
    """Run a step; return its `calls` in order, each [axis, collective, bytes sent], and `axis_of_group`.

    axes   as `engine.axes` has them
    """
    with ByteMeter(axes=axes) as meter:
        step()
    calls = [[record.axis or OTHER_AXIS, record.collective, record.sent_bytes] for record in meter.records]
    return {"calls": calls, "axis_of_group": meter.axis_of_group}


def trace_step(path: str | Path, step: Callable[[], object], calls: Mapping) -> Path:
    """Run a step under torch.profiler and write its Chrome trace, compressed if the path ends in .gz."""
    path, on_gpu = Path(path), torch.cuda.is_initialized()
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        with record_function(STEP):
            step()
            if on_gpu:
                torch.cuda.synchronize()
        profiler.add_metadata_json("course", json.dumps({"rank": dist.get_rank(), **calls}))
    profiler.export_chrome_trace(str(path))
    return path


# --- read
def read_trace(path: str | Path) -> RankTrace:
    """Read the trace of a rank that `trace_step` wrote.

    Raises   ValueError if the file is no such trace, or its collectives are not those that were counted
    """
    found = _load(Path(path))
    about, events = found["course"], [event for event in found["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event["name"] == STEP and event.get("cat") == "user_annotation"]
    if len(steps) != 1:
        raise ValueError(f"{path} has {len(steps)} recorded steps; give a file that trace_step wrote")
    begin_us, on_gpu = steps[0]["ts"], any(event.get("cat") in _ON_GPU for event in events)
    bars = _gpu_bars(events, about) if on_gpu else _cpu_bars(events, about, Path(path))
    step_s = steps[0]["dur"] * _US
    spans = []
    for lane, name, start_us, stop_us in sorted(bars, key=lambda bar: bar[2:]):
        start_s, stop_s = max(0.0, (start_us - begin_us) * _US), min(step_s, (stop_us - begin_us) * _US)
        if stop_s > start_s:
            spans.append(Span(about["rank"], lane, name, start_s, stop_s))
    return RankTrace(about["rank"], tuple(spans), step_s, "cuda" if on_gpu else "cpu")


def read_traces(folder: str | Path) -> list[RankTrace]:
    """Read the traces of all ranks in a folder, in the order of their ranks.

    Raises   ValueError if there is none, or two are of one rank
    """
    paths = sorted(Path(folder).glob("*.json*"))
    if not paths:
        raise ValueError(f"{folder} has no traces; give a folder with a .json or .json.gz file of each rank")
    traces = sorted(map(read_trace, paths), key=lambda trace: trace.rank)
    for trace, following in pairwise(traces):
        if trace.rank == following.rank:
            raise ValueError(f"{folder} has several traces of rank {trace.rank}; give a folder with one of each")
    return traces


def _load(path: Path) -> dict:
    try:
        raw = path.read_bytes()
        found = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        found["course"]["rank"], found["course"]["calls"], found["course"]["axis_of_group"], found["traceEvents"]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}; give a trace") from None
    except (ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no trace that trace_step wrote ({error!r}); give one that is") from None
    return found


def _gpu_bars(events: list[dict], about: dict) -> list[tuple]:
    """(lane, name, start, stop) of all that ran on the GPU: a kernel of NCCL's says of which process group it is."""
    bars = []
    for event in (event for event in events if event.get("cat") in _ON_GPU):
        axis = about["axis_of_group"].get(event.get("args", {}).get("Process Group Name"), OTHER_AXIS)
        lane = axis if "nccl" in event["name"].lower() else COMPUTE
        bars.append((lane, event["name"], event["ts"], event["ts"] + event["dur"]))
    return bars


def _cpu_bars(events: list[dict], about: dict, path: Path) -> list[tuple]:
    """(lane, name, start, stop) of operators that no other calls, and of collectives from the call to gloo's end.

    Autograd's nodes are left out, and with them functions written in Python: those wait for collectives as well.
    """
    in_time = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    asked = [event for event in in_time if event["name"].startswith(_OPERATORS)]
    done = [event for event in in_time if event["name"].startswith(_GLOO)]
    calls = about["calls"]
    if not len(calls) == len(asked) == len(done):
        raise ValueError(
            f"{path} has {len(asked)} collectives, of which gloo did {len(done)}, and {len(calls)} were counted; trace "
            "a step that repeats what was counted"
        )
    bars = [
        (axis, f"{collective} {sent_bytes:,} B", ask["ts"], do["ts"] + do["dur"])
        for (axis, collective, sent_bytes), ask, do in _pairs(calls, asked, done)
    ]
    until_us: dict[int, float] = {}  # of each thread
    for event in in_time:
        is_compute = event.get("cat") == "cpu_op" and "::" in event["name"] and not event["name"].startswith(_WRAPPERS)
        if is_compute and event["ts"] >= until_us.get(event["tid"], 0.0):
            until_us[event["tid"]] = event["ts"] + event["dur"]
            bars.append((COMPUTE, event["name"], event["ts"], event["ts"] + event["dur"]))
    return bars


def _pairs(calls: list, asked: list[dict], done: list[dict]) -> list[tuple]:
    """(call, its operator, gloo's record of it).

    Each process group has threads of its own that take its collectives in order. To which axis a thread belongs most of
    its records say, paired as they began; two that began at nearly the same time on two axes are then told apart.
    """
    votes: dict[int, Counter] = defaultdict(Counter)
    for call, do in zip(calls, done, strict=True):
        if do["name"] not in _ONE_TO_ONE:
            votes[do["tid"]][call[0]] += 1
    needed = Counter(call[0] for call in calls if f"{_GLOO}{call[1]}" not in _ONE_TO_ONE)
    _, axis_of_thread = _most_votes(sorted(votes), votes, needed)
    waiting: dict[object, list[dict]] = defaultdict(list)
    for do in done:
        waiting[do["name"] if do["name"] in _ONE_TO_ONE else axis_of_thread.get(do["tid"])].append(do)
    pairs = []
    for call, ask in zip(calls, asked, strict=True):
        one_to_one = f"{_GLOO}{call[1]}"
        of_call = waiting[one_to_one if one_to_one in _ONE_TO_ONE else call[0]]
        if not of_call:
            raise ValueError(f"gloo has no record of a {call[1]} over {call[0]} that was counted; trace the step again")
        pairs.append((call, ask, of_call.pop(0)))
    return pairs


def _most_votes(threads: list[int], votes: dict[int, Counter], needed: Counter) -> tuple[int, dict[int, str]]:
    """(votes, thread -> axis): of the ways in which no axis gets more records than it has calls, the one most vote for.

    No votes and no threads where there is no such way.
    """
    if not threads:
        return 0, {}
    thread, best = threads[0], (-1, {})
    for axis in [axis for axis, left in needed.items() if left >= votes[thread].total()]:
        rest, axes = _most_votes(threads[1:], votes, needed - Counter({axis: votes[thread].total()}))
        if rest >= 0 and rest + votes[thread][axis] > best[0]:
            best = rest + votes[thread][axis], {thread: axis} | axes
    return best


# --- add up, and tell
@dataclass(frozen=True)
class Line:
    """A collective, or what was computed before the next one began: so many operators and the longest of them."""

    start_s: float
    lane: str
    text: str
    busy_s: float
    exposed_s: float

    def __str__(self) -> str:
        exposed = f"{self.exposed_s * 1e3:>9.2f}" if self.lane != COMPUTE else ""
        return f"{self.start_s * 1e3:>9.2f}  {self.lane:<10}{self.text:<46}{self.busy_s * 1e3:>9.2f}{exposed}"


HEADING = f"{'at ms':>9}  {'lane':<10}{'what':<46}{'busy ms':>9}{'exposed':>9}"  # of lines


@checked
def lines_of(trace: RankTrace) -> list[Line]:
    """Return a rank's step line by line: each collective, and between two that begin what is computed."""
    compute, lines, together = trace.lane(COMPUTE), [], []
    for span in trace.spans:
        if span.lane == COMPUTE:
            together.append(span)
            continue
        lines += _line_of(together)
        together = []
        at_once = [other for other in compute if other.start_s < span.stop_s and other.stop_s > span.start_s]
        exposed_s = busy([*at_once, span]) - busy(at_once)
        lines.append(Line(span.start_s, span.lane, span.name, span.seconds, exposed_s))
    return lines + _line_of(together)


def _line_of(spans: list[Span]) -> list[Line]:
    if not spans:
        return []
    longest = max(spans, key=lambda span: span.seconds).name
    text = f"{len(spans)} operator{'s' * (len(spans) > 1)}, longest {longest.removeprefix('aten::')}"
    return [Line(spans[0].start_s, COMPUTE, text[:45], busy(spans), 0.0)]


@checked
def seconds_of(trace: RankTrace) -> RankSeconds:
    """Add up a rank's seconds: computing, communication and its exposed part by axis, and neither."""
    covered, exposed_s = [COMPUTE], {}
    compute_s = covered_s = busy(trace.lane(COMPUTE))
    for axis in trace.axes:
        covered.append(axis)
        before_s, covered_s = covered_s, busy(trace.lane(*covered))
        exposed_s[axis] = covered_s - before_s
    communication_s = {axis: busy(trace.lane(axis)) for axis in trace.axes}
    return RankSeconds(trace.rank, trace.step_s, compute_s, communication_s, exposed_s, trace.step_s - covered_s)
