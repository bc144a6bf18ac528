"""The command `course`: what it prints, its exit codes, and errors that say what to do."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course_lib import authoring
from course_lib.cli import commands as cli

GPU = {"name": "H100", "memory_bytes": 80 << 30}


@pytest.fixture(scope="module")
def machine() -> cli.Machine:
    return cli.look_at_machine()


def test_the_doctor_launches_two_ranks_and_tells_what_it_saw(machine, monkeypatch, capsys):
    assert machine.launch_error == "" and machine.launch_s > 0 and machine.launch_backend in ("gloo", "nccl")
    monkeypatch.setattr(cli, "look_at_machine", lambda: machine)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch {machine.packages['torch']}" in text and "2 ranks over" in text
    assert all(f"{chapter.stem:<28} runs" in text for chapter in cli.CHAPTERS)
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] and told["cores"] == machine.cores and len(told["chapters"]) == len(cli.CHAPTERS)


def test_the_doctor_says_no_where_ranks_do_not_start(machine, monkeypatch, capsys):
    broken = replace(machine, launch_error="rank 1 of 2 was killed", packages={"torch": "2.13.0", "nbval": None})
    monkeypatch.setattr(cli, "look_at_machine", lambda: broken)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert (
        "launch    FAILED: rank 1 of 2 was killed" in text and "not installed: nbval" in text and "runs  " not in text
    )


def test_a_verdict_tells_memory_cores_and_gpus(machine):
    chapter = cli.Chapter("03_data_parallel", 4, 3 << 30, "ranks use NCCL")
    small = replace(machine, memory_bytes=1 << 30, gpus=[])
    assert cli.verdict(chapter, small) == (False, "needs 3 GiB of memory, and here are 1.0 GiB")
    large = replace(machine, memory_bytes=8 << 30, cores=2, gpus=[GPU])
    assert cli.verdict(chapter, large) == (True, "on up to 4 CPU ranks (gloo), sharing 2 cores")
    larger = "larger ones on up to 4 CPU ranks (gloo), sharing 2 cores"
    two = f"launches of up to 2 ranks with 2 GPUs: ranks use NCCL; {larger}"
    assert cli.verdict(chapter, replace(large, gpus=[GPU] * 2)) == (True, two)
    assert cli.verdict(chapter, replace(large, gpus=[GPU] * 4)) == (True, "with 4 GPUs: ranks use NCCL")
    assert cli.verdict(replace(chapter, ranks=1), large) == (True, "with 1 GPU: ranks use NCCL")


def test_the_doctor_knows_every_chapter_and_no_other():
    assert {path.stem for path in authoring.notebook_paths("notebooks")} <= {chapter.stem for chapter in cli.CHAPTERS}


def notebook(folder: Path, *sources: str) -> Path:
    cells = [new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    path = folder / "07_planted.ipynb"
    authoring.write(authoring.normalise(new_notebook(cells=[new_markdown_cell("# Title", id="title"), *cells])), path)
    return path


def test_run_leaves_the_file_alone_unless_asked_to_save(tmp_path, capsys):
    path = notebook(tmp_path, "print(6 * 7)", "import os; print(os.path.basename(os.getcwd()))")
    before = path.read_bytes()
    assert cli.main(["run", str(path)]) == 0
    assert "07_planted: 2 code cells ran in" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert cli.main(["run", str(path), "--save"]) == 0
    outputs = [cell.outputs[0].text for cell in authoring.code_cells(authoring.read(path))]
    assert outputs == ["42\n", f"{tmp_path.name}\n"], "it runs in the notebook's own folder"


def test_run_says_which_cell_failed_and_which_took_too_long(tmp_path, capsys):
    assert cli.main(["run", str(notebook(tmp_path, "x = 1", "x / 0", "x"))]) == 1
    error = capsys.readouterr().err
    assert "07_planted: code cell 2 of 3 failed, id cell-1:\n\nx / 0" in error and "ZeroDivisionError" in error
    assert cli.main(["run", str(notebook(tmp_path, "import time", "time.sleep(60)")), "--timeout", "1"]) == 1
    assert "code cell 2 of 2 failed, id cell-1" in capsys.readouterr().err


def test_a_chapter_is_found_by_number_stem_or_path_and_otherwise_told(tmp_path, capsys):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    path = notebook(folder)
    assert cli.find_notebook("7", tmp_path) == cli.find_notebook("07", tmp_path) == path
    assert cli.find_notebook("07_planted", tmp_path) == cli.find_notebook(str(path)) == path
    with pytest.raises(ValueError, match="no chapter '8'; give a number, a stem .* Chapters here: 07_planted"):
        cli.find_notebook("8", tmp_path)
    assert cli.main(["run", "99"]) == 2
    assert "course run: no chapter '99'" in capsys.readouterr().err


def test_run_names_the_extra_that_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert cli.main(["run", str(notebook(tmp_path))]) == 2
    assert 'pip install -e ".[lab,test]"' in capsys.readouterr().err


def test_the_command_course_and_the_module_are_the_same():
    (script,) = [script for script in entry_points(group="console_scripts") if script.name == "course"]
    assert script.value == "course_lib.cli:main"
    run = subprocess.run([sys.executable, "-m", "course_lib", "--help"], capture_output=True, text=True, timeout=60)
    assert all(name in run.stdout for name in ("doctor", "run", "demo", "bench"))
