"""Frameworks beside nanotron: what each adds to the course's own engines, and how far published runs are."""

import csv
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import pytest

from course_lib.cli import main
from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.plan.measured import CLUSTER as MEASURED_ON
from course_lib.plan.measured import MODELS, measured_runs
from course_lib.predict import FRAMEWORKS, RATES, Calibration, How, Rates, calibrate, predict
from course_lib.predict import frameworks as fw
from course_lib.predict.calibrate import measured_step_s, ranges
from course_lib.predict.prediction import Spread
from course_lib.predict.sensitivity import fastest, sensitivity
from course_lib.predict.table import predict_rows, run_of
from course_lib.run import Run
from course_lib.timing.step import step_time

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import published_errors  # noqa: E402 - a script beside the package

CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
EIGHT = replace(preset("llama-3.1-8b"), max_seq_len=2**18)
FP32_GRADS = "bf16-master-fp32-grads"
TITAN, MEGATRON = fw.FRAMEWORKS["torchtitan"], fw.FRAMEWORKS["megatron"]


def a_run(config=EIGHT, seq_len=8192, **axes) -> Run:
    return Run(config, Layout(**{"dp": 8, "zero_stage": 3, **axes}), seq_len)


# ---- memory


def test_megatron_holds_what_the_engines_hold_with_18_bytes():
    run = a_run(zero_stage=1, micro_batches=4)
    own = budgets(replace(run, recipe="bf16-master-fp32-grads"))[0]
    assert sum(fw.memory_of(run, MEGATRON).values()) == own.total_bytes


def test_torchtitan_keeps_embedding_head_and_bf16_logits_and_reserves_a_twentieth_more():
    run = a_run(recompute="full", micro_batch=2)
    own = budgets(replace(run, recipe="bf16-master"))[0].peak_bytes
    ends, logits = 2 * 2 * 128_256 * 4096, 2 * 2 * 8192 * 128_256
    assert sum(fw.memory_of(run, TITAN).values()) == pytest.approx(1.05 * (own + ends + logits))


def test_operators_keep_outputs_of_attention_and_of_every_second_product():
    run, kinds = a_run(micro_batch=2), []
    for how, layout in ((How(operators=True), run.layout), (How(), replace(run.layout, recompute="full"))):
        kinds.append(fw.memory_of(replace(run, layout=layout), TITAN, how)["activations"])
    a_token = 2 * (4096 + 4096 + 1024 + 14_336 + 4096)  # attention, q, v, gate, down
    assert kinds[0] - kinds[1] == 2 * 8192 * 32 * a_token


def test_zero_3_in_a_pipeline_keeps_parameters_and_fp32_gradients():
    run = a_run(pp=4, micro_batches=8, recompute="full")
    under = fw.run_under(run, TITAN, How())
    assert (under.layout.zero_stage, under.recipe) == (1, "bf16-master-fp32-grads")
    assert fw.run_under(run, MEGATRON, How()).layout.zero_stage == 3
    messages = fw.memory_of(run, TITAN)["messages"]
    assert messages == 2 * 2 * 8 * 8192 * 4096  # of 8 micro-batches, in and out


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("axes", [{"dp": 1, "tp": 4}, {"dp": 4, "tp": 2}, {"dp": 4, "pp": 2, "micro_batches": 4}])
def test_more_zero_needs_no_more_memory_and_more_sequences_need_more(name, axes):
    def needed(stage: int, size: int) -> float:
        run = a_run(**axes | {"zero_stage": stage, "micro_batch": size})
        return predict(run, CLUSTER, name).memory_bytes

    stages = (0, 1) if name == "nanotron" else (0, 1, 2, 3)
    grid = [[needed(stage, size) for size in (1, 2)] for stage in stages]
    for one, two in grid:
        assert one < two
    for sizes in zip(*grid, strict=True):
        assert list(sizes) == sorted(sizes, reverse=True)


# ---- time


def test_time_is_step_time_at_an_effective_rate_and_an_update():
    run = a_run(zero_stage=1)
    parts = fw.seconds_of(run, CLUSTER, MEGATRON, RATES)
    own = step_time(
        fw.run_under(run, MEGATRON, How()), CLUSTER, fw.utilisation_of(run, CLUSTER, MEGATRON, RATES, How())
    )
    assert parts["compute"] == own.compute_s and parts["bubble"] == own.bubble_s
    assert parts["update"] > 0


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ((a_run(), "torchtitan", How("fp8")), (a_run(), "torchtitan", How())),
        ((a_run(), "torchtitan", How()), (a_run(), "fsdp2", How())),
        ((a_run(), "torchtitan", How()), (a_run(), "torchtitan", How(operators=True))),
        ((a_run(), "torchtitan", How(operators=True)), (a_run(recompute="full"), "torchtitan", How())),
    ],
)
def test_what_is_faster_is_predicted_to_be(faster, slower):
    steps = [predict(run, CLUSTER, name, how=how).step_s for run, name, how in (faster, slower)]
    assert steps[0] < steps[1]


def test_a_small_micro_batch_takes_as_long_as_its_kernels_need_to_be_launched():
    """A layer of 128 tokens computes in a fraction of a millisecond; launching its kernels one by one takes 4.28 ms."""
    small = Run(replace(EIGHT, vocab_size=64), Layout(), 128)
    eager, fused = (predict(small, CLUSTER, name).seconds_by_part["compute"] for name in ("fsdp2", "torchtitan"))
    assert eager == pytest.approx(32 * 4.28e-3, rel=0.05) and fused < eager / 3


def test_a_contiguous_ring_waits_and_megatrons_zigzag_does_not():
    run = a_run(dp=1, cp=8, seq_len=262_144)
    waiting = [predict(run, CLUSTER, name, how=How("fp8")).seconds_by_part["cp"] for name in ("torchtitan", "megatron")]
    assert waiting[0] > 10 * waiting[1]


def test_hfu_counts_what_recomputation_repeats_and_mfu_does_not():
    plain, full, some = (
        predict(a_run(recompute=recompute), CLUSTER, "torchtitan", how=how)
        for recompute, how in (("none", How()), ("full", How()), ("none", How(operators=True)))
    )
    assert plain.hfu == plain.mfu and plain.causal_mfu < plain.mfu
    assert full.hfu / full.mfu > some.hfu / some.mfu > 1
    assert full.hfu / full.mfu < 4 / 3


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_table_of_parts_adds_up(name):
    one = predict(a_run(zero_stage=1), CLUSTER, name)
    lines = one.table().splitlines()
    shares = [int(line.split()[3].removesuffix("%")) for line in lines if line.startswith("  ")]
    assert 195 <= sum(shares) <= 203  # two tables, parts below 0.5 % left out
    assert max(map(len, lines)) <= 100 and "nine in ten" in lines[0]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_error_bars_contain_the_prediction_with_and_without_a_pipeline(name):
    for pp in (1, 2):
        one = predict(a_run(pp=pp, zero_stage=1), CLUSTER, name)
        assert one.speed_range[0] <= one.tokens_per_s_per_gpu <= one.speed_range[1]
        assert one.memory_range[0] <= one.memory_bytes <= one.memory_range[1]
    with pytest.raises(ValueError, match=r"memory is \(1.1, 1.23\); the prediction must be inside"):
        Spread((1.1, 1.23), (0.8, 1.2))


def test_experts_over_ranks_are_predicted():
    one = predict(Run(preset("mixtral-8x7b"), Layout(dp=8, ep=8, zero_stage=1), 4096), CLUSTER, "megatron")
    assert one.seconds_by_part["ep"] > 0 and 0 < one.mfu < 0.6


def test_offload_takes_optimizer_states_away():
    row = {"model": "8B", "nodes": 1, "gpus": 8, "mbs": 1, "grad_acc": 1, "dp": 8, "pp": 1, "tp": 1, "zero": 3}
    row = {key: str(value) for key, value in row.items()}
    kinds = [
        predict(run_of(row | extra, {"8B": EIGHT}, 8192), CLUSTER, "deepspeed").bytes_by_kind
        for extra in ({}, {"offload": "optimizer"})
    ]
    assert kinds[0]["optimizer"] > 0 and "optimizer" not in kinds[1]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"recompute": "half"}, "recompute is 'half'; choose from none"),
        ({"precision": "fp4"}, "precision is 'fp4'"),
        ({"offload": "gradients"}, "offload is 'gradients'"),
        ({"cp": "2"}, "dp x pp x tp x cp is 16"),
    ],
)
def test_a_row_that_cannot_be_says_why_in_its_line(extra, said):
    row = {"model": "8B", "nodes": 1, "gpus": 8, "mbs": 1, "grad_acc": 1, "dp": 8, "pp": 1, "tp": 1, "zero": 1}
    row = {key: str(value) for key, value in row.items()} | extra
    (found,) = predict_rows([row], {"8B": EIGHT}, CLUSTER, 8192, "torchtitan")
    assert said in found


# ---- published runs


@pytest.mark.slow
def test_published_runs_are_predicted_within_what_the_document_says():
    """Rows that set no rate: dense and cp runs of torchtitan, memory and step."""
    rows = [one for one in published_errors.read_published() if one.source.startswith("torchtitan 2024-12")]
    checked = [one for one in rows if one.sample == "check"]
    figures = published_errors.summary(checked, [published_errors.errors_of(one) for one in checked])
    count, step, _, with_memory, memory, _ = figures["sample check"]
    assert (count, with_memory) == (12, 12)
    assert step <= 0.2 and memory <= 0.12
    one_f_one_b, interleaved = (one.predicted().memory_bytes for one in rows if "table 5" in one.source)
    assert interleaved < one_f_one_b  # as published: 72.7 and 82.5 GiB


GROUPS = {  # of the document's table: which sources are in a row
    "torchtitan, 8B, context parallel": ("torchtitan 2024-12 table 2",),
    "torchtitan, 70B, FSDP and TP": ("torchtitan 2024-12 table 4",),
    "torchtitan, 405B, pipeline |": ("torchtitan 2024-12 table 5",),
    "torchtitan, 405B, pipeline and context": ("torchtitan 2024-12 table 6",),
    "torchtitan, A100": ("torchtitan 2024 A100",),
    "NeMo on Megatron, FP8": ("NeMo 24.07 H100", "NeMo Bridge 25.11 H100"),
    "NeMo on Megatron, Llama 2 7B": ("NeMo 24.03 H100 long",),
    "Megatron on A100, 22B to 1T": ("Korthikanti 2022 table 5",),
    "Llama 3 405B": ("Llama 3 2024 table 4",),
    "NeMo AutoModel": ("NeMo AutoModel 2025",),
}


@pytest.mark.slow
def test_errors_of_all_published_runs_are_those_of_the_document_to_a_tenth_of_a_percent():
    """A rate that is 1 % off changes some of them."""
    published = published_errors.read_published()
    errors = [published_errors.errors_of(one) for one in published]
    samples = {"runs that set three rates": "fit", "**runs that set none**": "check"}
    rows = [(name, lambda one, sample=sample: one.sample == sample) for name, sample in samples.items()]
    rows += [(name, lambda one, sources=sources: one.source in sources) for name, sources in GROUPS.items()]
    lines = (ROOT / "docs" / "PREDICTOR.md").read_text().splitlines()
    for name, is_in in rows:
        found = [error for one, error in zip(published, errors, strict=True) if is_in(one)]
        count, *step, _, memory, memory_most = published_errors._figures(found)
        figures = [f"{value:.1%}".replace("%", " %") for value in (*step, *((memory, memory_most) if memory else ()))]
        (line,) = [line for line in lines if line.startswith(f"| {name}")]
        assert re.findall(r"[\d.]+ %", line) == figures and f"| {count} |" in line, line
    assert len(published) == 53 and set(sum(GROUPS.values(), ())) > {
        one.source for one in published if one.sample != "fit"
    }


@pytest.mark.slow
def test_the_measured_runs_of_the_package_are_predicted_as_well_as_the_document_says():
    """Nanotron's rates: a change of 1 % in any of them shows in the fourth digit."""
    runs = [run for model in MODELS for run in measured_runs(model)]
    found = [predict(Run(MODELS[one.model], one.layout, 4096, FP32_GRADS), MEASURED_ON, "nanotron") for one in runs]
    memory = geometric_mean(new.memory_bytes / 1e9 / one.memory_gb for new, one in zip(found, runs, strict=True))
    speed = geometric_mean(
        new.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu for new, one in zip(found, runs, strict=True)
    )
    said = f"predicted over measured is {memory:.4f} for memory and {speed:.4f} for tokens/s"
    assert said in " ".join((ROOT / "docs" / "PREDICTOR.md").read_text().split())


# ---- calibration


def test_calibration_finds_the_rates_that_made_three_runs():
    small = replace(EIGHT, num_layers=4)
    layouts = ({"zero_stage": 1}, {"dp": 4, "tp": 8, "zero_stage": 1}, {"dp": 32, "tp": 2})
    runs = [a_run(small, **layout) for layout in layouts]

    def steps(calibration: Calibration) -> list[float]:
        return [predict(run, calibration.of(CLUSTER), "deepspeed").step_s for run in runs]

    true = Calibration(0.8, 0.3, 0.7)
    found = calibrate(steps, steps(true))
    assert found.compute == pytest.approx(true.compute, rel=0.03)
    errors = [new / told - 1 for new, told in zip(steps(found), steps(true), strict=True)]
    assert (
        max(map(abs, errors))
        < 0.03
        < max(abs(new / told - 1) for new, told in zip(steps(Calibration()), steps(true), strict=True))
    )


def test_of_each_factor_it_is_told_how_well_the_runs_determine_it():
    """On one node nothing goes over the network, so that its factor is known no better than before the fit."""
    small = replace(EIGHT, num_layers=4)
    runs = [a_run(small, dp=2, tp=4, micro_batches=count) for count in (1, 2)]

    def steps(calibration: Calibration) -> list[float]:
        return [predict(run, calibration.of(CLUSTER), "deepspeed").step_s for run in runs]

    spans = ranges(steps, calibrate(steps, steps(Calibration(0.8))), len(runs))
    low, high = spans["compute"]
    assert 0.76 < low < 0.8 < high < 0.84
    assert spans["network"] == pytest.approx((1 / math.e, math.e)) and set(spans) == {"compute", "network"}


def test_a_fit_that_ends_where_its_search_ends_is_told(tmp_path, capsys):
    runs, models = tmp_path / "runs.csv", tmp_path / "models.json"
    small = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1536, "vocab": 2048, "tied": False}
    models.write_text(json.dumps({"8B": small}))
    for step_s, end in (("100", "compute x 0.1 is where the search ends"), ("0.001", "compute x 4.0 is where")):
        runs.write_text(f"{COLUMNS}\n8B,1,8,64,8,8,1,1,0,{step_s}\n")
        assert main(["calibrate", str(runs), "--models", str(models), "--out", str(tmp_path / "out.json")]) == 0
        said = capsys.readouterr().out
        assert end in said and "network x 1.0 (not fitted)" in said, said


def test_a_measured_step_is_read_from_three_columns(tmp_path):
    (tmp_path / "log").write_text(
        "\n".join(json.dumps({"step": i, "seconds": 9.0 if i < 3 else 2.0}) for i in range(8))
    )
    assert measured_step_s({"step_s": "1.5"}, 100, tmp_path) == 1.5
    assert measured_step_s({"tok_s_gpu": "50", "gpus": "2"}, 100, tmp_path) == 1.0
    assert measured_step_s({"log": "log"}, 100, tmp_path) == 2.0
    for row, said in (
        ({}, "required: step_s, tok_s_gpu or log"),
        ({"step_s": "soon"}, "required: a number"),
        ({"step_s": "1e-300"}, "a measured step takes 1e-300 s; required: 1e-06 to 1e\\+06 s"),
        ({"log": "none"}, "there is no log"),
    ):
        with pytest.raises(ValueError, match=said):
            measured_step_s(row, 100, tmp_path)


COLUMNS = "model,nodes,gpus,mbs,grad_acc,dp,pp,tp,zero,step_s"
ROWS = ("8B,1,8,1,2,8,1,1,1,0.3", "8B,4,32,1,2,4,1,8,1,0.1", "8B,8,64,1,1,32,1,2,3,0.12")


@pytest.mark.slow
def test_the_commands_calibrate_then_predict_with_it(tmp_path, capsys):
    runs, models, out = tmp_path / "runs.csv", tmp_path / "models.json", tmp_path / "mine.json"
    runs.write_text("\n".join((COLUMNS, *ROWS)) + "\n")
    small = {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "tied": False}
    models.write_text(json.dumps({"8B": small}))
    common = [str(runs), "--models", str(models), "--recipe", "megatron", "--seq", "8192"]
    assert main(["calibrate", *common, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "before" in said and said.count(" -> ") == 3 and "compute x" in said
    table = tmp_path / "out.csv"
    options = ["--calibration", str(out), "--breakdown", "--sensitivity", "--error-bars", "--out", str(table)]
    assert main(["predict", *common, *options]) == 0
    said = capsys.readouterr().out
    assert "where the time goes" in said and "HFU" in said and "dense_share +-20%" in said
    assert max(len(line) for line in said.splitlines()[1:]) <= 100
    with table.open() as file:
        for row in csv.DictReader(file):
            low, told, high = (float(row[name]) for name in ("tok_s_gpu_from", "predicted_tok_s_gpu", "tok_s_gpu_to"))
            assert low < told < high and float(row["predicted_mem_gb"]) > 0
    assert main(["predict", *common, "--calibration", str(models), "--out", str(table)]) == 2
    assert "is no calibration" in capsys.readouterr().err


def test_sensitivity_finds_the_rate_that_turns_a_ranking():
    """One run has more recomputation, the other more waiting at the network: a slower network turns them."""
    row = {"model": "8B", "nodes": 2, "gpus": 16, "mbs": 1, "pp": 1, "zero": 1}
    rows = [
        {key: str(value) for key, value in (row | axes).items()}
        for axes in ({"dp": 16, "tp": 1, "grad_acc": 1}, {"dp": 2, "tp": 8, "grad_acc": 8})
    ]
    models = {"8B": replace(EIGHT, num_layers=8)}

    def predict_all(cluster: Cluster, rates: Rates):
        return predict_rows(rows, models, cluster, 8192, "megatron", rates)

    found = sensitivity(rows, predict_all, CLUSTER, RATES)
    assert found["dense_share +-20%"][1] > 0.1 and found["stall_s +-20%"] == (0, 0.0)
    best = {
        fastest(rows, predict_all(Calibration(network=share).of(CLUSTER), RATES))["8B", "16"] for share in (1, 0.02)
    }
    assert best == {0, 1}
