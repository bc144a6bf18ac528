"""Launches as Slurm jobs, as far as no Slurm is needed: arguments, messages through files, the batch script."""

import importlib.util
import os
import re
import tomllib

import pytest

from course_lib.authoring import ROOT
from course_lib.launch import RankError, _failures, _rank, _slurm, launch
from course_lib.launch._file_link import FileLink
from course_lib.launch._slurm import Slurm, SlurmWorld

TEMPLATE = ROOT / "course_lib" / "templates" / "train.sbatch"


# What Slurm(...) and launch refuse, before anything is sent


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"nodes": 0}, "nodes is 0; give a whole number from 1"),
        ({"ntasks_per_node": 1.5}, "ntasks_per_node is 1.5; give a whole number"),
        ({"gpus_per_node": -1}, "gpus_per_node is -1; give a whole number from 0"),
        ({"partition": "gpu\n#SBATCH --uid=0"}, "partition must be a text of one line"),
        ({"account": ""}, "account must be a text of one line"),
        ({"options": ["--mem=8G"]}, "options is a list; give a dictionary"),
        ({"options": {"--mem": "8G"}}, "'--mem' is no long option of sbatch; write {'mem': '8G'}"),
        ({"options": {"mem": "8G\n"}}, "mem must be a text of one line"),
        ({"options": {"job_name": "x"}}, "'job_name' is set by the launch"),
    ],
)
def test_an_allocation_that_cannot_be_is_refused_when_it_is_written_down(arguments, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        Slurm(**arguments)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Slurm's commands, none of which may be called."""
    for name in ("sbatch", "srun", "squeue", "scancel"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(_slurm.importlib.util, "find_spec", lambda name: name)  # submitit is an extra
    yield
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("where", "world_size", "settings", "text"),
    [
        (Slurm(), 3, {}, r"world_size (3) must be nodes * ntasks_per_node (2 * 2 = 4); call launch(fn, 4, ...)"),
        (Slurm(time_min=1), 4, {"timeout": 61}, "timeout (61 s) must be at most time_min (1 min)"),
        (Slurm(time_min=1), 4, {"timeout": 61}, "pass time_min=2"),
        ("cluster", 4, {}, "where must be None or Slurm(...), got 'cluster'"),
        (Slurm(gpus_per_node=1), 4, {"backend": "nccl"}, "needs a GPU for every rank, got 2 GPUs for 4 ranks"),
    ],
)
def test_a_launch_that_does_not_fit_its_allocation_is_refused_before_anything_is_sent(
    commands, where, world_size, settings, text
):
    with pytest.raises(ValueError, match=re.escape(text)):
        launch(print, world_size, where=where, **settings)


def test_what_is_missing_on_this_machine_is_named_with_what_to_install(commands, monkeypatch, tmp_path):
    monkeypatch.setattr(_slurm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs submitit.*pip install 'submitit>=1.5'"):
        launch(print, 4, where=Slurm())
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["slurm"]
    assert extra == ["submitit>=1.5"]
    monkeypatch.setattr(_slurm.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"sbatch, srun, squeue, scancel cannot be found; start the notebook on"):
        launch(print, 4, where=Slurm())


def test_the_folder_of_launches_is_the_owners_alone(commands, tmp_path):
    folder = tmp_path / "new" / "shared"
    assert Slurm(folder=str(folder)).shared_folder() == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        with pytest.raises(ValueError, match=rf"can be written by others \(mode {mode:o}\).*chmod go-w"):
            launch(print, 4, where=Slurm(folder=str(folder)))
        assert list(folder.iterdir()) == []
    folder.chmod(0o1777)  # as /tmp: nobody can replace what belongs to somebody else
    Slurm(folder=str(folder)).shared_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused_whatever_its_mode(commands, tmp_path):
    for mode in (0o755, 0o1777):
        tmp_path.chmod(mode)
        os.chown(tmp_path, 12345, -1)
        with pytest.raises(ValueError, match="belongs to user 12345.*required: a folder of user 0"):
            Slurm(folder=str(tmp_path)).shared_folder()
    os.chown(tmp_path, 0, -1)


# Messages, and what becomes of them


def test_messages_come_in_order_whole_and_once(tmp_path):
    writer, reader = FileLink(tmp_path / "said").make(), FileLink(tmp_path / "said")
    assert reader.receive() == []
    writer.send("node", "n1")
    writer.send("done", 1.5, 7)
    assert reader.receive() == [("node", "n1"), ("done", 1.5, 7)] and reader.receive() == []
    writer.send("half", "way")
    whole = (tmp_path / "said").read_bytes()
    (tmp_path / "said").write_bytes(whole[:-1])
    assert reader.receive() == []
    (tmp_path / "said").write_bytes(whole)
    assert reader.receive() == [("half", "way")]
    assert (tmp_path / "said").stat().st_mode & 0o077 == 0


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """A watch over two ranks; what Slurm says of the job is `watch.said`."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "job").mkdir()
    world = SlurmWorld(tmp_path, 2)
    world.job = "Slurm job 7"
    watch = _slurm.SlurmWatch(world, 2, _slurm.Output(tmp_path / "ranks", 2), tmp_path / "ranks")
    watch.said, watch.folder = "RUNNING|None\n", tmp_path
    monkeypatch.setattr(_slurm, "_ask", lambda *command: watch.said)
    monkeypatch.setattr(_slurm, "WAITING_FILES_S", 0.0)
    monkeypatch.setattr(_slurm, "STATE_S", 0.0)
    return watch


def say(watch, rank, *message):
    FileLink(watch.folder / "ranks" / f"{rank}.said").send(*message)


def test_a_failure_is_told_with_the_node_of_every_rank(watch):
    failure = _rank.Failure("exception", 1.0, [([("cell.py", 3, "work")], "ValueError: mine")])
    for message in ((0, "node", "n1"), (1, "node", "n2"), (1, "failed", failure)):
        say(watch, *message)
    watch.look()
    say(watch, 1, "failed", _rank.Failure("died", 2.0, [], 9))  # the process ends after it: that is no news
    say(watch, 0, "where", [("cell.py", 4, "work")])
    watch.look()
    text = _failures.failure_text(1, 2, watch, "")
    assert text.startswith('rank 1 of 2 on n2 failed:\n  File "cell.py", line 3, in work')
    assert "\nrank 0 on n1 stood at cell.py, line 4, in work" in text
    assert "rank 0 on n1 stood at" in _failures.hang_text(2, 3, watch)


def test_a_job_that_slurm_has_ended_says_how_with_slurms_own_words(watch):
    say(watch, 0, "node", "n1")
    say(watch, 0, "done", 1.0, 2)
    (watch.folder / "job" / "7_0_log.err").write_text("submitit WARNING x\nsrun: error: n2: task 1: Out Of Memory\n")
    watch.look()
    watch.said = None  # Slurm does not answer: that is no end
    watch.look()
    watch.said = "OUT_OF_MEMORY|OutOfMemory\n"
    with pytest.raises(RankError) as caught:
        for _ in range(3):
            watch.look()
    first, *rest = str(caught.value).splitlines()
    assert first == "Slurm job 7 of 2 ranks was ended by Slurm: OUT_OF_MEMORY (OutOfMemory)"
    assert rest == ["  srun: error: n2: task 1: Out Of Memory"]


def test_a_job_that_ends_because_its_ranks_are_done_is_no_failure(watch):
    for rank in range(2):
        say(watch, rank, "done", 1.0, 2)
    watch.said = "COMPLETED|None\n"
    for _ in range(3):
        watch.look()
    assert watch.unfinished() == [] and watch.done == {0: (1.0, 2), 1: (1.0, 2)}


def test_a_job_that_waits_says_why(watch):
    world = watch._world
    world.state, world.reason = "PENDING", "Priority"
    assert world.waits() == "Slurm job 7 waits (Priority)"
    world.state = "RUNNING"
    assert world.waits() == "Slurm job 7 starts"


# The batch script


def test_the_batch_script_explains_every_option():
    lines = TEMPLATE.read_text().splitlines()  # that each line is explained, tests/cluster/test_site.py says
    last = max(number for number, line in enumerate(lines) if line and not line.startswith(("#", " ")))
    explained = " ".join(line for line in lines if line.startswith("# "))
    for option in re.findall(r"(--[a-z][a-z-]+)", " ".join(lines[last:])):
        assert f"{option} " in explained or f"{option}," in explained or f"{option}." in explained, option


def test_the_batch_script_asks_for_what_it_uses():
    text = TEMPLATE.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert options["nodes"] == "2" and options["ntasks-per-node"] == "1"
    assert {"job-name", "cpus-per-task", "time", "output", "open-mode", "requeue"} <= set(options)
    first_command = next(n for n, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert all("#SBATCH --" not in line for line in text.splitlines()[first_command:]), "sbatch would not read it"
    module = re.search(r"-m (course_lib\S+)", text).group(1)
    assert importlib.util.find_spec(module) is not None
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert any(TEMPLATE.match(pattern) for pattern in packaged["course_lib"])
