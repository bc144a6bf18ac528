"""nanotron: how it cuts a model into stages, what its ranks keep, and where its steps wait.

What is counted here was read off measured runs: their peak is that of the first stage, whose micro-batches in flight
are the most; the cut into stages follows the cost of layers and head; pipelines over many nodes stall, for the same
time at each message; and runs that would fill the memory are slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from course_lib.config import ModelConfig, require_dense
from course_lib.flops import attention_flops_per_token, head_parameters, layer_matmul_parameters
from course_lib.hardware import GB, Cluster, measured_bus_bandwidth, peak_flops
from course_lib.layout import Layout
from course_lib.memory.states import RECIPES
from course_lib.predict.rates import Rates
from course_lib.run import Run
from course_lib.timing.rates import FLASH_ATTENTION_2

RECIPE = RECIPES["bf16-master-fp32-grads"]
# Assumed, not fitted: outside of tensors; of a parameter, a copy for the wire; and all that an update holds besides.
OUTSIDE_BYTES = int(0.31 * GB)
WIRE_BYTES, UPDATE_BYTES = 0.7, 4.9
REFERENCE_WIDTH, WIDTH_POWER = 4096, 0.3  # a gathered tensor's numbers a token: d_model ** 0.3 * 4096 ** 0.7
MANY_NODES, SOME_NODES, FEW_NODES = 64, 32, 4
TP_OF_ONE_NODE, TP_OF_FOUR_NODES = 8, 32
MANY_SHARDS, MANY_MICRO_BATCHES = 32, 16
WITHOUT_PIPELINE, ONE_MICRO_BATCH = 2.0, 0.6  # of the gathered copies of a pipeline, of these again
STEP_S = 0.05  # of every step: data, logging
FITTED_PORT_GB_PER_S = 50.0  # of the cluster whose bandwidth was measured; other ports are faster or slower by that
TP_GB_PER_S, NETWORK_GB_PER_S = 350.0, 130.0  # of tp's collectives inside a node, and over nodes
UNGATHERED_BYTES = 25 * GB  # what would be more than this is not kept gathered: such runs hold their shards alone
CROWDED_SHARE = 0.88  # of the GPU's memory: a run that wants more waits for memory to become free
WIDE_TP = 16  # without a pipeline: over many nodes, the collectives of tp up to this wait, and keep no copies


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
    """Whether each message of the pipeline waits, as measured runs do

    - over 64 nodes, and from 8 nodes on where a tp group goes over four of them;
    - over 32 nodes with several sequences a micro-batch, or with states sharded over 32 ranks or more;
    - from 4 nodes on with ZeRO-0, whose all-reduce is under way beside the messages, if 16 micro-batches or more follow
      each other; but not where tp is one whole node.
    """
    layout = run.layout
    if layout.pp == 1 or nodes == 1:
        return False
    if nodes >= MANY_NODES or layout.tp >= TP_OF_FOUR_NODES:
        return True
    if nodes >= SOME_NODES and (layout.micro_batch > 1 or (layout.zero_stage > 0 and layout.dp >= MANY_SHARDS)):
        return True
    beside_messages = layout.zero_stage == 0 and layout.dp > 1 and layout.micro_batches >= MANY_MICRO_BATCHES
    return beside_messages and nodes >= FEW_NODES and layout.tp != TP_OF_ONE_NODE


def is_crowded(run: Run, rates: Rates, nodes: int, usable_bytes: float) -> bool:
    """Whether a run that queues its kernels ahead would want nearly all of the memory, and more than one node.

    The allocator then waits for the GPU before it gives a block again, and so do the other ranks at the next message.
    """
    wanted = sum(_memory_of(run, rates, _gathered_copies(run, rates, nodes)).values())
    return nodes > 1 and wanted > CROWDED_SHARE * usable_bytes


def memory_of(run: Run, rates: Rates, nodes: int, usable_bytes: float) -> dict[str, float]:
    """Bytes of the first stage's rank at its peak, by kind."""
    crowded = is_crowded(run, rates, nodes, usable_bytes)
    return _memory_of(run, rates, 0.0 if crowded else _gathered_copies(run, rates, nodes))


def _memory_of(run: Run, rates: Rates, gathered_copies: float) -> dict[str, float]:
    config, layout = run.config, run.layout
    stage = stages_of(config, layout.pp)[0]
    parameters = parameters_of(config, stage) / layout.tp
    shards = layout.dp if layout.zero_stage else 1
    kept = _kept_tokens(run)
    tokens = layout.micro_batch * run.seq_len
    activations = 2 * kept * (10 * config.d_model + 4 * config.d_ff) * rates.activation_scale / layout.tp
    logits = rates.logits_bytes * tokens * config.vocab_size / layout.tp if layout.pp == 1 else 0.0
    gathered = gathered_copies * _gathered_bytes(run)
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


def _kept_tokens(run: Run) -> int:
    """Tokens whose activations the first stage keeps, of all its layers and micro-batches in flight."""
    layout = run.layout
    layers = stages_of(run.config, layout.pp)[0].layers
    return layers * layout.micro_batch * run.seq_len * min(layout.micro_batches, layout.pp)


def _gathered_bytes(run: Run) -> float:
    """One tensor of the whole sequence for each layer and micro-batch in flight."""
    return 2 * _kept_tokens(run) * run.config.d_model**WIDTH_POWER * REFERENCE_WIDTH ** (1 - WIDTH_POWER)


def _gathered_copies(run: Run, rates: Rates, nodes: int) -> float:
    """Copies of a whole sequence beside the shard: none where the run stalls; with one micro-batch runs differ, and
    their columns do not say why, so that they stand in between."""
    layout = run.layout
    if layout.tp == 1 or stalls(run, nodes):
        return 0.0
    if layout.pp > 1:
        return rates.gathered_copies if layout.micro_batches > 1 and layout.pp > 2 and layout.tp < 32 else 0.0
    if nodes >= MANY_NODES and layout.tp <= WIDE_TP:
        return 0.0
    copies = WITHOUT_PIPELINE * rates.gathered_copies
    if layout.micro_batches == 1:
        copies *= ONE_MICRO_BATCH if layout.tp >= 8 else 0.0
    return 0.0 if copies * _gathered_bytes(run) > UNGATHERED_BYTES else copies


def seconds_of(run: Run, cluster: Cluster, rates: Rates, nodes: int) -> dict[str, float]:
    """Seconds of one step by what they are spent on: the parts add up to the step."""
    config, layout = run.config, run.layout
    peak = peak_flops(cluster.gpu) * cluster.gpu.sustained
    tokens, tp = layout.micro_batch * run.seq_len, layout.tp
    matrices, scores = layer_matmul_parameters(config), attention_flops_per_token(config, run.seq_len, causal=True)
    small = 2 * (8 * config.d_model + 4 * config.d_ff)
    a_token_s = 6 * matrices / (peak * rates.dense_share)
    a_token_s += 3.5 * scores / config.num_layers / (peak * FLASH_ATTENTION_2)
    a_token_s += rates.eager_passes * small / cluster.gpu.memory_bytes_per_s
    compute_s = tokens * a_token_s / tp
    rate = (TP_GB_PER_S if tp <= cluster.gpus_per_node else NETWORK_GB_PER_S) * GB
    tp_s = 8 * 2 * tokens * config.d_model * (tp - 1) / tp / rate
    crowded = is_crowded(run, rates, nodes, cluster.gpu.usable_bytes)
    crossing = layout.pp > 1 and nodes > 1
    scattered = _is_scattered(layout, cluster, nodes)
    waiting = crossing or crowded or (scattered and tp <= WIDE_TP)
    hop_ms = rates.tp_hop_waiting_ms if waiting else rates.tp_hop_ms
    least_s = (rates.layer_launch_ms + (hop_ms * tp if tp > 1 else 0.0)) / 1000
    layer_s = ((compute_s + tp_s) ** 8 + least_s**8) ** (1 / 8)
    head_s = 1.3 * 6 * tokens * head_parameters(config) / (tp * peak * rates.dense_share)
    num_waits = int(scattered)
    if layout.pp > 1 and (crowded or stalls(run, nodes)):
        num_waits = layout.micro_batches * min(2, layout.pp - 1) + layout.pp - 2  # of a stage's neighbours; and to fill
    cut = stages_of(config, layout.pp)
    slots = [stage.layers * layer_s + stage.head * head_s for stage in cut]
    parameters = parameters_of(config, cut[0]) / tp
    shards = layout.dp if layout.zero_stage else 1
    slot, filling = max(slots), sum(slots) - max(slots)
    compute_share = min(1.0, compute_s / layer_s)
    return {
        "compute": layout.micro_batches * slot * compute_share,
        "launches and tp": layout.micro_batches * slot * (1 - compute_share),
        "bubble": filling,
        "stall": num_waits * rates.stall_s,
        "data": _data_s(run, cluster, rates, nodes, parameters),
        "update": rates.eager_passes * 16 * parameters / shards / cluster.gpu.memory_bytes_per_s,
        "step": STEP_S,
    }


def _is_scattered(layout: Layout, cluster: Cluster, nodes: int) -> bool:
    """Whether each node is in as many data-parallel groups as it has GPUs, over many nodes and without a pipeline:
    every GPU's gradients then go over the network alone, and the step waits for the last group."""
    return layout.pp == 1 and nodes >= MANY_NODES and layout.tp >= cluster.gpus_per_node


def _data_s(run: Run, cluster: Cluster, rates: Rates, nodes: int, parameters: float) -> float:
    """Reduce-scatter of FP32 gradients and all-gather of parameters; ZeRO-0's all-reduce hides behind backward."""
    layout = run.layout
    if layout.dp == 1 or not layout.zero_stage:
        return 0.0
    spread = min(layout.dp * layout.tp / cluster.gpus_per_node, nodes)
    port = cluster.between.achieved_bytes_per_s / (FITTED_PORT_GB_PER_S * GB)
    measured = measured_bus_bandwidth(ceil(spread), "reduce_scatter")
    rate = TP_GB_PER_S * GB if spread <= 1 else port * rates.data_share * measured
    return 6 * parameters * (layout.dp - 1) / layout.dp / rate


def counted_flops_per_token(run: Run) -> int:
    """FLOPs a token as nanotron's MFU counts them: 6 N of all parameters, embedding too, and 12 L h s."""
    config = run.config
    copies = 1 if config.tied and run.layout.pp == 1 else 2
    weights = config.num_layers * layer_matmul_parameters(config) + copies * config.vocab_size * config.d_model
    return 6 * weights + 3 * attention_flops_per_token(config, run.seq_len)
