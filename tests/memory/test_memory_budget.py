"""The budget of a run is near what the engine holds when a rank of it is simulated, whatever the layout."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from random_layouts import LLAMA, MODELS, SEQ_LEN

from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.memory.budget import budgets, fits
from course_lib.model import build
from course_lib.run import FP64, Offload, Run
from course_lib.simulate import simulate_rank, simulate_ranks
from course_lib.simulate.cluster import STATES
from course_lib.tensors import LoRA, count_parameters
from course_lib.training import offload_activations

LLAMA_8B = preset("llama-3.1-8b")
GIB = 2**30


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name, recompute", [*product(MODELS, ("none", "selective", "full"))])
def test_one_gpu_peaks_where_the_engine_does(name, recompute):
    for micro_batches in (1, 2):
        run = Run(MODELS[name], Layout(micro_batch=2, micro_batches=micro_batches, recompute=recompute), SEQ_LEN)
        found, (predicted,) = simulate_rank(run, 0), budgets(run)
        assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.04), predicted.moment


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["foreach", "for-loop", "fused"])
@pytest.mark.parametrize("layout", ["dp=1", "dp=2,tp=2,pp=2,micro_batches=2"])
def test_the_update_peaks_where_torch_s_adamw_does(layout, implementation):
    """In FP32, and with rows so few that the update is the largest moment of a step."""
    run = Run(
        replace(LLAMA, num_layers=2), Layout.parse(layout), 8, "fp32",
        device="cpu", optimizer_implementation=implementation,
    )  # fmt: skip
    for predicted, found in zip(budgets(run), simulate_ranks(run), strict=True):
        assert predicted.moment == "update" or implementation == "fused"
        assert {kind: getattr(predicted, kind) for kind in STATES} == found.states
        # fused ones need no work space: there the largest moment is a backward, or the engine's clipping, which squares
        near = 0.08 * found.peak_bytes if implementation == "fused" else 100
        assert abs(predicted.peak_bytes - found.peak_bytes) < near


def test_8b_on_four_gpus_of_40_gb_fits_with_full_recomputation():
    (budget,) = budgets(Run(LLAMA_8B, Layout(dp=4, zero_stage=3, recompute="full"), 4096))
    assert round(budget.peak_bytes / GIB, 1) == 33.1 and fits(budget, "a100-40")
    assert (budget.parameters + budget.optimizer) / count_parameters(LLAMA_8B) == pytest.approx(3.5)  # no gradients


def test_a_recipe_needs_no_name_in_the_table():
    in_fp64, in_fp32 = (budgets(Run(LLAMA, Layout(), SEQ_LEN, recipe))[0] for recipe in (FP64, "fp32"))
    assert in_fp64.states_bytes == 2 * in_fp32.states_bytes
    assert 1.9 * in_fp32.peak_bytes < in_fp64.peak_bytes <= 2 * in_fp32.peak_bytes


# ---- the update


def test_an_update_over_lists_is_the_largest_moment_of_8b_in_fp32():
    peaks = {}
    for how in (None, "foreach", "for-loop", "fused"):
        (budget,) = budgets(Run(LLAMA_8B, Layout(), 2048, "fp32", optimizer_implementation=how))
        peaks[how] = budget.peak_bytes, budget.moment
    copy = 4 * count_parameters(LLAMA_8B)
    assert peaks[None] == peaks["foreach"] == (5 * copy, "update")  # torch's choice on CUDA
    assert peaks["fused"][0] < peaks["for-loop"][0] + copy / 10 < peaks["foreach"][0]
    (on_cpu,) = budgets(Run(LLAMA_8B, Layout(), 2048, "fp32", device="cpu"))
    assert on_cpu.peak_bytes == pytest.approx(peaks["for-loop"][0], rel=0.001)


# ---- LoRA, offload, overheads


def test_lora_trains_adapters_beside_weights_that_stay():
    whole, thin = (budgets(Run(LLAMA_8B, Layout(), 4096, lora=lora))[0] for lora in (None, LoRA(8)))
    assert thin.parameters > whole.parameters and thin.optimizer < whole.optimizer / 1000
    assert thin.activations < whole.activations  # a frozen matrix saves no input
    assert fits(thin, "h100") and not fits(whole, "h100")


def test_offloaded_activations_leave_the_device_and_come_back_one_by_one():
    toy = preset("toy")
    here, away = (
        budgets(Run(toy, Layout(micro_batch=8), 128, "fp32", device="cpu", offload=Offload(activations=place)))[0]
        for place in ("device", "host")
    )
    model = build(toy)
    tokens_BS = torch.zeros(8, 128, dtype=torch.int64)
    with offload_activations(model) as record:
        logits = model(tokens_BS)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BS.flatten())
        loss.backward()
    assert away.elsewhere["host"] == pytest.approx(record.moved_bytes, rel=0.02)
    assert away.activations < here.activations / 5


def test_what_is_no_tensor_is_an_assumption_by_name():
    alone, many = (budgets(Run(preset("toy"), Layout.parse(text), 64))[0].overheads for text in ("dp=1", "dp=2,tp=2"))
    assert set(many) - set(alone) == {"NCCL's buffers"}
    assert 2 * 16 * 4 * 2**20 < many["NCCL's buffers"] < 512 * 2**20  # two groups of 16 channels, 4 MiB and more each
    assert budgets(Run(preset("toy"), Layout(), 64, device="cpu"))[0].overheads == {}


# ---- ranks of tp


def test_a_budget_can_be_asked_of_any_rank_of_tp():
    odd = replace(preset("toy"), d_ff=193, vocab_size=257)
    first, last = (budgets(Run(odd, Layout(tp=2), 64), tp_rank=rank)[0] for rank in (0, 1))
    assert last.parameters < first.parameters and last.peak_bytes < first.peak_bytes
