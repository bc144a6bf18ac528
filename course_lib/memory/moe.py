"""A mixture of experts' arithmetic: parameters in all and for one token, rows that are routed, memory by EP x DP x TP.

Of dp ranks ep neighbours share the experts among them, so dp / ep ranks hold the same ones; everything else is on all.

                         each rank holds                        ZeRO shards it over
    attention, norms,
    router, shared, ends     whole                                  dp
    experts                  E / ep of them                         dp / ep
    tp                       divides attention, every MLP and expert, the vocabulary; not norms and router

A token becomes k rows, each of which one expert works on. What a layer of experts keeps for backward, instead of an
MLP's input and 4 F numbers a token (R = rows a token: k, or fewer where some are dropped, or this rank's part of all
ranks' rows; F = d_expert; e bytes a number):

    input of the router, in FP32       4 D                  dispatched rows: input of gate and up     R D e
    scores, sigmoid's also as shares   4 E, 8 E             inside the experts                        R 4 F e
    the choice: ids, weights, kept     8 k + 4 k + k        the experts' outputs                      k D e
    weights not yet divided, sum       4 k + 4              their weights                             k e
    places of rows, three times        24 k                 input of the shared, if e < 4; inside     D e, 4 F_shared e

So with k F = d_ff it keeps more than the MLP of as many FLOPs, mainly by 2 k D: the rows themselves.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from course_lib.config import ModelConfig, MoeConfig
from course_lib.layout.experts import check_expert_parallel
from course_lib.layout.partition import piece_sizes
from course_lib.memory.activations import PRECISIONS, Activations, block_terms, own_activations
from course_lib.memory.states import (
    Recipe,
    Shapes,
    StateBytes,
    moments_bytes,
    parameter_shapes,
    recipe_of,
)
from course_lib.memory.tensor import narrow
from course_lib.memory.zero import zero_state_bytes

_FP32, _INT64 = 4, 8


# ---- parameters


def active_parameters(config: ModelConfig) -> int:
    """Count the parameters that one token uses: all but the experts that it did not choose. Without experts, all.

    The embedding counts whole, as published figures count it: 12.9 billion of Mixtral 8x7B's 46.7.
    """
    idle = config.moe.num_experts - config.moe.top_k if config.moe else 0
    unused = sum(
        prod(shape) * copies // config.moe.num_experts * idle
        for name, (shape, copies) in parameter_shapes(config).items()
        if _is_expert(name)
    )
    return sum(prod(shape) * copies for shape, copies in parameter_shapes(config).values()) - unused


def dense_twin(config: ModelConfig) -> ModelConfig:
    """A model without experts whose tokens need the same FLOPs, but for the router's: MLPs as wide as what one uses."""
    if config.moe is None:
        return config
    width = (config.moe.top_k + config.moe.num_shared_experts) * config.moe.d_expert
    if config.moe.first_dense_layers and width != config.d_ff:
        raise ValueError(
            f"{config.name} has dense blocks of width {config.d_ff} and uses experts of width {width} in all; "
            "a twin of equal blocks needs first_dense_layers=0"
        )
    return replace(config, name=f"{config.name}, dense", d_ff=width, moe=None)


def _is_expert(name: str) -> bool:
    return name.startswith("moe.experts.")


# ---- activations


def moe_terms(moe: MoeConfig, d_model: int, precision: str = "fp32", rows: float | None = None) -> dict[str, float]:
    """List what a layer of experts keeps for each token, in bytes, by name: in place of an MLP and its input.

    rows     rows a token that this rank's experts work on; None: top_k, nothing dropped, or as many as others send
    Raises   ValueError for autocast, whose casts are not counted here
    """
    if PRECISIONS[recipe_of(precision).name].casts:
        raise ValueError(f"precision is {precision!r}; with experts choose one without casts, such as fp32 or bf16")
    e, k = PRECISIONS[recipe_of(precision).name].matmul_bytes, moe.top_k
    rows = k if rows is None else rows
    shared = moe.num_shared_experts * moe.d_expert * e
    returned = min(rows, k)
    return {
        "input of the router": d_model * _FP32,
        "scores": moe.num_experts * (2 if moe.score == "sigmoid" else 1) * _FP32,
        "choice": k * (_INT64 + _FP32 + 1) + (k + 1) * _FP32 * moe.normalise_weights,
        "places of rows": 3 * returned * _INT64,
        "dispatched rows": rows * d_model * e,
        "experts": rows * 4 * moe.d_expert * e,
        "experts' outputs": returned * d_model * e,
        "weights of rows": returned * e,
        "input of the shared experts": d_model * e if shared and e != _FP32 else 0,
        "shared experts": 4 * shared,
    }


def moe_activations(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    attention: str = "fused",
    recompute: str = "none",
    precision: str = "fp32",
    device: str = "cpu",
    rows: float | None = None,
    sequence_share: float = 1.0,
    regather: bool = False,
) -> Activations:
    """Predict what the course's model with experts keeps for the backward pass of one micro-batch.

    rows     as in `moe_terms`
    sequence_share, regather   as in `own_activations`; tokens of experts are whole sequences again, and stay so
    Raises   ValueError if a word is unknown, or a combination is not counted
    """
    dense, tokens = replace(config, moe=None), batch_size * seq_len
    kept = own_activations(
        dense, batch_size, seq_len, attention, recompute, precision, device, sequence_share, regather
    )
    if config.moe is None:
        return kept
    extra = sum(moe_terms(config.moe, config.d_model, precision, rows).values())
    replaced = block_terms(dense, seq_len, attention, precision, device)
    extra -= replaced["input of the MLP"] * (sequence_share if regather else 1) + replaced["MLP"]
    constant = _router_casts(config, precision)
    if recompute == "full":
        held, once = _held_routing(config.moe)
        turn = extra + config.num_moe_layers * held - once
        return replace(kept, last_block_s_turn=kept.last_block_s_turn + round(turn * tokens) + constant)
    blocks = kept.blocks + round(config.num_moe_layers * extra * tokens) + config.num_moe_layers * constant
    turn = kept.last_block_s_turn and kept.last_block_s_turn + blocks - kept.blocks - round(extra * tokens) - constant
    return replace(kept, blocks=blocks, last_block_s_turn=turn)


def _router_casts(config: ModelConfig, precision: str) -> int:
    """The router's weights in FP32, where they are not."""
    if PRECISIONS[recipe_of(precision).name].matmul_bytes == _FP32:
        return 0
    return config.moe.num_experts * config.d_model * _FP32


def _held_routing(moe: MoeConfig) -> tuple[int, int]:
    """Bytes a token: `moe.routing` of a block's first run, until the next step; and what its second run holds not."""
    shares = moe.num_experts * _FP32
    choice = moe.top_k * (_INT64 + _FP32 + 1)
    return shares + choice, moe.top_k * (_FP32 + 1) + (shares if moe.score == "sigmoid" else 0)


# ---- one rank of dp = ep x expert_dp, and tp


def rank_shapes(config: ModelConfig, dp_size: int, ep_size: int, tp_size: int = 1) -> tuple[Shapes, Shapes]:
    """The tensors of the first rank: experts, and everything else.

    Raises   ValueError where experts, ranks or heads do not divide
    """
    check_expert_parallel(config, dp_size, ep_size, tp_size)
    shapes = parameter_shapes(narrow_experts(config, tp_size))
    experts = {name: (shape, n // ep_size) for name, (shape, n) in shapes.items() if _is_expert(name)}
    return experts, {name: entry for name, entry in shapes.items() if name not in experts}


def narrow_experts(config: ModelConfig, tp_size: int, tp_rank: int = 0) -> ModelConfig:
    """What one rank of tensor parallelism runs: fewer heads, narrower MLPs and experts; the first, a widest one."""
    local = narrow(replace(config, moe=None), tp_size, tp_rank)
    moe = config.moe and replace(config.moe, d_expert=piece_sizes(config.moe.d_expert, tp_size)[tp_rank])
    return replace(local, moe=moe)


def expert_parallel_states(
    config: ModelConfig,
    dp_size: int = 1,
    ep_size: int = 1,
    tp_size: int = 1,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    zero_stage: int = 0,
    step_counters: bool = False,
) -> StateBytes:
    """Predict what a rank holds between two steps: parameters, gradients, optimizer states.

    Shards of ZeRO are counted as two flat pieces, experts and the rest: how it groups tensors moves some bytes.

    Raises   ValueError if ranks or experts do not divide, or zero_stage is none of 0, 1, 2
    """
    if zero_stage not in (0, 1, 2):
        raise ValueError(f"zero_stage is {zero_stage}; with experts choose from 0, 1, 2")
    recipe, kinds = recipe_of(recipe), rank_shapes(config, dp_size, ep_size, tp_size)
    if zero_stage == 0:
        held = [_whole_states(shapes, recipe, optimizer, step_counters) for shapes in kinds]
    else:
        held = [
            zero_state_bytes([_numel(shapes)], zero_stage, ranks, recipe, optimizer)
            for shapes, ranks in zip(kinds, (dp_size // ep_size, dp_size), strict=True)
        ]
    return StateBytes(*(sum(getattr(part, kind) for part in held) for kind in ("parameters", "gradients", "optimizer")))


def _numel(shapes: Shapes) -> int:
    return sum(prod(shape) * copies for shape, copies in shapes.values())


def _whole_states(shapes: Shapes, recipe: Recipe, optimizer: str, step_counters: bool) -> StateBytes:
    moments = sum(copies * moments_bytes(shape, recipe, optimizer) for shape, copies in shapes.values())
    counters = 4 * sum(copies for _, copies in shapes.values()) if step_counters else 0
    numel = _numel(shapes)
    return StateBytes(
        recipe.param_bytes * numel, recipe.grad_bytes * numel, recipe.master_bytes * numel + moments + counters
    )
