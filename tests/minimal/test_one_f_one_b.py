"""The smallest pipeline equals one process and the engine: gradients, bytes, memory, times; planted bugs do not."""

from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from harness import sampled

from course_lib.checks.ch08.nccl_order import recorded_calls, replay
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal import compare_pipeline
from course_lib.minimal.compare_pipeline import (
    CONFIG,
    SEQ_LEN,
    SEQUENCES,
    busy_share,
    pipeline_difference,
    pipeline_kept,
    pipeline_peak_bytes,
    pipeline_sent,
    pipeline_trace,
)
from course_lib.minimal.one_f_one_b import PipelineRank, SplitRank, afab, naive, one_f_one_b
from course_lib.model import build
from course_lib.parallel import pipeline
from course_lib.schedules import from_lists, make, simulate
from course_lib.span import Span

launches = pytest.mark.launches
BUILDERS = {"naive": naive, "afab": afab, "1f1b": one_f_one_b}
BOUNDARY = SEQUENCES * SEQ_LEN * CONFIG.d_model  # elements of a message


def words_of(name, p, m):
    return [[f"{one.op}{one.micro_batch}" for one in row] for row in make(name, p, m).instructions]


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (2, 5), (4, 2), (4, 4), (4, 9), (7, 12)])
@pytest.mark.parametrize("name", BUILDERS)
def test_lists_are_those_of_the_package(name, p, m):
    assert BUILDERS[name](p, m) == words_of(name, p, m)


@launches
@pytest.mark.parametrize(("p", "m"), sampled([(1, 2), (2, 1), (2, 3), (4, 1), (4, 6)], 1, seed=3))
def test_gradients_of_every_list_are_those_of_one_process(p, m):
    for build_lists in BUILDERS.values():
        assert pipeline_difference(PipelineRank, build_lists(p, m)) < 1e-12


@launches
@pytest.mark.parametrize(("name", "p", "m"), [("zb_h1", 4, 6), ("zb_h2", 2, 5)])
def test_gradients_of_split_lists_are_those_of_one_process(name, p, m):
    assert pipeline_difference(SplitRank, words_of(name, p, m)) < 1e-12


def step_of_both(name, m):
    """Gradients and sent bytes of a step, minimal and engine."""
    group, parts, rank = dist.group.WORLD, compare_pipeline.micro_batches_of_step(m), dist.get_rank()
    rank_class = SplitRank if name.startswith("zb") else PipelineRank
    worker = rank_class(build(CONFIG, dtype=torch.float64), parts)
    with ByteMeter() as meter:
        worker.run(words_of(name, group.size(), m)[rank])
    engine = pipeline.build(build(CONFIG, dtype=torch.float64), group, name)
    with ByteMeter() as engine_meter:
        engine.run(parts)
    (engine_stage,) = engine.stages.values()
    both = dict(worker.stage.named_parameters()), dict(engine_stage.named_parameters())
    same_names = both[0].keys() == both[1].keys()
    worst = max((param.grad - both[1][key].grad).abs().max().item() for key, param in both[0].items())
    return same_names, worst, meter.sent_bytes, engine_meter.sent_bytes


@launches
@pytest.mark.parametrize(("name", "p"), sampled([*product(["afab", "1f1b", "zb_h1"], [2, 4])], 1))
def test_gradients_and_bytes_are_those_of_the_engine(name, p):
    for rank, (same_names, worst, sent, of_engine) in enumerate(launch(step_of_both, p, name, 4)):
        neighbours = (rank > 0) + (rank < p - 1)
        assert same_names and worst < 1e-12
        assert sent == of_engine == neighbours * 4 * BOUNDARY * 8


class StartsAlone(PipelineRank):
    """Sends and receives in calls of their own: right on gloo."""

    def start(self, *receive):
        messages, self.to_send = [*self.to_send, *receive], []
        self.works += [(message.op(message.tensor, message.peer), message) for message in messages]


def calls_of_steps(rank_class, lists_of_steps):
    """The calls that start messages on this rank, for each list."""
    recorded = []
    for lists, count in lists_of_steps:
        worker = rank_class(build(CONFIG), compare_pipeline.micro_batches_of_step(count))
        with recorded_calls() as calls:
            worker.run(lists[dist.get_rank()])
        recorded.append(calls)
    return recorded


@launches
def test_no_list_of_the_lesson_waits_for_ever_in_the_order_of_nccl():
    sizes = [(make_lists(4, m), m) for make_lists in BUILDERS.values() for m in (1, 2, 6)]
    split = [(words_of(name, 4, 6), 6) for name in ("zb_h1", "zb_h2")]
    for rank_class, steps in ((PipelineRank, sizes), (SplitRank, split)):
        for calls in zip(*launch(calls_of_steps, 4, rank_class, steps), strict=True):
            rounds, stuck = replay(calls)
            assert rounds > 1 and not stuck


@launches
def test_sends_and_receives_in_calls_of_their_own_wait_for_ever_in_the_order_of_nccl():
    (calls,) = zip(*launch(calls_of_steps, 2, StartsAlone, [(one_f_one_b(2, 3), 3)]), strict=True)
    assert replay(calls)[1] == "rank 0 stands at its send to rank 1, rank 1 stands at its send to rank 0"


@launches
def test_sent_bytes_follow_the_formula():
    assert pipeline_sent(PipelineRank, one_f_one_b(4, 3)) == [n * 3 * BOUNDARY * 2 for n in (1, 2, 2, 1)]


@pytest.mark.exhaustive
@launches
def test_kept_bytes_follow_the_micro_batches_in_flight():
    for build_lists in BUILDERS.values():
        lists = build_lists(4, 6)
        live = simulate(from_lists(lists)).peak_live
        kept = [peak / one for peak, one in pipeline_peak_bytes(PipelineRank, lists)]
        assert kept == pytest.approx(live, abs=0.35)
    assert pipeline_kept(SplitRank, words_of("zb_h1", 4, 6)) == [4, 4, 4, 4]  # those that wait for W, too


def test_the_busy_share_counts_all_ranks():
    traces = [[Span(0, "compute", "F0@0", 1.0, 3.0)], [Span(1, "compute", "F0@1", 3.0, 4.0)]]
    assert busy_share(traces) == 3.0 / (2 * 3.0)
    with pytest.raises(ValueError, match="one has no span"):
        busy_share([[], traces[1]])


@launches
def test_a_trace_has_each_instruction_in_its_order_and_no_waiting():
    traces = pipeline_trace(PipelineRank, naive(2, 2), runs=3)
    assert [[span.name for span in of_rank] for of_rank in traces] == [
        [f"{word}@{rank}" for word in ("F0", "B0", "F1", "B1")] for rank in range(2)
    ]
    assert all(a.stop_s <= b.start_s for of_rank in traces for a, b in pairwise(of_rank))
    assert traces[0][0].stop_s <= traces[1][0].stop_s <= traces[0][1].stop_s  # F0@0, F0@1, B0@0


class NotDivided(PipelineRank):
    """The sum of the losses where the mean belongs."""

    def F(self, i):
        super().F(i)
        x, out = self.in_flight[i]
        self.in_flight[i] = (x, out * len(self.micro_batches)) if self.rank == self.last else (x, out)


class OldestLast(PipelineRank):
    """Takes any micro-batch that is in flight: gradients meet the wrong activations."""

    def B(self, i):
        newest = max(self.in_flight)
        self.in_flight[i], self.in_flight[newest] = self.in_flight[newest], self.in_flight[i]
        super().B(i)


class WTwice(SplitRank):
    """I leaves gradients of the weights, and W adds them again."""

    def I(self, i):
        super().I(i)
        out, grad = self.in_flight["W", i]
        torch.autograd.backward(out, grad, inputs=list(self.stage.parameters()), retain_graph=True)


@launches
@pytest.mark.parametrize(
    ("wrong", "lists"),
    [(NotDivided, afab(2, 3)), (OldestLast, one_f_one_b(4, 4)), (WTwice, words_of("zb_h1", 2, 3))],
)
def test_a_planted_bug_differs_from_one_process(wrong, lists):
    assert pipeline_difference(wrong, lists) > 1e-6


@launches
def test_a_missing_half_is_named():
    without_w = [[word for word in row if word[0] != "W"] for row in words_of("zb_h1", 2, 2)]
    with pytest.raises(ValueError, match="run B, or I and W"):
        compare_pipeline.pipeline_difference(SplitRank, without_w)
