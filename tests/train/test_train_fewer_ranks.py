"""A rank is killed, and the run goes on with fewer ranks, the same sequences in each step, and the same losses."""

import os
import signal

import pytest
import run_logs
import torch.distributed as dist

from course_lib.launch import RankError, launch
from course_lib.parallel import engine as engines
from course_lib.train import Checkpoints, Logs, TrainPlan, trainer
from course_lib.train import log as train_log
from course_lib.train.options import layout_for, model_named

BATCH, KILLED_IN = 8, 4
MODEL = model_named("toy,num_layers=2,d_model=32,d_ff=64,num_heads=4,num_kv_heads=2")
PLAN = TrainPlan(steps=7, seq_len=32, warmup=2, seed=3, precision="fp64", compare_every=1)


def killed(victim: int, layout: str, kept: Checkpoints, logs: Logs) -> None:
    """Train; one rank dies in the middle of a step."""
    steps = []

    def step_or_die(*arguments):
        steps.append(len(steps))
        if steps[-1] == KILLED_IN and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    original, engines.measured_step = engines.measured_step, step_or_die
    trainer.train(MODEL, layout_for(layout, BATCH), PLAN, kept, logs, trainer.ignore)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("dp=4,zero_stage=1", "dp=2,zero_stage=3"), ("dp=2,tp=2", "pp=2")])
def test_after_a_rank_is_killed_half_as_many_go_on_with_the_same_losses(before, after, tmp_path):
    kept, logs, log = Checkpoints(str(tmp_path / "run"), every=3), Logs(str(tmp_path)), train_log.log_path(tmp_path)
    with pytest.raises(RankError, match="rank 3 of 4 was killed by SIGKILL"):
        launch(killed, 4, 3, before, kept, logs, timeout=100)
    assert list(run_logs.losses_of(log)) == list(range(KILLED_IN))
    layout = layout_for(after, BATCH)
    assert layout.sequences_per_step == BATCH
    record = launch(trainer.train, 2, MODEL, layout, PLAN, kept, logs, timeout=100, quiet=True)[0]
    assert record.first_step == 3
    whole = launch(trainer.train, 1, MODEL, layout_for("dp=1", BATCH), PLAN, timeout=100, quiet=True)[0]
    losses = run_logs.losses_of(log)
    assert list(losses) == list(range(PLAN.steps)) and len(losses[3]) == 2  # repeated after the last checkpoint
    for step, of_step in losses.items():
        assert of_step == pytest.approx([whole.losses[step]] * len(of_step), abs=1e-10)
