"""The smallest ZeRO: planted bugs differ from one process, another form sends more."""

import pytest

from course_lib import comm
from course_lib.minimal import compare_with_one_process, sent_bytes
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
    assert compare_with_one_process(wrong, 2) > 1e-6


@pytest.mark.exhaustive
def test_a_form_that_sends_more_is_counted():
    assert sent_bytes(AllReduceForm, 2) == 2 * sent_bytes(Zero1, 2)
    assert compare_with_one_process(AllReduceForm, 2) < 1e-10


def test_a_trainer_that_leaves_a_parameter_out_is_told_which():
    class Forgets(DataParallel):
        def full_parameters(self):
            return {name: p for name, p in super().full_parameters().items() if name != "norm.weight"}

    with pytest.raises(Exception, match=r"lacks or adds \['norm.weight'\]"):
        compare_with_one_process(Forgets, 2)
