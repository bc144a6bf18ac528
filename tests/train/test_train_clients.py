"""The clients get the numbers of the log: each is tried with the real one where it is installed."""

import importlib.util
import json
import re
import sqlite3
import sys
import tomllib

import pytest

from course_lib.authoring import ROOT
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.train import Logs, TrainPlan, clients, trainer
from course_lib.train import log as train_log
from course_lib.train.options import layout_for, read
from course_lib.train.plan import CLIENTS


@pytest.fixture
def losses(request, tmp_path) -> dict[int, list[float]]:
    """Train two ranks with a client; the losses in the log of rank 1, by step."""
    name = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'course-lib[{name}]'")
    plan, folder = TrainPlan(steps=3, seq_len=16), tmp_path / "run"
    launch(trainer.train, 2, preset("toy"), layout_for("dp=2", 4), plan, None, Logs(str(folder), (name,)), quiet=True)
    return {step: of_step[0] for step, of_step in train_log.losses_of(train_log.log_path(folder, 1)).items()}


@pytest.mark.parametrize("losses", ["tensorboard"], indirect=True)
def test_tensorboard_reads_the_losses_of_a_rank(losses, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "log" / "tensorboard" / "rank1"))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(losses)
    assert {"tokens_per_s_per_rank", "forward_s", "memory_bytes"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
@pytest.mark.parametrize("losses", ["wandb"], indirect=True)
def test_wandb_writes_an_offline_run_for_each_rank(losses, tmp_path):
    runs = [path.read_bytes() for path in (tmp_path / "run" / "log" / "wandb").glob("offline-run-*/*.wandb")]
    (of_rank_1,) = [run for run in runs if b"rank1" in run]
    assert len(runs) == 2 and all(json.dumps(loss).encode() in of_rank_1 for loss in losses.values())


@pytest.mark.slow
@pytest.mark.parametrize("losses", ["trackio"], indirect=True)
def test_trackio_keeps_the_losses_in_a_data_base_of_each_rank(losses, tmp_path):
    (path,) = (tmp_path / "run" / "log" / "trackio").glob("*rank1.db")
    rows = sqlite3.connect(path).execute("select step, metrics from metrics").fetchall()
    assert {step: json.loads(metrics)["loss"] for step, metrics in rows} == pytest.approx(losses)


def test_a_client_that_is_missing_is_named_with_its_extra_before_ranks_are_joined(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(clients.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        trainer, "join_world", lambda *_, **__: pytest.fail("ranks were joined before the client was sought")
    )
    assert trainer.main(f"--log-folder {tmp_path} --log-to wandb".split()) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"train: wandb is not installed; run: pip install 'course-lib\[wandb\]', or .*\n", said)


def test_each_client_is_an_extra_and_none_is_imported_unasked():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(CLIENTS) == set(clients.OPEN) and all(extras[name][0].startswith(name) for name in CLIENTS)
    assert launch(imported_unasked, 1)[0] == set()


def imported_unasked() -> set[str]:
    trainer.train(preset("toy"), layout_for("dp=1", 1), TrainPlan(steps=1, seq_len=8), say=trainer.ignore)
    return set(CLIENTS) & set(sys.modules)


def test_clients_are_options_that_need_a_folder():
    _, _, _, _, options = read(["--log-folder", "runs/a", "--log-to", "wandb, trackio", "--peak-tflops", "2"])
    assert options.logs == Logs("runs/a", ("wandb", "trackio"), 2.0)
    with pytest.raises(ValueError, match="client is 'wandbs'; did you mean 'wandb'"):
        Logs("runs/a", ("wandbs",))
