"""The smallest ZeRO: planted bugs differ from one process, another form sends more."""

import pytest

from course_lib import comm
from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_trainer
from course_lib.minimal.data import DataParallel
from course_lib.minimal.zero import Zero1, Zero2, Zero3

pytestmark = pytest.mark.launches


# ------------------------------------------------------------------------------------ planted bugs
class SumsGradients(Zero1):
    def update(self):
        for flat in self.flats:
            flat.reduce_scatter()
            flat.shard_p.grad *= flat.group.size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            flat.all_gather()


class NeverGathers(Zero2):
    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class KeepsOldGradients(Zero3):
    def update(self):
        self.optimizer.step()


class AllReduceForm(Zero1):
    """Right, but it sends half as much again."""

    def update(self):
        for flat in self.flats:
            for param in flat.params:
                param.grad = comm.all_reduce(param.grad, flat.group) / flat.group.size()
            flat.reduce_scatter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            flat.all_gather()


@pytest.mark.parametrize("wrong", [SumsGradients, NeverGathers, KeepsOldGradients])
def test_a_planted_bug_differs_from_one_process(wrong):
    assert on_ranks(wrong, as_trainer, 2).difference > 1e-6


@pytest.mark.exhaustive
def test_a_form_that_sends_more_is_counted():
    run, right = (on_ranks(one, as_trainer, 2) for one in (AllReduceForm, Zero1))
    assert run.difference < 1e-10 and run.sent_bytes == [2 * sent for sent in right.sent_bytes]


def test_a_trainer_that_leaves_a_parameter_out_is_told_which():
    class Forgets(DataParallel):
        def full_parameters(self):
            return {name: p for name, p in super().full_parameters().items() if name != "norm.weight"}

    with pytest.raises(Exception, match=r"lacks or adds \['norm.weight'\]"):
        on_ranks(Forgets, as_trainer, 2)
