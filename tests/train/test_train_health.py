"""Ranks that hold other numbers are named; so is a slow one."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RankError, launch
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.train import TrainPlan, health, trainer
from course_lib.train.options import layout_for, model_named
from course_lib.training import data

MODEL = model_named("toy,num_layers=2,d_model=32,d_ff=64,num_heads=4,num_kv_heads=2")
EXPERTS = model_named("toy-moe,num_layers=2,d_model=32,d_ff=64,num_heads=4,num_kv_heads=2")
HEAD_NORMS = replace(MODEL, qk_norm=True)
FOUR = replace(MODEL, num_layers=4, num_kv_heads=4)  # four ranks divide it along any axis
PLAN = TrainPlan(steps=2, seq_len=32, seed=3, compare_every=1)
RUNS = [
    (MODEL, layout_for("dp=4", 8)),
    (MODEL, layout_for("dp=2,tp=2,zero_stage=1", 8)),
    (MODEL, layout_for("dp=4,zero_stage=3", 8)),
    (MODEL, layout_for("pp=2,tp=2,sequence_parallel=true", 8)),
    (MODEL, layout_for("cp=2,dp=2,zero_stage=2", 8)),
    (EXPERTS, layout_for("dp=4,ep=2", 8)),
    (HEAD_NORMS, layout_for("tp=4", 8)),  # norms of heads on four ranks, each key/value head on two
]


def run_all() -> list[int]:
    return [len(trainer.train(config, layout, PLAN, say=trainer.ignore).losses) for config, layout in RUNS]


def test_ranks_that_do_as_they_should_hold_the_same_under_every_layout():
    assert list(launch(run_all, 4)) == [[2] * len(RUNS)] * 4


def damaged(layout_text: str, victim: int, name: str) -> None:
    """After a step one number of one rank changes by one bit, and all go on."""

    done = []

    def step_and_damage(engine, *arguments):
        loss = original(engine, *arguments)
        param = five_d.named_parameters(engine).get(name)
        if dist.get_rank() == victim and not done:  # once: a second time would turn the bit back
            done.append(True)
            with torch.no_grad():
                param.view(-1)[0:1].view(torch.int32).bitwise_xor_(256)
        return loss

    original, engines.measured_step = engines.measured_step, step_and_damage
    config = HEAD_NORMS if layout_text == "tp=4" else MODEL
    trainer.train(config, layout_for(layout_text, 8), replace(PLAN, compare_every=2), say=trainer.ignore)


@pytest.mark.parametrize(
    ("layout", "victim", "name", "said"),
    [
        ("dp=4", 2, "blocks.1.mlp.down.weight", "rank 2 differs in blocks.1.mlp.down.weight"),
        ("dp=2,tp=2", 3, "blocks.0.attention_norm.weight", "rank 3 differs in blocks.0.attention_norm.weight"),
        ("tp=4", 2, "blocks.0.attention.q_norm.weight", "rank 2 differs in blocks.0.attention.q_norm.weight"),
    ],
)
def test_one_bit_of_one_rank_is_found_and_named(layout, victim, name, said):
    with pytest.raises(RankError) as error:
        launch(damaged, 4, layout, victim, name, timeout=60)
    assert said in str(error.value) and "after step 1" in str(error.value), str(error.value)


def test_the_majority_is_right_and_without_one_all_are_named():
    alike = {"the loss": "a", "w": "1"}
    assert health.differences([alike, alike, alike]) == ""
    assert health.differences([alike, alike | {"w": "2"}, alike]) == "rank 1 differs in w"
    assert health.differences([alike, alike | {"the loss": "b"}]) == "ranks 0, 1 differ in the loss"
    assert health.differences([{"w": "1"}, {"v": "2"}]) == ""  # pieces of one rank alone
    many = {f"w{i}": "1" for i in range(5)}
    assert health.differences([many, many, dict.fromkeys(many, "2")]) == "rank 2 differs in w0, w1, w2 and 2 more"


def test_the_rule_forgets_single_slow_steps_and_needs_a_clear_difference():
    even = [1.0, 1.1, 0.9]
    assert health.slowest_rank([even, [1.0, 9.0, 1.0], even]) is None
    assert health.slowest_rank([even, even, [1.1, 1.1, 1.1]]) is None
    assert health.slowest_rank([even, even, [1.3, 1.1, 1.3]]) == 2
    with pytest.raises(ValueError, match="at least two ranks"):
        health.slowest_rank([even])


def planted(layout_text: str, plant) -> str:
    """Train with something planted into this rank; what the comparison says."""
    plant()
    try:
        trainer.train(FOUR, layout_for(layout_text, 8), PLAN, say=trainer.ignore)
    except health.RanksDisagree as error:
        return str(error)
    return ""


def other_norm() -> None:
    """Rank 1 finds another gradient norm than all others."""
    original = engines.measured_step

    def step(*arguments):
        numbers = original(*arguments)
        return numbers._replace(norm=numbers.norm * (1 + (dist.get_rank() == 1) * 1e-6))

    engines.measured_step = step


def other_tokens() -> None:
    """One token of rank 3 is another one."""
    original = data.batch

    def batch(*arguments, **named):
        x_BS, y_BS = original(*arguments, **named)
        if dist.get_rank() == 3:
            x_BS[0, 0] = (x_BS[0, 0] + 1) % 256
        return x_BS, y_BS

    data.batch = batch


def same_tokens() -> None:
    """Every rank takes the tokens of dp rank 0: the sampler was never told its rank."""
    original = data.batch
    data.batch = lambda text_T, index, size, seq_len, dp_rank, *rest, **named: original(
        text_T, index, size, seq_len, 0, *rest, **named
    )


@pytest.mark.parametrize(
    ("layout", "plant", "said"),
    [
        ("dp=4", other_norm, "rank 1 differs in the gradient norm"),
        ("tp=4", other_tokens, "rank 3 differs in the tokens of dp=0"),
        pytest.param("cp=4", other_tokens, "rank 3 differs in the tokens of dp=0", marks=pytest.mark.exhaustive),
        pytest.param("pp=4", other_tokens, "rank 3 differs in the tokens of dp=0", marks=pytest.mark.exhaustive),
        ("dp=2,tp=2", same_tokens, "ranks 0, 1, 2, 3 trained on the same tokens, though they are dp ranks 0 and 1"),
    ],
)
def test_another_norm_other_tokens_and_the_same_data_are_named(layout, plant, said):
    for text in launch(planted, 4, layout, plant, timeout=60):
        assert said in text and "after step 0" in text, text


def nan_on(victim: int, layout: str) -> None:
    """From step 1 on, every forward pass of one rank gives NaN."""
    calls = []

    def damaged(engine, micro_batches):
        share = original(engine, micro_batches)
        calls.append(share)
        return share * math.nan if dist.get_rank() == victim and len(calls) > 1 else share

    original, five_d.FiveD.run = five_d.FiveD.run, damaged
    trainer.train(MODEL, layout_for(layout, 8), PLAN, say=trainer.ignore)


def test_nan_on_one_rank_names_the_rank_and_the_step():
    with pytest.raises(RankError, match=r"the loss of step 1 is nan \(not finite on rank 2\)"):
        launch(nan_on, 4, 2, "dp=2,tp=2", timeout=60)
