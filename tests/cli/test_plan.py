"""`course plan`: a table, why, neighbours that lost, the same as JSON, one sentence for what cannot be."""

import json

import pytest

from course_lib.cli import main
from course_lib.layout import Layout

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
    assert found["best"]["step_s"] <= found["ranked"][0]["step_s"] / 0.97 and len(found["rejected"]) == 2
    assert found["best"]["room"] == "fits"
    assert found["best"]["step_s"] == pytest.approx(sum(found["best"]["seconds_by_part"].values()))


def test_the_best_layout_is_exported_and_refusals_are_told(model, tmp_path, capsys):
    assert main(["plan", model, *ASKED, "--export", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "no course.sh: the course's trainer has presets alone" in said
    for name in ("course.sbatch", "torchtitan.toml", "megatron.args", "nanotron.yaml", "deepspeed.json"):
        assert (name in names) != (f"no {name}: " in said)
    (tmp_path / "file").write_text("")
    assert main(["plan", model, *ASKED, "--export", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_chosen_layout_is_marked_and_always_shown(model, capsys):
    for show in ("1", "20"):
        assert main(["plan", model, *ASKED, "--show", show]) == 0
        said = capsys.readouterr().out
        table = said.split("1. Fit.")[0].splitlines()
        assert sum(line.startswith("->") for line in table) == 1


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        ("deepspeed", {"deepspeed.json", "accelerate_deepspeed.yaml"}),
        ("fsdp2", {"accelerate_fsdp2.yaml"}),
        ("megatron", {"megatron.args"}),
        ("torchtitan", {"torchtitan.toml"}),
        ("nanotron", {"nanotron.yaml"}),
    ],
)
def test_the_files_of_the_framework_asked_for_are_of_the_layout_that_is_explained(
    model, framework, names, tmp_path, capsys
):
    out = tmp_path / framework
    assert main(["plan", model, *ASKED, "--framework", framework, "--export", str(out)]) == 0
    said = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == names and "no " + min(names) not in said
    (line,) = (line for line in said.split("1. Fit.")[0].splitlines() if line.startswith("->"))
    layout = Layout.parse(line.split()[-1])
    assert f"micro-batch {layout.micro_batch} x {layout.micro_batches} micro-batches" in said
    if framework == "deepspeed":
        written = json.loads((out / "deepspeed.json").read_text())
        assert written["zero_optimization"]["stage"] == layout.zero_stage
        assert written["gradient_accumulation_steps"] == layout.micro_batches
        yaml = (out / "accelerate_deepspeed.yaml").read_text()
        assert f"zero3_init_flag: {str(layout.zero_stage == 3).lower()}" in yaml


def test_where_nothing_fits_it_is_told_how_much_is_missing_and_what_would(capsys):
    asked = ["--gpus", "1", "--seq", "2048", "--batch", "2048", "--gpu", "rtx-4090", "--per-node", "1"]
    assert main(["plan", "llama-3.1-8b", *asked]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "GB, " in said and " too many; this would fit: " in said
    for way in ("LoRA of rank 16", "GPUs, ZeRO-3"):
        assert way in said


def test_an_engine_without_experts_is_told_in_words(capsys):
    assert main(["plan", "mixtral-8x7b", "--gpus=16", "--seq=4K", "--batch=1M", "--framework=nanotron"]) == 2
    said = capsys.readouterr().err
    assert "nanotron has no experts, but mixtral-8x7b has; choose another engine (course, fsdp2, torchtitan" in said
