"""A run of `speaks` goes on from its trained weights, under any layout, and what it exports speaks."""

from dataclasses import replace

import pytest
import torch

from course_lib.checkpoint.export import export_safetensors
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.train import Checkpoints, TrainPlan, trainer
from course_lib.train.options import layout_for
from course_lib.train.start import is_trained, text_of, tokens_of
from course_lib.training import data
from course_lib.training.data import batch
from course_lib.training.loop import loss_of
from course_lib.training.text import questions, speak
from course_lib.weights.base import load_base, load_tokenizer

SPEAKS = preset("speaks")


def test_only_the_preset_as_it_stands_is_trained():
    assert is_trained(SPEAKS)
    for other in (replace(SPEAKS, num_layers=2), replace(SPEAKS, name="random"), preset("toy")):
        assert not is_trained(other) and text_of(other) == data.corpus() and tokens_of(other).max() < 256


def test_its_text_is_questions_in_its_own_tokens():
    tokens_T = tokens_of(SPEAKS)
    assert load_tokenizer().to_bytes(tokens_T) == text_of(SPEAKS) == questions().encode()
    assert tokens_T.max() >= 256


@pytest.mark.launches
@pytest.mark.slow
def test_a_run_of_four_ranks_is_gone_on_with_by_two_and_its_model_speaks(tmp_path):
    plan, kept = TrainPlan(steps=2, seq_len=64, learning_rate=1e-3), Checkpoints(str(tmp_path / "run"), every=2)
    four = launch(trainer.train, 4, SPEAKS, layout_for("dp=2,tp=2", 4), plan, kept, quiet=True)[0]
    longer, sharded = replace(plan, steps=4), layout_for("dp=2,zero_stage=3", 4)
    two = launch(trainer.train, 2, SPEAKS, sharded, longer, kept, quiet=True)[0]
    assert (four.first_step, two.first_step) == (0, 2)
    model, tokenizer = load_base()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=plan.weight_decay)
    for step, loss in enumerate((*four.losses, *two.losses)):
        expected = loss_of(model, *batch(tokens_of(SPEAKS), step, 4, 64))
        assert loss == pytest.approx(expected.item(), abs=1e-3)
        assert loss < 7  # a model that guesses has ln 2048 = 7.6
        optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
        optimizer.step()
    export_safetensors(tmp_path / "run", tmp_path / "out")
    said = [speak(one, tokenizer, "Q: What does", 10, seed=1) for one in (load_base(tmp_path / "out")[0], model)]
    assert said[0] == said[1]
