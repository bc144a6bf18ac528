"""Pipeline parallelism in bytes: hand values, the playbook's bars, claims by their ids."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from kept_bytes import kept_bytes

from course_lib import model, training
from course_lib.config import preset
from course_lib.layout import Layout, even_layers
from course_lib.memory.activations import block_terms
from course_lib.memory.budget import budget, budgets, saved_for_backward
from course_lib.memory.flats import flats_of, live_layers, stage_parameters
from course_lib.parallel.stages import cut
from course_lib.parallel.weight_gradients import DelayedWeightGradients, WeightGradientStore
from course_lib.run import Run
from course_lib.schedules import (
    SCHEDULES,
    all_forward_all_backward,
    interleaved_1f1b,
    interleaving_memory,
    make,
    naive,
    one_f_one_b,
    peak_live,
)
from course_lib.tensors import count_parameters

LLAMA_8B, LLAMA_405B, TOY = preset("llama-3.1-8b"), preset("llama-3.1-405b"), preset("toy")
TIED = preset("llama-3.2-1b")
SMALL_GPT = replace(TOY, name="gpt", family="gpt", num_kv_heads=TOY.num_heads)


# ---- layers and parameters


def test_a_tied_head_is_a_copy_on_the_last_stage():
    embedding = TIED.vocab_size * TIED.d_model
    assert sum(stage_parameters(TIED, even_layers(16, 4))) == count_parameters(TIED) + embedding
    assert stage_parameters(TIED, [16]) == [count_parameters(TIED)]
    last = flats_of(TIED, Layout(pp=2, dp=2, zero_stage=3), pp_rank=1)
    assert sum(flat.numel for flat in last if flat.unit == "end") == embedding + TIED.d_model
    with pytest.raises(ValueError, match="16 together"):
        stage_parameters(TIED, [8, 9])


# ---- activations


def test_C100_C105_C143_activations_of_1f1b_do_not_shrink_with_stages():
    for pp in (2, 4, 8):
        assert live_layers(one_f_one_b(pp, 16), even_layers(32, pp))[0] == 32  # C100: pp x L / pp
    counts = [live_layers(schedule(4, 8), [1] * 4) for schedule in (naive, all_forward_all_backward, one_f_one_b)]
    assert counts == [[1] * 4, [8] * 4, [4, 3, 2, 1]]  # C105: from m to p - i; C143
    assert live_layers(one_f_one_b(4, 2), [1] * 4) == [2, 2, 2, 1]  # min(m, p - i)
    for name in SCHEDULES:
        schedule = make(name, 4, 12)
        assert tuple(live_layers(schedule, [1] * schedule.num_stages)) == peak_live(name, 4, 12, schedule.v), name
    kept = saved_for_backward(Run(LLAMA_8B, Layout(pp=8), 4096), 1).activations
    tables = 4096 * 2 * LLAMA_8B.head_dim * 2  # RoPE's, once a stage
    assert kept - tables == 4 * 4096 * sum(block_terms(LLAMA_8B, 4096, precision="bf16-master").values())


def test_C114_interleaving_costs_activation_memory():
    for pp, v, printed in ((4, 2, 1.375), (8, 2, 1.44), (35, 3, 1.32)):
        factor = interleaving_memory(pp, v)
        assert factor == pytest.approx(printed, abs=0.005)
        m = 2 * pp
        plain = live_layers(one_f_one_b(pp, m), [v] * pp)[0]
        assert live_layers(interleaved_1f1b(pp, m, v), [1] * (pp * v))[0] == factor * plain


@pytest.mark.parametrize("config", [TOY, SMALL_GPT], ids=["llama", "gpt"])
def test_a_real_stage_keeps_what_is_predicted_and_what_waits_for_w_too(config):
    whole, layers = model.build(config), [1, 1, 2]
    tokens_BS, y_BS = (torch.arange(32).view(2, 16) for _ in range(2))
    for stage in range(3):
        module = cut(whole, stage, layers)
        x = tokens_BS if stage == 0 else torch.zeros(2, 16, config.d_model, requires_grad=True)
        forward = partial(training.loss_of, module, x, y_BS) if stage == 2 else partial(module, x)
        kept, queue, delayed = kept_bytes(module, forward), WeightGradientStore(), DelayedWeightGradients(module)
        with delayed.into(queue):
            out = forward()
        out.backward(torch.ones_like(out))
        products = [handle.grad_fn.product for handle in queue.handles]
        waiting = {x.data_ptr(): x.untyped_storage().nbytes() for one in products for x in (one.x, one.grad)}
        layout = Layout(pp=3, layers_of_stage=tuple(layers), schedule="zb_h1", micro_batch=2, micro_batches=3)
        said = saved_for_backward(Run(config, layout, 16, "fp32", device="cpu"), stage)
        assert kept - said.total in (0, 4), stage  # the loss is one number
        assert sum(waiting.values()) == said.waiting, stage


def test_ranks_of_a_pipeline_hold_different_amounts():
    ranks = budgets(Run(LLAMA_8B, Layout(pp=8, micro_batches=16), 4096))
    assert [rank.parameters for rank in ranks] == [2 * n for n in stage_parameters(LLAMA_8B, even_layers(32, 8))]
    kept = [rank.activations for rank in ranks]
    assert kept[:7] == sorted(kept[:7], reverse=True) and kept[0] / kept[6] == pytest.approx(4, rel=0.01)
    assert [rank.logits > 0 for rank in ranks] == [False] * 7 + [True]
    total = sum(rank.states_bytes for rank in ranks)
    assert total == budget(LLAMA_8B, 1, 4096).states_bytes
    zero = budgets(Run(TIED, Layout(pp=4, micro_batches=8, zero_stage=3, dp=8), 4096))
    assert sum(rank.optimizer for rank in zero) * 8 == 12 * sum(stage_parameters(TIED, even_layers(16, 4)))
