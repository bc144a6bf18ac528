"""One layer of one micro-batch on one rank, forward and backward: what computes, what is launched, what is sent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from course_lib.config import ModelConfig
from course_lib.engines import EngineFacts, engine_of
from course_lib.flops import (
    attention_flops_per_token,
    attention_parameters,
    head_parameters,
    mlp_parameters,
    repeated_share,
)
from course_lib.hardware import MOST_NODES, PUBLISHED_BUS_BANDWIDTH, Cluster, measured_bus_bandwidth, peak_flops
from course_lib.layout.mesh import AXES
from course_lib.layout.partition import layers_by_cost
from course_lib.memory.flats import layers_of
from course_lib.run import Offload, Run
from course_lib.timing.collectives import bus_factor, calls_s, collective_s, ranks_in_a_node
from course_lib.timing.context import attention_time
from course_lib.timing.rates import RATES, Rates, Utilisation, attention_share
from course_lib.timing.tensor import FUSED_BACKWARD, backward_of_scores, hidden_s
from course_lib.traffic import Call, stage_calls

_ROUNDING = 6  # a layer takes the longer of its work and its launches; where both are near, a little more
_WAITS_GROW = 4  # waiting goes as nodes to this power: none on few nodes, all of it on the most that were measured
# Bytes that kernels go over, counted. Of a logit: FP32 copy, softmax, loss and gradient, one kernel each, or fused. Of
# a score that is materialized: product, scale and mask, softmax, dropout, and back.
LOGIT_BYTES, FUSED_LOGIT_BYTES, SCORE_BYTES = 30, 12, 30

_OF_A_LAYER = (
    "cp", "tp", "ep", "sequence_parallel", "regather", "micro_batch", "recompute", "cp_method", "cp_sharding",
    "expert_method", "folded",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """What every part of the clock needs; equal to another case in which a layer takes as long."""

    run: Run
    cluster: Cluster
    engine: EngineFacts
    rates: Rates

    @cached_property
    def _of_a_layer(self) -> tuple:
        """What a layer depends on: a few choices of the layout, and all that is no layout."""
        run, layout = self.run, self.run.layout
        mesh = None if layout.order == AXES else layout.mesh  # in the usual order tp, cp and ep have neighbours
        of_layout = (*(getattr(layout, name) for name in _OF_A_LAYER), mesh)
        of_run = (run.config, run.seq_len, run.recipe, run.attention, run.lora, run.fp8, run.operators)
        of_pipeline = (layout.schedule in self.engine.hides_ep, layout.pp > 1 and self.slowness > 0, self.nodes)
        return (*of_layout, *of_run, *of_pipeline, self.cluster, self.engine, self.rates)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and self._of_a_layer == other._of_a_layer

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._of_a_layer)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.run.layout.micro_batch * self.run.seq_len / self.run.layout.cp

    @property
    def nodes(self) -> int:
        return -(-self.run.layout.world_size // self.cluster.gpus_per_node)

    @property
    def slowness(self) -> float:
        """How much of what ranks waited for each other on the most nodes that were measured they wait here (0 to 1)."""
        if self.nodes == 1 or not self.cluster.between.by_nodes:
            return 0.0
        return (min(self.nodes, MOST_NODES) / MOST_NODES) ** _WAITS_GROW


class Times(NamedTuple):
    """Seconds of one micro-batch: F, I and W as the simulator has them, and of these what is no computing."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    launches_s: float = 0.0
    tp_s: float = 0.0
    cp_s: float = 0.0
    ep_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    @property
    def compute_s(self) -> float:
        return self.total_s - self.launches_s - self.tp_s - self.cp_s - self.ep_s

    def plus(self, other: "Times", times: int = 1) -> "Times":
        return Times(*(one_s + times * other_s for one_s, other_s in zip(self, other, strict=True)))


def stages_of(run: Run, engine: EngineFacts) -> Sequence[int]:
    """How many layers each stage has, as the engine cuts a model unless the layout says it."""
    if run.layout.layers_of_stage is not None:  # in some engines a stage may have none
        return run.layout.layers_of_stage
    by_cost = engine.cut == "cost" and run.config.moe is None
    return layers_by_cost(run.config, run.layout.num_stages) if by_cost else layers_of(run.config, run.layout)


@lru_cache(maxsize=8192)
def layer_times(case: Case, experts: bool) -> Times:
    """One layer of one micro-batch, forward and backward, on one rank; most layouts have one in common."""
    run, layout, engine = case.run, case.run.layout, case.engine
    config = _one_layer(run.config, experts)
    linear_s = _linear_s(case, config)
    scores_s = _scores_s(case, config)
    small_s = _small_s(case, config) / 3
    forward_s, input_s = linear_s + scores_s + small_s, linear_s + backward_of_scores(run) * scores_s + small_s
    weight_s = 0.0 if run.lora else linear_s + small_s
    again_s = {"none": 0.0, "selective": scores_s, "full": forward_s}[layout.recompute]
    input_s += repeated_share(config) * linear_s + small_s if run.operators else again_s

    one = _alone(run, experts)
    listed = stage_calls(one, 0)
    inside = [call for call in listed["tp"] if call.place in _OF_LAYERS]
    tp_forward_s, tp_backward_s = _tp_s(case, inside)
    shares = Utilisation(min(1.0, _matmul_share(case)), attention_share(case.cluster.gpu))
    if engine.hides_behind_weights and layout.tp > 1 and not experts:
        tp_backward_s -= min(tp_backward_s, hidden_s(one, case.cluster, shares))
    tp_forward_s, tp_backward_s = ((1 - engine.hides_tp) * each_s for each_s in (tp_forward_s, tp_backward_s))
    cp_s = _exposed_cp_s(case, one, shares)
    cp_forward_s = cp_s / (1 + FUSED_BACKWARD)
    cp_s += cp_forward_s if layout.recompute != "none" else 0.0
    ep_calls = _forward_and_backward(listed["ep"])
    ep_forward_s, ep_backward_s = (calls_s(part, layout, case.cluster, "ep") for part in ep_calls)
    if layout.recompute == "full":  # rows go out and back again: half of these are in backward
        again_s = ep_forward_s / 2
        ep_forward_s, ep_backward_s = ep_forward_s - again_s, ep_backward_s + again_s
    if layout.schedule in engine.hides_ep:
        ep_forward_s, ep_backward_s = max(0.0, ep_forward_s - forward_s), max(0.0, ep_backward_s - input_s - weight_s)
    forward_s = forward_s + tp_forward_s + cp_forward_s + ep_forward_s
    input_s = input_s + tp_backward_s + cp_s - cp_forward_s + ep_backward_s
    work_s = forward_s + input_s + weight_s
    longer = (1 + (_least_s(case) / work_s) ** _ROUNDING) ** (1 / _ROUNDING)
    passes = (longer * each for each in (forward_s, input_s, weight_s))
    sent = tp_forward_s + tp_backward_s, cp_s, ep_forward_s + ep_backward_s
    return Times(*passes, (longer - 1) * work_s, *sent)


@lru_cache(maxsize=256)
def _one_layer(config: ModelConfig, experts: bool) -> ModelConfig:
    moe = replace(config.moe, first_dense_layers=0, every=1) if experts else None
    return replace(config, num_layers=1, moe=moe)


def _alone(run: Run, experts: bool) -> Run:
    """The run of one layer without a pipeline."""
    alone = {"pp": 1, "schedule": "1f1b", "v": 1, "layers_of_stage": None, "zero_stage": 0, "dp_replicate": 1}
    layout = replace(run.layout, ep=run.layout.ep if experts else 1, **alone)
    config = _one_layer(run.config, experts)
    return replace(run, config=config, layout=layout, lora=None, offload=Offload(), operators=False)


def runs_ahead(run: Run, cluster: Cluster, engine: str | EngineFacts = "course", rates: Rates = RATES) -> float:
    """How far Python runs ahead of the GPU (0 to 1): not where launching a layer takes longer than its work."""
    case = Case(run, cluster, engine_of(engine), rates)
    layer = layer_times(case, experts=run.config.moe is not None)
    least_s = _least_s(case) if run.layout.pp > 1 else _launch_s(case)
    return 1 / (1 + (least_s / (layer.total_s - layer.launches_s)) ** _ROUNDING)


def _launch_s(case: Case) -> float:
    again = 4 / 3 if case.run.layout.recompute == "full" else 1
    return again * case.rates.layer_launch_ms * (case.rates.fused if case.engine.fused else 1) / 1000


def _least_s(case: Case) -> float:
    """Launching a layer's kernels; and waiting for other ranks of tp: always in a pipeline over measured nodes."""
    layout, rates, least_s = case.run.layout, case.rates, _launch_s(case)
    if layout.tp > 1:
        in_pipeline = layout.pp > 1 and case.slowness > 0
        least_s += rates.tp_wait_ms / 1000 * layout.tp * (1.0 if in_pipeline else case.slowness)
    return least_s


@lru_cache(maxsize=8192)
def ends_times(case: Case, first: bool, last: bool) -> Times:
    """Embedding and head: the head's products stay in BF16, whatever the layers compute in."""
    run, layout, config = case.run, case.run.layout, case.run.config
    listed = stage_calls(_alone(run, config.moe is not None), 0)["tp"]
    ends = [call for call in listed if call.place not in _OF_LAYERS]
    wanted = [call for call in ends if (first if call.place == "embedding" else last)]
    tp_s = calls_s(wanted, layout, case.cluster, "tp")
    forward_s = input_s = weight_s = 0.0
    if last and (numel := head_parameters(config)):
        tokens = case.tokens / layout.tp
        product_s = 2 * tokens * numel / (_matmul_share(case) * peak_flops(case.cluster.gpu))
        logit_bytes = FUSED_LOGIT_BYTES if case.engine.fused else LOGIT_BYTES
        logits_s = tokens * config.vocab_size * logit_bytes / case.cluster.gpu.memory_bytes_per_s
        forward_s, input_s = product_s + logits_s / 2, product_s + logits_s / 2
        weight_s = 0.0 if run.lora else product_s
    return Times(forward_s + tp_s / 2, input_s + tp_s / 2, weight_s, tp_s=tp_s)


def _matmul_share(case: Case, rows: float | None = None, width: float | None = None) -> float:
    """Share of the GPU's peak that products reach: less with few rows or in a narrow matrix, and under a power cap."""
    half, width, rows = case.rates.half_width, width or case.run.config.d_model, rows or case.tokens
    return case.rates.matmul_share * case.cluster.gpu.sustained * rows / (rows + half) * width / (width + half)


def _linear_s(case: Case, config: ModelConfig) -> float:
    """Forward products of a layer: their FLOPs, or reading their weights, whichever takes longer."""
    layout, moe = case.run.layout, config.moe
    attention = attention_parameters(config)
    dense = attention + (0 if moe else mlp_parameters(config))
    seconds = _product_s(case, case.tokens * dense / layout.tp, dense / layout.tp, _matmul_share(case))
    if moe:
        expert, tokens = 3 * config.d_model * moe.d_expert, case.tokens
        shared = moe.num_shared_experts * expert + moe.num_experts * config.d_model
        seconds += _product_s(case, tokens * shared / layout.tp, shared / layout.tp, _matmul_share(case))
        whole, cut = (layout.tp, 1) if layout.folded else (1, layout.tp)  # folded, fewer tokens go to whole experts
        rows = tokens / whole * moe.top_k * layout.ep / moe.num_experts
        share = _matmul_share(case, rows, moe.d_expert)
        held = moe.num_experts / layout.ep * expert / cut
        seconds += _product_s(case, tokens * moe.top_k * expert / layout.tp, held, share)
    return seconds


def _product_s(case: Case, multiplications: float, weights: float, share: float) -> float:
    faster = case.rates.fp8_gain if case.run.fp8 else 1.0
    gpu = case.cluster.gpu
    return max(2 * multiplications / (faster * share * peak_flops(gpu)), 2 * weights / gpu.memory_bytes_per_s)


def _scores_s(case: Case, config: ModelConfig) -> float:
    """Attention's scores and their product with the values, forward, at the kernel's rate."""
    run, gpu = case.run, case.cluster.gpu
    fused, causal = run.attention == "fused", run.attention == "fused" and run.config.family != "xlmr"
    flops = case.tokens / run.layout.tp * attention_flops_per_token(config, run.seq_len, causal=causal)
    if fused:
        return flops / (attention_share(gpu) * peak_flops(gpu))
    scores = case.tokens / run.layout.tp * config.num_heads * run.seq_len
    return flops / (_matmul_share(case) * peak_flops(gpu)) + SCORE_BYTES * scores / 3 / gpu.memory_bytes_per_s


def _small_s(case: Case, config: ModelConfig) -> float:
    """Norms, rotations, activations and residuals, forward and backward: times over the bytes that they read."""
    layout, moe = case.run.layout, config.moe
    D, heads = config.d_model, (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    chosen = (moe.top_k + moe.num_shared_experts) if moe else 0
    inside = heads + (4 * chosen * moe.d_expert + 4 * moe.top_k * D if moe else 4 * config.d_ff)
    shared_by = layout.tp if layout.sequence_parallel else 1
    size = 2 * case.tokens * (4 * D / shared_by + inside / layout.tp)
    passes = case.rates.small_passes * (case.rates.fused if case.engine.fused else 1)
    return passes * size / case.cluster.gpu.memory_bytes_per_s


def _tp_s(case: Case, listed: Sequence[Call]) -> tuple[float, float]:
    """Seconds of tp's calls in forward and in backward; over measured nodes each waits once more for each node."""
    layout, cluster, hop_s = case.run.layout, case.cluster, 0.0
    if layout.tp > cluster.gpus_per_node and cluster.between.by_nodes:
        hop_s = case.rates.tp_hop_ms / 1000 * layout.tp / cluster.gpus_per_node
    per_node = ranks_in_a_node(layout, cluster, "tp")

    def seconds(call: Call) -> float:
        return hop_s + network_s(cluster, call.collective, call.payload_bytes, call.group_size, per_node)

    return tuple(sum(call.count * seconds(call) for call in part) for part in _forward_and_backward(listed))


_OF_LAYERS = ("layers forward", "layers backward", "recomputation", "weights of experts")
_IN_BACKWARD = ("layers backward", "recomputation", "weights of experts", "combine backward", "dispatch backward")


def _forward_and_backward(listed: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    return tuple([call for call in listed if (call.place in _IN_BACKWARD) == backward] for backward in (False, True))


def network_s(cluster: Cluster, name: str, size: float, ranks: int, per_node: int) -> float:
    """Seconds of a collective: at the bandwidth that was measured over as many nodes, or as NCCL would do it.

    A group with few ranks in a node gets no more than their ports let through.
    """
    nodes = ranks // per_node
    if nodes == 1 or not cluster.between.by_nodes or name not in PUBLISHED_BUS_BANDWIDTH:
        return collective_s(name, size, ranks, cluster, per_node)
    ports = per_node * cluster.between.achieved_bytes_per_s
    rate = min(cluster.between.achieved_share * measured_bus_bandwidth(nodes, name), ports)
    return bus_factor(name, ranks) * size / rate


def _exposed_cp_s(case: Case, one: Run, shares: Utilisation) -> float:
    """What one layer's attention takes longer on cp ranks than an even share of the work, forward and backward."""
    if (layout := one.layout).cp == 1:
        return 0.0
    if not case.engine.balanced_cp and layout.cp_method == "ring":
        layout = replace(layout, cp_sharding="contiguous")
    time = attention_time(replace(one, layout=layout), case.cluster, shares)
    return time.waiting_s + time.exposed_s
