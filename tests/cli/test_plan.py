"""`course plan`: a table, why, neighbours that lost, the same as JSON, one sentence for what cannot be."""

import json
from pathlib import Path

import pytest

from course_lib.cli import main
from course_lib.cli.plan import write_files
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plan import Job, search
from course_lib.shapes import read_models

SMALL = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1536, "vocab": 2048, "tied": False}
ASKED = ["--gpus", "8", "--seq", "512", "--batch", "8192"]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"small": SMALL}))
    return str(path)


def test_the_plan_is_told_in_three_steps(model, capsys):
    assert main(["plan", model, *ASKED]) == 0
    said = capsys.readouterr().out
    assert said.startswith("small on 8 x H100")
    for words in ("1. Fit.", "2. Batch.", "3. Throughput.", "that lost:", "Less memory for less throughput", "MFU"):
        assert words in said


def test_json_has_the_same(model, capsys):
    assert main(["plan", model, *ASKED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = Layout.parse(found["best"]["layout"])
    assert best.world_size == 8 and best.sequences_per_step * 512 == 8192
    assert found["best"]["memory_bytes"] <= found["best"]["usable_bytes"]
    assert found["ranked"][0] == found["best"] and len(found["rejected"]) == 2
    assert found["best"]["step_s"] == pytest.approx(sum(found["best"]["seconds_by_part"].values()))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--gpus", "12"], "must fill nodes of 8; choose 8 or 16"),
        (["--gpus", "0"], "gpus is 0"),
        (["--batch", "8000"], "choose 7680 or 8192"),
        (["--gpu", "h1000"], "did you mean"),
        (["--link", "string"], "link is 'string'"),
        (["--framework", "nosuch"], "framework is 'nosuch'"),
    ],
)
def test_what_cannot_be_is_one_sentence(model, wrong, said, capsys):
    assert main(["plan", model, *ASKED, *wrong]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and told.startswith("course plan: ")


def test_models_are_presets_or_files_of_one(tmp_path, capsys):
    assert main(["plan", "llama-3.1-9b", *ASKED]) == 2
    assert "did you mean 'llama-3.1-8b'" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none.json"), *ASKED]) == 2
    assert "there is no file" in capsys.readouterr().err
    (tmp_path / "two.json").write_text(json.dumps({"a": SMALL, "b": SMALL}))
    assert main(["plan", str(tmp_path / "two.json"), *ASKED]) == 2
    assert "has 2 models; required: one" in capsys.readouterr().err


def test_the_best_layout_is_exported_and_refusals_are_told(model, tmp_path, capsys):
    assert main(["plan", model, *ASKED, "--export", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "no course.sh: the course's trainer has presets alone" in said
    for name in (
        "course.sbatch",
        "torchtitan.toml",
        "megatron.args",
        "nanotron.yaml",
        "picotron.json",
        "deepspeed.json",
    ):
        assert (name in names) != (f"no {name}: " in said)
    (tmp_path / "file").write_text("")
    assert main(["plan", model, *ASKED, "--export", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_files_of_the_framework_asked_for_are_of_the_fastest_layout_that_it_can_do(model, tmp_path):
    job = Job(
        read_models(Path(model), 512)["small"],
        Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"), 8),
        8,
        512,
        8192,
        framework="deepspeed",
    )
    found = search(job)
    best = next(option for option in found.ranked if option.layout.tp > 1)
    told = write_files(best, tmp_path / "out", 8, "deepspeed", found.ranked)
    able = next(option for option in found.ranked if option.layout.dp == 8 and option.layout.recompute == "none")
    written = json.loads((tmp_path / "out" / "deepspeed.json").read_text())
    assert written["zero_optimization"]["stage"] == able.layout.zero_stage
    assert written["gradient_accumulation_steps"] == able.layout.micro_batches
    line = next(line for line in told if line.startswith("wrote") and "/deepspeed.json" in line)
    assert f"deepspeed.json of {able.layout}, at " in line and "DeepSpeed has no tp in this file" in line
    assert not any(line.startswith("no deepspeed.json") for line in told)
    assert any(line.startswith("no accelerate_fsdp2.yaml: ") for line in told)
