"""Table of chapter 06, exercise 8: a broken program, whose hooks sum a norm's gradient again in each micro-batch."""

from course_lib import comm
from course_lib.checks.table import Exercise
from course_lib.checks.trainers import inputs, trained
from course_lib.minimal.sequence import TensorSequenceParallel, norms_of
from course_lib.minimal.tensor import TensorParallel


class HookedSequenceParallel(TensorSequenceParallel):
    """TP + SP that sums a norm's gradient at once, while backward goes on."""

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for param in norms_of(self.model):
            param.register_post_accumulate_grad_hook(self.complete)

    def complete(self, param):
        """Sum over the ranks: each has the part of its own tokens."""
        param.grad = comm.all_reduce(param.grad, self.group)

    def backward(self, micro_batches):
        """Accumulate the mean gradient; the hooks do the rest."""
        TensorParallel.backward(self, micro_batches)


class Sums(HookedSequenceParallel):
    """Sums in some micro-batches, by their numbers from the end."""

    when, op = staticmethod(lambda left, count: left == 0), "sum"

    def backward(self, micro_batches):
        self.left = self.count = len(micro_batches)
        for part in micro_batches:
            self.left -= 1
            (self.loss(*part) / len(micro_batches)).backward()

    def complete(self, param):
        if self.when(self.left, self.count):
            param.grad = comm.all_reduce(param.grad, self.group, op=self.op)


WRONG = {
    "it is right with one micro-batch; with three, gradients of norms are too large": HookedSequenceParallel,
    "gradients of norms are too small, already with one micro-batch": {"op": "mean"},
    "with three micro-batches, gradients of norms lack the part of some tokens": {
        "when": staticmethod(lambda left, count: left == count - 1)
    },
    "each rank uses its own tokens' part of the norms' gradients": {"when": staticmethod(lambda left, count: False)},
}
check_hooked_sequence = Exercise(Sums, inputs, WRONG, trained, ranks=True, seconds=30.0)
