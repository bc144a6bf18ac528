"""Experts' arithmetic against transformers' models, published figures, and what the tracker measures."""

import dataclasses

import pytest
import torch

from course_lib import flops, timing
from course_lib.compare.profile import profile_step, scale_down
from course_lib.config import MOE_PRESETS, preset
from course_lib.layout import Layout
from course_lib.memory.activations import block_terms
from course_lib.memory.budget import budget, budgets, states_of
from course_lib.memory.flats import Flat, bucket_units, buckets_of, flats_of, layer_units, tensors_of
from course_lib.memory.peak import gradients_of
from course_lib.memory.states import padded, state_bytes
from course_lib.model import build, with_moe
from course_lib.run import Run, recipe_of
from course_lib.tensors import active_parameters, count_parameters, dense_twin, parameter_shapes

TOY, MIXTRAL, DEEPSEEK = (preset(name) for name in ("toy-moe", "mixtral-8x7b", "deepseek-v3"))


# ---- parameters and FLOPs


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MOE_PRESETS)
def test_parameters_and_tensors_are_counted_as_the_built_model_has_them(name):
    few = dataclasses.replace(preset(name), num_layers=4)  # DeepSeek-V3's own 61 have 45,000 tensors
    for config in (few, with_moe(few, num_shared_experts=2, first_dense_layers=1)):
        parameters = list(build(config, device="meta").parameters())
        assert count_parameters(config) == sum(parameter.numel() for parameter in parameters)
        assert sum(copies for _, copies in parameter_shapes(config).values()) == len(parameters)


@pytest.mark.slow
def test_mixtral_and_deepseek_v3_have_as_many_parameters_as_transformers_models():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):  # the classes' defaults are the shapes of the published models
        one, two = (count(MixtralForCausalLM(MixtralConfig(num_hidden_layers=layers))) for layers in (1, 2))
        four, five = (count(DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=n, vocab_size=129_280)))
                      for n in (4, 5))  # fmt: skip
    assert count_parameters(MIXTRAL) == one + 31 * (two - one) == 46_702_792_704
    assert count_parameters(DEEPSEEK) == four + 57 * (five - four) == 671_026_404_352


def test_active_parameters_are_those_published():
    assert round(count_parameters(MIXTRAL) / 1e9, 1) == 46.7
    assert round(active_parameters(MIXTRAL) / 1e9, 1) == 12.9
    assert round(count_parameters(DEEPSEEK) / 1e9) == 671
    without_look_up = active_parameters(DEEPSEEK) - DEEPSEEK.vocab_size * DEEPSEEK.d_model
    assert (round(active_parameters(DEEPSEEK) / 1e9, 1), round(without_look_up / 1e9, 1)) == (37.6, 36.6)  # "37B"
    assert active_parameters(preset("llama-3.1-8b")) == 8_030_261_248


def test_active_parameters_are_those_that_one_token_gives_a_gradient():
    config = with_moe(TOY, num_shared_experts=1, first_dense_layers=1)
    model = build(config)
    model(torch.tensor([[7]])).sum().backward()
    # Counted whole without a look: the embedding, of which a token uses a row, and q and k, as it sees itself alone.
    whole = ("embed.weight", "attention.q.weight", "attention.k.weight")
    used = [p.numel() for name, p in model.named_parameters() if name.endswith(whole) or p.grad.any()]
    assert active_parameters(config) == sum(used) < count_parameters(config)


def test_flops_count_what_a_token_is_multiplied_with():
    for name in ("toy-moe", "mini-moe"):
        config, dense = preset(name), dense_twin(preset(name))
        assert dense.d_ff == preset(name.removesuffix("-moe")).d_ff
        router = config.num_layers * 8 * config.d_model
        assert flops.matmul_parameters(config) == flops.matmul_parameters(dense) + router
        assert timing.flops_per_token(config, 64) == timing.flops_per_token(dense, 64) + 6 * router
    assert timing.step_flops(TOY, 10, 64, "full") > timing.step_flops(TOY, 10, 64)
    # 250 GFLOP a token at 4096, attention causal: Zhao et al. 2025 (arXiv:2505.09343), table 2
    assert round(timing.flops_per_token(DEEPSEEK, 4096, causal=True) / 1e9) == 250


def test_a_twin_of_equal_flops_is_refused_where_blocks_differ():
    assert dense_twin(preset("toy")) == preset("toy")
    with pytest.raises(ValueError, match="a twin of equal blocks needs first_dense_layers=0"):
        dense_twin(with_moe(TOY, first_dense_layers=1, d_expert=32))


# ---- measured


CASES = {
    "softmax": {},
    "bias and shared": {"score": "sigmoid", "balancing": "bias", "num_shared_experts": 1},
    "dense first": {"first_dense_layers": 2, "normalise_weights": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe, recomputes", [("fp32", ["none", "full"]), ("bf16-master", ["selective"])])
@pytest.mark.parametrize("case", CASES)
def test_states_and_what_is_saved_are_measured_to_the_byte(case, recipe, recomputes):
    """But for losses and counts, a few numbers each; of a block that is made again, within one percent."""
    config = with_moe(TOY, **CASES[case])
    for recompute in recomputes:
        found = profile_step(config, 4, 64, recipe, recompute=recompute)
        for kind in ("parameters", "gradients", "optimizer"):
            assert found.row(kind).predicted_bytes == found.row(kind).measured_bytes, kind
        row = found.row("activations")
        near = 0.01 * row.measured_bytes if recompute == "full" else 200
        assert 0 <= row.measured_bytes - row.predicted_bytes < near
        assert abs(found.row("peak").error_percent) < (12 if recompute == "full" else 1)  # gradients beside a turn


# ---- EP x DP x TP


def states(**layout):
    """Of the only rank of a pipeline of one."""
    return states_of(Run(MIXTRAL, Layout(**layout), 4096))


def test_ranks_together_hold_every_expert_and_ranks_of_tp_every_matrix():
    held = 32 * 8 * 3 * 4096 * 14_336
    for dp, ep in ((1, 1), (4, 1), (4, 4), (8, 4), (16, 8)):
        assert states(dp=dp, ep=ep).parameters == 2 * (held // ep + count_parameters(MIXTRAL) - held)
    twice = (2 * 32 + 1) * 4096 + 32 * 8 * 4096  # norms and routers are on all
    assert 8 * states(tp=8).parameters == states().parameters + 7 * 2 * twice
    assert states() == state_bytes(MIXTRAL)


def test_zero_shards_experts_over_those_that_hold_the_same_ones():
    # hand: 45.1 billion parameters of experts over ep 4 on dp 16, so 4 ranks share each; 1.6 billion over all 16
    experts, others = 32 * 8 * 3 * 4096 * 14_336, count_parameters(MIXTRAL) - 32 * 8 * 3 * 4096 * 14_336
    one = states(dp=16, ep=4, zero_stage=1)
    assert one.optimizer == pytest.approx(12 * (experts / 4 / 4 + others / 16), rel=1e-9)
    assert one.parameters == 2 * (experts // 4 + others)
    two = states(dp=16, ep=4, zero_stage=2)
    assert two.gradients == pytest.approx(2 * (experts / 4 / 4 + others / 16), rel=1e-9)
    without = states(dp=16, zero_stage=1)
    assert without.optimizer == one.optimizer  # ZeRO alone shards the optimizer as far; EP divides the rest
    assert without.parameters > 3 * one.parameters


def test_what_a_rank_keeps_grows_with_the_rows_that_others_send():
    even, crowded = (budgets(Run(MIXTRAL, Layout(dp=8, ep=8), 4096), load=load)[0] for load in (1.0, 2.0))
    row_bytes = (4096 + 4 * 14_336) * 2 + 2 * 8  # input of gate and up; gate, up, silu, product; two places of a row
    assert crowded.activations - even.activations == 32 * 4096 * 2 * row_bytes
    assert crowded.states_bytes == even.states_bytes
    divided = budgets(Run(MIXTRAL, Layout(dp=8, ep=8, tp=8), 4096))[0]
    inside = 2 * 4 * 14_336 * 2  # of two experts, which tp divides
    assert even.activations - divided.activations > 32 * 4096 * inside * 7 / 8 * 0.99


def test_a_rank_of_64_has_four_of_deepseek_v3s_experts_in_each_layer():
    whole = budgets(Run(DEEPSEEK, Layout(dp=64, ep=64, zero_stage=1, recompute="full"), 4096))[0]
    experts = 58 * 4 * 3 * 7168 * 2048
    flats = flats_of(DEEPSEEK, Layout(dp=64, ep=64, zero_stage=1))
    assert experts == sum(flat.numel for flat in flats if flat.kind == "experts")
    assert whole.parameters == 2 * (experts + count_parameters(DEEPSEEK) - 64 * experts)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_equal_tensors_of_experts_counted_together_are_the_bytes_of_each_alone(zero, tp):
    """A bucket of 25 MiB closes in the middle of an expert's tensors: they fill one, two or eight."""
    config = dataclasses.replace(DEEPSEEK, num_layers=6)
    layout, recipe = Layout(dp=4, tp=tp, ep=4, zero_stage=zero), recipe_of("bf16-master-fp32-grads")
    together = tensors_of(config, layout)
    alone = [one._replace(place=one.place + i, count=1) for one in together for i in range(one.count)]
    assert max(one.count for one in together) == 3 * 256 // 4

    def flat(group, count):
        ranks = layout.expert_shard_size if group[0].kind == "experts" else 4
        numel = sum(one.numel * one.count for one in group)
        padded_numel = count * padded(numel // count, ranks)
        return Flat(tuple(group), ranks, 0, group[0].kind, group[0].unit, numel, padded_numel, count)

    counted, single = ([flat(*bucket) for bucket in buckets_of(tensors, 2)] for tensors in (together, alone))
    assert tuple(counted) == flats_of(config, layout)
    assert {one.count for one in single} == {1} and sum(one.count for one in counted) == len(single)
    assert sum(one.padded for one in counted) == sum(one.padded for one in single)
    a, b = (gradients_of(layout, recipe, *each, False) for each in ((together, counted), (alone, single)))
    assert (a.held, a.product) == (b.held, b.product)
    for unit in ("end", *(f"blocks.{layer}" for layer in range(6)), "embed"):
        for name in ("", "norm", "moe.shared.gate", "moe.router", "mlp.norm", "mlp.down", "attention.o", "embed"):
            assert a.after(unit, name) == b.after(unit, name), (unit, name)


# ---- refusals


@pytest.mark.parametrize(
    "use",
    [
        lambda c: bucket_units(c),
        lambda c: layer_units(c),
        lambda c: scale_down(c),
        lambda c: timing.layer_matmul_parameters(c),
    ],
)
def test_formulas_of_dense_models_refuse_experts(use):
    for config in (TOY, DEEPSEEK, dataclasses.replace(DEEPSEEK, moe=None)):
        with pytest.raises(ValueError, match=r"knows no (experts|latent attention), but .* has; use a dense model"):
            use(config)
    with pytest.raises(ValueError, match="knows no experts, but .* has"):
        block_terms(DEEPSEEK, 64)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: budgets(Run(TOY, Layout(dp=4, ep=4), 64), load=5.0), "load is 5.0; required: 0 to ep .4."),
        (lambda: budget(TOY, 1, 512), "reads at most 256 tokens"),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use()
