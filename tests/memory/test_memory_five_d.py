from dataclasses import replace

import pytest
import torch

from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.memory.budget import budgets, fullest_budget, states_of
from course_lib.memory.flats import flats_of
from course_lib.memory.states import padded
from course_lib.model import Llama
from course_lib.run import Run
from course_lib.tensors import count_parameters

TOY, MOE = preset("toy"), preset("toy-moe")


def test_a_rank_of_llama_405b_counted_by_hand():
    """tp 8, pp 16, dp 128, ZeRO-1: embedding and 7 blocks on the first rank, 8 on others, norm and head on the last."""
    layout = Layout(dp=128, tp=8, pp=16, zero_stage=1, micro_batches=16, layers_of_stage=(7, *[8] * 14, 7))
    D, F, V = 16_384, 53_248, 128_256
    matrices = 2 * D * D + 2 * 8 * 128 * D + 3 * D * F
    block, ends = matrices // 8 + 2 * D, V * D // 8
    for rank, numel in ((0, ends + 7 * block), (5, 8 * block), (15, 7 * block + D + ends)):
        states = states_of(Run(preset("llama-3.1-405b"), layout, 8192), rank)
        shard = padded(numel, 128) // 128
        assert (states.parameters, states.optimizer) == (2 * 128 * shard, 12 * shard)
        assert states.gradients == states.parameters


@pytest.mark.parametrize("config", [TOY, MOE, replace(TOY, tied=True)], ids=["dense", "experts", "tied"])
def test_all_ranks_together_have_the_model_once(config):
    layout = Layout(pp=2, v=2, schedule="interleaved", micro_batches=2, dp=2, ep=2 if config.moe else 1, zero_stage=3)
    flats = [flat for rank in range(2) for flat in flats_of(config, layout, rank)]
    total = sum(flat.numel * (2 if flat.kind == "experts" else 1) for flat in flats)
    assert total == count_parameters(config) + config.tied * config.vocab_size * config.d_model  # a copy for the head
    with torch.device("meta"):
        names = [name for name, _ in Llama(config).named_parameters()]
    assert len({flat.unit for flat in flats if flat.unit.startswith("blocks")}) == config.num_layers
    copies = sum(len(flat.sizes) * (2 if flat.kind == "experts" else 1) for flat in flats)
    assert copies == len(names) + config.tied


@pytest.mark.slow
def test_deepseek_v3_fits_its_gpus_with_its_layout():
    """16 stages, experts over 64 ranks, ZeRO-1: its dense first layers are on the first stage alone."""
    config = preset("deepseek-v3")
    layout = Layout(dp=128, pp=16, ep=64, zero_stage=1, micro_batches=64, recompute="full")
    of_ranks = budgets(Run(config, layout, 4096))
    assert len(of_ranks) == 16
    flats = [flat for rank in range(16) for flat in flats_of(config, layout, rank)]
    assert sum(flat.numel * (64 if flat.kind == "experts" else 1) for flat in flats) == count_parameters(config)
    assert max(rank.total_bytes for rank in of_ranks) < 80 * 2**30


def test_C239_C240_gpus_that_hold_the_weights_alone():
    """70.6B and 405.9B parameters of 2 bytes, over 80 GiB: 2 and 10 GPUs; over 80 GB 405B needs 11."""
    of_80_gib = [2 * count_parameters(preset(f"llama-3.1-{size}")) / (80 * 2**30) for size in ("70b", "405b")]
    assert [round(each, 2) for each in of_80_gib] == [1.64, 9.45]
    assert round(2 * count_parameters(preset("llama-3.1-405b")) / 80e9, 2) == 10.15


@pytest.mark.parametrize("name, layers", [("llama-3.1-405b", (7, *[8] * 14, 7)), ("deepseek-v3", (*[4] * 13, 3, 3, 3))])
def test_the_fullest_of_three_ranks_is_the_fullest_of_all(name, layers):
    layout = Layout(dp=8, tp=8, pp=16, zero_stage=1, micro_batches=32, layers_of_stage=layers)  # rank 1 is the fullest
    run = Run(preset(name), layout, 8192)
    of_ranks = [one.total_bytes for one in budgets(run)]
    assert fullest_budget(run).total_bytes == max(of_ranks) == of_ranks[1]
