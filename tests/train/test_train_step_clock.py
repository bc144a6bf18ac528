"""What a rank's log says of a step: every number is that of the run, and the parts are parts of the whole."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import EXHAUSTIVE

from course_lib.config import preset
from course_lib.flops import flops_per_token
from course_lib.launch import RankError, launch
from course_lib.measure.waits import StreamSpans
from course_lib.parallel import engine as engines
from course_lib.span import Span
from course_lib.train import Logs, TrainPlan, health, trainer, watch
from course_lib.train import log as train_log
from course_lib.train.options import layout_for
from course_lib.train.step_clock import PARTS, parts_of, peak_flops_of

MODEL = replace(preset("toy"), num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8)
PLAN = TrainPlan(steps=3, seq_len=32, seed=3)
LAYOUT = layout_for("dp=2,pp=2,zero_stage=1", 8)


def train_logged(folder: str, layout=LAYOUT, slow: int | None = None) -> list[tuple[float, float]]:
    """Train, with every module of one rank slower; return the losses and norms that the engine gave."""
    found, original = [], engines.measured_step

    def step(*arguments):
        numbers = original(*arguments)
        found.append((numbers.loss.item(), numbers.norm.item()))
        return numbers

    engines.measured_step, trainer.peak_flops_of = step, lambda *_: 1e10
    if dist.get_rank() == slow:
        torch.nn.modules.module.register_module_forward_hook(lambda *_: time.sleep(0.01))
    trainer.train(MODEL, layout, PLAN, None, Logs(folder), trainer.ignore)
    return found


def lines_of(folder, rank: int) -> list[dict]:
    return [line for line in train_log.read(train_log.log_path(folder, rank)) if "loss" in line]


def test_each_rank_has_a_line_for_each_step_with_the_numbers_of_the_run(tmp_path):
    of_ranks = launch(train_logged, 4, str(tmp_path))
    for rank, found in enumerate(of_ranks):
        events = [line["event"] for line in train_log.read(train_log.log_path(tmp_path, rank)) if "event" in line]
        lines = lines_of(tmp_path, rank)
        assert events == ["start", "end"] and [line["step"] for line in lines] == [0, 1, 2]
        assert [(line["loss"], line["grad_norm"]) for line in lines] == found
        for line in lines:
            tokens_per_s = 8 * 32 / 4 / line["seconds"]
            assert line["tokens_per_s_per_rank"] == pytest.approx(tokens_per_s)
            assert line["mfu"] == pytest.approx(flops_per_token(MODEL, 32) * tokens_per_s / 1e10)
            assert 0 < line["memory_bytes"] <= line["peak_memory_bytes"] * 1.01
            assert all(line[part] > 0 for part in PARTS) and sum(line[part] for part in PARTS) <= line["seconds"]


def test_a_slow_rank_is_slow_in_its_own_seconds_and_all_others_wait_for_it(tmp_path):
    launch(train_logged, 3, str(tmp_path), layout_for("dp=3", 6), 1)
    lines = [lines_of(tmp_path, rank) for rank in range(3)]
    forward = [[line["forward_s"] for line in of_rank] for of_rank in lines]
    assert health.slowest_rank(forward, factor=2.0) == 1
    whole = [[line["seconds"] for line in of_rank] for of_rank in lines]
    assert health.slowest_rank(whole, factor=1.5) is None
    waited = [sum(line["communication_s"] for line in of_rank) for of_rank in lines]
    assert waited.index(min(waited)) == 1


class Event:
    """Of a GPU that computes at once: the host's moment. It may be read once the step's end was waited for."""

    steps_ended = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at_s, self.step = time.perf_counter(), Event.steps_ended

    def elapsed_time(self, later: "Event") -> float:
        assert Event.steps_ended > later.step, "read before the GPU has passed it"
        return 1e3 * (later.at_s - self.at_s)


def end_step(device) -> None:
    Event.steps_ended += 1


def train_as_on_a_gpu(folder: str, layout, slow: int | None) -> int:
    """Train with stubs of CUDA's events. As with NCCL, a synchronous collective leaves no Work to wait for.

    Return how often the GPU was waited for.
    """
    all_reduce, clock = dist.ProcessGroup.allreduce, trainer.clock_step

    def on_current_stream(group, tensors, options):
        work = all_reduce(group, tensors, options)
        return work if options.asyncOp else work.get_future().wait() and None

    dist.ProcessGroup.allreduce = on_current_stream
    torch.cuda.Event, torch.cuda.synchronize = Event, end_step
    trainer.clock_step = lambda device, in_parts: clock(torch.device("cuda"), in_parts)
    train_logged(folder, layout, slow)
    return Event.steps_ended


@pytest.mark.parametrize(
    "layout", ["dp=2,pp=2,zero_stage=1", *(pytest.param(one, marks=EXHAUSTIVE) for one in ("dp=3", "tp=2"))]
)
def test_on_a_gpu_events_name_the_slow_rank_and_cost_no_wait(tmp_path, layout):
    layout = layout_for(layout, 12)
    waits = launch(train_as_on_a_gpu, layout.world_size, str(tmp_path), layout, 1)
    assert set(waits) == {PLAN.steps}, "one a step, at its end"
    assert watch.look(tmp_path).finding.startswith("rank 1 is slow: ")
    for rank in range(layout.world_size):
        for line in lines_of(tmp_path, rank):
            assert all(line[part] > 0 for part in PARTS) and sum(line[part] for part in PARTS) <= line["seconds"]


def test_on_a_gpu_the_seconds_are_those_of_the_events():
    moments = iter([0.0, 1.0, 4.0, 2.0, 3.0])

    class Planned(Event):
        def record(self):
            self.at_s, self.step = next(moments), -1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Planned)
        patch.setattr(dist, "get_rank", lambda: 0)
        computing, waits = StreamSpans(), StreamSpans()
        start = computing.now()
        computing.around("compute", "F0@0", lambda: None)()
        waits.around("communication", "wait", lambda: None)()
        parts = parts_of(computing.in_seconds(start), waits.in_seconds(start))
    assert parts == {
        "forward_s": 2.0, "backward_s": 0.0, "optimizer_s": 0.0, "data_s": 0.0, "communication_s": 1.0
    }  # fmt: skip


def failing(folder: str) -> None:
    original = engines.measured_step
    engines.measured_step = lambda *arguments: original(*arguments)._replace(loss=torch.tensor(float("nan")))
    trainer.train(MODEL, layout_for("dp=1", 2), PLAN, None, Logs(folder), trainer.ignore)


def test_a_run_that_fails_says_so_in_its_last_line(tmp_path):
    with pytest.raises(RankError):
        launch(failing, 1, str(tmp_path))
    last = train_log.read(train_log.log_path(tmp_path))[-1]
    assert last["event"] == "error" and last["text"].startswith("FloatingPointError: the loss of step 0 is nan")


def test_parts_are_added_up_by_what_was_done_and_waits_belong_to_communication():
    names = ("data", "F0@1", "B0@1", "I1@1", "W1@1", "optimizer")
    spans = [Span(0, "compute", name, float(start), start + 1.0) for start, name in enumerate(names)]
    waits = [Span(0, "communication", "wait", 1.5, 1.75), Span(0, "communication", "wait", 6.0, 8.0)]
    assert parts_of(spans, waits) == {
        "forward_s": 0.75, "backward_s": 3.0, "optimizer_s": 1.0, "data_s": 1.0, "communication_s": 2.25
    }  # fmt: skip


def test_the_peak_is_the_gpus_and_a_cpu_has_none(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert peak_flops_of(cpu, torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops_of(gpu, torch.bfloat16) == 989e12


def test_a_run_without_a_log_has_the_same_losses(tmp_path):
    with_log = launch(train_logged, 4, str(tmp_path))[0]
    record = launch(trainer.train, 4, MODEL, LAYOUT, PLAN, quiet=True)[0]
    assert record.losses == [loss for loss, _ in with_log]
