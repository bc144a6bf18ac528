"""Bytes of layouts drawn at random: the formula against a simulated rank, to the byte, along every axis.

COURSE_LAYOUTS=300 pytest tests/traffic/test_traffic_random.py draws so many for each model, at about 2.5 s of CPU each.
"""

import os
import random

import pytest
from random_layouts import MODELS, SEQ_LEN, random_layouts

from course_lib.layout.partition import stage_config
from course_lib.memory.five_d import layers_of
from course_lib.run import Run
from course_lib.simulate.cluster import planned_assignment, simulate_rank
from course_lib.traffic import sent

COUNT = int(os.environ.get("COURSE_LAYOUTS", "2"))


def routings_of(config, layout, stages):
    """The assignments that simulated tokens make: the same ones on every rank, in every layer and micro-batch."""
    layers = layers_of(config, layout)
    num_layers = sum(stage_config(config, layers, stage).num_moe_layers for stage in stages)
    choice_Tk = planned_assignment(layout.micro_batch * SEQ_LEN // layout.cp, config.moe)
    return [[choice_Tk] * layout.ep] * (num_layers * layout.micro_batches)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_a_simulated_rank_sends_along_each_axis_what_the_formula_says(name):
    config, draw = MODELS[name], random.Random(name)
    for layout in random_layouts(config, COUNT, seed=1):
        rank = draw.randrange(layout.world_size)
        simulated = simulate_rank(config, layout, SEQ_LEN, rank)
        routings = routings_of(config, layout, simulated.stages) if config.moe else None
        predicted = sent(Run(config, layout, SEQ_LEN), rank, clip=True, routings=routings)
        assert {axis: size for axis, size in predicted.items() if size} == simulated.sent_by_axis, (layout, rank)
