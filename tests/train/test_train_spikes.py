"""A loss spike is found, rolled back, and its batch left out: bit for bit as if the data had never had that batch."""

import math
from dataclasses import replace
from functools import partial

import pytest
import run_logs
import torch
import torch.distributed as dist
from harness import sampled

from course_lib.launch import RankError, launch
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.train import Checkpoints, Logs, TrainPlan, spikes, trainer
from course_lib.train import log as train_log
from course_lib.train.options import layout_for, model_named
from course_lib.training import data

MODEL = model_named("toy,num_layers=2,d_model=32,d_ff=64,num_heads=4,num_kv_heads=2")
RULE = TrainPlan(steps=8, seq_len=32, seed=3, spike_factor=1.3, spike_window=3)
NO_RULE = replace(RULE, spike_factor=0.0)
BAD = 5  # a batch


def final_state(engine) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in engines.full_parameters(engine).items()}


def run_with(
    batches, layout: str, plan: TrainPlan, kept: Checkpoints | None = None, logs: Logs | None = None, say=trainer.ignore
) -> tuple:
    """Train; `batches(original, number)` gives the batch of that number. What train returned, and the whole weights."""
    original, built, build = data.batch, [], five_d.build
    data.batch = lambda text_T, number, *rest, **named: batches(
        lambda index: original(text_T, index, *rest, **named), number
    )
    five_d.build = lambda *rest, **named: built.append(build(*rest, **named)) or built[-1]
    try:
        record = trainer.train(MODEL, layout_for(layout, 8), plan, kept, logs, say)
    finally:
        data.batch, five_d.build = original, build
    return record, final_state(built[0])


def with_bad(batch_of, number: int, bad: int = BAD):
    """One batch asks for byte 255, which no text has, everywhere."""
    x_BS, y_BS = batch_of(number)
    return (x_BS, torch.full_like(y_BS, 255)) if number == bad else (x_BS, y_BS)


def without_bad(batch_of, number: int):
    """The same order of batches, in which BAD never was."""
    return batch_of(number + (number >= BAD))


def both_runs(layout: str, folder: str, logs: Logs) -> tuple:
    """(rolled back, never bad): what each leaves, on every rank."""
    stored = run_with(with_bad, layout, RULE, Checkpoints(folder, every=2), logs)
    return stored, run_with(without_bad, layout, NO_RULE)


@pytest.mark.parametrize(
    "layout", sampled(["dp=2", "dp=2,zero_stage=1", "dp=2,zero_stage=3", "pp=2", "tp=2"], 2, seed=9)
)
def test_a_run_that_was_rolled_back_is_bit_for_bit_one_whose_data_never_had_the_batch(layout, tmp_path):
    logs, log = Logs(str(tmp_path / "run")), train_log.log_path(tmp_path / "run")
    for (stored, its_weights), (whole, weights) in launch(both_runs, 2, layout, str(tmp_path), logs):
        assert stored.skipped == [BAD] and whole.skipped == []
        assert stored.losses == whole.losses and len(whole.losses) == RULE.steps
        assert all(torch.equal(its_weights[name], weights[name]) for name in weights)
    events = [line for line in train_log.read(log) if "skipped_batch" in line]
    assert [(line["step"], line["back_to_step"], line["skipped_batch"]) for line in events] == [(5, 4, BAD)]
    assert "times the median of 3 steps" in events[0]["why"]
    assert [len(of_step) for of_step in run_logs.losses_of(log).values()] == [1, 1, 1, 1, 2, 2, 1, 1]


def in_parts(folder: str) -> tuple:
    """A run that stops after the spike, goes on without a rule; and one whose data never had the batch."""
    kept = Checkpoints(folder, every=2)
    run_with(with_bad, "dp=1", replace(RULE, steps=6), kept)
    goes_on = run_with(with_bad, "dp=1", NO_RULE, kept)
    return goes_on, run_with(without_bad, "dp=1", NO_RULE)


def test_a_resumed_run_skips_the_batch_as_well(tmp_path):
    (goes_on, weights), (whole, expected) = launch(in_parts, 1, str(tmp_path))[0]
    assert goes_on.first_step == 6 and goes_on.skipped == [BAD]
    assert goes_on.losses == whole.losses[6:]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_spike_before_the_first_checkpoint_goes_back_to_the_beginning(tmp_path):
    early, kept = replace(RULE, steps=5, spike_window=1), Checkpoints(str(tmp_path), every=4)
    record, _ = launch(run_with, 1, partial(with_bad, bad=2), "dp=1", early, kept)[0]
    assert record.skipped == [2] and len(record.losses) == 5


def nan_on(victim: int, layout: str, plan: TrainPlan, kept: Checkpoints) -> None:
    """From step 2 on, every forward pass of one rank gives NaN."""
    calls = []

    def damaged(engine, micro_batches):
        share = original(engine, micro_batches)
        calls.append(share)
        return share * math.nan if dist.get_rank() == victim and len(calls) > 2 else share

    original, five_d.FiveD.run = five_d.FiveD.run, damaged
    trainer.train(MODEL, layout_for(layout, 8), plan, kept, None, trainer.ignore)


@pytest.mark.parametrize("with_rule", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_nan_on_one_rank_names_the_rank_and_the_step(with_rule, tmp_path):
    plan, kept = replace(RULE if with_rule else NO_RULE, spike_rollbacks=1), Checkpoints(str(tmp_path), every=2)
    said = "step 2 is a spike: the loss is nan" if with_rule else "the loss of step 2 is nan"
    with pytest.raises(RankError) as error:
        launch(nan_on, 4, 2, "dp=2,tp=2", plan, kept, timeout=60)
    assert said in str(error.value) and "(not finite on rank 2)" in str(error.value), str(error.value)
    assert ("rolled back 1 times already" in str(error.value)) == with_rule


def test_the_order_leaves_out_what_is_skipped():
    assert [spikes.batch_of_step(step, []) for step in range(3)] == [0, 1, 2]
    assert [spikes.batch_of_step(step, [5, 1]) for step in range(6)] == [0, 2, 3, 4, 6, 7]
    assert [spikes.batch_of_step(step, [2, 3]) for step in range(4)] == [0, 1, 4, 5]


def test_the_rule_wants_a_full_window_and_forgets_what_is_older():
    earlier = [9.0, 3.0, 1.0, 2.0]
    assert spikes.spike_in(2.6, earlier, RULE, "the loss") == ""  # 1.3 times the median of 3, 1 and 2
    assert spikes.spike_in(2.7, earlier, RULE, "the loss") == "the loss is 2.7, 1.4 times the median of 3 steps"
    assert spikes.spike_in(99.0, earlier[:2], RULE, "the loss") == ""
    assert spikes.spike_in(math.inf, [], RULE, "the gradient norm") == "the gradient norm is inf"


def said_by(folder: str) -> list[str]:
    said = []
    run_with(with_bad, "dp=1", replace(RULE, steps=6), Checkpoints(folder, every=2), say=said.append)
    return [line for line in said if "spike" in line]


def test_rank_0_says_where_it_goes_on_and_which_batch_is_left_out(tmp_path):
    ((said,),) = launch(said_by, 1, str(tmp_path))
    assert said.endswith("back to step 4 from the last checkpoint, without batch 5")


def test_a_rule_without_a_state_to_go_back_to_is_refused():
    with pytest.raises(RankError, match="spike_factor is 1.3 and there is no state to go back to; give a folder"):
        launch(trainer.train, 1, MODEL, layout_for("dp=1", 8), RULE)
    with pytest.raises(ValueError, match="spike_factor is 0.5; give more than 1, or 0 for no rule"):
        replace(RULE, spike_factor=0.5)
