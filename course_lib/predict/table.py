"""A table of runs, and the same table with predictions: CSV in, CSV out.

columns read    model nodes gpus mbs grad_acc dp pp tp zero      (others are handed through)
columns added   predicted_mem_gb predicted_tok_s_gpu predicted_mfu_pct fits why
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from course_lib.config import ModelConfig
from course_lib.hardware import GB, Cluster
from course_lib.layout import Layout
from course_lib.predict.prediction import Prediction, predict
from course_lib.predict.rates import RATES, Rates
from course_lib.run import Run
from course_lib.validate import Size, checked

READ = ("nodes", "gpus", "mbs", "grad_acc", "dp", "pp", "tp", "zero")
ADDED = ("predicted_mem_gb", "predicted_tok_s_gpu", "predicted_mfu_pct", "fits", "why")
SHAPES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")


def read_models(path: str | Path, seq_len: int) -> dict[str, ModelConfig]:
    """Read shapes by name: {"8B": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 14336, ...}}.

    Raises   ValueError that names the model and what it lacks
    """
    told = json.loads(Path(path).read_text())
    if not isinstance(told, dict):
        raise ValueError(f"{path} holds a {type(told).__name__}; required: an object of shapes by a model's name")
    return {name: _model(name, shape, seq_len) for name, shape in told.items()}


def _model(name: str, shape: Mapping[str, object], seq_len: int) -> ModelConfig:
    if not isinstance(shape, dict) or set(shape) != set(SHAPES):
        got = ", ".join(shape) if isinstance(shape, dict) else repr(shape)
        raise ValueError(f"model {name!r} has {got}; required: {', '.join(SHAPES)}")
    sizes = (shape[key] for key in SHAPES)
    layers, hidden, heads, kv_heads, ffn, vocab, tied = sizes
    return ModelConfig(name, layers, hidden, heads, kv_heads, ffn, vocab, seq_len, tied=tied)


@checked
def run_of(row: Mapping[str, str], models: Mapping[str, ModelConfig], seq_len: Size) -> Run:
    """Make the run of one row.

    Raises   ValueError that says what the row lacks, or why it cannot be
    """
    if (name := row.get("model")) not in models:
        raise ValueError(f"model is {name!r}; known: {', '.join(models)}")
    numbers = {}
    for column in READ:
        text = (row.get(column) or "").strip()
        if not text.isdigit():
            raise ValueError(f"{column} is {row.get(column)!r}; required: a whole number")
        numbers[column] = int(text)
    dp, pp, tp = (numbers[axis] for axis in ("dp", "pp", "tp"))
    if numbers["gpus"] != dp * pp * tp:
        raise ValueError(f"gpus is {numbers['gpus']}, but dp x pp x tp is {dp * pp * tp}")
    layout = Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        zero_stage=numbers["zero"],
        sequence_parallel=tp > 1,
        micro_batch=numbers["mbs"],
        micro_batches=numbers["grad_acc"],
    )
    return Run(models[name], layout, seq_len, "bf16-master-fp32-grads")


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Read a CSV file; ValueError if it lacks a column."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in ("model", *READ) if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; required: model, {', '.join(READ)}")
        return list(reader)


def predict_rows(
    rows: Iterable[Mapping[str, str]],
    models: Mapping[str, ModelConfig],
    cluster: Cluster,
    seq_len: int,
    framework: str = "nanotron",
    rates: Rates = RATES,
) -> list[dict[str, str]]:
    """Predict each row; one that cannot be has no numbers, does not fit, and says why."""
    found = []
    for number, row in enumerate(rows, 2):  # line 1 is the header
        try:
            run = run_of(row, models, seq_len)
        except ValueError as error:
            if row.get("model") not in models:
                raise ValueError(f"line {number}: {error}") from None
            found.append({**row, **dict.fromkeys(ADDED, ""), "fits": "no", "why": f"cannot be: {error}"})
            continue
        found.append({**row, **_told(predict(run, cluster, framework, rates))})
    return found


def _told(one: Prediction) -> dict[str, str]:
    return {
        "predicted_mem_gb": f"{one.memory_bytes / GB:.2f}",
        "predicted_tok_s_gpu": f"{one.tokens_per_s_per_gpu:.1f}",
        "predicted_mfu_pct": f"{100 * one.mfu:.2f}",
        "fits": "yes" if one.fits else "no",
        "why": one.why,
    }


def predict_table(
    runs: str | Path, models: str | Path, cluster: Cluster, seq_len: int, framework: str, out: str | Path
) -> list[dict[str, str]]:
    """Read a table of runs, predict each, and write the table with what was added."""
    rows = predict_rows(read_rows(runs), read_models(models, seq_len), cluster, seq_len, framework)
    if not rows:
        raise ValueError(f"{runs} has a header and no run; required: a line for each run")
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return rows
