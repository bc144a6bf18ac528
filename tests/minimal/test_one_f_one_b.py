"""The smallest pipeline: the package's lists, NCCL's order of messages, planted bugs."""

import pytest
import torch
import torch.distributed as dist

from course_lib.checks.ch08.nccl_order import recorded_calls, replay
from course_lib.checks.ch08.pipeline_schedules import lists_of
from course_lib.compare.record import on_ranks
from course_lib.compare.trials import PIPELINE_CONFIG, as_pipeline, pipeline_micro_batches
from course_lib.launch import RankError, launch
from course_lib.minimal.one_f_one_b import PipelineRank, SplitRank, afab, naive, one_f_one_b
from course_lib.model import build

launches = pytest.mark.launches
BUILDERS = {"naive": naive, "afab": afab, "1f1b": one_f_one_b}


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (2, 5), (4, 2), (4, 4), (4, 9), (7, 12)])
@pytest.mark.parametrize("name", BUILDERS)
def test_lists_are_those_of_the_package(name, p, m):
    assert BUILDERS[name](p, m) == lists_of(name, p, m)


class StartsAlone(PipelineRank):
    """Sends and receives in calls of their own: right on gloo."""

    def start(self, *receive):
        messages, self.to_send = [*self.to_send, *receive], []
        self.works += [(message.op(message.tensor, message.peer), message) for message in messages]


def calls_of_steps(rank_class, lists_of_steps):
    """The calls that start messages on this rank, for each list."""
    recorded = []
    for lists, count in lists_of_steps:
        worker = rank_class(build(PIPELINE_CONFIG), pipeline_micro_batches(count))
        with recorded_calls() as calls:
            worker.run(lists[dist.get_rank()])
        recorded.append(calls)
    return recorded


@launches
def test_no_list_of_the_lesson_waits_for_ever_in_the_order_of_nccl():
    sizes = [(make_lists(4, m), m) for make_lists in BUILDERS.values() for m in (1, 2, 6)]
    split = [(lists_of(name, 4, 6), 6) for name in ("zb_h1", "zb_h2")]
    for rank_class, steps in ((PipelineRank, sizes), (SplitRank, split)):
        for calls in zip(*launch(calls_of_steps, 4, rank_class, steps), strict=True):
            rounds, stuck = replay(calls)
            assert rounds > 1 and not stuck


@launches
def test_sends_and_receives_in_calls_of_their_own_wait_for_ever_in_the_order_of_nccl():
    (calls,) = zip(*launch(calls_of_steps, 2, StartsAlone, [(one_f_one_b(2, 3), 3)]), strict=True)
    assert replay(calls)[1] == "rank 0 stands at its send to rank 1, rank 1 stands at its send to rank 0"


class WTwice(SplitRank):
    """I leaves gradients of the weights, and W adds them again."""

    def I(self, i):
        super().I(i)
        out, grad = self.in_flight["W", i]
        torch.autograd.backward(out, grad, inputs=list(self.stage.parameters()), retain_graph=True)


@launches
def test_a_planted_bug_differs_from_one_process():
    assert on_ranks(WTwice, as_pipeline, 2, lists=lists_of("zb_h1", 2, 3), backend="gloo").difference > 1e-6


@launches
def test_a_missing_half_is_named():
    without_w = [[word for word in row if word[0] != "W"] for row in lists_of("zb_h1", 2, 2)]
    with pytest.raises(RankError, match="run B, or I and W"):
        on_ranks(SplitRank, as_pipeline, 2, lists=without_w, backend="gloo")
