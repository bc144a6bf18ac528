"""The smallest data parallelism: planted bugs differ from one process, clipping follows the average."""

import pytest
import torch
import torch.distributed as dist

from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_trainer
from course_lib.launch import launch
from course_lib.minimal.data import BucketedDP, OverlappedDP, when_all_arrived

pytestmark = pytest.mark.launches


# ------------------------------------------------------------------------------------ planted bugs
class ForgetsTheMean(OverlappedDP):
    """Undoes the division by the number of ranks."""

    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat_P *= bucket.group.size()
        super().finish()


class KeepsOldGradients(BucketedDP):
    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
        self.optimizer.step()


@pytest.mark.parametrize("wrong", [ForgetsTheMean, KeepsOldGradients])
def test_a_planted_bug_differs_from_one_process(wrong):
    assert on_ranks(wrong, as_trainer, 2, num_micro_batches=3).difference > 1e-6


def test_the_action_runs_once_for_each_backward_after_the_last_gradient():
    layer, seen = torch.nn.Linear(2, 2), []
    params = list(layer.parameters())
    when_all_arrived(params, lambda: seen.append([p.grad is not None for p in params]))
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    assert seen == [[True, True]] * 2


class Clips(OverlappedDP):
    max_norm = 0.5


class ClipsItsOwnGradient(Clips):
    """Before the average: a wrong order."""

    def send(self, bucket):
        self.clip()
        super().send(bucket)

    def finish(self):
        self.wait()
        self.step()


def _step_taken(trainer: type) -> list[float]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1, bias=False).double()
    before = layer.weight.detach().clone()
    trained = trainer(layer, lambda params: torch.optim.SGD(params, lr=1.0), dist.group.WORLD)
    trained.is_last = True
    layer(torch.tensor([[4.0, 0.0, 0.0], [0.0, 3.0, 0.0]], dtype=torch.float64)[dist.get_rank()]).sum().backward()
    trained.update()
    return (before - layer.weight.detach())[0].tolist()


def test_the_mean_gradient_is_clipped_after_the_wait_and_before_the_step():
    """Mean gradient (2, 1.5, 0) of norm 2.5, by hand; clipped before the average it keeps another direction."""
    assert launch(_step_taken, 2, OverlappedDP)[0] == pytest.approx([2.0, 1.5, 0.0])
    for of_rank in launch(_step_taken, 2, Clips):
        assert of_rank == pytest.approx([0.4, 0.3, 0.0], rel=1e-5)
    assert launch(_step_taken, 2, ClipsItsOwnGradient)[0] == pytest.approx([0.25, 0.25, 0.0], rel=1e-5)
