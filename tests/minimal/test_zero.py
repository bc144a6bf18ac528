"""The smallest ZeRO: a parameter left out is named, the drawn order is the order that runs."""

import pytest
import torch.distributed as dist

from course_lib.compare.record import on_ranks
from course_lib.compare.trials import CONFIG, adamw, as_trainer
from course_lib.launch import launch
from course_lib.minimal import zero
from course_lib.minimal.data import DataParallel
from course_lib.minimal.zero import Zero3
from course_lib.model import build
from course_lib.span import COMPUTE
from course_lib.timing import zero3_backward_spans
from course_lib.training.data import batch, tokens

pytestmark = pytest.mark.launches


def test_a_trainer_that_leaves_a_parameter_out_is_told_which():
    class Forgets(DataParallel):
        def full_parameters(self):
            return {name: p for name, p in super().full_parameters().items() if name != "norm.weight"}

    with pytest.raises(Exception, match=r"lacks or adds \['norm.weight'\]"):
        on_ranks(Forgets, as_trainer, 2)


def _events_of_a_pass() -> list[str]:
    """What a rank does with its units in a forward and a backward, in order: unit i is the i-th that runs."""
    events, flats = [], []

    def told(word, act):
        def told_act(flat):
            events.append((word, flat))
            return act(flat)

        return told_act

    zero.gather, zero.free = told("gather", zero.gather), told("free", zero.free)  # this process ends with the launch
    zero.FlatParameter.reduce_scatter = told("reduce-scatter", zero.FlatParameter.reduce_scatter)
    trainer = Zero3(build(CONFIG), adamw, dist.group.WORLD)
    flats += trainer.flats
    events.clear()
    trainer.backward([batch(tokens(2000), 0, 1, 16)])
    return [f"{word} {flats.index(flat)}" for word, flat in events]


def test_the_drawn_backward_of_stage_3_is_the_order_that_runs():
    events = launch(_events_of_a_pass, 2)[0]
    units = [str(unit) for unit in range(len(events) // 5)]
    forward = [f"{word} {unit}" for unit in units for word in ("gather", "free")]
    drawn = [f"{s.lane} {s.name}" for s in zero3_backward_spans(units) if s.lane != COMPUTE]
    assert len(units) == 7 and events == forward + drawn
    ahead = zero3_backward_spans(units, prefetch=True)
    start_s = {(s.lane, s.name): s.start_s for s in ahead}
    assert all(start_s["gather", str(u)] == start_s[COMPUTE, str(u + 1)] for u in range(6))
