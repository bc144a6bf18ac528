"""Bytes held and bytes sent: the formulas against simulated ranks of layouts drawn at random, along every axis.

Of each model make test takes 1 layout and make test-exhaustive 30, one rank of each. How many is said so:

    COURSE_LAYOUTS=300 pytest -v tests/memory/test_random_layouts.py             # about 600 ranks a model
    COURSE_LAYOUTS=300 COURSE_MODELS=gpt pytest -v -rP ...                       # one model; how far each peak is off
    COURSE_LAYOUTS=300 pytest --last-failed ...                                  # those again that differed

From 300 on a rank of every stage is simulated. A rank takes about a second of one core.
"""

import os
import random
from dataclasses import replace

import pytest
from random_layouts import MODELS, SEQ_LEN, random_layouts

from course_lib.layout.partition import stage_config
from course_lib.memory.budget import budgets
from course_lib.memory.flats import layers_of
from course_lib.run import Run
from course_lib.simulate import simulate_rank
from course_lib.simulate.cluster import STATES, planned_assignment
from course_lib.traffic import sent

COUNT = int(os.environ.get("COURSE_LAYOUTS", "30"))
EVERY = COUNT >= 300  # a rank of every stage; otherwise of one stage
NAMES = os.environ.get("COURSE_MODELS", ",".join(MODELS)).split(",")
ALWAYS = 1  # layouts that make test takes
PEAK_ERROR = 0.12


def routings_of(config, layout, stages):
    """The choices that simulated tokens make: the same ones on every rank, in every layer and micro-batch."""
    layers = layers_of(config, layout)
    num_layers = sum(stage_config(config, layers, stage).num_moe_layers for stage in stages)
    cut = layout.cp * (layout.tp if layout.folded else 1)
    choice_Tk = planned_assignment(layout.micro_batch * SEQ_LEN // cut, config.moe)
    return [[choice_Tk] * layout.ep] * (num_layers * layout.micro_batches)


def differences(run, place):
    """What the formulas and one simulated rank disagree about; of the peak also by how much."""
    config, layout = run.config, run.layout
    rank = layout.mesh.rank(**place)
    simulated = simulate_rank(run, rank)
    predicted = budgets(run, place["tp"])[place["pp"]]
    routings = routings_of(config, layout, simulated.stages) if config.moe else None
    by_axis = {axis: size for axis, size in sent(run, rank, clip=True, routings=routings).items() if size}
    error = predicted.peak_bytes / simulated.peak_bytes - 1
    wrong = []
    if {kind: getattr(predicted, kind) for kind in STATES} != simulated.states:
        wrong.append(f"states {simulated.states}")
    if by_axis != simulated.sent_by_axis:
        wrong.append(f"sent {by_axis}, simulated {simulated.sent_by_axis}")
    if abs(error) > PEAK_ERROR:
        wrong.append(f"peak {100 * error:+.1f} % at {predicted.moment}")
    return wrong, error


def cases(name):
    """A rank of every stage of each layout, or of one stage; its place along dp and tp is drawn, along cp the last."""
    draw = random.Random(name)
    for number, layout in enumerate(random_layouts(MODELS[name], COUNT)):
        for pp in range(layout.pp) if EVERY else [draw.randrange(layout.pp)]:
            place = {"pp": pp, "dp": draw.randrange(layout.dp), "cp": layout.cp - 1, "tp": draw.randrange(layout.tp)}
            marks = pytest.mark.exhaustive if number >= ALWAYS else ()
            yield pytest.param(name, layout, place, marks=marks, id=f"{name}-{layout}-pp_{pp}")


@pytest.mark.slow
@pytest.mark.parametrize("name, layout, place", [case for name in NAMES for case in cases(name)])
def test_a_rank_of_a_random_layout_holds_and_sends_what_the_formulas_say(name, layout, place):
    """States and bytes sent to the byte; one simulation of the rank gives all of it."""
    wrong, error = differences(run_of(name, layout), place)
    print(f"peak {100 * error:+.3f} %")
    assert wrong == []


def run_of(name, layout):
    """The model with as few layers as the layout has stages: cheaper."""
    return Run(replace(MODELS[name], num_layers=max(2, layout.num_stages)), layout, SEQ_LEN)
