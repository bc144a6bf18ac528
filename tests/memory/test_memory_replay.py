"""Layers that repeat what an equal one did hold what layers hold that all ran, to the byte and the moment's name."""

import random
from dataclasses import replace

import pytest
from random_layouts import MODELS, SEQ_LEN, random_layouts

from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.memory import moments, replay
from course_lib.memory.blocks import StageProgram
from course_lib.memory.budget import budget_of_rank
from course_lib.memory.states import LoRA
from course_lib.memory.zero import Offload
from course_lib.run import Run


def all_ranks(run, tp_rank=0):
    """The budget of each rank, anew."""
    return [budget_of_rank.__wrapped__(run, pp_rank, tp_rank) for pp_rank in range(run.layout.pp)]


def each_layer(run, tp_rank, monkeypatch):
    """The budgets where no layer is repeated."""
    with monkeypatch.context() as patched:
        patched.setattr(moments, "notes_of", lambda *_: None)
        return all_ranks(run, tp_rank)


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", MODELS)
def test_random_layouts_of_many_layers_hold_the_same(name, count, monkeypatch):
    draw = random.Random(name)
    for layout in random_layouts(MODELS[name], count, seed=3):
        layers = layout.num_stages * draw.choice((5, 6, 9)) + draw.choice((0, 1, 3))
        recipe = draw.choice(("bf16-master", "fp32", "bf16-master-fp32-grads", "autocast"))
        config = replace(MODELS[name], num_layers=layers)
        run = Run(config, layout, SEQ_LEN, recipe, device=draw.choice(("cpu", "cuda")))
        tp_rank = draw.randrange(layout.tp)
        assert all_ranks(run, tp_rank) == each_layer(run, tp_rank, monkeypatch), f"{layout} {recipe}"


def test_layers_are_repeated_where_they_can_be_and_run_where_not(monkeypatch):
    seen = []
    real = moments.notes_of
    monkeypatch.setattr(moments, "notes_of", lambda *given: seen.append(real(*given)) or seen[-1])
    config = replace(MODELS["llama"], num_layers=12)
    for run, repeats in (
        (Run(config, Layout(), SEQ_LEN), True),
        (Run(config, Layout(pp=3, micro_batches=3), SEQ_LEN), False),  # four layers a stage: all of them run
        (Run(config, Layout(), SEQ_LEN, "autocast"), False),
        (Run(config, Layout(), SEQ_LEN, lora=LoRA(4)), False),
    ):
        seen.clear()
        all_ranks(run)
        assert [one is not None for one in seen] == [repeats] * len(seen) and seen
    seen.clear()
    all_ranks(Run(config, Layout(), SEQ_LEN, offload=Offload(activations="host")))
    assert not seen


def test_two_layers_that_should_be_alike_and_are_not_are_no_notes(monkeypatch):
    monkeypatch.setattr(replay.Section, "like", lambda one, other: one.layer != 1)
    replay._noted.cache_clear()
    run = Run(replace(MODELS["llama"], num_layers=12), Layout(), SEQ_LEN)
    stage = []
    real = moments.notes_of
    monkeypatch.setattr(moments, "notes_of", lambda *given: stage.append(real(*given)))
    all_ranks(run)
    replay._noted.cache_clear()
    assert stage == [None]


@pytest.mark.parametrize("planted", ["a change is lost", "a layer too few", "names are not moved"])
def test_a_planted_fault_is_seen(planted, monkeypatch):
    run = Run(replace(MODELS["llama"], num_layers=12), Layout(dp=2, zero_stage=2, micro_batches=2), SEQ_LEN)
    right = each_layer(run, 0, monkeypatch)
    assert all_ranks(run) == right
    if planted == "a change is lost":
        real = replay.Passage.apply
        monkeypatch.setattr(replay.Passage, "apply", lambda one, L, shift: shift == 3 or real(one, L, shift))
    elif planted == "a layer too few":
        real = replay.notes_of
        monkeypatch.setattr(moments, "notes_of", lambda *given: (real(*given)[0], real(*given)[1][1:]))
    else:
        monkeypatch.setattr(replay, "shifted", lambda name, shift: name)
        replay._noted.cache_clear()
    with pytest.raises((AssertionError, KeyError)):
        assert all_ranks(run) == right
    replay._noted.cache_clear()


def test_of_126_equal_layers_four_run(monkeypatch):
    ran, real = [], StageProgram.block
    monkeypatch.setattr(StageProgram, "block", lambda *given: ran.append(given[1]) or real(*given))
    run = Run(preset("llama-3.1-405b"), Layout(tp=8, sequence_parallel=True), 8192)
    replay._noted.cache_clear()
    all_ranks(run)
    assert ran == 2 * [0, 1, 2, 3]  # the first micro-batch, and a later one
    all_ranks(replace(run, layout=Layout(dp=4, tp=8, sequence_parallel=True, zero_stage=3)))
    assert len(ran) == 8  # noted already
