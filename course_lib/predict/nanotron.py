"""nanotron: how it cuts a model into stages, what its ranks keep, and where its steps wait.

Memory is counted tensor by tensor, as nanotron's code of February 2025 keeps them on rank 0, which writes the log: the
first stage, whose micro-batches in flight are the most. Its log has what PyTorch's allocator reserved, in GiB. What
waits and where was read off measured runs: pipelines over many nodes stall, for the same time at each message, and runs
that would fill the memory are slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from course_lib.config import ModelConfig, require_dense
from course_lib.flops import attention_flops_per_token, head_parameters, layer_matmul_parameters
from course_lib.hardware import GB, GIB, Cluster, measured_bus_bandwidth, peak_flops
from course_lib.layout import Layout
from course_lib.memory.states import RECIPES
from course_lib.predict.rates import Rates
from course_lib.run import Run
from course_lib.timing.rates import FLASH_ATTENTION_2

RECIPE = RECIPES["bf16-master-fp32-grads"]
# Counted: BF16 gradients of one backward, which are added to the FP32 ones when it ends; FP32 logits and their softmax;
# with tp, tensors of a whole sequence: two that are gathered into for every layer, one that a product makes, one sent.
BACKWARD_BYTES, LOGITS_BYTES, WHOLE_TENSORS = 2, 8, 4
# Assumed: of a parameter, buckets of DDP, by which ZeRO-0 sends (2 bytes of buckets, but half is found); all that an
# update holds beside states; and pieces of the allocator that no tensor fills.
BUCKET_BYTES, UPDATE_BYTES = 1, 6
UNFILLED_BYTES = int(0.2 * GIB)
MANY_NODES, SOME_NODES, FEW_NODES = 64, 32, 4
TP_OF_ONE_NODE, TP_OF_FOUR_NODES = 8, 32
MANY_SHARDS, MANY_MICRO_BATCHES = 32, 16
SENT_OF_LAYER = 2  # tensors of a whole sequence that a layer sends, forward and again backward: attention's, the MLP's
STEP_S = 0.05  # of every step: data, logging
FITTED_PORT_GB_PER_S = 50.0  # of the cluster whose bandwidth was measured; other ports are faster or slower by that
TP_GB_PER_S, NETWORK_GB_PER_S = 350.0, 150.0  # of tp's collectives inside a node, and over nodes
HIDING_BYTES = 4  # of a parameter, there and back, in an all-reduce beside backward: runs hide as BF16 gradients would
ROUNDING = 8  # a layer takes the longer of its work and its least time; where both are near, a little more
HEAD_COST = 0.95  # of its parameters, as the cut counts the head: over 16 stages the last one has it alone
CROWDED_SHARE = 0.93  # of the GPU's memory: a run that wants more keeps nothing queued, and waits for memory
QUEUED_SHARE = 0.8  # of a layer's least time: ranks of a pipeline with more work than this fill the queue of launches
WIDE_TP = 16  # without a pipeline: over many nodes, the collectives of tp up to this wait, and none is queued


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
    costs = [0] + [layer_matmul_parameters(config)] * config.num_layers + [HEAD_COST * head_parameters(config)]
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


def fills_memory(run: Run, cluster: Cluster, rates: Rates, nodes: int) -> bool:
    """Whether a run that queues its kernels ahead would want nearly all of the memory, and more than one node: the
    allocator then gives back what nobody holds, and waits for the GPU before it takes a block again."""
    wanted = sum(_memory_of(run, _queued_tensors(run, cluster, rates, nodes), rates).values())
    return nodes > 1 and wanted > CROWDED_SHARE * cluster.gpu.usable_bytes


def is_crowded(run: Run, cluster: Cluster, rates: Rates, nodes: int) -> bool:
    """Whether a run fills the memory with every micro-batch, and not once a step while a pipeline fills: its ranks wait
    for the allocator, and at the next message for each other."""
    return run.layout.micro_batches > run.layout.pp and fills_memory(run, cluster, rates, nodes)


def memory_of(run: Run, cluster: Cluster, rates: Rates, nodes: int) -> dict[str, float]:
    """Bytes that the allocator of the first stage's rank reserves at its peak, by kind."""
    full = fills_memory(run, cluster, rates, nodes)
    return _memory_of(run, 0.0 if full else _queued_tensors(run, cluster, rates, nodes), rates)


def _memory_of(run: Run, queued_tensors: float, rates: Rates) -> dict[str, float]:
    config, layout = run.config, run.layout
    stage = stages_of(config, layout.pp)[0]
    parameters = parameters_of(config, stage) / layout.tp
    shards = layout.dp if layout.zero_stage else 1
    tokens = layout.micro_batch * run.seq_len
    kept = stage.layers * tokens * min(layout.micro_batches, layout.pp)
    whole = 2 * tokens * config.d_model if layout.tp > 1 else 0
    has_buckets = layout.zero_stage == 0 and layout.dp > 1
    step = {
        "activations": rates.activation_scale * 2 * kept * _kept_numbers(config) / layout.tp,
        "logits": LOGITS_BYTES * tokens * config.vocab_size / layout.tp if layout.pp == 1 else 0.0,
        "whole sequences": WHOLE_TENSORS * whole,
        "queued": queued_tensors * whole,
        "backward": (BACKWARD_BYTES + BUCKET_BYTES * has_buckets) * parameters,
    }
    if (update := UPDATE_BYTES * parameters) > sum(step.values()):
        step = {"update": update}
    return {
        "parameters": RECIPE.param_bytes * parameters,
        "gradients": RECIPE.grad_bytes * parameters,
        "optimizer": (RECIPE.master_bytes + RECIPE.moment_bytes) * parameters / shards,
        **step,
        "unfilled": float(UNFILLED_BYTES),
    }


def _kept_numbers(config: ModelConfig) -> int:
    """Numbers that a layer keeps of a token: inputs of both norms and their outputs; q, k, v and attention's output;
    the MLP's four. Where q, k and v are one tensor, k and v stay beside the copy that attention reads."""
    queries, pairs = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    copied = pairs if config.num_kv_heads == config.num_heads else 0
    return 4 * config.d_model + 2 * queries + pairs + copied + 4 * config.d_ff


def _queued_tensors(run: Run, cluster: Cluster, rates: Rates, nodes: int) -> float:
    """Tensors of a whole sequence that tp's collectives still read: their memory is free again when the GPU has sent
    them, and Python runs ahead of it, in a pipeline from the forwards that fill it on. The queue of launches holds only
    so many; ranks that wait for each other more than they compute do not fill it; and none is left where a run stalls.
    """
    layout = run.layout
    if layout.tp == 1 or stalls(run, nodes):
        return 0.0
    a_pass = SENT_OF_LAYER * stages_of(run.config, layout.pp)[0].layers
    if layout.pp == 1:
        if nodes >= MANY_NODES and layout.tp <= WIDE_TP:
            return 0.0
        return min(rates.queued_tensors, a_pass if layout.micro_batches == 1 else 2 * a_pass)
    layer = layer_of(run, cluster, rates, waits=nodes > 1)
    filling = min(layout.micro_batches, layout.pp) - 1
    if layer.work_s < QUEUED_SHARE * layer.least_s:
        return min(rates.queued_tensors, a_pass * max(0, filling - 1))
    if layout.micro_batches > layout.pp:
        return rates.queued_tensors
    return min(rates.queued_tensors, a_pass * max(1, filling))


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and micro-batch on each rank of tp, forward and backward.

    compute_s   products, attention, small operations
    tp_s        bytes of tp's collectives
    least_s     launches; and waiting for other ranks
    hops_s      latency of tp's collectives over nodes, on top of all
    """

    compute_s: float
    tp_s: float
    least_s: float
    hops_s: float

    @property
    def work_s(self) -> float:
        """Computing, and sending: beside each other over nodes, one after the other in a node."""
        return max(self.compute_s, self.tp_s) if self.hops_s else self.compute_s + self.tp_s

    @property
    def total_s(self) -> float:
        return (self.work_s**ROUNDING + self.least_s**ROUNDING) ** (1 / ROUNDING) + self.hops_s


def layer_of(run: Run, cluster: Cluster, rates: Rates, waits: bool) -> LayerSeconds:
    """Seconds of one layer; `waits` says that its ranks wait for other ranks of tp."""
    config, layout = run.config, run.layout
    peak = peak_flops(cluster.gpu) * cluster.gpu.sustained
    tokens, tp = layout.micro_batch * run.seq_len, layout.tp
    over_nodes = tp > cluster.gpus_per_node
    scores = attention_flops_per_token(config, run.seq_len, causal=True)
    small = 2 * (8 * config.d_model + 4 * config.d_ff)
    a_token_s = 6 * layer_matmul_parameters(config) / (peak * rates.dense_share)
    a_token_s += 3.5 * scores / config.num_layers / (peak * FLASH_ATTENTION_2)
    a_token_s += rates.eager_passes * small / cluster.gpu.memory_bytes_per_s
    return LayerSeconds(
        tokens * a_token_s / tp,
        8 * 2 * tokens * config.d_model * (tp - 1) / tp / ((NETWORK_GB_PER_S if over_nodes else TP_GB_PER_S) * GB),
        (rates.layer_launch_ms + (rates.tp_hop_waiting_ms * tp if waits and tp > 1 else 0.0)) / 1000,
        rates.tp_hop_ms * tp / 1000 if over_nodes else 0.0,
    )


def seconds_of(run: Run, cluster: Cluster, rates: Rates, nodes: int) -> dict[str, float]:
    """Seconds of one step by what they are spent on: the parts add up to the step."""
    config, layout = run.config, run.layout
    crowded, scattered = is_crowded(run, cluster, rates, nodes), _is_scattered(layout, cluster, nodes)
    crossing = layout.pp > 1 and nodes > 1
    layer = layer_of(run, cluster, rates, waits=crossing or crowded or (scattered and layout.tp <= WIDE_TP))
    head_flops = 1.3 * 6 * layout.micro_batch * run.seq_len * head_parameters(config) / layout.tp
    head_s = head_flops / (peak_flops(cluster.gpu) * cluster.gpu.sustained * rates.dense_share)
    num_waits = int(scattered)
    if layout.pp > 1 and (crowded or stalls(run, nodes)):
        num_waits = layout.micro_batches * min(2, layout.pp - 1) + layout.pp - 2  # of a stage's neighbours; and to fill
    cut = stages_of(config, layout.pp)
    slots = [stage.layers * layer.total_s + stage.head * head_s for stage in cut]
    slot, filling = pipeline_s(slots, layout.micro_batches)
    parameters = parameters_of(config, cut[0]) / layout.tp
    shards = layout.dp if layout.zero_stage else 1
    compute_share = min(1.0, layer.compute_s / layer.total_s)
    return {
        "compute": layout.micro_batches * slot * compute_share,
        "launches and tp": layout.micro_batches * slot * (1 - compute_share),
        "bubble": filling,
        "stall": num_waits * rates.stall_s,
        "data": _data_s(run, cluster, rates, nodes, parameters, slots[0] * 2 / 3),
        "update": rates.eager_passes * 16 * parameters / shards / cluster.gpu.memory_bytes_per_s,
        "step": STEP_S,
    }


def pipeline_s(slots: Sequence[float], micro_batches: int) -> tuple[float, float]:
    """Seconds that the stage that decides computes for one micro-batch, and that it waits besides in a 1F1B step.

    It first waits for stages before it. Then it runs ahead, one micro-batch for each stage behind it, and waits for the
    first gradient if that comes later; and again for the last one. A backward takes twice as long as a forward.
    slots   seconds of each stage, forward and backward of one micro-batch
    """
    found = []
    for stage, slot in enumerate(slots):
        behind, ahead = sum(slots[stage + 1 :]), len(slots) - 1 - stage
        waits = sum(slots[:stage]) + max(0.0, behind - min(ahead, micro_batches - 1) * slot / 3)
        if micro_batches > ahead + 1:
            waits += max(0.0, behind - ahead * slot * 2 / 3)
        found.append((micro_batches * slot + waits, slot, waits))
    return max(found)[1:]


def _is_scattered(layout: Layout, cluster: Cluster, nodes: int) -> bool:
    """Whether each node is in as many data-parallel groups as it has GPUs, over many nodes and without a pipeline:
    every GPU's gradients then go over the network alone, and the step waits for the last group."""
    return layout.pp == 1 and nodes >= MANY_NODES and layout.tp >= cluster.gpus_per_node


def _data_s(run: Run, cluster: Cluster, rates: Rates, nodes: int, parameters: float, backward_s: float) -> float:
    """Reduce-scatter of FP32 gradients and all-gather of parameters; of ZeRO-0's all-reduce what the last micro-batch's
    backward (backward_s) does not hide. In a pipeline nothing hides it."""
    layout = run.layout
    if layout.dp == 1:
        return 0.0
    hides = layout.zero_stage == 0 and layout.pp == 1
    spread = min(layout.dp * layout.tp / cluster.gpus_per_node, nodes)
    port = cluster.between.achieved_bytes_per_s / (FITTED_PORT_GB_PER_S * GB)
    measured = measured_bus_bandwidth(ceil(spread), "all_reduce" if hides else "reduce_scatter")
    rate = TP_GB_PER_S * GB if spread <= 1 else port * rates.data_share * measured
    size = HIDING_BYTES if hides else 6 if layout.zero_stage else 8
    seconds = size * parameters * (layout.dp - 1) / layout.dp / rate
    return max(0.0, seconds - backward_s) if hides else seconds


def counted_flops_per_token(run: Run) -> int:
    """FLOPs a token as nanotron's MFU counts them: 6 N of all parameters, embedding too, and 12 L h s."""
    config = run.config
    copies = 1 if config.tied and run.layout.pp == 1 else 2
    weights = config.num_layers * layer_matmul_parameters(config) + copies * config.vocab_size * config.d_model
    return 6 * weights + 3 * attention_flops_per_token(config, run.seq_len)
