"""The project as files: README, pins, environment, licence, and nothing of any one machine."""

import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter

import nightly
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from course_lib.authoring import ROOT, notebook_paths
from course_lib.authoring.__main__ import package_map
from course_lib.cli.doctor import CHAPTERS
from course_lib.plots.course_map import PICTURES

README = (ROOT / "README.md").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__", ".gitignore", "shared"}


def files() -> list[str]:
    """What git tracks or would; in an archive without git, everything."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


# The README


def commands() -> list[str]:
    """Each command of the README's bash blocks, without its comment."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_is_run_by_ci(command):
    called = r"^ *(?:step )?(?:\.venv/bin/)?((?:make|course|torchrun) .*?)(?: LAB_FLAGS.*)?$"
    steps = re.findall(called, CI, re.MULTILINE)
    assert command in steps


def test_the_readme_names_the_two_commands_first_with_their_minutes_and_the_quick_one():
    assert commands()[:2] == ["make lab", "make test"]
    assert all(re.search(rf"^{command} .*minutes", README, re.MULTILINE) for command in commands()[:2])
    assert "`make quick`" in README


def test_the_map_has_a_line_for_every_file_of_the_package_and_everything_at_the_top():
    document = (ROOT / "docs" / "MAP.md").read_text(encoding="utf-8")
    assert f"```\n{package_map()}\n```" in document, "make fmt writes the map"
    assert len(package_map().splitlines()) <= 40, "a newcomer reads it in a minute"
    top = {name.split("/")[0] for name in files()} - NOT_OURS
    lines = {line.split()[0].split("/")[0] for line in document.splitlines() if line[:1].strip()}
    assert top - lines == set(), "a line is missing in docs/MAP.md"


def test_the_readme_is_short_and_shows_pictures_that_say_what_they_show():
    assert README.count("\n") <= 120
    pictures = re.findall(r"!\[([^\]]*)\]\(docs/([^)]*)\)", README)
    assert {name for _, name in pictures} == set(PICTURES) and all(len(alt.split()) > 8 for alt, _ in pictures)


def test_every_link_inside_the_repository_leads_somewhere():
    for document in (
        "README.md",
        "README.ko.md",
        "CONTRIBUTING.md",
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    ):
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / document).parent.joinpath(target).exists(), f"{document}: {target}"


def test_the_table_of_chapters_is_complete():
    assert all(f"(notebooks/{path.name})" in README for path in notebook_paths("notebooks"))


def test_ci_starts_with_the_readmes_test_command_and_may_not_hang_on_input():
    assert re.search(r"^step (.*)$", CI, re.MULTILINE).group(1) == "make test"
    assert "set -euo pipefail" in CI and "exec </dev/null" in CI


MARKERS = ("launches", "slow", "long", "programs", "core", "exhaustive")


def selected_by(target: str, marks: tuple[str, ...]) -> bool:
    """Whether a target of make runs a test with these marks."""
    (expression,) = re.findall(r'-m pytest -m "?([\w ()]+?)"? -n', recipe_of(target))
    return eval(expression, {"__builtins__": {}}, {marker: marker in marks for marker in MARKERS})


@pytest.mark.parametrize("marks", [some for n in range(7) for some in itertools.combinations(MARKERS, n)], ids=" ".join)
def test_each_test_is_run_once_by_make_test_by_the_rest_or_by_make_nightly(marks):
    targets = [target for target in ("unit", "rest", "test-programs", "test-exhaustive") if selected_by(target, marks)]
    assert len(targets) == 1
    assert selected_by("quick", marks) <= ("unit" in targets or not {"long", "programs"}.isdisjoint(marks))


def test_what_ci_does_not_run_make_nightly_does():
    targets = set(re.findall(r"^(test-[a-z-]+):", MAKEFILE, re.MULTILINE))
    assert targets == set(re.findall(r"step make (test-[a-z-]+)", CI)) | {
        target for target in nightly.TOUCHES if target.startswith("test-")
    }


def test_no_two_test_files_are_the_same_module_for_pytest():
    paths = (ROOT / "tests").rglob("test_*.py")
    named = Counter((path.parent if (path.parent / "__init__.py").exists() else "", path.stem) for path in paths)
    assert [name for name, count in named.items() if count > 1] == [], "give the folder an __init__.py"


def recipe_of(target: str) -> str:
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE).group(1)


def test_every_target_that_is_phony_exists_and_says_what_it_does():
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE).group(1).replace("\\\n", " ").split()
    for target in phony:
        assert re.search(rf"^{target}:.*## \S", MAKEFILE, re.MULTILINE), target


# Pins and environments


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower().replace("_", "-").replace(".", "-"): Version(v) for name, v in (x.split("==") for x in lines)}


def requirements() -> list[Requirement]:
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    return [
        Requirement(text)
        for text in PYPROJECT["project"]["dependencies"] + [text for extra in extras for text in extra]
    ]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_requirement_is_pinned_inside_its_range(requirement):
    pinned = pins()[requirement.name.lower()]
    assert requirement.specifier.contains(pinned)
    assert pinned.local is None, "a local label such as +cpu cannot be had everywhere"


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_every_installed_pin_can_be_had_on_the_oldest_python_of_each_series(python):
    for name, version in pins().items():
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed here
        if metadata["Version"].split("+")[0] == str(version):
            assert SpecifierSet(metadata["Requires-Python"] or "").contains(python), f"{name}=={version}"


def test_the_environment_for_conda_is_the_project_with_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, section = environment["dependencies"]
    assert Requirement(python).specifier == Requirement(f"python{PYPROJECT['project']['requires-python']}").specifier
    assert pip == "pip" and set(section) == {"pip"}
    assert section["pip"] == ["--constraint constraints.txt", "--editable .[lab,test]"]
    assert environment["name"] == PYPROJECT["project"]["name"]
    assert {"lab", "test"} <= set(PYPROJECT["project"]["optional-dependencies"])


def test_the_image_is_built_from_files_that_are_here_with_the_pins_and_opens_what_the_readme_opens():
    """There is no Docker where the tests run: its file is read, and what it calls is looked up."""
    text = (ROOT / ".devcontainer" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    called = {word: [rest for name, rest in steps if name == word] for word in {name for name, _ in steps}}
    assert set(called) == {"FROM", "COPY", "WORKDIR", "RUN", "USER", "EXPOSE", "CMD"} and steps[0][0] == "FROM"
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", called["FROM"][0])[1]
    assert Version(version) in SpecifierSet(PYPROJECT["project"]["requires-python"])
    install = called["RUN"][0]
    assert PYTORCH_CPU.split()[1] in install and "-c constraints.txt" in install and "torch" in pins()
    assert re.findall(r'"\.\[(\w+)\]"', install) == ["lab"] and "jupyterlab" in names_of_extra("lab")
    assert "course new course" in called["RUN"][-1] and "course new" in README
    assert called["USER"] == ["learner"], "a notebook runs any code, so not as root"
    command = json.loads(called["CMD"][0])
    index = command[-1].removeprefix("--LabApp.default_url=/lab/tree/")
    assert command[:2] == ["jupyter", "lab"] and (ROOT / index).is_file()
    described = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert described["forwardPorts"] == [int(port) for port in called["EXPOSE"]]
    assert (ROOT / ".devcontainer" / described["build"]["dockerfile"]).is_file()
    assert described["postCreateCommand"].startswith("course new ")


def names_of_extra(extra: str) -> set[str]:
    return {Requirement(text).name for text in PYPROJECT["project"]["optional-dependencies"][extra]}


def test_learners_get_what_chapters_import_and_no_tools_of_the_tests():
    assert {name for chapter in CHAPTERS for name in chapter.needs} <= names_of_extra("lab")
    assert names_of_extra("lab").isdisjoint(names_of_extra("test"))


def test_the_workflow_runs_the_oldest_and_the_newest_torch_that_the_package_allows():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    versions = [Version(text) for text in workflow["jobs"]["quick"]["strategy"]["matrix"]["torch"]]
    (torch,) = [Requirement(text) for text in PYPROJECT["project"]["dependencies"] if text.startswith("torch")]
    oldest, newest = min(versions), max(versions)
    allowed = {f">={oldest.major}.{oldest.minor}", f"<{newest.major}.{newest.minor + 1}"}
    assert set(str(torch.specifier).split(",")) == allowed


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_the_quick_tests_run_on_both_ends_of_python_in_the_workflow(python):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert python in workflow["jobs"]["quick"]["strategy"]["matrix"]["python"]
    assert "quick-newer" in nightly.TOUCHES and "$(call found,3.13)" in MAKEFILE


@pytest.mark.parametrize("flag", ["", "CPU=1"])
def test_make_lab_takes_the_build_without_cuda_only_where_it_is_asked_for(flag, tmp_path):
    command = ["make", "--dry-run", "lab", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", *flag.split()]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (PYTORCH_CPU in shown) == bool(flag)


def test_lessons_with_two_threads_run_one_at_a_time():
    """On two cores several kernels of two threads each would wait for each other by spinning."""
    command = ["make", "--dry-run", "test-processors", "VENV=", f"PYTHON={sys.executable}", "WORKERS=2"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    runs = re.findall(r"OMP_NUM_THREADS=(\d+) .* -n (\d+) --dist", shown)
    assert sorted(runs) == [("1", "3")] * 3 + [("2", "1")] * 3


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "environment.yml"])
def test_a_document_names_no_extra_that_does_not_exist(document):
    lists = re.findall(r"\.\[([\w,]+)\]", (ROOT / document).read_text(encoding="utf-8"))
    named = [extra for names in lists for extra in names.split(",")]
    assert set(named) <= set(PYPROJECT["project"]["optional-dependencies"])


def test_pins_are_renewed_with_every_extra():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (named,) = re.findall(r'pip install -e "\.\[([\w,]+)\]"`', text)
    assert set(named.split(",")) == set(PYPROJECT["project"]["optional-dependencies"])


def test_make_lab_opens_a_copy_and_not_the_clone():
    shown = recipe_of("lab")
    assert "-m course_lib new '$(LAB_FOLDER)'" in shown and "cd '$(LAB_FOLDER)'" in shown
    folder = re.search(r"^LAB_FOLDER \?= (\S+)", MAKEFILE, re.MULTILINE).group(1)
    assert f"{folder.split('/')[0]}/" in (ROOT / ".gitignore").read_text().splitlines()


# The rest


def test_the_licence_is_there_and_is_the_one_that_the_package_declares():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0" in text
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


ELSEWHERE = re.compile(
    r"(?<![\w.:/])/(?:home|root|Users|opt|mnt|work|workspace)/[\w.-]+|file://|extra-index-url|find-links"
)

PYTORCH_CPU = "--extra-index-url https://download.pytorch.org/whl/cpu"  # PyTorch's own, for everybody


def test_no_file_names_a_path_or_a_package_index_of_one_machine():
    for name in files():
        if name == "tests/test_project.py" or not name.endswith(
            (".py", ".md", ".ipynb", ".txt", ".yml", ".toml", "Makefile", "run")
        ):
            continue
        text = (ROOT / name).read_text(encoding="utf-8").replace(PYTORCH_CPU, "")
        found = ELSEWHERE.findall(text)
        assert found == [], name
