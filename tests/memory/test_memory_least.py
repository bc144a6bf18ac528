"""The least sums of a run are never above the peak that the ledger finds, and close enough to reject by."""

import random
import statistics
from dataclasses import replace
from itertools import cycle

import pytest
from random_layouts import MODELS, SEQ_LEN, random_layouts

from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.memory import least
from course_lib.memory.budget import fullest_budget
from course_lib.memory.least import least_bytes, least_states
from course_lib.memory.states import LoRA
from course_lib.memory.zero import Offload
from course_lib.run import Run

OPTIMIZERS = ("adamw", "adamw-8bit", "sgd-momentum", "sgd")
RECIPES = ("bf16-master", "bf16-master-fp32-grads", "bf16-master-both-grads", "autocast", "fp32", "bf16")


def runs_of(name: str, count: int) -> list[Run]:
    draw = random.Random(name)
    return [
        Run(MODELS[name], layout, SEQ_LEN, draw.choice(RECIPES), device=draw.choice(("cuda", "cpu")), optimizer=one)
        for layout, one in zip(random_layouts(MODELS[name], count, seed=7), cycle(OPTIMIZERS), strict=False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_no_run_holds_less(name):
    for run in runs_of(name, 40):
        assert least_states(run) <= least_bytes(run) <= fullest_budget(run).total_bytes, run


LARGE = [
    "dp=8,tp=8,zero_stage=1,sequence_parallel=true,micro_batches=4",
    "dp=64,zero_stage=3,micro_batches=2,recompute=full",
    "dp=2,tp=8,pp=4,zero_stage=1,sequence_parallel=true,micro_batches=32",
    "dp=4,tp=4,pp=4,zero_stage=2,sequence_parallel=true,schedule=interleaved,v=2,micro_batches=16",
    "dp=4,tp=4,pp=4,zero_stage=1,sequence_parallel=true,schedule=zb_h1,micro_batches=16,recompute=selective",
    "dp=8,cp=8,zero_stage=3,recompute=full",
    "dp=8,tp=8,zero_stage=2,sequence_parallel=true,micro_batch=4,micro_batches=2,recompute=full",
]


def shares(model: str, seq_len: int) -> list[float]:
    runs = [Run(preset(model), Layout.parse(text), seq_len) for text in LARGE]
    return [least_bytes(run) / fullest_budget(run).total_bytes for run in runs]


def test_the_least_is_most_of_what_large_runs_hold():
    found = shares("llama-3.1-70b", 8192)
    assert max(found) <= 1 and statistics.median(found) > 0.9 and min(found) > 0.7, found


@pytest.mark.parametrize("what", ["_saved", "_gradients", "_whole", "_made_again"])
def test_a_part_counted_five_times_is_more_than_some_run_holds(what, monkeypatch):
    real = getattr(least, what)
    monkeypatch.setattr(least, what, lambda *given: 5 * real(*given))
    assert max(shares("llama-3.1-70b", 8192)) > 1


def test_states_counted_twice_are_more_than_some_run_holds(monkeypatch):
    real = least.zero_state_bytes

    def twice(*given):
        one = real(*given)
        return replace(one, parameters=2 * one.parameters, optimizer=2 * one.optimizer)

    monkeypatch.setattr(least, "zero_state_bytes", twice)
    assert max(shares("llama-3.1-70b", 8192)) > 1


def test_of_states_that_are_too_many_no_activations_are_counted():
    run = Run(preset("llama-3.1-70b"), Layout(dp=8, micro_batches=4), 8192)
    assert least_bytes(run, usable_bytes=80e9) == least_states(run) < least_bytes(run)


def test_what_has_no_least_sum_is_refused():
    run = Run(preset("llama-3.1-8b"), Layout(), 8192)
    changes = ({"lora": LoRA(8)}, {"offload": Offload(optimizer="host")}, {"optimizer": "adafactor"})
    for other in (replace(run, **change) for change in changes):
        for sum_of in (least_bytes, least_states):
            with pytest.raises(ValueError, match="ask budgets"):
                sum_of(other)
