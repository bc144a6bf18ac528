"""One named step of a run is recorded on every rank, and the run's numbers stay as they are."""

from pathlib import Path

import pytest

from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure.trace import read_traces, seconds_of
from course_lib.train import Logs, TrainPlan, trainer
from course_lib.train.options import Options
from course_lib.train.step_clock import trace_problem

LAYOUT, PLAN = Layout.parse("tp=2"), TrainPlan(steps=4, seq_len=16)


def losses(folder: str, step: int | None) -> list[float]:
    return trainer.train(preset("toy"), LAYOUT, PLAN, None, Logs(folder, trace=step), trainer.ignore).losses


@pytest.mark.launches
def test_each_rank_records_the_named_step_and_trains_as_without(tmp_path):
    recorded, plain = tmp_path / "recorded", tmp_path / "plain"
    assert list(launch(losses, 2, str(recorded), 2, quiet=True)) == list(
        launch(losses, 2, str(plain), None, quiet=True)
    )
    assert sorted(path.name for path in recorded.iterdir()) == ["log", "trace"] and not (plain / "trace").exists()
    traces = read_traces(recorded / "trace")
    assert [trace.rank for trace in traces] == [0, 1]
    for row in map(seconds_of, traces):
        assert {"tp", "world"} <= set(row.exposed_s) and row.compute_s > 0
        assert row.compute_s + sum(row.exposed_s.values()) + row.neither_s == pytest.approx(row.step_s)


def test_a_run_that_begins_too_late_says_so():
    assert trace_problem(None, 5) is trace_problem(Logs("runs"), 5) is trace_problem(Logs("runs", trace=6), 5) is None
    assert trace_problem(Logs("runs", trace=5), 5).startswith("step 5 is not recorded: this run begins at step 5")


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="trace is step 4, and steps is 4; give 1 to 3"):
        Options(plan=PLAN, log_folder="runs", trace=4)
    with pytest.raises(ValueError, match="give log_folder"):
        Options(plan=PLAN, trace=2)
    with pytest.raises(ValueError, match="trace"):
        Logs(str(Path("runs")), trace=0)
