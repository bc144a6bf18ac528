"""Each lab runs on CPU ranks and sends what its formula says; sheets and forms say what the table and the model say."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import free_port
from torch.distributed.run import get_args_parser

from course_lib.cli import commands
from course_lib.labs import LABS, Nodes, form, lab_named, sheet
from course_lib.labs.answers import numbers_of, words_of
from course_lib.labs.measure import SUMS, on_gpus, run_lab
from course_lib.labs.sheet import PORT, compare, launch_lines, modelled, modelled_sent, modelled_sums, published_shares
from course_lib.language import spoken, told
from course_lib.launch import launch
from course_lib.timing.collectives import collective_s

ROOT = Path(__file__).parents[2]
FLAGS = {"torchrun": "--node-rank", "accelerate": "--machine_rank"}
MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}


def test_without_gpus_a_chapter_says_within_the_columns_which_lab_it_would_measure(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for chapter, lab in LABS.items():
        said = on_gpus(chapter)
        assert said.startswith(f"Here no GPUs; with {min(lab.ranks)} or more") and max(map(len, said.split("\n"))) <= 88


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "chapter", [pytest.param(one, marks=pytest.mark.slow if one in ("00", "05") else pytest.mark.long) for one in LABS]
)
def test_a_lab_runs_on_cpu_ranks_and_sends_what_is_counted(chapter):
    lab, ranks = LABS[chapter], LABS[chapter].ranks[0]
    measured = launch(run_lab, ranks, chapter, 1, quiet=True)[0]
    rows = compare(lab, json.loads(json.dumps(measured)))
    assert [row["run"] for row in rows] == ([str(layout) for layout in lab.layouts_on(ranks)] or list(SUMS))
    for row in rows:
        assert row["measured"]["step_s"] > 0 and row["measured"].get("peak_bytes") is None
        if "ep" in row["run"]:  # tokens choose; the formula expects an even choice
            assert row["measured"]["sent_bytes"] == pytest.approx(row["modelled"]["sent_bytes"], rel=0.2)
        else:
            assert row["measured"]["sent_bytes"] == row["modelled"]["sent_bytes"] >= ranks - 1


def test_there_is_a_lab_for_each_chapter_and_its_layouts_fit_its_numbers_of_ranks():
    assert list(LABS) == [f"{chapter:02}" for chapter in range(13)] and lab_named("5") is LABS["05"]
    for lab in LABS.values():
        assert (ROOT / "notebooks" / f"{lab.notebook}.ipynb").exists() and len(lab.layouts or SUMS) > 1
        for ranks in lab.ranks:
            for layout in lab.layouts_on(ranks):
                assert layout.world_size == ranks
                layout.check_model(*lab.model(on_gpu=True))
        for layout in lab.layouts_on(lab.ranks[0]):
            layout.check_model(*lab.model(on_gpu=False))


@pytest.mark.parametrize("chapter", sorted(LABS))
def test_the_sheets_in_docs_are_those_of_the_table(chapter):
    path = ROOT / "docs" / "labs" / f"{chapter}.md"
    assert path.read_text(encoding="utf-8") == sheet(LABS[chapter]), "run: course lab all --folder docs/labs"
    for question in LABS[chapter].questions:
        assert question.asks in path.read_text()
        assert question.half not in path.read_text() and question.answer[:30] not in path.read_text()


PARAMETERS = 2 * 32768 * 2048 + 2048 + 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048)
BY_HAND = {  # by the chapter's formula, on two nodes of four H100: chapter, question, number -> value
    ("00", 1, "of_the_bytes"): 1,
    ("01", 1, "gflop_per_token"): (6 * PARAMETERS + 12 * 16 * 2048 * 4096 / 2) / 1e9,
    ("03", 1, "mb"): 2 * 7 / 8 * 2 * PARAMETERS / 1e6,
    ("04", 0, "by_stage_1_gb"): 7 / 8 * 12 * PARAMETERS / 1e9,
    ("07", 1, "tokens_of_a_rank"): 2 * 8 / 32 * 0.35 * 989.4e12 / 50e9,
    ("08", 0, "second"): 7 / 39,
}


@pytest.mark.parametrize(("chapter", "place", "name"), BY_HAND)
def test_what_a_chapters_formula_gives_by_hand_is_marked_as_right(chapter, place, name):
    lab = LABS[chapter]
    question, value = lab.questions[place], BY_HAND[chapter, place, name]
    computed = numbers_of(question, words_of(lab, Nodes().of(lab)))[name]
    assert abs(value - computed) <= question.within * computed + 1e-9 < computed


def test_answers_tell_each_number_with_its_bounds_and_what_gets_half_and_none(tmp_path):
    assert commands.main(["lab", "all", "--answers", "--folder", str(tmp_path)]) == 0
    for lab in LABS.values():
        text = (tmp_path / f"{lab.chapter}-answers.md").read_text()
        assert text.count(", right from ") >= len(lab.questions) and "{" not in text
        assert all(words in text for one in lab.questions for words in (one.asks, one.half, one.none))
        with spoken("ko"):
            korean = re.sub("`[^`]*`", "", told(f"{text}\n{sheet(lab)}"))
        assert not re.search("[a-z]{2,} [a-z]{2,} [a-z]{2,}", korean), "an English sentence"


@pytest.mark.parametrize("per_node", [2, 4])
def test_lab_12_shows_that_tp_must_not_cross_the_network(per_node):
    lab, cluster = LABS["12"], Nodes(2, per_node).cluster()
    inside, across = (modelled(lab, layout, cluster) for layout in lab.layouts_on(2 * per_node))
    assert across.step_s > 1.2 * inside.step_s
    assert across.seconds_by_part["tp"] > 5 * inside.seconds_by_part["tp"] and across.memory_bytes < 40e9


def test_every_launch_line_starts_as_many_ranks_of_the_lab():
    lab, machine = LABS["05"], Nodes(2, 4)
    lines = {way: shlex.split(line) for way, line in launch_lines(lab, machine).items()}
    assert all(words[-5:] == ["-m", "course_lib.labs", "05", "--out", "lab05.json"] for words in lines.values())
    told = [get_args_parser().parse_args(words[1:]) for words in lines.values() if words[0] == "torchrun"]
    assert [(one.nnodes, one.nproc_per_node, one.module, one.training_script_args[0]) for one in told] == [
        ("2", "4", True, "05"), ("1:1", "4", True, "05"),
    ]  # fmt: skip
    assert [words[words.index("--num_processes") + 1] for words in lines.values() if words[0] == "accelerate"] == ["8"]
    assert lines["srun"][1:5] == ["--nodes", "2", "--ntasks-per-node", "4"]


def of_gpus(lab, speed=1.0, memory=1.0) -> dict:
    """What four GPUs would have measured, as factors on what is predicted."""
    cluster = Nodes(2, 2).cluster()
    runs = []
    for layout in lab.layouts_on(4):
        one = modelled(lab, layout, cluster)
        runs.append({
            "run": str(layout), "step_s": one.step_s / speed, "peak_bytes": one.memory_bytes * memory,
            "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu * speed, "sent_bytes": modelled_sent(lab, layout),
        })  # fmt: skip
    return {"lab": lab.chapter, "device": "NVIDIA H100 80GB HBM3", "ranks": 4, "nodes": 2, "runs": runs}


def test_sums_are_modelled_as_slow_as_published_ones_and_the_form_says_which_are_outside():
    told = modelled_sums(Nodes(1, 8), 256 * 10**6)
    least, most = published_shares()
    assert 0.5 < least < most < 1  # no published collective reaches what links and latencies allow
    fast_s, slow_s = told["backend"]["step_s"]
    modelled_s = collective_s("all_reduce", 256 * 10**6, 8, Nodes(1, 8).cluster())
    assert (fast_s, slow_s) == pytest.approx((modelled_s, modelled_s / least))
    assert told["through rank 0"]["step_s"][0] > 5 * told["ring by hand"]["step_s"][0] > 0
    assert [one["sent_bytes"] for one in told.values()] == [7 * 256 * 10**6, 448 * 10**6, 448 * 10**6]
    runs = [{"run": name, "step_s": one["step_s"][0], "sent_bytes": one["sent_bytes"]} for name, one in told.items()]
    runs[2]["step_s"] = 2 * slow_s
    measured = {"lab": "00", "device": "NVIDIA H100 80GB HBM3", "ranks": 8, "nodes": 1, "runs": runs}
    rows = compare(LABS["00"], measured)
    assert [row["inside"]["step_s"] for row in rows] == [True, True, False]
    shown = form(LABS["00"], measured)
    assert shown.count(": inside") == 2 and shown.count(": above") == 1 and "fastest measured: ring by hand" in shown


def test_a_lab_of_one_gpu_takes_one_of_the_machine():
    text = sheet(LABS["01"], Nodes(2, 4))
    assert "1 node with 1 GPU, for" in text and "on 1 node of 1 H100" in text and "--multi_gpu" not in text


def test_a_form_says_what_lies_inside_the_error_bars_and_what_does_not():
    lab = LABS["04"]
    assert all(all(row["inside"].values()) for row in compare(lab, of_gpus(lab)))
    slow = form(lab, of_gpus(lab, speed=0.5, memory=2.0))
    assert slow.count(": below") == slow.count(": above") == 3 and slow.count("exactly as counted") == 3
    assert "4 ranks on 2 nodes, NVIDIA H100 80GB HBM3" in slow and "fastest measured: dp=4" in slow
    assert max(map(len, slow.splitlines())) <= 100


def test_the_command_prints_sheets_and_forms_and_refuses_what_is_no_file_of_the_lab(tmp_path, capsys):
    assert commands.main(["lab", "5", "--gpu", "a100-80", "--nodes", "1"]) == 0
    assert "on 1 node of 4 A100 SXM 80 GB" in capsys.readouterr().out
    path = tmp_path / "lab05.json"
    path.write_text(json.dumps(of_gpus(LABS["05"])))
    assert commands.main(["lab", "05", "--measured", str(path)]) == 0
    assert "inside" in capsys.readouterr().out
    for arguments, text in [
        (["06", "--measured", str(path)], "the file is of lab '05'; give one of lab 06"),
        (["05", "--measured", str(tmp_path / "none")], "there is no file"),
        (["13"], "chapter is '13'; labs are for 00, 01"),
        (["05", "--nodes", "3"], "lab 05 has 12 ranks; start it with 4 or 8"),
    ]:
        assert commands.main(["lab", *arguments]) == 2 and text in capsys.readouterr().err
    path.write_text('{"lab": "05", "runs": []}')
    assert commands.main(["lab", "05", "--measured", str(path)]) == 2
    assert "the file lacks something" in capsys.readouterr().err


@pytest.mark.programs
@pytest.mark.parametrize(("engine", "chapter"), [("torchrun", "03"), ("accelerate", "01")])
def test_a_lab_under_an_engine_writes_the_file_and_prints_the_form(tmp_path, engine, chapter):
    lab, out = LABS[chapter], tmp_path / "lab.json"
    line = launch_lines(lab, Nodes(1, lab.ranks[0]))[f"{engine}, on each node with its own {FLAGS[engine]}"]
    line = (
        line.replace("FIRST-NODE", "127.0.0.1").replace(str(PORT), free_port()).replace(f"lab{chapter}.json", str(out))
    )
    program, *words = shlex.split(line)
    done = subprocess.run(
        [sys.executable, "-m", MODULES[program], *words, "--rounds", "1"],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"lab {chapter}, {lab.title}: measured on {lab.ranks[0]} rank"), done.stdout
    assert compare(lab, json.loads(out.read_text()))
