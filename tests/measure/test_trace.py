"""Traces written by hand, whose seconds are known; and real ones of four ranks."""

import gzip
import json

import pytest

from course_lib.compare.step_traces import trace_ranks
from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.measure.trace import HEADING, STEP, lines_of, read_trace, read_traces, seconds_of
from course_lib.span import COMPUTE

ABOUT = {"rank": 1, "calls": [], "axis_of_group": {"11": "tp", "5": "dp"}}


def event(cat: str, name: str, start_us: float, stop_us: float, tid: int = 1, **args) -> dict:
    dur = stop_us - start_us
    return {"ph": "X", "cat": cat, "name": name, "ts": 1000 + start_us, "dur": dur, "tid": tid, "args": args}


def write(path, events, about=ABOUT):
    step = event("user_annotation", STEP, 0, 30)
    text = json.dumps({"course": about, "traceEvents": [{"ph": "M", "name": "process_name"}, step, *events]})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def us(seconds: dict | float):
    """Microseconds, rounded as the hand has them."""
    return {key: us(x) for key, x in seconds.items()} if isinstance(seconds, dict) else round(seconds * 1e6, 6)


def test_kernels_on_two_streams_give_the_seconds_known_by_hand(tmp_path):
    """Compute 0-10 and 12-20; tp 5-15, of which 10-12 is exposed; dp 20-24, all of it; a copy 24-25; nothing 25-30."""
    nccl = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
    events = [
        event("kernel", "gemm", 0, 10, tid=7),
        event("kernel", "gemm", 12, 20, tid=7),
        event("kernel", nccl, 5, 15, tid=20, **{"Process Group Name": "11"}),
        event("kernel", nccl, 20, 24, tid=21, **{"Process Group Name": "5"}),
        event("gpu_memcpy", "Memcpy DtoH", 24, 25, tid=7),
        event("cpu_op", "aten::mm", 0, 29),  # the host runs ahead, and counts for nothing
    ]
    trace = read_trace(write(tmp_path / "rank1.json.gz", events))
    seconds = seconds_of(trace)
    assert (trace.device, trace.rank, us(seconds.step_s)) == ("cuda", 1, 30)
    assert us(seconds.compute_s) == 19
    assert us(seconds.communication_s) == {"tp": 10, "dp": 4}
    assert us(seconds.exposed_s) == {"tp": 2, "dp": 4}
    assert us(seconds.neither_s) == 5


def test_kernels_of_a_group_without_an_axis_are_other(tmp_path):
    trace = read_trace(write(tmp_path / "a.json", [event("kernel", "ncclDevKernel_SendRecv", 0, 3)]))
    assert us(seconds_of(trace).exposed_s) == {"other": 3}


CALLS = [["tp", "all_reduce", 64], ["dp", "all_reduce", 32], ["pp", "send", 16]]
CPU = [
    event("cpu_op", "aten::linear", 0, 6),  # calls the next, which is not counted again
    event("cpu_op", "aten::addmm", 1, 5),
    event("cpu_op", "autograd::engine::evaluate_function: FBackward", 13, 19),  # contains a collective and its wait
    event("cpu_op", "FBackward", 13.5, 19),
    event("cpu_op", "torch::autograd::AccumulateGrad", 13.6, 18),  # its hooks send
    event("cpu_op", "c10d::allreduce_", 6, 7),
    event("user_annotation", "gloo:all_reduce", 6.5, 12, tid=90),
    event("cpu_op", "aten::mul", 8, 10),
    event("cpu_op", "c10d::allreduce_", 14, 15),
    event("user_annotation", "gloo:all_reduce", 15, 18, tid=91),
    event("cpu_op", "c10d::send", 20, 21),
    event("user_annotation", "gloo:send", 20.5, 23),
]


def test_collectives_of_gloo_are_named_by_the_order_of_calls(tmp_path):
    """Compute 0-6 and 8-10; tp 6-12 without 8-10; dp 14-18; pp 20-23."""
    trace = read_trace(write(tmp_path / "rank1.json", CPU, ABOUT | {"calls": CALLS}))
    seconds = seconds_of(trace)
    assert [span.name for span in trace.lane(COMPUTE)] == ["aten::linear", "aten::mul"]
    assert (us(seconds.compute_s), trace.axes) == (8, ["tp", "dp", "pp"])
    assert us(seconds.communication_s) == {"tp": 6, "dp": 4, "pp": 3}
    assert us(seconds.exposed_s) == {"tp": 4, "dp": 4, "pp": 3}
    assert us(seconds.neither_s) == 30 - 8 - 11
    sent = [span.name for span in trace.spans if span.lane != COMPUTE]
    assert sent == ["all_reduce 64 B", "all_reduce 32 B", "send 16 B"]


def test_a_trace_is_told_line_by_line(tmp_path):
    lines = lines_of(read_trace(write(tmp_path / "rank1.json", CPU, ABOUT | {"calls": CALLS})))
    assert [(line.lane, line.text) for line in lines] == [
        (COMPUTE, "1 operator, longest linear"),
        ("tp", "all_reduce 64 B"),
        (COMPUTE, "1 operator, longest mul"),
        ("dp", "all_reduce 32 B"),
        ("pp", "send 16 B"),
    ]
    assert [us(line.exposed_s) for line in lines] == [0, 4, 0, 4, 3]
    assert [us(line.busy_s) for line in lines] == [6, 6, 2, 4, 3]
    assert max(len(str(line)) for line in lines) <= 100 and len(HEADING) <= 100


def test_two_axes_that_begin_at_once_are_told_apart_by_their_threads(tmp_path):
    """dp's thread begins before tp's, which was called first: what else the threads did says whose they are."""
    calls = [["tp", "all_reduce", 1], ["dp", "all_reduce", 2]] * 3
    events = []
    for index, (tp_us, dp_us) in enumerate([(1, 2), (1, 2), (2, 1)]):  # the last pair the other way round
        at = 10 * index
        events += [event("cpu_op", "c10d::allreduce_", at + 0.1, at + 0.2)]
        events += [event("cpu_op", "c10d::allreduce_", at + 0.3, at + 0.4)]
        events += [event("user_annotation", "gloo:all_reduce", at + tp_us, at + 5, tid=90)]
        events += [event("user_annotation", "gloo:all_reduce", at + dp_us, at + 9, tid=91)]
    seconds = seconds_of(read_trace(write(tmp_path / "a.json", events, ABOUT | {"calls": calls})))
    assert us(seconds.communication_s) == {"tp": us(3 * 4.9e-6), "dp": us(3 * 8.7e-6)}


def test_a_thread_whose_records_mostly_began_out_of_order_is_told_by_how_many_an_axis_has(tmp_path):
    """tp calls three times, dp once; dp's one began behind tp's last, so its place in the order says tp."""
    calls = [["tp", "all_reduce", 1], ["tp", "all_reduce", 1], ["dp", "all_reduce", 2], ["tp", "all_reduce", 1]]
    begun = [(1, 90), (11, 90), (22, 91), (21, 90)]
    events = [event("cpu_op", "c10d::allreduce_", 10 * index + 0.1, 10 * index + 0.2) for index in range(2)]
    events += [event("cpu_op", "c10d::allreduce_", at, at + 0.1) for at in (20.1, 20.3)]
    events += [event("user_annotation", "gloo:all_reduce", at, 29, tid=thread) for at, thread in begun]
    trace = read_trace(write(tmp_path / "a.json", events, ABOUT | {"calls": calls}))
    assert [(span.lane, span.name) for span in trace.spans if span.lane != COMPUTE][2:] == [
        ("dp", "all_reduce 2 B"),
        ("tp", "all_reduce 1 B"),
    ]


def test_two_axes_that_wait_at_once_are_counted_once(tmp_path):
    events = [
        event("kernel", "ncclKernel", 0, 10, tid=20, **{"Process Group Name": "11"}),
        event("kernel", "ncclKernel", 4, 16, tid=21, **{"Process Group Name": "5"}),
    ]
    seconds = seconds_of(read_trace(write(tmp_path / "a.json", events)))
    assert us(seconds.exposed_s) == {"tp": 10, "dp": 6} and us(seconds.neither_s) == 14


def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path):
    for name, raw in [("a.json", b"{}"), ("b.json", b"torn"), ("c.json.gz", b"\x1f\x8btorn"), ("d.json", b"[1]")]:
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(ValueError, match="is no trace that trace_step wrote"):
            read_trace(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(ValueError, match="has no traces"):
        read_traces(tmp_path / "none")
    with pytest.raises(ValueError, match="has 3 collectives, of which gloo did 3, and 2 were counted"):
        read_trace(write(tmp_path / "e.json", CPU, ABOUT | {"calls": CALLS[:2]}))
    twice = tmp_path / "twice"
    twice.mkdir()
    write(twice / "a.json", [])
    write(twice / "b.json", [])
    with pytest.raises(ValueError, match="several traces of rank 1"):
        read_traces(twice)


@pytest.mark.launches
def test_a_rank_that_sleeps_in_forward_is_the_one_that_neither_computes_nor_sends(tmp_path):
    traces = trace_ranks(preset("toy"), Layout.parse("dp=2"), tmp_path, seq_len=32, slow={1: 0.05})
    assert seconds_of(traces[1]).neither_s >= 0.05
    with pytest.raises(ValueError, match="one machine traces at most 16"):
        trace_ranks(preset("toy"), Layout.parse("dp=32"), tmp_path)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("dp=2,tp=2", {"world", "tp", "data"}),
        pytest.param("pp=2,cp=2,micro_batches=2", {"world", "pp", "cp", "data"}, marks=pytest.mark.exhaustive),
        pytest.param("dp=4,zero_stage=3", {"world", "data"}, marks=pytest.mark.exhaustive),
    ],
)
def test_real_traces_of_four_ranks_add_up(tmp_path, layout, axes):
    traces = trace_ranks(preset("toy"), Layout.parse(layout), tmp_path, seq_len=32)
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    for trace in traces:
        seconds = seconds_of(trace)
        assert set(trace.axes) == axes and trace.device == "cpu"
        parts = [seconds.compute_s, seconds.neither_s, *seconds.exposed_s.values()]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(seconds.step_s)
        assert all(seconds.exposed_s[axis] <= seconds.communication_s[axis] + 1e-9 for axis in axes)
        assert seconds.compute_s > 0 and sum(seconds.exposed_s.values()) > 0
    lanes = [[span.lane for span in trace.spans if span.lane != COMPUTE] for trace in traces]
    assert lanes[0] == lanes[1] or "pp" in axes  # pipeline stages send one after the other
