"""`course predict`: a table of runs in, the same table with estimates out; what makes no sense says why in its line."""

import csv
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.cli import main
from course_lib.config import ModelConfig
from course_lib.estimate import estimate, predict_rows, read_rows
from course_lib.estimate.table import ADDED, BARS, READ, run_of
from course_lib.hardware import Cluster, gpu, link
from course_lib.shapes import read_models

CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("efa"))
SHAPES = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 14336, "vocab": 131072, "tied": False}
SMALL = SHAPES | {"layers": 16, "hidden": 2048, "ffn": 8192, "tied": True}
EIGHT = ModelConfig("8B", 32, 4096, 32, 32, 14336, 131072, 4096)


def a_table(folder: Path, rows: list[dict], **models) -> tuple[Path, Path]:
    runs, shapes = folder / "runs.csv", folder / "models.json"
    with open(runs, "w", newline="") as file:
        writer = csv.DictWriter(file, ["model", *READ, *[key for key in rows[0] if key not in ("model", *READ)]])
        writer.writeheader()
        writer.writerows(rows)
    shapes.write_text(json.dumps(models or {"8B": SHAPES, "1B": SMALL}))
    return runs, shapes


def a_row(**changed) -> dict:
    return dict(zip(("model", *READ), ("8B", 2, 16, 1, 64, 4, 1, 4, 1), strict=True)) | changed


def test_files_that_lack_something_are_told_in_one_line(tmp_path, capsys):
    runs, models = a_table(tmp_path, [a_row()], **{"8B": {"layers": 32}})
    assert main(["predict", str(runs), "--models", str(models), "--out", str(tmp_path / "out.csv")]) == 2
    assert "required: layers, hidden" in capsys.readouterr().err
    (tmp_path / "short.csv").write_text("model,nodes\n8B,1\n")
    assert main(["predict", str(tmp_path / "short.csv"), "--models", str(models), "--out", "x"]) == 2
    assert "has no column gpus, mbs" in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "none.csv"), "--models", str(models), "--out", "x"]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_an_engine_that_leaves_stages_empty_has_more_stages_than_layers_and_no_other(tmp_path):
    """28 layers on pp 32, as nanotron ran them: its last stages have none."""
    three = ModelConfig("3B", 28, 3072, 32, 32, 8192, 131072, 4096, tied=True)
    row = {name: str(value) for name, value in a_row(model="3B", gpus=64, nodes=8, dp=2, pp=32, tp=1).items()}
    run = run_of(row, {"3B": three}, 4096)
    assert run.layout.layers_of_stage == (*[1] * 28, *[0] * 4)
    assert estimate(run, CLUSTER, "nanotron").tokens_per_s_per_gpu > 0
    with pytest.raises(ValueError, match="4 stages without a layer, of which megatron can have 0; .* .5 in nanotron"):
        estimate(run, CLUSTER, "megatron")
    for engine, layers in (("megatron", 28), ("nanotron", 26)):  # 26 layers and 5 other blocks are not 32
        with pytest.raises(ValueError, match=f"32 stages, but 3B has {layers} layers, .* nearest: pp="):
            run_of(row, {"3B": replace(three, num_layers=layers)}, 4096, engine)


def test_a_zero_stage_that_an_engine_has_not_is_refused_and_not_counted_as_another(tmp_path):
    found = {}
    for name, row in (("nanotron", a_row(zero=3)), ("megatron", a_row(zero=2, tp=2, pp=2))):
        run = run_of({key: str(value) for key, value in row.items()}, {"8B": EIGHT}, 4096, name)
        with pytest.raises(ValueError) as error:
            estimate(run, CLUSTER, name)
        found[name] = str(error.value)
    assert found["nanotron"] == "nanotron has no ZeRO-3; choose from 0, 1, or another engine"
    assert found["megatron"] == "megatron has no ZeRO-2 in a pipeline; choose from 0, 1, or another engine"


# ---- the table


def test_the_table_keeps_its_columns_and_gains_five(tmp_path):
    rows = [a_row(status="ok"), a_row(status="crashed", pp=64, gpus=1024)]
    runs, models = a_table(tmp_path, rows)
    out = tmp_path / "out.csv"
    assert main(["predict", str(runs), "--models", str(models), "--out", str(out)]) == 0
    first, second = csv.DictReader(out.open())
    assert list(first) == ["model", *READ, "status", *ADDED]
    found = estimate(run_of(first, read_models(models, 4096), 4096), CLUSTER, "nanotron")
    assert float(first["predicted_mem_gb"]) == pytest.approx(found.logged_bytes / 2**30, abs=0.005)  # as its log
    assert float(first["predicted_tok_s_gpu"]) == pytest.approx(found.tokens_per_s_per_gpu, abs=0.05)
    assert first["fits"] == "yes" and "most memory" in first["why"]
    assert second["predicted_mem_gb"] == "" and second["fits"] == "no" and "32 layers" in second["why"]


def test_two_thousand_rows_take_seconds(tmp_path):
    rows = [a_row(mbs=1 + index % 4, grad_acc=16 + index) for index in range(2000)]
    runs, models = a_table(tmp_path, rows)
    begun = time.process_time()
    assert len(predict_rows(read_rows(runs), read_models(models, 4096), CLUSTER, 4096)) == 2000
    assert time.process_time() - begun < 10  # 5 s where nothing else runs


def test_error_bars_are_four_columns_around_the_estimate(tmp_path):
    runs, models = a_table(tmp_path, [a_row()])
    out = tmp_path / "out.csv"
    assert main(["predict", str(runs), "--models", str(models), "--out", str(out), "--error-bars"]) == 0
    (row,) = csv.DictReader(out.open())
    low, high, slow, fast = (float(row[name]) for name in BARS)
    assert low < float(row["predicted_mem_gb"]) < high and slow < float(row["predicted_tok_s_gpu"]) < fast


def test_states_are_the_engine_s_unless_the_row_tells_its_own():
    row = {key: str(value) for key, value in a_row(zero=0).items()}
    models = {"8B": EIGHT}
    recipes = [run_of(row | extra, models, 4096, engine).recipe for extra, engine in (
        ({}, "nanotron"), ({}, "torchtitan"), ({"states": "bf16"}, "torchtitan"))]  # fmt: skip
    assert recipes == ["bf16-master-fp32-grads", "bf16-master", "bf16"]
    with pytest.raises(ValueError, match="recipe is 'fp9'"):
        run_of(row | {"states": "fp9"}, models, 4096)


# ---- odd tables

HEADER = "model,nodes,gpus,mbs,grad_acc,dp,pp,tp,zero,Note"
LINE = "8B,2,16,1,64,4,1,4,1,mine"


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{HEADER}\n{LINE}\n",
        f"{HEADER.upper().replace('NOTE', 'Note')}\n{LINE}\n",
        f"{HEADER}\n{LINE}\n".replace(",", ", "),
        f"{HEADER}\n\n{LINE}\n,,,,,,,,,\n",
        f"{HEADER},predicted_mem_gb,fits\n{LINE},1.0,no\n",
    ],
)
def test_a_table_may_be_written_in_other_ways(tmp_path, text):
    runs, models = a_table(tmp_path, [a_row()])
    runs.write_text(text)
    main(["predict", str(runs), "--models", str(models), "--gpu", "h100-80g", "--out", str(tmp_path / "out.csv")])
    header, line = (tmp_path / "out.csv").read_text().splitlines()
    assert header.split(",") == [*HEADER.split(","), *ADDED]
    assert line.startswith(LINE) and ",yes,fits" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no column model, nodes.*found: nothing"),
        (HEADER.replace(",", ";").encode(), "separated by commas; found: model;nodes"),
        (f"{HEADER}\n".encode(), "has a header and no run"),
        (f"{HEADER}\n{LINE},7,8\n".encode(), "line 2 has 2 values more than the header"),
        (bytes(range(256)), "is no text in UTF-8"),
    ],
)
def test_what_is_no_table_is_told_in_a_sentence(tmp_path, capsys, content, message):
    runs, models = a_table(tmp_path, [a_row()])
    runs.write_bytes(content)
    assert main(["predict", str(runs), "--models", str(models), "--gpu", "h100-80g", "--out", str(tmp_path / "o")]) == 2
    told = capsys.readouterr().err
    assert re.search(message, told) and len(told.splitlines()) == 1


def test_a_row_that_is_short_or_no_number_says_so_and_the_others_are_predicted(tmp_path):
    runs, models = a_table(tmp_path, [a_row()])
    runs.write_text(f"{HEADER}\n{LINE}\n8B,2,16\n{LINE.replace(',64,', ',many,')}\n{LINE.replace(',64,', ',²,')}\n")
    main(["predict", str(runs), "--models", str(models), "--gpu", "h100-80g", "--out", str(tmp_path / "out.csv")])
    fine, short, word, square = csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8"))
    assert fine["fits"] == "yes" and {short["fits"], word["fits"], square["fits"]} == {"no"}
    assert "grad_acc is '²'; required: a whole number" in square["why"]
    assert "mbs is ''" in short["why"] and "grad_acc is 'many'; required: a whole number" in word["why"]


def test_a_row_of_an_unknown_model_and_one_of_other_nodes_say_so_and_the_table_goes_on(tmp_path):
    rows = [a_row(), a_row(model="9B"), a_row(nodes=4), a_row(mbs="1.0"), a_row(pp=4, dp=1, grad_acc=2)]
    runs, models = a_table(tmp_path, rows)
    main(["predict", str(runs), "--models", str(models), "--out", str(tmp_path / "out.csv")])
    fine, unknown, other, spreadsheet, few = csv.DictReader((tmp_path / "out.csv").open())
    assert (unknown["fits"], unknown["why"]) == (
        "no",
        "cannot be: model is '9B'; known: 8B, 1B; give others by --models",
    )
    assert other["why"] == fine["why"] + "; nodes is 4, predicted for 2: 16 GPUs in nodes of 8"
    assert few["why"].endswith("; nanotron takes 3 micro-batches or more")
    assert other["predicted_mem_gb"] == fine["predicted_mem_gb"] == spreadsheet["predicted_mem_gb"]
