"""Formulas against hand values, papers' tables, claims of the source notes (by their ids) and the tracker."""

from dataclasses import replace
from math import prod

import pytest
import torch
from kept_bytes import saved_by_a_layer

from course_lib.config import PRESETS, ModelConfig, preset
from course_lib.layout import Layout
from course_lib.measure import MemoryTracker
from course_lib.memory.activations import (
    block_terms,
    korthikanti_bytes,
    korthikanti_layer_bytes,
    selective_flops_share,
)
from course_lib.memory.budget import budget, budgets, fits
from course_lib.memory.states import state_bytes
from course_lib.model import build
from course_lib.run import OPTIMIZERS, Run
from course_lib.tensors import LoRA, count_parameters, lora_parameters, parameter_shapes
from course_lib.training import make_optimizer, train_step

GIB, GB = 2**30, 10**9
LLAMA_8B, LLAMA_70B, LLAMA_405B = (preset(f"llama-3.1-{size}") for size in ("8b", "70b", "405b"))
GPT3 = preset("gpt3-175b")
MT_NLG = replace(
    GPT3, name="MT-NLG 530B", num_layers=105, d_model=20_480, num_heads=128, num_kv_heads=128, head_dim=160
)


# ---- states


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PRESETS))
def test_parameters_and_tensors_are_counted_as_the_built_model_has_them(name):
    parameters = list(build(preset(name), device="meta").parameters())
    assert count_parameters(preset(name)) == sum(p.numel() for p in parameters)
    assert sum(copies for _, copies in parameter_shapes(preset(name)).values()) == len(parameters)


def test_optimizers_rank_by_their_states():
    sizes = [state_bytes(LLAMA_8B, "fp32", optimizer).optimizer for optimizer in OPTIMIZERS]
    assert sizes[0] == 8 * count_parameters(LLAMA_8B) and sizes[-1] == 0
    adam, adam8, adafactor, momentum, sgd = sizes
    assert adam > momentum > adam8 > adafactor > sgd
    assert 2.02 < adam8 / count_parameters(LLAMA_8B) < 2.04  # two bytes, and a scale for each 256 numbers
    assert adafactor / count_parameters(LLAMA_8B) < 0.01


# ---- activations in papers


def test_korthikanti_table_2_for_gpt3_and_mt_nlg():
    for config, scores, saved, flops in ((GPT3, 80, 70, 2.7), (MT_NLG, 64, 65, 1.6)):
        sbh = 2048 * config.d_model
        whole = korthikanti_layer_bytes(config, 1, 2048)
        selective = korthikanti_layer_bytes(config, 1, 2048, "selective")
        assert whole == sbh * (34 + scores) and selective == 34 * sbh  # C038: the scores outweigh all the rest
        assert korthikanti_layer_bytes(config, 1, 2048, "full") == 2 * sbh
        assert round(100 * (1 - selective / whole)) == saved  # C037
        assert round(100 * selective_flops_share(config, 2048), 1) == flops
    t8 = [
        korthikanti_layer_bytes(GPT3, 1, 2048, recompute, tp=8) / (2048 * GPT3.d_model)
        for recompute in ("none", "full")
    ]
    assert t8 == [10 + 24 / 8 + 80 / 8, 2]
    assert round(100 * t8[1] / t8[0], 1) == 8.7  # C036: not a third


def test_zero_paper_s_activation_example():
    xl = replace(preset("gpt2-xl"), d_model=1600, num_layers=48)
    assert round(korthikanti_bytes(xl, 32, 1024) / GB) == 287  # with the scores, which the paper left out
    one_checkpoint_a_layer = 2 * 1024 * 32 * 8192 * 125  # 100B parameters: 125 layers of width 8192
    assert round(one_checkpoint_a_layer / GIB / 2, 0) == 31  # 33 GB


# ---- activations of the course's models


def test_gpt_block_in_bf16_is_korthikanti_s_formula_but_for_layernorm_statistics():
    config, s = replace(preset("gpt2"), max_seq_len=2048), 2048
    terms = block_terms(config, s, "standard", "bf16")
    statistics = terms["first norm's statistics"] + terms["second norm's statistics"]
    assert sum(terms.values()) - statistics == korthikanti_layer_bytes(config, 1, s) / s
    assert terms["core"] - block_terms(config, s, "fused", "bf16")["core"] == config.num_heads * (5 * s - 4)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("attention", ["fused", "standard"])
@pytest.mark.parametrize("name, changes", [("toy", {}), ("toy", {"qk_norm": True}), ("gpt2", {})])
def test_the_closed_formula_of_a_block_is_what_the_ledger_saves_of_a_layer(name, changes, attention, recipe):
    """To the byte; autocast saves its BF16 copies of the block's matrices as well."""
    config = replace(preset(name), max_seq_len=96, **changes)
    if attention == "fused":  # which has no dropout on a CPU
        config = replace(config, dropout=0.0)
    tokens, weights = 2 * 96, parameter_shapes(config).items()
    copies = 2 * sum(prod(s) for n, (s, _) in weights if n.startswith(("attention.", "mlp.")) and len(s) == 2)
    terms = block_terms(config, 96, attention, recipe)
    found = saved_by_a_layer(config, 96, recipe, attention, micro_batch=2)
    assert found == tokens * sum(terms.values()) + (copies if recipe == "autocast" else 0)


def llama(layers, d, heads, kv, ff, vocab, tied=False):
    return ModelConfig("grid", layers, d, heads, kv, ff, vocab, 512, tied=tied)


def head_norms(*shape):
    return replace(llama(*shape), qk_norm=True)


def gpt(layers, d, heads, ff, vocab, dropout):
    return ModelConfig("grid", layers, d, heads, heads, ff, vocab, 512, tied=True, family="gpt", dropout=dropout)


GRID = [  # config, batch, sequence, attention, recomputation, precision
    (llama(2, 64, 8, 4, 192, 256), 4, 64, "fused", "none", "fp32"),
    (llama(3, 64, 8, 2, 192, 256, tied=True), 4, 64, "fused", "full", "fp32"),
    (llama(3, 64, 8, 4, 192, 256), 2, 96, "standard", "full", "bf16-master"),
    (llama(1, 128, 4, 4, 512, 512), 2, 128, "fused", "none", "bf16"),
    (llama(2, 128, 4, 1, 344, 512), 2, 128, "standard", "selective", "bf16"),
    (llama(4, 96, 6, 2, 256, 300), 3, 96, "standard", "selective", "fp32"),
    (llama(2, 64, 4, 1, 128, 256), 2, 256, "fused", "full", "bf16"),
    (llama(2, 64, 8, 8, 256, 1024), 1, 128, "fused", "none", "bf16-master-fp32-grads"),
    (llama(2, 64, 8, 4, 192, 256), 4, 64, "fused", "none", "autocast"),
    (llama(2, 64, 8, 4, 192, 256), 4, 64, "standard", "none", "autocast"),
    (llama(3, 64, 4, 2, 192, 256), 2, 192, "standard", "selective", "autocast"),
    (head_norms(3, 64, 8, 2, 192, 256), 4, 64, "fused", "none", "fp32"),
    (head_norms(3, 64, 8, 2, 192, 256), 4, 64, "standard", "selective", "bf16"),
    (head_norms(3, 64, 8, 4, 192, 256), 4, 64, "fused", "none", "autocast"),
    (gpt(2, 64, 4, 256, 256, 0.1), 4, 64, "standard", "none", "fp32"),
    (gpt(3, 64, 4, 256, 256, 0.1), 4, 64, "standard", "full", "fp32"),
    (gpt(3, 64, 4, 256, 256, 0.1), 2, 192, "standard", "selective", "fp32"),
    (gpt(2, 128, 8, 512, 300, 0.1), 2, 128, "standard", "none", "autocast"),
    (gpt(2, 128, 8, 512, 300, 0.1), 2, 128, "standard", "full", "bf16-master"),
    (gpt(2, 128, 8, 512, 300, 0.0), 2, 128, "fused", "selective", "fp32"),
    (gpt(2, 128, 8, 512, 300, 0.0), 2, 128, "fused", "none", "autocast"),
    (gpt(2, 160, 10, 640, 256, 0.0), 2, 64, "fused", "none", "bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", GRID, ids=lambda c: f"{c[0].family}-{c[0].num_layers}x{c[0].d_model}-{'-'.join(map(str, c[1:]))}"
)
def test_activations_measured_are_the_formula_s_but_for_a_few_numbers(case):
    config, batch_size, seq_len, attention, recompute, recipe = case
    dtype = torch.float32 if recipe in ("fp32", "autocast") else torch.bfloat16
    model = build(config, dtype=dtype, attention=attention, recompute=recompute)
    optimizer = make_optimizer(model, recipe)
    with MemoryTracker(model, optimizer) as tracker:
        x_BS, y_BS = torch.randint(0, config.vocab_size, (2, batch_size, seq_len)).clone().unbind()
        train_step(model, optimizer, x_BS, y_BS, precision=recipe)
    measured = {kind: max(column) for kind, column in tracker.timeline.bytes_by_kind.items()}
    layout = Layout(micro_batch=batch_size, recompute=recompute)
    (predicted,) = budgets(Run(config, layout, seq_len, recipe, attention, "cpu"))
    for kind in ("parameters", "gradients", "optimizer"):
        assert predicted.by_kind[kind] == measured[kind], kind
    left = measured["activations"] - predicted.by_kind["activations"]
    assert 0 <= left <= 20  # the loss, its mean and counts: a few numbers


def test_the_encoder_s_activations_are_too():
    config = ModelConfig("encoder", 3, 64, 4, 4, 256, 300, 128, tied=True, family="xlmr", dropout=0.1)
    for recompute in ("none", "full"):
        model = build(config, attention="standard", recompute=recompute)
        with MemoryTracker(model) as tracker:
            model(torch.randint(0, 300, (4, 64))).square().mean().backward()
        measured = max(tracker.timeline.bytes_by_kind["activations"])
        output = 4 * 64 * 64 * 4  # the loss here saves the output, which a head would save, and two numbers
        run = Run(config, Layout(micro_batch=4, recompute=recompute), 64, "fp32", "standard", "cpu")
        predicted = budgets(run)[0].activations
        assert 0 <= measured - predicted <= output + 8, (recompute, measured, predicted)


# ---- budgets


def test_accumulation_and_fp32_gradients_raise_the_peak_by_the_gradients():
    once, twice = (budget(LLAMA_8B, 1, 4096, micro_batches=n) for n in (1, 2))
    assert once.at_peak["gradients"] == 0 and twice.at_peak["gradients"] == twice.gradients
    assert twice.peak_bytes - once.peak_bytes == twice.gradients
    in_fp32 = budget(LLAMA_8B, 1, 4096, "bf16-master-fp32-grads")
    assert in_fp32.at_peak["gradients"] == in_fp32.gradients == 4 * count_parameters(LLAMA_8B)


def test_selective_recomputation_brings_explicit_attention_down_to_the_fused_one():
    """C039: one or the other, they save the same."""
    standard, fused = (
        saved_by_a_layer(LLAMA_8B, 4096, "bf16", attention, recompute=recompute)
        for attention, recompute in (("standard", "selective"), ("fused", "none"))
    )
    assert standard == pytest.approx(fused, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: state_bytes(LLAMA_8B, "bf17"), "choose from fp32, autocast"),
        (lambda: state_bytes(LLAMA_8B, "fp32", "adam"), "choose from adamw"),
        (lambda: state_bytes(LLAMA_8B, lora=LoRA(8, ("query",))), "choose from"),
        (lambda: LoRA(0), "from 1"),
        (lambda: block_terms(LLAMA_8B, 8, attention="flash"), "choose from fused, standard"),
        (lambda: block_terms(LLAMA_8B, 8, precision="fp8"), "choose from fp32"),
        (lambda: korthikanti_layer_bytes(LLAMA_8B, 1, 8, tp=0), "tp is 0"),
        (lambda: budget(preset("gpt2"), 1, 2048), "at most 1024"),
        (lambda: fits(budget(preset("gpt2"), 1, 8), "h1000"), "h100"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_C234_twice_the_width_is_four_times_the_parameters_and_twice_the_layers_twice():
    wide = replace(GPT3, d_model=24_576, d_ff=98_304, num_heads=192, num_kv_heads=192)
    deep = replace(GPT3, num_layers=192)
    times = [count_parameters(config) / count_parameters(GPT3) for config in (wide, deep)]
    assert times == pytest.approx([3.99, 2.0], abs=0.005)


def test_C211_C220_lora_trains_one_percent_and_keeps_all_weights():
    xl = preset("xlm-r-xl")
    q_and_v, every_matrix = LoRA(32), LoRA(32, ("q", "k", "v", "o", "up", "down"))
    assert round(100 * lora_parameters(xl, q_and_v) / count_parameters(xl), 2) == 0.34
    assert round(100 * lora_parameters(xl, every_matrix) / count_parameters(xl), 1) == 1.5
    states = state_bytes(xl, "bf16-master", lora=q_and_v)
    assert states.parameters == 2 * (count_parameters(xl) + lora_parameters(xl, q_and_v))  # 7 GB, not 0.07
    assert round(states.parameters / GB, 1) == 7.0
    assert states.gradients == 2 * lora_parameters(xl, q_and_v) and states.optimizer == 12 * lora_parameters(
        xl, q_and_v
    )
