"""A table of runs, and the same table with predictions: CSV in, CSV out.

columns read    model nodes gpus mbs grad_acc dp pp tp zero      (others are handed through)
    and, if there cp ep expert_tp sp regather seq precision recompute states finetune optimizer offload attention
                  loss_chunks schedule v layers_of_stage dp_replicate cp_method cp_sharding
columns added   predicted_mem_gb predicted_tok_s_gpu predicted_mfu_pct fits why
                mem_gb as the engine's log counts: nanotron's in GiB, other engines' in GB; "fits" is no where not even
                the lower end of the error bar does, and "why" tells it in words: fits, tight, does not fit
    and, if asked mem_gb_from mem_gb_to tok_s_gpu_from tok_s_gpu_to: where nine in ten runs like it lay
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import get_args

from course_lib.config import ModelConfig, Recompute
from course_lib.engines import EngineFacts, engine_of
from course_lib.estimate.estimate import Estimate, estimate
from course_lib.hardware import Cluster, gpu_for
from course_lib.layout import Layout
from course_lib.layout.partition import layers_by_cost
from course_lib.run import OPTIMIZERS, Offload, Run, recipe_of
from course_lib.tensors import LoRA
from course_lib.timing.rates import RATES, Rates
from course_lib.validate import Size, checked, one_of, show

# Columns by what they are called in a Layout: those that each table has, and those that it may have.
SIZES = {"mbs": "micro_batch", "grad_acc": "micro_batches", "dp": "dp", "pp": "pp", "tp": "tp", "zero": "zero_stage"}
READ = ("nodes", "gpus", *SIZES)
MORE_SIZES = ("cp", "ep", "expert_tp", "v", "dp_replicate")
WORDS = ("schedule", "cp_method", "cp_sharding", "layers_of_stage")
ADDED = ("predicted_mem_gb", "predicted_tok_s_gpu", "predicted_mfu_pct", "fits", "why")
BARS = ("mem_gb_from", "mem_gb_to", "tok_s_gpu_from", "tok_s_gpu_to")
KNOWN = {
    "model", *READ, *MORE_SIZES, *WORDS, "sp", "regather", "seq", "precision", "recompute", "states", "finetune",
    "optimizer", "attention", "loss_chunks", "offload", "status", "step_s", "tok_s_gpu",
}  # fmt: skip
RECOMPUTE = (*get_args(Recompute), "operators")
PRECISIONS = ("bf16", "fp8", "fp16", "fp32")  # of products; fp16 and fp32 have states of their own
_STATES_IN = {"fp16": "fp16-master-fp32-grads", "fp32": "fp32"}
_LORA_RANK = 16


@checked
def run_of(
    row: Mapping[str, str], models: Mapping[str, ModelConfig], seq_len: Size, engine: str | EngineFacts = "nanotron"
) -> Run:
    """Make the run of one row, with the engine's states unless the row tells its own."""
    if (name := row.get("model")) not in models:
        raise ValueError(f"model is {name!r}; known: {', '.join(models) or 'presets'}; give others by --models")
    config, facts = models[name], engine_of(engine)
    numbers = {column: _whole(column, row.get(column)) for column in READ}
    sizes = {SIZES[column]: numbers[column] for column in SIZES}
    sizes |= {column: _whole(column, row[column]) for column in MORE_SIZES if row.get(column)}
    cp = sizes.get("cp", 1)
    if numbers["gpus"] != (ranks := sizes["dp"] * sizes["pp"] * sizes["tp"] * cp):
        raise ValueError(f"gpus is {numbers['gpus']}, but dp x pp x tp{' x cp' * (cp > 1)} is {ranks}")
    words = {column: row[column] for column in WORDS if row.get(column)}
    if layers := words.get("layers_of_stage"):
        words["layers_of_stage"] = tuple(_whole("layers_of_stage", part) for part in layers.split("-"))
    elif config.num_layers < sizes["pp"] <= config.num_layers + facts.other_blocks:
        words["layers_of_stage"] = tuple(layers_by_cost(config, sizes["pp"]))
    recompute = _word(row, "recompute", RECOMPUTE)
    sharded_sequence = sizes["tp"] > 1 and _word(row, "sp", ("yes", "no")) == "yes"
    gathers_again = _word(row, "regather", ("yes", "no")) == "yes" if facts.name == "course" else facts.regathers
    layout = Layout(
        **sizes,
        **words,
        sequence_parallel=sharded_sequence,
        regather=sharded_sequence and gathers_again,
        recompute="none" if recompute == "operators" else recompute,
    )
    tokens = _whole("seq", row["seq"]) if row.get("seq") else seq_len
    if tokens > config.max_seq_len and config.family == "llama":
        config = replace(config, max_seq_len=tokens)
    precision = _word(row, "precision", PRECISIONS)
    finetune = _word(row, "finetune", ("full", "lora", "qlora"))
    return Run(
        config,
        layout,
        tokens,
        row.get("states") or _STATES_IN.get(precision) or facts.recipe,
        attention=_word(row, "attention", ("fused", "standard")),
        optimizer=_word(row, "optimizer", OPTIMIZERS),
        lora=None if finetune == "full" else LoRA(_LORA_RANK, four_bits=finetune == "qlora"),
        offload=offload_of(row.get("offload") or ""),
        loss_chunks=_whole("loss_chunks", row.get("loss_chunks") or "1"),
        fp8=precision == "fp8",
        operators=recompute == "operators",
    )


def _whole(column: str, text: str | None) -> int:
    text = (text or "").strip().removesuffix(".0")  # as spreadsheets write them
    if not re.fullmatch(r"[0-9]{1,18}", text):  # str.isdigit is true of a superscript
        raise ValueError(f"{column} is {show(text)}; required: a whole number")
    return int(text)


def _word(row: Mapping[str, str], column: str, known: Sequence[str]) -> str:
    word = row.get(column) or known[0]
    one_of(column, word, known)
    return word


def offload_of(text: str) -> Offload:
    """The record of words such as optimizer-activations, which wait on the host; of "none" or "" nothing does."""
    words = [word for word in text.split("-") if word not in ("", "none")]
    for word in words:
        one_of("offload", word, ("none", "optimizer", "parameters", "activations"))
    return Offload(**dict.fromkeys(words, "host"))


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Read a CSV file: the rows by column, whatever the case of its names; lines without a value are left out."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
        lines = [(reader.line_num, [value.strip() for value in values]) for values in reader]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}); give a CSV file") from None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}); give another") from None
    header = lines[0][1] if lines else []
    columns = [name.lower() if name.lower() in KNOWN else name for name in header]
    if missing := [column for column in ("model", *READ) if column not in columns]:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; required: model, {', '.join(READ)}, separated by commas; "
            f"found: {', '.join(columns) or 'nothing'}"
        )
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise ValueError(f"{path} has column {', '.join(twice)} twice; give each once")
    for number, values in lines[1:]:
        if (more := len(values) - len(columns)) > 0:
            raise ValueError(f"{path}, line {number} has {more} values more than the header; give one a column")
    return [dict(zip_longest(columns, values, fillvalue="")) for _, values in lines[1:] if any(values)]


def predict_rows(
    rows: Iterable[Mapping[str, str]],
    models: Mapping[str, ModelConfig],
    cluster: Cluster,
    seq_len: int,
    engine: str | EngineFacts = "nanotron",
    rates: Rates = RATES,
) -> list[Estimate | str]:
    """Predict each row; of one that cannot be, say why."""
    found: list[Estimate | str] = []
    for row in rows:
        try:
            is_told = cluster.gpu.bf16_flops is not None or row.get("precision") or row.get("states")
            run = run_of(row if is_told else {**row, "precision": "fp16"}, models, seq_len, engine)
            there = replace(cluster, gpu=gpu_for(cluster.gpu, recipe_of(run.recipe).name))
            one = estimate(run, there, engine, rates)
            notes = [*_notes(row, cluster, engine), *([one.note] if one.note else [])]
            found.append(replace(one, note="; ".join(notes)))
        except ValueError as error:
            found.append(f"cannot be: {error}")
    return found


def _notes(row: Mapping[str, str], cluster: Cluster, engine: str | EngineFacts) -> list[str]:
    """What else to know of a row: its nodes are not those that its GPUs fill; nanotron would refuse it."""
    gpus, notes = _whole("gpus", row["gpus"]), []
    nodes = ceil(gpus / cluster.gpus_per_node)
    if _whole("nodes", row["nodes"]) != nodes:
        notes.append(f"nodes is {row['nodes']}, predicted for {nodes}: {gpus} GPUs in nodes of {cluster.gpus_per_node}")
    least = _whole("pp", row["pp"]) - 1
    if engine_of(engine).name == "nanotron" and _whole("grad_acc", row["grad_acc"]) < least:
        notes.append(f"nanotron takes {least} micro-batches or more")
    return notes


def told(one: Estimate | str) -> dict[str, str]:
    """The columns that are added to a row, bars too; one that cannot be has no numbers, does not fit, and says why."""
    if isinstance(one, str):
        return dict.fromkeys((*ADDED, *BARS), "") | {"fits": "no", "why": one}
    not_logged = one.memory_bytes - one.logged_bytes
    bars = (*((size - not_logged) / one.gb for size in one.memory_range), *one.speed_range)
    return {
        "predicted_mem_gb": f"{one.logged_bytes / one.gb:.2f}",
        "predicted_tok_s_gpu": f"{one.tokens_per_s_per_gpu:.1f}",
        "predicted_mfu_pct": f"{100 * one.mfu:.2f}",
        "fits": "yes" if one.may_run else "no",
        "why": one.why,
        **{name: f"{value:.1f}" for name, value in zip(BARS, bars, strict=True)},
    }


def write_table(
    rows: Sequence[Mapping[str, str]], predictions: Sequence[Estimate | str], out: str | Path, bars: bool = False
) -> None:
    """Write the rows with their predictions, and with error bars if asked for; older predictions are replaced."""
    columns = [name for name in rows[0] if name not in (*ADDED, *BARS)]
    with open(out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *ADDED, *(BARS if bars else ())], extrasaction="ignore")
        writer.writeheader()
        for row, one in zip(rows, predictions, strict=True):
            writer.writerow({**row, **told(one)})
