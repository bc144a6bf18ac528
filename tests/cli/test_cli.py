"""The command `course`: what it prints, its exit codes, and errors that say what to do."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from jupyter_client import KernelManager
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from packaging.requirements import Requirement

from course_lib import authoring
from course_lib.authoring.rules import link_problems
from course_lib.cli import commands as cli
from course_lib.cli import doctor
from course_lib.cli import notebooks as written

GPU = {"name": "H100", "memory_bytes": 80 << 30}


@pytest.fixture(scope="module")
def machine() -> doctor.Machine:
    return doctor.look_at_machine()


def test_a_limit_of_ranks_before_a_command_holds_for_its_launches(monkeypatch, capsys):
    monkeypatch.setenv("COURSE_MAX_RANKS", "64")  # and so given back at the end
    for words in (["--max-ranks", "1"], ["--max-ranks=1"]):
        assert cli.main([*words, "demo"]) == 2
        assert "a launch of 2 ranks was asked, and at most 1 run" in capsys.readouterr().err
    assert cli.main(["--max-ranks", "none", "demo"]) == 2
    assert "course --max-ranks: 'none' is no number of ranks; give a whole number" in capsys.readouterr().err


def test_the_doctor_launches_two_ranks_and_tells_what_it_saw(machine, monkeypatch, capsys):
    assert machine.launch_error == "" and machine.launch_s > 0 and machine.launch_backend in ("gloo", "nccl")
    monkeypatch.setattr(doctor, "look_at_machine", lambda: machine)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch {machine.packages['torch']}" in text and "2 ranks over" in text
    assert all(re.search(rf"^{chapter.stem} +runs  ", text, re.MULTILINE) for chapter in doctor.CHAPTERS)


def test_the_doctor_says_no_where_ranks_do_not_start(machine, monkeypatch, capsys):
    broken = replace(machine, launch_error="rank 1 of 2 was killed", packages={"torch": "2.13.0", "nbval": None})
    monkeypatch.setattr(doctor, "look_at_machine", lambda: broken)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "launch    FAILED: rank 1 of 2 was killed" in text and "not installed: nbval" in text
    assert "runs  " not in text


def test_a_verdict_tells_memory_cores_and_gpus(machine):
    chapter = doctor.Chapter("03_data_parallel", 4, "ranks use NCCL", memory_bytes=3 << 30)
    small = replace(machine, memory_bytes=1 << 30, gpus=[])
    assert doctor.can_run(chapter, small) == (False, "needs 3 GiB of memory, and here are 1.0 GiB")
    large = replace(machine, memory_bytes=8 << 30, cores=2, gpus=[GPU])
    assert doctor.can_run(chapter, large) == (True, "on up to 4 CPU ranks (gloo), sharing 2 cores")
    larger = "larger ones on up to 4 CPU ranks (gloo), sharing 2 cores"
    two = f"launches of up to 2 ranks with 2 GPUs: ranks use NCCL; {larger}"
    assert doctor.can_run(chapter, replace(large, gpus=[GPU] * 2)) == (True, two)
    assert doctor.can_run(chapter, replace(large, gpus=[GPU] * 4)) == (True, "with 4 GPUs: ranks use NCCL")
    assert doctor.can_run(replace(chapter, ranks=1), large) == (True, "with 1 GPU: ranks use NCCL")


def test_the_doctor_knows_every_chapter_and_no_other():
    chapters = (authoring.ROOT / "notebooks").glob("[0-9][0-9]*.ipynb")
    assert {path.stem for path in chapters} == {chapter.stem for chapter in doctor.CHAPTERS}


def notebook(folder: Path, *sources: str) -> Path:
    cells = [new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    path = folder / "07_planted.ipynb"
    authoring.write(authoring.normalise(new_notebook(cells=[new_markdown_cell("# Title", id="title"), *cells])), path)
    return path


@pytest.mark.long
def test_run_leaves_the_file_alone_unless_asked_to_save(tmp_path, capsys):
    path = notebook(tmp_path, "print(6 * 7)", "import os; print(os.path.basename(os.getcwd()))")
    before = path.read_bytes()
    assert cli.main(["run", str(path)]) == 0
    assert "07_planted: 2 code cells ran in" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert cli.main(["run", str(path), "--save"]) == 0
    outputs = [cell.outputs[0].text for cell in authoring.code_cells(authoring.read(path))]
    assert outputs == ["42\n", f"{tmp_path.name}\n"], "it runs in the notebook's own folder"


@pytest.mark.long
@pytest.mark.skipif(not hasattr(KernelManager, "transport_encryption"), reason="this jupyter_client encrypts nothing")
def test_run_encrypts_what_kernel_and_command_tell_each_other(tmp_path, capfd):
    has_key = "from ipykernel.kernelapp import IPKernelApp; assert IPKernelApp.instance().curve_secretkey"
    assert cli.main(["run", str(notebook(tmp_path, has_key))]) == 0
    assert "without encryption" not in capfd.readouterr().err


def test_run_finds_that_it_cannot_save_before_the_first_cell(tmp_path, monkeypatch, capsys):
    def refuse(name, path):
        raise ValueError(f"{name} is {path}, where nothing can be written")

    monkeypatch.setattr(written, "writable", refuse)
    path = notebook(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert cli.main(["run", str(path), "--save"]) == 2
    assert "nothing can be written" in capsys.readouterr().err and not (tmp_path / "ran").exists()


@pytest.mark.long
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
    assert written.find_notebook("7", tmp_path) == written.find_notebook("07", tmp_path) == path
    assert written.find_notebook("07_planted", tmp_path) == written.find_notebook(str(path)) == path
    with pytest.raises(ValueError, match="no chapter '8'; give a number, a stem .* Chapters here: 07_planted"):
        written.find_notebook("8", tmp_path)
    for name in ("08a_first", "08b_second", "08_planted_in_depth"):
        (folder / f"{name}.ipynb").write_bytes(path.read_bytes())
    assert written.find_notebook("8b", tmp_path).stem == "08b_second"
    with pytest.raises(ValueError, match="chapter '8' has several lessons: 08a_first, 08b_second; give a number with"):
        written.find_notebook("8", tmp_path)
    assert cli.main(["run", "99"]) == 2
    assert "course run: no chapter '99'" in capsys.readouterr().err


def test_run_names_the_extra_that_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert cli.main(["run", str(notebook(tmp_path))]) == 2
    assert "course run needs nbclient: pip install nbclient" in capsys.readouterr().err


def packages_imported_by(path: Path) -> set[str]:
    """The packages that a notebook's cells import, also inside functions."""
    trees = [ast.parse(authoring.without_magics(cell.source)) for cell in authoring.code_cells(authoring.read(path))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    known = {*sys.stdlib_module_names, "course_lib", "functorch"}  # functorch comes with torch
    return {name.partition(".")[0] for name in names} - known


@pytest.mark.parametrize("chapter", doctor.CHAPTERS, ids=lambda chapter: chapter.stem)
def test_the_doctor_knows_what_a_chapter_imports_beside_the_packages_of_the_course(chapter):
    pyproject = tomllib.loads((authoring.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with_course = {Requirement(text).name for text in pyproject["project"]["dependencies"]}
    imported = packages_imported_by(authoring.ROOT / "notebooks" / f"{chapter.stem}.ipynb")
    assert imported - with_course == set(chapter.needs)


def test_a_chapter_whose_package_is_missing_does_not_run(machine):
    chapter = next(chapter for chapter in doctor.CHAPTERS if chapter.needs == ("transformers",))
    without = replace(machine, packages=machine.packages | {"transformers": None})
    assert doctor.can_run(chapter, without) == (False, "needs transformers, not installed: pip install transformers")
    assert doctor.can_run(chapter, replace(machine, memory_bytes=8 << 30))[0]


@pytest.fixture(autouse=True)
def _no_signatures_at_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.getbasetemp() / "jupyter"))


def test_new_writes_every_notebook_and_keeps_what_the_learner_changed(tmp_path, capsys):
    folder = tmp_path / "mine"
    command = ["new", str(folder), "--with-solutions"]
    assert cli.main(command) == 0
    lesson = authoring.read(folder / "notebooks" / "05_tensor_parallel.ipynb")
    assert NotebookNotary().check_signature(lesson)  # so JupyterLab shows its SVG before a cell has run
    lesson.cells[0].source += "."
    assert not NotebookNotary().check_signature(lesson)
    folders = ("notebooks", "solutions", "exercises")
    there = authoring.notebook_paths(*(f"{edition}{name}" for edition in ("ko/", "") for name in folders))
    assert f"{len(there)} notebooks are in {folder}; start with" in capsys.readouterr().out
    for path in there:
        assert (folder / path.relative_to(authoring.ROOT)).read_bytes() == path.read_bytes()
    changed = folder / "exercises" / there[-1].name
    changed.write_text("my answers")
    assert cli.main(command) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"kept, as their cells differ from the course's (--force overwrites them): exercises/{changed.name}"
    assert changed.read_text() == "my answers"
    assert cli.main([*command, "--force"]) == 0
    assert changed.read_bytes() == there[-1].read_bytes()


def test_a_notebook_that_jupyterlab_stored_without_a_change_is_not_told_as_changed(tmp_path, capsys):
    assert cli.main(["new", str(tmp_path)]) == 0
    opened = tmp_path / "notebooks" / "index.ipynb"
    stored = json.dumps(json.loads(opened.read_text()), indent=3)
    opened.write_text(stored)
    capsys.readouterr()
    assert cli.main(["new", str(tmp_path)]) == 0
    assert "kept" not in capsys.readouterr().out
    assert opened.read_text() == stored


def test_new_writes_no_solution_and_no_link_to_one_unless_asked(tmp_path):
    assert cli.main(["new", str(tmp_path)]) == 0
    assert not (tmp_path / "solutions").exists() and not (tmp_path / "ko" / "solutions").exists()
    folders = ("notebooks", "exercises", "ko/notebooks", "ko/exercises")
    paths = authoring.notebook_paths(*folders, root=tmp_path)
    assert len(paths) == len(authoring.notebook_paths(*folders))
    assert [path.name for path in paths if "solutions/" in path.read_text(encoding="utf-8")] == []
    for path in paths:
        for cell in authoring.read(path).cells:
            assert all((path.parent / target).exists() for target in re.findall(r"\]\(([\w./]+\.ipynb)\)", cell.source))


def test_no_link_of_a_new_folder_is_dead(tmp_path):
    assert cli.main(["new", str(tmp_path), "--with-solutions"]) == 0
    paths = authoring.notebook_paths("notebooks", "exercises", "solutions", root=tmp_path)
    assert [problem for path in paths for problem in link_problems(authoring.read(path), path)] == []
    (tmp_path / "solutions" / paths[-1].name).unlink()
    exercise = tmp_path / "exercises" / paths[-1].name
    assert len(link_problems(authoring.read(exercise), exercise)) == 2


def test_run_finds_the_chapters_of_the_current_folder_first(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    path = notebook(tmp_path / "notebooks")
    monkeypatch.chdir(tmp_path)
    assert written.find_notebook("7") == path
    monkeypatch.chdir(tmp_path / "notebooks")
    assert written.find_notebook("7").parent == authoring.ROOT / "notebooks"


def test_a_current_folder_that_has_been_removed_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["lab", "05"]) == 2
    assert "the current folder has been removed; cd to one that is there" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"course {version('course-lib')}\n"


HELP = """
import sys, time
from course_lib.cli import main
for command in sys.argv[1:]:
    start = time.process_time()
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert not end.code
    assert time.process_time() - start < 1, f"{command} took {time.process_time() - start} s of CPU time"
assert "torch" not in sys.modules, "imported torch"
assert time.process_time() < 2, f"took {time.process_time()} s of CPU time"
"""


@pytest.mark.long
def test_help_needs_less_than_a_second_and_no_torch():
    commands = ["", "doctor", "new", "run", "demo", "bench", "simulate", "plan", "train"]
    run = subprocess.run([sys.executable, "-c", HELP, *commands], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(f"usage: course {command}".strip() in run.stdout for command in commands)


@pytest.mark.long
@pytest.mark.parametrize("command", ["", "plan", "cluster init"])
def test_help_is_korean_where_that_is_asked_for_and_its_boxes_are_even(command):
    call, env = [sys.executable, "-m", "course_lib", *command.split(), "--help"], {"COURSE_LANG": "ko", "COLUMNS": "80"}
    run = subprocess.run(call, capture_output=True, text=True, env=os.environ | env)
    head, *boxes = re.split("^(?=╭)", run.stdout, flags=re.MULTILINE)
    assert len(boxes) >= 2 and re.search("[가-힣]", head) and (command or all(name in head for name in cli.COMMANDS))
    for line in "".join(boxes).splitlines():
        assert len(line) + len(re.findall("[가-힣]", line)) == 80, "a letter of Hangul is two columns wide"
        assert not re.search("[a-z]{2,} [a-z]{2,} [a-z]{2,}", line), "an English sentence"


def test_the_shell_can_complete_every_subcommand(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--tyro-print-completion", "bash"])
    script = capsys.readouterr().out
    assert "complete " in script and all(name in script for name in ("doctor", "new", "simulate", "train"))


@pytest.mark.programs
def test_train_is_the_trainer(tmp_path):
    small = ["--model", "toy,num_layers=1,d_model=32,num_heads=2,num_kv_heads=2", "--steps", "1", "--seq-len", "16"]
    command = [sys.executable, "-m", "course_lib", "train", *small]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and "started alone" in run.stdout and "loss" in run.stdout, run.stderr
    wrong = subprocess.run([*command, "--layout", "dp=2"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "layout dp=2 needs 2 ranks" in wrong.stderr + wrong.stdout


def test_the_command_course_is_the_module_s_main():
    (script,) = [script for script in entry_points(group="console_scripts") if script.name == "course"]
    assert script.value == "course_lib.cli:main"
