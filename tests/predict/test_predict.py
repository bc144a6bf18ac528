"""Predictions of a framework's runs: counted where they can be counted, refused where they cannot be, fitted again."""

import csv
import json
import os
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from course_lib.cli import main
from course_lib.config import ModelConfig, preset
from course_lib.hardware import PUBLISHED_BUS_BANDWIDTH, Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.memory.states import count_parameters
from course_lib.predict import RATES, Rates, predict, predict_rows
from course_lib.predict.nanotron import (
    fills_memory,
    is_crowded,
    layer_of,
    memory_of,
    parameters_of,
    pipeline_s,
    seconds_of,
    stages_of,
    stalls,
)
from course_lib.predict.table import ADDED, READ, read_rows, run_of
from course_lib.run import Run
from course_lib.schedules import Costs, one_f_one_b, simulate
from course_lib.shapes import read_models

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import fit_rates  # noqa: E402 - a script beside the package

CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("efa"))
SHAPES = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 14336, "vocab": 131072, "tied": False}
SMALL = SHAPES | {"layers": 16, "hidden": 2048, "ffn": 8192, "tied": True}
EIGHT = ModelConfig("8B", 32, 4096, 32, 32, 14336, 131072, 4096)
NARROW = ModelConfig("1B", 16, 2048, 32, 32, 8192, 131072, 4096, tied=True)
TABLE = Path(os.environ.get("MEASURED_RUNS", ROOT.parent / "shared" / "data" / "cluster_runs.csv"))


def a_run(config=EIGHT, **axes) -> Run:
    return Run(config, Layout(**{"micro_batches": 8, **axes}), 4096, "bf16-master-fp32-grads")


def a_table(folder: Path, rows: list[dict], **models) -> tuple[Path, Path]:
    runs, shapes = folder / "runs.csv", folder / "models.json"
    with open(runs, "w", newline="") as file:
        writer = csv.DictWriter(file, ["model", *READ, *[key for key in rows[0] if key not in ("model", *READ)]])
        writer.writeheader()
        writer.writerows(rows)
    shapes.write_text(json.dumps(models or {"8B": SHAPES, "1B": SMALL}))
    return runs, shapes


def a_row(**changed) -> dict:
    return {
        "model": "8B",
        "nodes": 2,
        "gpus": 16,
        "mbs": 1,
        "grad_acc": 64,
        "dp": 4,
        "pp": 1,
        "tp": 4,
        "zero": 1,
    } | changed


# ---- the cut


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8, 16, 32])
def test_every_layer_and_each_end_is_on_one_stage(pp):
    stages = stages_of(EIGHT, pp)
    assert sum(stage.layers for stage in stages) == 32
    assert [stage.embedding for stage in stages] == [True] + [False] * (pp - 1)
    assert sum(stage.head for stage in stages) == 1
    assert sum(parameters_of(EIGHT, stage) for stage in stages) == count_parameters(EIGHT) - EIGHT.d_model


def test_the_head_costs_as_much_as_two_layers_and_takes_their_place():
    # a layer has 243 M parameters, the head 537 M: 34.2 layers' worth, 8.55 a stage
    assert [(stage.layers, stage.head) for stage in stages_of(EIGHT, 4)] == [(9, 0), (9, 0), (8, 0), (6, 1)]


def test_a_tied_head_is_counted_once_beside_the_embedding():
    tied = replace(EIGHT, tied=True)
    assert parameters_of(tied, stages_of(tied, 1)[0]) == count_parameters(tied) - tied.d_model


# ---- memory


def test_states_are_18_bytes_a_parameter_and_zero_shards_12_of_them():
    kinds = memory_of(a_run(dp=8), CLUSTER, RATES, 1)
    parameters = count_parameters(EIGHT) - EIGHT.d_model
    states = [kinds[name] for name in ("parameters", "gradients", "optimizer")]
    assert states == [2 * parameters, 4 * parameters, 12 * parameters]
    assert memory_of(a_run(dp=8, zero_stage=1), CLUSTER, RATES, 1)["optimizer"] == 12 * parameters / 8


def test_a_backward_holds_bf16_gradients_and_zero_0_the_buckets_of_ddp_too():
    parameters = (count_parameters(EIGHT) - EIGHT.d_model) / 4
    held = [
        memory_of(a_run(dp=dp, tp=4, zero_stage=zero, micro_batch=4), CLUSTER, RATES, 1)["backward"]
        for dp, zero in ((1, 0), (2, 1), (2, 0))
    ]
    assert held == [2 * parameters, 2 * parameters, 3 * parameters]


def test_activations_grow_with_micro_batch_and_with_micro_batches_in_flight():
    def kept(config=EIGHT, **axes) -> float:
        return memory_of(a_run(config, **axes), CLUSTER, RATES, 1)["activations"]

    assert kept(tp=4, micro_batch=16) == 2 * kept(tp=4, micro_batch=8) == 2 * kept(tp=8, micro_batch=16)
    one, four = kept(tp=2, pp=4, micro_batch=8, micro_batches=1), kept(tp=2, pp=4, micro_batch=8, micro_batches=16)
    assert four == pytest.approx(4 * one)
    a_token = 32 * 2 * (10 * 4096 + 4 * 14_336) * RATES.activation_scale
    assert kept(micro_batch=2) == pytest.approx(2 * 4096 * a_token)
    grouped = replace(EIGHT, num_kv_heads=8)  # k and v a quarter as wide, and not kept twice
    assert kept(micro_batch=2) - kept(grouped, micro_batch=2) == pytest.approx(
        2 * 4096 * 32 * 2 * (2 * 4096 + 2 * 3072) * RATES.activation_scale
    )


@pytest.mark.parametrize(
    ("axes", "nodes", "tensors"),
    [
        ({"tp": 8}, 1, RATES.queued_tensors),  # 32 layers x 2 of each pass are more than the queue holds
        ({"tp": 8, "config": "narrow", "micro_batches": 1}, 1, 2 * 16),  # the forward alone
        ({"dp": 128, "tp": 4}, 64, 0),  # over 64 nodes ranks wait for each other
        ({"pp": 8, "tp": 4, "micro_batch": 8}, 4, RATES.queued_tensors),  # in flight: more than fill the pipeline
        ({"pp": 4, "tp": 4, "micro_batch": 8, "micro_batches": 4, "config": "narrow"}, 2, 2 * 5 * 3),  # these alone
        ({"pp": 4, "tp": 8, "config": "narrow"}, 4, 2 * 5 * 2),  # ranks wait for each other
        ({"pp": 2, "tp": 8, "config": "narrow"}, 2, 0),
        ({"dp": 64, "pp": 2, "tp": 4}, 64, 0),  # stalled
        ({"tp": 1, "micro_batch": 4, "config": "narrow"}, 1, 0),
    ],
)
def test_tensors_of_a_whole_sequence_wait_in_the_queue_of_launches(axes, nodes, tensors):
    config = NARROW if axes.get("config") == "narrow" else EIGHT
    run = a_run(config, **{name: value for name, value in axes.items() if name != "config"})
    whole = 2 * run.layout.micro_batch * 4096 * config.d_model
    larger = replace(CLUSTER, gpu=replace(CLUSTER.gpu, usable_bytes=4 * CLUSTER.gpu.usable_bytes))
    kinds = memory_of(run, larger, RATES, nodes)
    assert kinds["queued"] / whole == pytest.approx(tensors)
    assert kinds["whole sequences"] == (4 * whole if run.layout.tp > 1 else 0)


def test_the_largest_micro_batch_of_a_model_in_no_fit_is_the_one_that_was_published():
    """3.57 billion parameters on one node (Ultra-Scale Playbook, TP scaling): 4, 10, 20 sequences with tp 2, 4, 8."""
    model = replace(preset("playbook-3b"), max_seq_len=4096)

    def fits(tp: int, size: int) -> bool:
        return predict(a_run(model, tp=tp, micro_batch=size, micro_batches=1), CLUSTER).fits

    largest = [max(size for size in range(1, 30) if fits(tp, size)) for tp in (2, 4, 8)]
    assert largest == [4, 10, 20]


def test_the_update_is_the_peak_of_small_batches():
    small, large = (memory_of(a_run(micro_batch=size), CLUSTER, RATES, 1) for size in (1, 4))
    assert small["update"] == 6 * (count_parameters(EIGHT) - EIGHT.d_model) and "activations" not in small
    assert "update" not in large and large["activations"] > 0


# ---- time


def test_parts_add_up_and_tokens_follow():
    found = predict(a_run(dp=4, tp=4, zero_stage=1), CLUSTER)
    assert found.step_s == pytest.approx(sum(found.seconds_by_part.values()))
    assert found.tokens_per_s_per_gpu == pytest.approx(32 * 4096 / found.step_s / 16)
    assert found.memory_bytes == sum(found.bytes_by_kind.values())


def test_a_pipeline_over_64_nodes_stalls_and_one_node_does_not():
    over, inside = a_run(dp=32, pp=2, tp=8, zero_stage=1), a_run(pp=2, tp=4)
    assert stalls(over, 64) and not stalls(inside, 1)
    assert seconds_of(over, CLUSTER, RATES, 64)["stall"] == RATES.stall_s * 8  # micro-batches, at one neighbour
    deeper = a_run(dp=8, pp=8, tp=8, zero_stage=1)
    assert seconds_of(deeper, CLUSTER, RATES, 64)["stall"] == pytest.approx(RATES.stall_s * (2 * 8 + 6))
    assert predict(over, CLUSTER).mfu < 0.08


@pytest.mark.parametrize(
    ("axes", "nodes", "stalling"),
    [
        ({"dp": 1, "pp": 2, "tp": 32}, 8, True),  # tp over four nodes
        ({"dp": 2, "pp": 2, "tp": 16, "zero_stage": 1}, 8, False),
        ({"dp": 4, "pp": 4, "tp": 4}, 8, False),  # ZeRO-0: eight micro-batches, then sixteen
        ({"dp": 4, "pp": 4, "tp": 4, "micro_batches": 16}, 8, True),
        ({"dp": 2, "pp": 4, "tp": 8, "micro_batches": 16}, 8, False),  # tp is one node
        ({"dp": 1, "pp": 16, "tp": 4, "micro_batches": 16}, 8, False),  # no gradients to sum
        ({"dp": 32, "pp": 4, "tp": 2, "zero_stage": 1}, 32, True),
        ({"dp": 16, "pp": 4, "tp": 4, "zero_stage": 1}, 32, False),
        ({"dp": 16, "pp": 4, "tp": 4, "zero_stage": 1, "micro_batch": 2}, 32, True),
        ({"dp": 512, "zero_stage": 1}, 64, False),  # no pipeline
    ],
)
def test_which_pipelines_stall(axes, nodes, stalling):
    assert stalls(a_run(**axes), nodes) is stalling


def test_a_run_that_would_fill_the_memory_keeps_less_and_waits():
    eighty = replace(EIGHT, name="80B", num_layers=80, d_model=8192, d_ff=28672, num_heads=64, num_kv_heads=64)
    fine, full = (
        a_run(eighty, dp=4, tp=16, zero_stage=1, micro_batch=size, micro_batches=64 // size) for size in (1, 2)
    )
    larger = replace(CLUSTER, gpu=replace(CLUSTER.gpu, usable_bytes=2 * CLUSTER.gpu.usable_bytes))
    assert [is_crowded(run, CLUSTER, RATES, 8) for run in (fine, full)] == [False, True]
    assert not is_crowded(full, larger, RATES, 8) and not is_crowded(full, CLUSTER, RATES, 1)
    queued = [memory_of(full, cluster, RATES, 8).get("queued", 0.0) for cluster in (CLUSTER, larger)]
    assert queued[0] == 0 < queued[1]
    assert predict(full, CLUSTER).tokens_per_s_per_gpu < predict(fine, CLUSTER).tokens_per_s_per_gpu / 2
    once, again = (a_run(dp=8, pp=4, tp=4, zero_stage=1, micro_batch=8, micro_batches=size) for size in (4, 8))
    assert [fills_memory(run, CLUSTER, RATES, 16) for run in (once, again)] == [True, True]
    assert [is_crowded(run, CLUSTER, RATES, 16) for run in (once, again)] == [False, True]


def test_over_64_nodes_tp_of_a_node_waits_and_narrower_tp_does_not():
    parts = {tp: predict(a_run(dp=512 // tp, tp=tp, micro_batches=1), CLUSTER).seconds_by_part for tp in (4, 8)}
    assert parts[4]["stall"] == 0 and parts[8]["stall"] == RATES.stall_s
    assert parts[8]["launches and tp"] > 5 * parts[4]["launches and tp"]
    fewer = predict(a_run(dp=32, tp=8, micro_batches=1), CLUSTER).seconds_by_part
    assert fewer["stall"] == 0


def test_gradients_go_at_the_bandwidth_that_was_measured_over_as_many_nodes():
    run = a_run(dp=32, tp=4, zero_stage=1)
    volume = 6 * parameters_of(EIGHT, stages_of(EIGHT, 1)[0]) / 4 * 31 / 32
    measured = PUBLISHED_BUS_BANDWIDTH["reduce_scatter"][16]
    assert seconds_of(run, CLUSTER, RATES, 16)["data"] == pytest.approx(volume / (RATES.data_share * measured))


def test_zero_0_shows_its_all_reduce_in_a_pipeline():
    shown = a_run(dp=32, pp=2, tp=2, micro_batches=4)
    volume = 8 * parameters_of(EIGHT, stages_of(EIGHT, 2)[0]) / 2 * 31 / 32  # FP32, there and back
    rate = RATES.data_share * PUBLISHED_BUS_BANDWIDTH["reduce_scatter"][8]
    assert seconds_of(shown, CLUSTER, RATES, 16)["data"] == pytest.approx(volume / rate)


def test_zero_0_shows_of_its_all_reduce_what_one_backward_does_not_hide():
    run, ethernet = a_run(dp=32, tp=4, micro_batch=2), replace(CLUSTER, between=link("ethernet-100g"))
    assert seconds_of(run, CLUSTER, RATES, 16)["data"] == 0
    volume = 4 * parameters_of(EIGHT, stages_of(EIGHT, 1)[0]) / 4 * 31 / 32
    rate = RATES.data_share * PUBLISHED_BUS_BANDWIDTH["all_reduce"][16] / 4  # a quarter of EFA's 400 Gb/s
    exposed_s = seconds_of(run, ethernet, RATES, 16)
    backward_s = (exposed_s["compute"] + exposed_s["launches and tp"]) / 8 * 2 / 3
    assert exposed_s["data"] == pytest.approx(volume / rate - backward_s)
    assert backward_s > 0.1 and exposed_s["data"] > 0.1


def test_a_layer_of_a_small_micro_batch_takes_its_launches_and_tp_over_nodes_its_hops():
    inside, over = layer_of(a_run(tp=8), CLUSTER, RATES, False), layer_of(a_run(tp=16), CLUSTER, RATES, False)
    assert inside.total_s == pytest.approx(inside.least_s, rel=0.01) and inside.hops_s == 0
    assert over.total_s == pytest.approx(over.least_s + 16 * RATES.tp_hop_ms / 1000, rel=0.02)
    waiting = layer_of(a_run(tp=8), CLUSTER, RATES, True)
    assert waiting.least_s - inside.least_s == pytest.approx(8 * RATES.tp_hop_waiting_ms / 1000)
    large = layer_of(a_run(tp=8, micro_batch=16), CLUSTER, RATES, True)
    assert large.total_s == pytest.approx(large.work_s, rel=0.02)  # its launches hide behind its computing


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 8, 32])
@pytest.mark.parametrize(
    "slots", [[3.0] * 4, [9, 6, 6, 6], [6, 6, 9, 6], [6, 6, 6, 15], [9, 6, 6, 9, 6, 6, 6, 7.5], [3.0, 30.0]]
)
def test_a_pipeline_of_unequal_stages_takes_as_long_as_the_simulator_says(slots, micro_batches):
    costs = Costs([slot / 3 for slot in slots], [slot / 3 for slot in slots], [slot / 3 for slot in slots])
    simulated = simulate(one_f_one_b(len(slots), micro_batches), costs).makespan_s
    slot, waits = pipeline_s(slots, micro_batches)
    assert micro_batches * slot + waits == pytest.approx(simulated, rel=1e-3)


def test_tensor_parallel_over_nodes_is_slower_than_pipeline():
    wide, deep = a_run(tp=32, micro_batches=64), a_run(tp=4, pp=8, micro_batches=64)
    assert predict(wide, CLUSTER).tokens_per_s_per_gpu < predict(deep, CLUSTER).tokens_per_s_per_gpu / 2


# ---- refusals


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (a_run(cp=2), "choose cp 1"),
        (Run(preset("mixtral-8x7b"), Layout(ep=2, dp=2), 4096), "choose ep 1"),
        (a_run(recompute="full"), "recompute none"),
        (a_run(dp=2, zero_stage=3), "0 or 1; choose"),
        (a_run(pp=2, schedule="interleaved", v=2), "1f1b: choose it"),
    ],
)
def test_what_no_run_was_fitted_to_is_refused(run, said):
    with pytest.raises(ValueError, match=said):
        predict(run, CLUSTER)


def test_unknown_frameworks_and_implausible_rates_are_refused():
    with pytest.raises(ValueError, match="choose from nanotron, megatron"):
        predict(a_run(), CLUSTER, framework="colossal")
    with pytest.raises(ValueError, match="plausible: 0.45 to 0.75"):
        Rates(dense_share=2.0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mbs": "x"}, "mbs is 'x'"),
        ({"gpus": 8}, "gpus is 8, but dp x pp x tp is 16"),
        ({"model": "9B"}, "known: 8B, 1B"),
    ],
)
def test_a_row_that_makes_no_sense_says_why(tmp_path, changed, said):
    runs, models = a_table(tmp_path, [a_row(**changed)])
    with pytest.raises(ValueError, match=said):
        run_of(read_rows(runs)[0], read_models(models, 4096), 4096)


def test_files_that_lack_something_are_told_in_one_line(tmp_path, capsys):
    runs, models = a_table(tmp_path, [a_row()], **{"8B": {"layers": 32}})
    assert main(["predict", str(runs), "--models", str(models), "--out", str(tmp_path / "out.csv")]) == 2
    assert "required: layers, hidden" in capsys.readouterr().err
    (tmp_path / "short.csv").write_text("model,nodes\n8B,1\n")
    assert main(["predict", str(tmp_path / "short.csv"), "--models", str(models), "--out", "x"]) == 2
    assert "has no column gpus, mbs" in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "none.csv"), "--models", str(models), "--out", "x"]) == 2
    assert "there is no file" in capsys.readouterr().err


# ---- the table


def test_the_table_keeps_its_columns_and_gains_five(tmp_path):
    rows = [a_row(status="ok"), a_row(status="crashed", pp=64, gpus=1024)]
    runs, models = a_table(tmp_path, rows)
    out = tmp_path / "out.csv"
    assert main(["predict", str(runs), "--models", str(models), "--out", str(out)]) == 0
    first, second = csv.DictReader(out.open())
    assert list(first) == ["model", *READ, "status", *ADDED]
    found = predict(run_of(first, read_models(models, 4096), 4096), CLUSTER)
    assert float(first["predicted_mem_gb"]) == pytest.approx(found.memory_bytes / 2**30, abs=0.005)  # as its log
    assert float(first["predicted_tok_s_gpu"]) == pytest.approx(found.tokens_per_s_per_gpu, abs=0.05)
    assert first["fits"] == "yes" and "most memory" in first["why"]
    assert second["predicted_mem_gb"] == "" and second["fits"] == "no" and "32 layers" in second["why"]


@pytest.mark.slow
def test_two_thousand_rows_take_seconds(tmp_path):
    rows = [a_row(mbs=1 + index % 4, grad_acc=16 + index) for index in range(2000)]
    runs, models = a_table(tmp_path, rows)
    begun = time.process_time()
    assert len(predict_rows(read_rows(runs), read_models(models, 4096), CLUSTER, 4096)) == 2000
    assert time.process_time() - begun < 20


# ---- the fit


@pytest.mark.slow
def test_the_fit_finds_the_rates_that_made_a_table(tmp_path):
    """Runs made with other rates, fitted from the package's own: every rate comes back."""
    fitted = {name: getattr(RATES, name) for name in (*fit_rates.OF_MEMORY, *fit_rates.OF_TIME)}
    true = Rates(
        **asdict(RATES)
        | {name: value * (1.08 if index % 2 else 0.93) for index, (name, value) in enumerate(fitted.items())}
    )
    models = {
        "8B": EIGHT,
        "1B": replace(EIGHT, name="1B", num_layers=16, d_model=2048, d_ff=8192, head_dim=64, tied=True),
    }
    layouts = [(16, 1, 1), (4, 1, 4), (64, 1, 4), (2, 1, 8), (2, 1, 16), (2, 4, 4), (4, 8, 2), (32, 2, 8), (8, 4, 1)]
    grid = [
        (name, dp, pp, tp, zero, mbs)
        for name in models
        for dp, pp, tp in layouts
        for zero in (0, 1)
        for mbs in (1, 2, 4, 8)
    ]
    measured = []
    for name, dp, pp, tp, zero, mbs in grid:
        run = a_run(models[name], dp=dp, pp=pp, tp=tp, zero_stage=zero, micro_batch=mbs, micro_batches=16)
        one = fit_rates.Measured(run, max(1, dp * pp * tp // 8), name, 20.0, 1.0, 1.0)
        measured.append(
            replace(
                one,
                tokens_per_s_per_gpu=fit_rates.speed(one, true, CLUSTER),
                memory_gb=fit_rates.memory_gb(one, true, CLUSTER),
            )
        )
    assert asdict(fit_rates.fit(measured, CLUSTER)) == pytest.approx(asdict(true), rel=0.02)


@pytest.mark.skipif(not TABLE.is_file(), reason=f"the table of measured runs is not here (MEASURED_RUNS={TABLE})")
def test_errors_on_measured_runs(capsys, tmp_path):
    shapes = {
        "1B": SMALL,
        "3B": SMALL | {"layers": 28, "hidden": 3072},
        "8B": SHAPES,
        "80B": SHAPES | {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn": 28672},
    }
    (tmp_path / "models.json").write_text(json.dumps(shapes))
    measured = fit_rates.read_measured(TABLE, read_models(tmp_path / "models.json", 4096), 4096)
    found = fit_rates.errors(measured, RATES, CLUSTER)
    fitting = [predict(one.run, CLUSTER).fits for one in measured]
    with capsys.disabled():
        print({name: round(value, 3) for name, value in found.items()}, "fit", sum(fitting) / len(fitting))
    assert found["memory, median error"] <= 0.05
    assert found["memory, nine in ten within"] <= 0.14
    assert found["tokens/s, median error"] <= 0.055
    assert found["tokens/s, nine in ten within"] <= 0.18
    assert found["rank correlation in a cell, median"] >= 0.93
    assert found["of runs below 5 % MFU, predicted below 8 %"] >= 0.95
    assert found["worst yield of the fastest"] >= 0.73
    assert found["worst yield of the least memory near it"] >= 0.85
    assert sum(fitting) >= 0.99 * len(fitting)
    memory, speed = (found[f"{which}, median error"] for which in ("memory", "tokens/s"))
    memory_90, speed_90 = (found[f"{which}, nine in ten within"] for which in ("memory", "tokens/s"))
    row = f"| {len(measured)} | {memory:.1%}, {memory_90:.1%} | {speed:.1%}, {speed_90:.1%} |".replace("%", " %")
    assert row in (ROOT / "docs" / "PREDICTOR.md").read_text()
    said = f"{speed:.1%} for tokens/s, {memory:.1%} for memory".replace("%", " %")
    assert said in (ROOT / "README.md").read_text()
    for which, told in (("memory", "memory_bytes"), ("speed", "tokens_per_s_per_gpu")):
        inside = []
        for one in measured:
            predicted = predict(one.run, CLUSTER)
            value = one.memory_gb * 2**30 if which == "memory" else one.tokens_per_s_per_gpu
            low, high = getattr(predicted.spread, which)
            inside.append(low <= value / getattr(predicted, told) <= high)
        assert 0.86 <= sum(inside) / len(inside) <= 0.94  # nine in ten


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
    assert (unknown["fits"], unknown["why"]) == ("no", "cannot be: model is '9B'; known: 8B, 1B")
    assert other["why"] == fine["why"] + "; nodes is 4, predicted for 2: 16 GPUs in nodes of 8"
    assert few["why"].endswith("; nanotron takes 3 micro-batches or more")
    assert other["predicted_mem_gb"] == fine["predicted_mem_gb"] == spreadsheet["predicted_mem_gb"]
