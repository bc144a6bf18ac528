"""nanotron: how it cuts a model into stages, what its ranks keep, and where its steps wait.

What is counted here was read off measured runs: their peak is that of the first stage, whose micro-batches in flight
are the most; the cut into stages follows the cost of layers and head; and pipelines over many nodes stall.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from course_lib.config import ModelConfig, require_dense
from course_lib.flops import attention_flops_per_token, head_parameters, layer_matmul_parameters
from course_lib.hardware import GB, Cluster, peak_flops
from course_lib.memory.states import RECIPES
from course_lib.predict.rates import Rates
from course_lib.run import Run

RECIPE = RECIPES["bf16-master-fp32-grads"]
# Assumed, not fitted: outside of tensors; of a parameter, a copy for the wire; and all that an update holds besides.
OUTSIDE_BYTES = int(0.31 * GB)
WIRE_BYTES, UPDATE_BYTES = 0.7, 4.9
REFERENCE_WIDTH, WIDTH_POWER = 4096, 0.3  # a gathered tensor's numbers a token: d_model ** 0.3 * 4096 ** 0.7
MANY_NODES, SOME_NODES, FEW_NODES = 64, 32, 4
STEP_S = 0.05  # of every step: data, logging
HALF_RATE_NODES = 6
TP_GB_PER_S, NETWORK_GB_PER_S = 350.0, 110.0  # of tp's collectives inside a node, and over nodes
UNGATHERED_BYTES = 25 * GB  # what would be more than this is not kept gathered: such runs hold their shards alone


@dataclass(frozen=True)
class Stage:
    """Layers of one stage, and whether it has the embedding and the head."""

    layers: int
    embedding: bool
    head: bool


@lru_cache(maxsize=1024)
def stages_of(config: ModelConfig, pp: int) -> tuple[Stage, ...]:
    """Cut a model by cost: a stage is full once it has its share of the parameters of layers and head.

    A last stage may be left without a layer.
    """
    require_dense(config, "nanotron's cut")
    costs = [0] + [layer_matmul_parameters(config)] * config.num_layers + [head_parameters(config)]
    counts, reached, stage = [0] * pp, 0, 0
    head_at = 0
    for index, cost in enumerate(costs):
        reached += cost
        if 0 < index <= config.num_layers:
            counts[stage] += 1
        head_at = stage
        if stage < pp - 1 and reached * pp >= sum(costs) * (stage + 1):
            stage += 1
    return tuple(Stage(counts[index], index == 0, index == head_at) for index in range(pp))


def parameters_of(config: ModelConfig, stage: Stage) -> int:
    """Parameters of a stage before tp cuts them; a tied head beside the embedding is no second tensor."""
    ends = stage.embedding + stage.head
    if stage.embedding and stage.head and config.tied:
        ends = 1
    norms = 2 * config.d_model
    return stage.layers * (layer_matmul_parameters(config) + norms) + ends * config.vocab_size * config.d_model


def stalls(run: Run, nodes: int) -> bool:
    """Whether the pipeline waits most of the time: measured runs do so over 64 nodes, over 32 with more than one
    sequence a micro-batch, and with ZeRO-0 from 4 nodes and 4 stages on."""
    layout = run.layout
    if layout.pp == 1:
        return False
    if nodes >= MANY_NODES or (nodes >= SOME_NODES and layout.micro_batch > 1):
        return True
    return layout.zero_stage == 0 and layout.dp > 1 and layout.pp >= 4 and nodes >= FEW_NODES


def memory_of(run: Run, rates: Rates, nodes: int) -> dict[str, float]:
    """Bytes of the first stage's rank at its peak, by kind."""
    config, layout = run.config, run.layout
    stage = stages_of(config, layout.pp)[0]
    parameters = parameters_of(config, stage) / layout.tp
    shards = layout.dp if layout.zero_stage else 1
    in_flight = min(layout.micro_batches, layout.pp)
    tokens = layout.micro_batch * run.seq_len
    kept = stage.layers * tokens * in_flight
    activations = 2 * kept * (10 * config.d_model + 4 * config.d_ff) * rates.activation_scale / layout.tp
    gathered = 2 * kept * config.d_model**WIDTH_POWER * REFERENCE_WIDTH ** (1 - WIDTH_POWER)
    logits = rates.logits_bytes * tokens * config.vocab_size / layout.tp if layout.pp == 1 else 0.0
    gathered *= _gathered_copies(run, rates, nodes, gathered)
    during, update = activations + gathered + logits, UPDATE_BYTES * parameters
    peak_is_update = update > during
    return {
        "parameters": RECIPE.param_bytes * parameters,
        "gradients": RECIPE.grad_bytes * parameters,
        "optimizer": (RECIPE.master_bytes + RECIPE.moment_bytes) * parameters / shards,
        "activations": 0.0 if peak_is_update else activations,
        "gathered": 0.0 if peak_is_update else gathered,
        "logits": 0.0 if peak_is_update else logits,
        "update": update if peak_is_update else 0.0,
        "communication": WIRE_BYTES * parameters if layout.dp > 1 else 0.0,
        "outside": float(OUTSIDE_BYTES),
    }


def _gathered_copies(run: Run, rates: Rates, nodes: int, one_copy: float) -> float:
    """Copies of a whole sequence beside the shard: none where a step has one micro-batch, or the run stalls."""
    layout = run.layout
    if layout.tp == 1 or layout.micro_batches == 1 or stalls(run, nodes):
        return 0.0
    if layout.pp == 1:
        copies = rates.gathered_copies_without_pipeline
        held_back = nodes >= MANY_NODES and layout.tp <= 16
        return 0.0 if held_back or copies * one_copy > UNGATHERED_BYTES else copies
    return rates.gathered_copies if layout.pp > 2 and layout.tp < 32 else 0.0


def seconds_of(run: Run, cluster: Cluster, rates: Rates, nodes: int) -> dict[str, float]:
    """Seconds of one step by what they are spent on: the parts add up to the step."""
    config, layout = run.config, run.layout
    peak = peak_flops(cluster.gpu)
    tokens, tp = layout.micro_batch * run.seq_len, layout.tp
    matrices, scores = layer_matmul_parameters(config), attention_flops_per_token(config, run.seq_len, causal=True)
    a_token = 6 * matrices + 3 * scores // config.num_layers
    share = rates.matmul_share / (1 + rates.narrow_width / config.d_model)
    compute_s = tokens * a_token / (tp * peak * share)
    rate = (TP_GB_PER_S if tp <= cluster.gpus_per_node else NETWORK_GB_PER_S) * GB
    tp_s = 8 * 2 * tokens * config.d_model * (tp - 1) / tp / rate
    crossing = layout.pp > 1 and nodes > 1
    hop_ms = rates.tp_hop_in_pipeline_ms if crossing else rates.tp_hop_ms
    least_s = (rates.layer_launch_ms + (hop_ms * tp if tp > 1 else 0.0)) / 1000
    layer_s = ((compute_s + tp_s) ** 8 + least_s**8) ** (1 / 8)
    head_s = 1.3 * 6 * tokens * head_parameters(config) / (tp * peak * rates.matmul_share)
    stall_s = rates.stall_s if stalls(run, nodes) else 0.0
    cut = stages_of(config, layout.pp)
    slots = [stage.layers * layer_s + stage.head * head_s for stage in cut]
    parameters = parameters_of(config, cut[0]) / tp
    shards = layout.dp if layout.zero_stage else 1
    slot, filling = max(slots), sum(slots) - max(slots)
    compute_share = min(1.0, compute_s / layer_s)
    num_slots = layout.micro_batches + layout.pp - 1
    return {
        "compute": layout.micro_batches * slot * compute_share,
        "launches and tp": layout.micro_batches * slot * (1 - compute_share),
        "bubble": filling,
        "stall": num_slots * stall_s,
        "data": _data_s(run, cluster, rates, nodes, parameters),
        "update": rates.update_ps_per_byte * 1e-12 * parameters * 16 / shards,
        "step": STEP_S,
    }


def _data_s(run: Run, cluster: Cluster, rates: Rates, nodes: int, parameters: float) -> float:
    """Reduce-scatter of FP32 gradients and all-gather of parameters; ZeRO-0's all-reduce hides behind backward."""
    layout = run.layout
    if layout.dp == 1 or not layout.zero_stage:
        return 0.0
    spread = min(layout.dp * layout.tp / cluster.gpus_per_node, nodes)
    rate = TP_GB_PER_S if spread <= 1 else rates.data_gb_per_s / (1 + spread / HALF_RATE_NODES)
    return 6 * parameters * (layout.dp - 1) / layout.dp / (rate * GB)


def counted_flops_per_token(run: Run) -> int:
    """FLOPs a token as nanotron's MFU counts them: 6 N of all parameters, embedding too, and 12 L h s."""
    config = run.config
    copies = 1 if config.tied and run.layout.pp == 1 else 2
    weights = config.num_layers * layer_matmul_parameters(config) + copies * config.vocab_size * config.d_model
    return 6 * weights + 3 * attention_flops_per_token(config, run.seq_len)
