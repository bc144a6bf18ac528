"""A site's file and its scripts: what is chosen stands in them, nonsense is refused, bash reads them."""

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from course_lib.authoring import ROOT
from course_lib.cli import commands
from course_lib.cluster import Site, batch_script, read_site, write_site
from course_lib.cluster.site import TEMPLATE, shared_file
from course_lib.launch import _turn
from course_lib.layout import Layout

FULL = Site("gpu", "me", 4, 8, None, "ib0", "mlx5", ("gcc/13", "cuda/12.8"), "img.sqsh", "/sw/bin/python")
ARGUMENTS = (
    "--partition gpu --account me --nodes 4 --gpus-per-node 8 --interface ib0 --hca mlx5 --module gcc/13 "
    "--module cuda/12.8 --container img.sqsh --python /sw/bin/python"
)
LINES = """\
# The trainer of this course on 4 nodes with 8 ranks each:   sbatch train.sbatch
#SBATCH --nodes=4
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --account=me
module load gcc/13 cuda/12.8
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export NCCL_IB_HCA=mlx5
PYTHON=${PYTHON:-/sw/bin/python}
LAYOUT=${LAYOUT:-dp=4,tp=8,zero_stage=1}
""".splitlines()


def test_the_command_writes_what_it_was_told_and_reads_it_back(tmp_path, capsys):
    assert commands.main(["cluster", "init", str(tmp_path / "site"), *shlex.split(ARGUMENTS)]) == 0
    assert read_site(tmp_path / "site" / "site.toml") == FULL
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["check.sbatch", "site.toml", "train.sbatch"]
    assert (tmp_path / "site" / "train.sbatch").read_text() == batch_script(FULL)
    assert str(tmp_path / "site" / "check.sbatch") in capsys.readouterr().out
    assert commands.main(["cluster", "init", str(tmp_path / "site")]) == 2
    assert "already has site.toml, train.sbatch, check.sbatch; give another folder" in capsys.readouterr().err
    assert commands.main(["cluster", "init", str(tmp_path / "site"), "--force"]) == 0
    assert read_site(tmp_path / "site" / "site.toml") == Site()


def test_scripts_have_the_choices_of_the_site_and_those_alone():
    assert batch_script(Site()) == TEMPLATE.read_text(), "nothing chosen, nothing changed"
    assert set(LINES) <= set(batch_script(FULL).splitlines())
    assert set(LINES[1:]) <= set(batch_script(FULL, "check").splitlines())
    changed = [new for old, new in both(TEMPLATE.read_text(), batch_script(FULL)) if old != new]
    assert sorted(changed) == sorted([*LINES, changed[-1]]) and changed[-1].startswith(
        "SRUN_OPTIONS=(--container-image="
    )
    assert "#SBATCH --cpus-per-task=12\n" in batch_script(Site(gpus_per_node=4, cpus_per_gpu=3))
    assert "#SBATCH --cpus-per-task=2\n" in batch_script(Site(gpus_per_node=0)), "ranks on the CPU have one each"
    assert "#SBATCH --gres=gpu:h100:4\n" in batch_script(Site(gres="gpu:h100:4"))
    assert Layout.parse(re.search(r"LAYOUT:-(.*)}", batch_script(Site(gres="gpu:6")))[1]).world_size == 12


def both(before: str, after: str) -> list[tuple[str, str]]:
    return list(zip(before.splitlines(), after.splitlines(), strict=True))


@pytest.mark.launches
@pytest.mark.parametrize("what", ["train", "check"])
def test_bash_reads_the_scripts_and_each_line_is_explained(what, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(batch_script(FULL, what))
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    for before, line in itertools.pairwise(path.read_text().splitlines()):
        if re.match(r"#+SBATCH|[^# ]", line):
            assert re.match(r"# .+", before), f"no comment above: {line}"


def test_the_check_runs_the_check_once_under_the_same_layout():
    text = batch_script(FULL, "check")
    assert text.rstrip().endswith('-m course_lib.cluster --layout "$LAYOUT" --folder "$SLURM_SUBMIT_DIR"')
    assert "--max-restarts=0" in text and "#SBATCH --no-requeue" in text and "-m course_lib.train" not in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--python", "a\nb"], "give a name of letters"),
        (["--gres", "gpu:8", "--gpus-per-node", "8"], "both ask for GPUs: give one of them"),
        (["--gres", "shard:8"], "gres is 'shard:8'; give GPUs as gpu:8 or gpu:h100:8"),
    ],
)
def test_nonsense_is_refused_in_one_sentence_and_nothing_is_written(options, text, tmp_path, capsys):
    assert commands.main(["cluster", "init", str(tmp_path / "site"), *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("course cluster: ") and text in told and not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "there is no file .*site.toml; write one with: course cluster init"),
        ("nodes = ", "site.toml is no TOML"),
        ("knots = 2\nnodes = 2", "site.toml has knots; a site has only partition, account"),
        ('nodes = "two"', "nodes is 'two'; give a whole number"),
    ],
)
def test_a_file_that_is_no_site_is_refused(content, text, tmp_path):
    path: Path = tmp_path / "site.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises((ValueError, TypeError), match=text):
        read_site(path)


def test_a_notebook_asks_for_the_allocation_of_the_site():
    where = FULL.slurm(time_min=30)
    assert (where.nodes, where.ntasks_per_node, where.gpus_per_node, where.num_ranks) == (4, 8, 8, 32)
    assert (where.partition, where.account, where.time_min) == ("gpu", "me", 30)
    assert Site(gpus_per_node=0).slurm(4).num_ranks == 8 and Site(gres="gpu:a:2").slurm().gpus_per_node == 2


def test_a_folder_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="folder is '/proc/none', and cannot be written"):
        write_site(Site(), Path("/proc/none"))


def test_one_installation_for_all_is_a_recipe_and_a_module_with_the_place_that_was_told(tmp_path, capsys):
    words = ["cluster", "init", str(tmp_path / "site"), "--kind", "shared", "--python", "/sw/a/bin/python"]
    assert commands.main(words) == 0
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"site.toml", "apptainer.def", "modulefile"}
    module = (tmp_path / "site" / "modulefile").read_text()
    assert "\nset root /sw/a\n" in module and "python3 -m venv /sw/a &&" in module and "/srv" not in module
    assert commands.main([*words[:3], "--force", *words[3:5], "--python", "python3"]) == 2
    assert "python is 'python3'; give that of an installation for all" in capsys.readouterr().err


def test_the_module_file_is_tcl_and_sets_what_the_launcher_reads():
    first, *lines = shared_file(Site(), "modulefile").splitlines()
    told = [shlex.split(line) for line in lines if line and line[0] != "#"]
    assert first == "#%Module1.0"
    assert [words[0] for words in told] == ["module-whatis", "set", "prepend-path", "setenv", "setenv", "setenv"]
    assert {words[1] for words in told[3:]} == {_turn.LIMIT, _turn.FOLDER, "OMP_NUM_THREADS"}
    assert all(lines[index - 1].startswith("#") for index, line in enumerate(lines) if line.startswith("setenv"))


def sections(recipe: str) -> dict[str, list[str]]:
    """The lines of each section of a recipe, without comments; "" is what stands above the first."""
    found, name = {"": []}, ""
    for line in recipe.splitlines():
        if line.startswith("%"):
            name = line[1:]
            found[name] = []
        elif line.strip() and not line.strip().startswith("#"):
            found[name].append(line.strip())
    return found


def test_the_recipe_installs_as_the_dockerfile_does_and_sets_what_the_module_sets():
    recipe = sections(shared_file(Site(), "apptainer"))
    dockerfile = (ROOT / ".devcontainer" / "Dockerfile").read_text()
    assert recipe[""] == ["Bootstrap: docker", f"From: {re.search('FROM (.*)', dockerfile)[1]}"]
    place = re.search("COPY . (.*)", dockerfile)[1]
    assert recipe["files"] == [f". {place}"] and recipe["post"][0] == f"cd {place}"
    assert recipe["post"][1] in dockerfile
    assert len(recipe["post"]) == 2
    module = dict(re.findall(r"(?m)^setenv (\w+) (.*)$", shared_file(Site(), "modulefile")))
    assert dict(line.removeprefix("export ").split("=") for line in recipe["environment"]) == module | {
        "LC_ALL": "C.UTF-8"
    }
    assert recipe["runscript"] == ['exec course "$@"'] and recipe["test"] == ["course --version"]
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["bash", "-n", "-c", "\n".join(recipe[name])], check=True)
