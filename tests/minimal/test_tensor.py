"""The smallest tensor parallelism: planted bugs differ from one process; what does not divide is refused."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from harness import sampled

from course_lib import comm
from course_lib.compare.record import on_ranks
from course_lib.compare.trials import CONFIG, as_trainer
from course_lib.launch import launch
from course_lib.minimal import tensor as minimal
from course_lib.minimal.tensor import TensorParallel, copy_in, sum_out, vocab_parallel_cross_entropy
from course_lib.model import build

pytestmark = pytest.mark.launches


# ------------------------------------------------------------------------------------ planted bugs
class WithoutF(TensorParallel):
    enter = staticmethod(lambda x, group: x)


class SumsTwice(TensorParallel):
    """The backward of g sums what every rank already has in full."""

    leave = staticmethod(lambda x_partial, group: copy_in(sum_out(x_partial, group), group))


class Averages(TensorParallel):
    leave = staticmethod(lambda x_partial, group: sum_out(x_partial, group) / group.size())


class SumsNorms(TensorParallel):
    """As sequence parallelism needs it, and tensor parallelism does not."""

    def update(self):
        for name, param in self.model.named_parameters():
            if "norm" in name:
                param.grad = comm.all_reduce(param.grad, self.group)
        super().update()


class OwnMaximum(TensorParallel):
    def loss(self, x_BS, y_BS):
        logits_BSv = self.model(x_BS)
        own_BS1 = logits_BSv.detach().amax(-1, keepdim=True)
        return vocab_parallel_cross_entropy(logits_BSv - own_BS1, y_BS, self.group).mean()


@pytest.mark.parametrize("wrong", sampled([WithoutF, SumsTwice, Averages, SumsNorms, OwnMaximum], 2))
def test_a_planted_bug_differs_from_one_process(wrong):
    assert on_ranks(wrong, as_trainer, 2).difference > 1e-6


def test_heads_that_do_not_divide_and_a_tied_head_are_refused_in_a_sentence():
    def refuse(config):
        try:
            minimal.tensor_parallel(build(config), dist.group.WORLD)
        except ValueError as error:
            return str(error)

    assert "4 key/value heads do not divide by tp; change tp" in launch(refuse, 3, CONFIG)[0]
    assert "tied=False" in launch(refuse, 2, replace(CONFIG, tied=True))[0]
    assert "255 does not divide by 2 ranks" in launch(refuse, 2, replace(CONFIG, vocab_size=255))[0]
