"""Frameworks other than nanotron: what each keeps and when it waits, put on top of `budgets` and `step_time`.

    FRAMEWORKS["torchtitan"]            facts of a framework, read in its code; none is fitted
    memory_of(run, framework, how)      bytes of the fullest rank, by kind
    seconds_of(run, cluster, ...)       seconds of a step, by what they are spent on

`budgets` and `step_time` are the course's own engines to the byte and to the call. A framework differs in few things:
which numbers its states are in, what survives a pipeline's micro-batch, what its loss holds, whether its small
operations are fused, and what it reports as memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from course_lib.config import ModelConfig, require_dense
from course_lib.flops import attention_parameters, head_parameters, matmul_parameters, mlp_parameters
from course_lib.hardware import Cluster, peak_flops
from course_lib.layout import Layout
from course_lib.memory.budget import fullest_budget
from course_lib.memory.states import RECIPES
from course_lib.predict.rates import Rates
from course_lib.run import Run
from course_lib.timing.rates import FLASH_ATTENTION_2, Utilisation
from course_lib.timing.step import step_time
from course_lib.validate import Amount, Share, check_fields

PRECISIONS = ("bf16", "fp8")
# Assumed, not fitted. An update reads master weight, moments, gradient and writes these and the parameter: bytes of a
# parameter. The allocator reserves more than tensors need: pieces that no tensor fits.
UPDATE_BYTES, RESERVED = 30, 1.05
# Of the dense peak that a flash kernel reaches, forward and backward, of the pairs that a causal mask leaves.
# Sources: Dao 2023 (arXiv:2307.08691): 50 to 73 % on A100; Shah et al. 2024 (arXiv:2407.08608): 35 % on H100.
A100_ATTENTION, ATTENTION = 0.55, FLASH_ATTENTION_2


@dataclass(frozen=True)
class Framework:
    """What a framework does otherwise than the course's engines: facts of its code, none is fitted.

    states            bytes of parameters, gradients, optimizer by kind: a name of memory/states.py
    fused             small operations run as one kernel: torch.compile, Transformer Engine
    root_gathered     with ZeRO-3 embedding and head, FSDP's root unit, stay gathered from forward to backward
    kept_in_pipeline  in a pipeline parameters stay gathered with any ZeRO, and FP32 gradients are sharded once a step;
                      buffers for the messages of all micro-batches are there from the start
    loss_bytes        of each logit, more than the course's loss has at its peak: the BF16 logits' place stays reserved
    tp_loss_bytes     the same where tp cuts the vocabulary: two more FP32 copies in its backward
    tp_hidden         share of tp's exposed time that is hidden: collectives cut in pieces beside products
    contiguous        a cp rank has one piece of the sequence, so that the last rank has most pairs
    reserved          its logs tell what the allocator reserved, without the CUDA context and NCCL's buffers
    """

    name: str
    states: Literal[tuple(RECIPES)]
    fused: bool
    root_gathered: bool = False
    kept_in_pipeline: bool = False
    loss_bytes: Amount = 0.0
    tp_loss_bytes: Amount = 0.0
    tp_hidden: Share = 0.0
    contiguous: bool = False
    reserved: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


_FSDP2 = Framework("fsdp2", "bf16-master", False, True, True, loss_bytes=2, tp_loss_bytes=8, contiguous=True)
# Sources: the frameworks' own code. torchtitan of December 2024 (parallelize_llama.py, train.py): FP32 shards gathered
# in BF16, so that a parameter costs bf16-master's 16 bytes; a loss that is not compiled; Megatron-Core: 18 bytes of its
# estimator, userbuffers for tp; DeepSpeed: BF16 gradients. torch's context parallelism of that time shards
# contiguously: its published throughput falls as such a ring's does (docs/PREDICTOR.md).
FRAMEWORKS: dict[str, Framework] = {
    one.name: one
    for one in (
        Framework("megatron", "bf16-master-fp32-grads", True, tp_hidden=0.8, reserved=False),
        _FSDP2,
        replace(_FSDP2, name="torchtitan", fused=True),
        Framework("deepspeed", "bf16-master", False),
    )
}


@dataclass(frozen=True)
class How:
    """What a run's layout does not tell.

    precision   of linear layers; head and attention stay in BF16
    operators   recomputation of selected operators: outputs of attention and of every second product are kept, and all
                else is made again
    """

    precision: Literal[PRECISIONS] = "bf16"
    operators: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def run_under(run: Run, framework: Framework, how: How) -> Run:
    """The run as the course's engines would have it in order to hold and to wait as the framework does."""
    layout, changes, states = run.layout, {}, framework.states
    if how.operators:
        require_dense(run.config, "recomputation of operators")
        changes["recompute"] = "full"
    if framework.contiguous and layout.cp > 1 and layout.cp_method == "ring":
        changes["cp_sharding"] = "contiguous"
    if layout.data_size == 1 and run.offload.parameters == "device":
        changes["zero_stage"] = 0  # there is nobody to shard over
    elif framework.kept_in_pipeline and layout.pp > 1 and layout.zero_stage > 0:
        changes["zero_stage"], states = 1, "bf16-master-fp32-grads"
    return replace(run, layout=replace(layout, **changes), recipe=states)


# ---- memory


def memory_of(run: Run, framework: Framework, how: How = How()) -> dict[str, float]:
    """Bytes of the fullest rank at its peak, by kind; no rate is in them."""
    return dict(_memory_of(run, framework, how))


def least_memory_of(run: Run, framework: Framework) -> float:
    """Bytes of the fullest rank, for a search."""
    return sum(memory_of(run, framework).values())


@lru_cache(maxsize=4096)
def _memory_of(run: Run, framework: Framework, how: How) -> dict[str, float]:
    under = run_under(run, framework, how)
    config, layout = under.config, under.layout
    fullest = fullest_budget(under)
    kinds = {kind: float(size) for kind, size in fullest.at_peak.items()}
    tokens = layout.micro_batch * run.seq_len / layout.cp
    in_flight = min(layout.micro_batches, layout.pp)
    if how.operators:
        kinds["activations"] += tokens * config.num_layers / layout.pp * in_flight * _kept_outputs(config, layout)
    if layout.zero_stage == 3 and framework.root_gathered:
        kinds["gathered"] += 2 * _ends(config) / layout.tp
    if layout.pp == 1:
        extra = framework.loss_bytes + (framework.tp_loss_bytes if layout.tp > 1 else 0)
        kinds["logits"] += extra * tokens * config.vocab_size / layout.tp
    elif framework.kept_in_pipeline:
        share = layout.tp if layout.sequence_parallel else 1
        kinds["messages"] = 2 * 2 * layout.micro_batches * tokens * config.d_model / share
    if framework.reserved:
        kinds["allocator"] = (RESERVED - 1) * sum(kinds.values())
    else:
        kinds["outside"] = float(sum(fullest.overheads.values()))
    return {kind: size for kind, size in kinds.items() if size}


def _ends(config: ModelConfig) -> int:
    return (1 if config.tied else 2) * config.vocab_size * config.d_model


def _kept_outputs(config: ModelConfig, layout: Layout) -> float:
    """Bytes a token and layer: outputs of q, v, gate and down, and of attention."""
    D, H = config.d_model, config.head_dim
    return 2 * (2 * config.num_heads * H + config.num_kv_heads * H + config.d_ff + D) / layout.tp


# ---- time


def utilisation_of(run: Run, cluster: Cluster, framework: Framework, rates: Rates, how: How) -> Utilisation:
    """Shares of the peak that make `step_time` spend what products and small operations take together."""
    config, gpu = run.config, cluster.gpu
    peak, is_a100 = peak_flops(gpu), "A100" in gpu.name
    share = rates.share_at(config.d_model) * gpu.sustained
    head = 2 * head_parameters(config)
    linear = 2 * matmul_parameters(config) - head
    faster = rates.fp8_speedup if how.precision == "fp8" else 1.0
    products_s = (linear / faster + head) / (share * peak)
    passes = rates.fused_passes if framework.fused else rates.eager_passes
    small_s = passes * _small_bytes(config) / gpu.memory_bytes_per_s / 3
    effective = (linear + head) / (products_s + small_s) / peak
    layer_s = 3 * run.layout.micro_batch * run.seq_len * linear / config.num_layers / (effective * peak)
    effective *= _launched_share(layer_s / (run.layout.cp * run.layout.tp), passes, rates)
    if how.operators:
        effective *= 3 / (3 + _again(config))
    return Utilisation(min(1.0, effective), A100_ATTENTION if is_a100 else ATTENTION)


def _launched_share(layer_s: float, passes: float, rates: Rates) -> float:
    """What is left of the rate where a layer's kernels take longer to launch than to run; fused ones are fewer."""
    least_s = rates.layer_launch_ms / 1000 * passes / rates.eager_passes
    return layer_s / (layer_s**8 + least_s**8) ** (1 / 8)


def _small_bytes(config: ModelConfig) -> float:
    """Bytes a token that norms, rotations, activations and residuals go over once, all layers together."""
    D, heads = config.d_model, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    dense = config.num_layers * 2 * (5 * D + heads) + 2 * 4 * config.d_ff * (config.num_layers - config.num_moe_layers)
    if (moe := config.moe) is None:
        return dense
    chosen = moe.top_k + moe.num_shared_experts
    return dense + config.num_moe_layers * 2 * (4 * chosen * moe.d_expert + 4 * moe.top_k * D)


def _again(config: ModelConfig) -> float:
    """Products that recomputation of operators repeats, of those in forward: k, o and up."""
    D, K, N, H = config.d_model, config.num_kv_heads, config.num_heads, config.head_dim
    repeated = D * H * (K + N) + mlp_parameters(config) / 3
    return repeated / (attention_parameters(config) + mlp_parameters(config))


def repeated_flops(run: Run) -> int:
    """FLOPs of a step that recomputation of operators does again."""
    linear = 2 * (matmul_parameters(run.config) - head_parameters(run.config))
    return round(run.layout.sequences_per_step * run.seq_len * linear * _again(run.config))


def seconds_of(run: Run, cluster: Cluster, framework: Framework, rates: Rates, how: How = How()) -> dict[str, float]:
    """Seconds of one step by what they are spent on: the parts add up to the step."""
    layout = run.layout
    under = run_under(run, framework, how)
    if how.operators:
        under = replace(under, layout=replace(under.layout, recompute="none"))
    time = step_time(under, cluster, utilisation_of(run, cluster, framework, rates, how))
    parts = dict(time.parts)
    parts["tp"] *= 1 - framework.tp_hidden
    parts["data"] /= layout.stages_per_rank  # beside the other chunks' computing
    parameters = _ends(run.config) + matmul_parameters(run.config)
    states = parameters / (layout.tp * layout.pp) / (layout.data_size if layout.zero_stage else 1)
    parts["update"] = UPDATE_BYTES * states / cluster.gpu.memory_bytes_per_s
    return parts
