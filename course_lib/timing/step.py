"""The clock: modelled seconds of one optimizer step of a whole layout, and what they are spent on.

    cluster = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
    time = step_time(Run(preset("llama-3.1-405b"), layout, 8192), cluster, engine="megatron")
    time.total_s, time.mfu, time.parts          # {"compute": ..., "tp": ..., "bubble": ..., ...}

It is a model with eight fitted constants (rates.py); docs/PREDICTOR.md has its errors beside measured and published
runs. An engine is data (engines.py). What the clock puts together are the models of the chapters:

    compute     products: FLOPs at a share of the peak that falls with few rows or narrow matrices, or the time to read
                their weights; attention at its kernel's rate; small operations: bytes over the memory's bandwidth
    launches    a layer takes at least the time to launch its kernels
    tp, sp      their calls (traffic/) as NCCL would do them, less what weight gradients hide (tensor.py)
    cp          of each layer what the ring does not hide, and what the busiest rank waits (context.py)
    ep          all-to-alls of expected rows, less what the engine hides
    bubble      what the busiest rank waits for other ranks, by the simulator, all of the above counted into the stages
    transfer    what the same step takes longer since messages between stages take time
    data        gradients and parameters of ZeRO, less what computing hides; once a step the other sums of gradients
    update      the optimizer's bytes, and what states that are offloaded take over PCIe

A network that was measured (`Link.by_nodes`) gives what it gave over that many nodes, and its ranks wait for each other
as they did in the measured runs. Assumed: each GPU has its own port to the network; computing and communicating do not
slow each other down; no expert is more popular than other experts.

Source   Narayanan et al. 2021 (arXiv:2104.04473), section 3; Llama Team 2024 (arXiv:2407.21783), table 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from course_lib.config import ModelConfig
from course_lib.engines import Engine, engine_of
from course_lib.flops import (
    attention_flops_per_token,
    attention_parameters,
    flops_per_token,
    head_parameters,
    matmul_parameters,
    mlp_parameters,
)
from course_lib.hardware import MOST_NODES, Cluster, measured_bus_bandwidth, peak_flops
from course_lib.layout import Layout
from course_lib.layout.mesh import AXES
from course_lib.layout.partition import layers_by_cost
from course_lib.memory.budget import states_of
from course_lib.memory.flats import layers_of, placed_by
from course_lib.memory.states import StateBytes, recipe_of
from course_lib.memory.zero import Offload, offload_link_bytes, wire_grad_bytes
from course_lib.run import Run
from course_lib.schedules import make
from course_lib.schedules.simulator import Costs, clock
from course_lib.timing.collectives import bus_factor, calls_s, collective_s, ranks_in_a_node
from course_lib.timing.context import attention_time
from course_lib.timing.data import offload_s
from course_lib.timing.rates import RATES, Rates, Utilisation, attention_share
from course_lib.timing.rates import mfu as mfu_of
from course_lib.timing.tensor import FUSED_BACKWARD, backward_of_scores, hidden_s
from course_lib.traffic import Call, stage_calls
from course_lib.validate import Size, checked

ROUNDING = 6  # a layer takes the longer of its work and its launches; where both are near, a little more
STEP_S = 0.05  # of every step: data, logging
# Bytes that kernels go over, counted. Of a logit: FP32 copy, softmax, loss and gradient, one kernel each, or fused. Of
# a parameter: PyTorch's foreach AdamW reads and writes each state several times; a fused one once.
LOGIT_BYTES, FUSED_LOGIT_BYTES = 30, 12
UPDATE_BYTES, FUSED_UPDATE_BYTES = 70, 30
SCORE_BYTES = 30  # of a score that is materialized: product, scale and mask, softmax, dropout, and back
WAITS_GROW = 4  # waiting goes as nodes to this power: none on few nodes, all of it on the most that were measured


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, as the busiest rank spends them; `parts` add up to total_s."""

    compute_s: float
    launches_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    bubble_s: float
    transfer_s: float
    waiting_s: float
    data_s: float
    update_s: float
    num_tokens: int
    num_gpus: int
    model_flops: float  # of the whole step: 6 N + 12 L h s a token, without recomputation
    causal_flops: float  # the same, of attention's scores the half that a causal mask leaves
    peak_flops_per_s: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they are spent on; all but compute is exposed: nothing hides it."""
        return {field.name[:-2]: getattr(self, field.name) for field in fields(self)[:_NUM_PARTS]}

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (0 to 1), attention counted whole, as most publish it."""
        return mfu_of(self.model_flops, self.total_s, self.num_gpus, self.peak_flops_per_s)

    @property
    def causal_mfu(self) -> float:
        """The same with half of attention's scores, as kernels do it: the longer sequences, the more that differs."""
        return mfu_of(self.causal_flops, self.total_s, self.num_gpus, self.peak_flops_per_s)

    @property
    def waiting_share(self) -> float:
        """The share of the step (0 to 1) that is no computing: exposed communication, and the pipeline's bubble."""
        return 1 - self.compute_s / self.total_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.num_tokens / self.total_s / self.num_gpus


_NUM_PARTS = 10


@dataclass(frozen=True)
class _Case:
    """What every part of the clock needs."""

    run: Run
    cluster: Cluster
    engine: Engine
    rates: Rates

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
        return (min(self.nodes, MOST_NODES) / MOST_NODES) ** WAITS_GROW


@checked
def step_time(run: Run, cluster: Cluster, engine: str | Engine = "course", rates: Rates = RATES) -> StepTime:
    """Model one optimizer step of a run.

    Raises   TypeError if an argument is no such record, ValueError for an engine that is not known
    """
    case = _Case(run, cluster, engine_of(engine), rates)
    config, layout = run.config, run.layout
    ranks = _rank_times(layout, _stage_times(case))
    busiest, bubble_s = _pipeline(layout, ranks)
    spent = {name: layout.micro_batches * getattr(ranks[busiest], name) for name in _SPENT}
    data_s = max(_exposed_data_s(case, ranks[pp_rank], pp_rank) for pp_rank in {0, layout.pp - 1})
    num_tokens = layout.sequences_per_step * run.seq_len
    return StepTime(
        **spent,
        bubble_s=bubble_s,
        transfer_s=2 * (layout.num_stages - 1) * _transfer_s(case),
        waiting_s=_message_waits(layout) * rates.stall_s * case.slowness,
        data_s=data_s,
        update_s=_update_s(case),
        num_tokens=num_tokens,
        num_gpus=layout.world_size,
        model_flops=num_tokens * flops_per_token(config, run.seq_len),
        causal_flops=num_tokens * flops_per_token(config, run.seq_len, causal=True),
        peak_flops_per_s=peak_flops(cluster.gpu),
    )


def _message_waits(layout: Layout) -> int:
    """Messages that a micro-batch waits for: at each neighbour of a stage, and while the pipeline fills."""
    if layout.pp == 1:
        return 0
    return layout.micro_batches * min(2, layout.pp - 1) * layout.stages_per_rank + layout.pp - 2


# ------------------------------------------------------------------------------------ the pipeline
def _rank_times(layout: Layout, stages: Sequence[_Times]) -> list[_Times]:
    """Seconds of one micro-batch on all stages of each rank."""
    if layout.stages_per_rank == 1:
        return list(stages)
    ranks = []
    for rank in range(layout.pp):
        times = _Times()
        for stage in placed_by(layout).stages_of_rank(rank):
            times = times.plus(stages[stage])
        ranks.append(times)
    return ranks


def _pipeline(layout: Layout, ranks: Sequence[_Times]) -> tuple[int, float]:
    """The rank that decides how long a step takes, and the seconds that it waits for other ranks."""
    if layout.pp == 1:
        return 0, 0.0
    slots = [times.total_s for times in ranks]
    if layout.schedule == "1f1b":
        return one_f_one_b_waits(slots, layout.micro_batches)
    busiest = max(range(layout.pp), key=lambda rank: slots[rank])
    few = min(layout.micro_batches, 2 * layout.pp)
    return busiest, sum(slots) / layout.pp * _waiting_slots(layout.schedule, layout.pp, few, layout.v)


@lru_cache(maxsize=1024)
def _waiting_slots(name: str, pp: int, micro_batches: int, v: int) -> float:
    """What the simulator finds of equal stages: how many micro-batches' time a rank waits in a step."""
    costs = Costs(*(share / v for share in _SHARES_OF_PASSES))
    if name == "dualpipe_v":
        costs = Costs(*(share / 2 for share in _SHARES_OF_PASSES))
    found = clock(make(name, pp, micro_batches, v), costs)
    return found.makespan_s - max(found.busy_s)


_SHARES_OF_PASSES = (0.33, 0.36, 0.31)  # of F, I and W, as attention's backward takes more than its forward


@checked
def one_f_one_b_waits(slots: Sequence[float], micro_batches: Size) -> tuple[int, float]:
    """Return the stage that decides how long a 1F1B step takes, and the seconds that it waits in it.

    It first waits for stages before it. Then it runs ahead, one micro-batch for each stage behind it, and waits for the
    first gradient if that comes later; and again for the last one. A backward takes twice as long as a forward.

    slots   seconds of each stage, forward and backward of one micro-batch
    """
    found, before, total = [], 0.0, sum(slots)
    for stage, slot in enumerate(slots):
        behind, ahead = total - before - slot, len(slots) - 1 - stage
        waits = before + max(0.0, behind - min(ahead, micro_batches - 1) * slot / 3)
        if micro_batches > ahead + 1:
            waits += max(0.0, behind - ahead * slot * 2 / 3)
        found.append((micro_batches * slot + waits, stage, waits))
        before += slot
    return max(found)[1:]


@checked
def stage_costs(run: Run, cluster: Cluster, engine: str | Engine = "course", rates: Rates = RATES) -> Costs:
    """Return what the simulator needs: seconds of each stage's F, I and W, and of a transfer between stages."""
    case = _Case(run, cluster, engine_of(engine), rates)
    columns = zip(*((times.forward_s, times.input_s, times.weight_s) for times in _stage_times(case)), strict=True)
    return Costs(*columns, _transfer_s(case))


def _transfer_s(case: _Case) -> float:
    """Seconds of a message between stages: activations of one micro-batch."""
    layout = case.run.layout
    if layout.pp == 1:
        return 0.0
    near = layout.world_size <= case.cluster.gpus_per_node
    if layout.order != AXES:
        near = ranks_in_a_node(layout, case.cluster, "pp") > 1
    link = case.cluster.inside if near else case.cluster.between
    size = 2 * case.tokens * case.run.config.d_model / (layout.tp if layout.sequence_parallel else 1)
    return link.latency_s + size / link.achieved_bytes_per_s


# ------------------------------------------------------------------------------------ one micro-batch on one stage
@dataclass(frozen=True)
class _Times:
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

    def plus(self, other: _Times, times: int = 1) -> _Times:
        return _Times(*(getattr(self, name) + times * getattr(other, name) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(_Times))
_SPENT = ("compute_s", "launches_s", "tp_s", "cp_s", "ep_s")


def _stage_times(case: _Case) -> list[_Times]:
    """The times of each stage: so many dense layers, so many with experts, and the two ends."""
    layers = stages_of(case.run, case.engine)
    config, found, before, last = case.run.config, [], 0, len(layers) - 1
    for stage, count in enumerate(layers):
        dense = count - config.moe_layers_before(before + count) + config.moe_layers_before(before)
        times = _Times()
        for number, experts in ((dense, False), (count - dense, True)):
            if number:
                times = times.plus(_layer(case, experts), number)
        if stage in (0, last):
            times = times.plus(_ends(case, stage == 0, stage == last))
        before += count
        found.append(times)
    return found


def stages_of(run: Run, engine: Engine) -> list[int]:
    """How many layers each stage has, as the engine cuts a model unless the layout says it."""
    if engine.cut == "cost" and run.layout.layers_of_stage is None and run.config.moe is None:
        return layers_by_cost(run.config, run.layout.pp)
    return layers_of(run.config, run.layout)


def _layer(case: _Case, experts: bool) -> _Times:
    """One layer of one micro-batch, forward and backward, on one rank; most layouts have one in common."""
    return _cached_layer(_known(case), experts)


_OF_A_LAYER = (
    "cp", "tp", "ep", "sequence_parallel", "regather", "micro_batch", "recompute", "cp_method", "cp_sharding",
    "expert_method", "order",
)  # fmt: skip


@dataclass(frozen=True)
class _Known:
    """What equals another if its key does: a layer depends on few fields of its run."""

    key: tuple
    of: _Case | Run = field(compare=False)


_OF_CALLS = len(_OF_A_LAYER) + 4  # of a key: what calls depend on


def _known(case: _Case) -> _Known:
    run, layout = case.run, case.run.layout
    of_layout = (*(getattr(layout, name) for name in _OF_A_LAYER), layout.dp if layout.ep > 1 else 1)
    of_run = (run.config, run.seq_len, run.recipe)
    rest = (run.attention, run.lora, run.fp8, run.operators, layout.pp > 1)
    rest += (case.nodes, case.cluster, case.engine, case.rates)
    return _Known((*of_layout, *of_run, *rest), case)


@lru_cache(maxsize=8192)
def _cached_layer(known: _Known, experts: bool) -> _Times:
    case = known.of
    run, layout, engine = case.run, case.run.layout, case.engine
    config = _one_layer(run.config, experts)
    linear_s = _linear_s(case, config)
    scores_s = _scores_s(case, config)
    small_s = _small_s(case, config) / 3
    forward_s, input_s = linear_s + scores_s + small_s, linear_s + backward_of_scores(run) * scores_s + small_s
    weight_s = 0.0 if run.lora else linear_s + small_s
    input_s += {
        "none": 0.0,
        "selective": scores_s,
        "full": forward_s,
        "operators": _repeated(config) * linear_s + small_s,
    }["operators" if run.operators else layout.recompute]

    one, listed = _alone(_Known(known.key[:_OF_CALLS], run), experts)
    inside = [call for call in listed["tp"] if call.place not in ("embedding", "head")]
    tp_forward_s, tp_backward_s = _tp_s(case, inside)
    shares = Utilisation(_matmul_share(case), attention_share(case.cluster.gpu))
    if engine.hides_behind_weights and layout.tp > 1 and not experts:
        tp_backward_s -= min(tp_backward_s, hidden_s(one, case.cluster, shares))
    tp_forward_s, tp_backward_s = ((1 - engine.hides_tp) * each_s for each_s in (tp_forward_s, tp_backward_s))
    cp_s = _exposed_cp_s(case, one, shares)
    cp_forward_s = cp_s / (1 + FUSED_BACKWARD)
    cp_s += cp_forward_s if layout.recompute != "none" else 0.0
    ep_forward_s, ep_backward_s = _by_pass(listed["ep"], layout, case.cluster, "ep")
    if layout.recompute == "full":  # rows go out and back again: half of these are in backward
        again_s = ep_forward_s / 2
        ep_forward_s, ep_backward_s = ep_forward_s - again_s, ep_backward_s + again_s
    if engine.hides_ep:
        ep_forward_s, ep_backward_s = max(0.0, ep_forward_s - forward_s), max(0.0, ep_backward_s - input_s - weight_s)
    work = _Times(
        forward_s=forward_s + tp_forward_s + cp_forward_s + ep_forward_s,
        input_s=input_s + tp_backward_s + cp_s - cp_forward_s + ep_backward_s,
        weight_s=weight_s,
        tp_s=tp_forward_s + tp_backward_s,
        cp_s=cp_s,
        ep_s=ep_forward_s + ep_backward_s,
    )
    longer = (1 + (_least_s(case) / work.total_s) ** ROUNDING) ** (1 / ROUNDING)
    passes = (longer * each for each in (work.forward_s, work.input_s, work.weight_s))
    return _Times(*passes, (longer - 1) * work.total_s, work.tp_s, work.cp_s, work.ep_s)


@lru_cache(maxsize=256)
def _one_layer(config: ModelConfig, experts: bool) -> ModelConfig:
    moe = replace(config.moe, first_dense_layers=0, every=1) if experts else None
    return replace(config, num_layers=1, moe=moe)


@lru_cache(maxsize=8192)
def _alone(known: _Known, experts: bool) -> tuple[Run, dict[str, list[Call]]]:
    """The run of one layer without a pipeline, and its calls."""
    run = known.of
    ep = run.layout.ep if experts else 1
    layout = replace(run.layout, pp=1, ep=ep, schedule="1f1b", v=1, layers_of_stage=None, zero_stage=0, dp_replicate=1)
    one = replace(
        run, config=_one_layer(run.config, experts), layout=layout, lora=None, offload=Offload(), operators=False
    )
    return one, stage_calls(one, 0)


@checked
def runs_ahead(run: Run, cluster: Cluster, engine: str | Engine = "course", rates: Rates = RATES) -> float:
    """How far Python runs ahead of the GPU (0 to 1): not where launching a layer takes longer than its work."""
    case = _Case(run, cluster, engine_of(engine), rates)
    layer = _layer(case, experts=run.config.moe is not None)
    least_s = _least_s(case) if run.layout.pp > 1 else _launch_s(case)
    return 1 / (1 + (least_s / (layer.total_s - layer.launches_s)) ** ROUNDING)


def _launch_s(case: _Case) -> float:
    again = 4 / 3 if case.run.layout.recompute == "full" else 1
    return again * case.rates.layer_launch_ms * (case.rates.fused if case.engine.fused else 1) / 1000


def _least_s(case: _Case) -> float:
    """Launching a layer's kernels; and waiting for other ranks of tp: always in a pipeline over measured nodes."""
    layout, rates, least_s = case.run.layout, case.rates, _launch_s(case)
    if layout.tp > 1:
        in_pipeline = layout.pp > 1 and case.slowness > 0
        least_s += rates.tp_wait_ms / 1000 * layout.tp * (1.0 if in_pipeline else case.slowness)
    return least_s


def _ends(case: _Case, first: bool, last: bool) -> _Times:
    return _cached_ends(_known(case), first, last)


@lru_cache(maxsize=8192)
def _cached_ends(known: _Known, first: bool, last: bool) -> _Times:
    """Embedding and head: the head's products stay in BF16, whatever the layers compute in."""
    case = known.of
    run, layout, config = case.run, case.run.layout, case.run.config
    listed = _alone(_Known(known.key[:_OF_CALLS], run), config.moe is not None)[1]["tp"]
    wanted = [call for call in listed if (call.place == "embedding" and first) or (call.place == "head" and last)]
    tp_s = calls_s(wanted, layout, case.cluster, "tp")
    forward_s = input_s = weight_s = 0.0
    if last and (numel := head_parameters(config)):
        tokens = case.tokens / layout.tp
        product_s = 2 * tokens * numel / (_matmul_share(case) * peak_flops(case.cluster.gpu))
        logit_bytes = FUSED_LOGIT_BYTES if case.engine.fused else LOGIT_BYTES
        logits_s = tokens * config.vocab_size * logit_bytes / case.cluster.gpu.memory_bytes_per_s
        forward_s, input_s = product_s + logits_s / 2, product_s + logits_s / 2
        weight_s = 0.0 if run.lora else product_s
    return _Times(forward_s + tp_s / 2, input_s + tp_s / 2, weight_s, tp_s=tp_s)


# ---- computing


def _matmul_share(case: _Case, rows: float | None = None, width: float | None = None) -> float:
    """Share of the GPU's peak that products reach: less with few rows or in a narrow matrix, and under a power cap."""
    half, width, rows = case.rates.half_width, width or case.run.config.d_model, rows or case.tokens
    return case.rates.matmul_share * case.cluster.gpu.sustained * rows / (rows + half) * width / (width + half)


def _linear_s(case: _Case, config: ModelConfig) -> float:
    """Forward products of a layer: their FLOPs, or reading their weights, whichever takes longer."""
    layout, moe = case.run.layout, config.moe
    attention = attention_parameters(config)
    dense = attention + (0 if moe else mlp_parameters(config))
    seconds = _product_s(case, case.tokens * dense / layout.tp, dense / layout.tp, _matmul_share(case))
    if moe:
        expert, tokens = 3 * config.d_model * moe.d_expert, case.tokens
        shared = moe.num_shared_experts * expert + moe.num_experts * config.d_model
        seconds += _product_s(case, tokens * shared / layout.tp, shared / layout.tp, _matmul_share(case))
        rows = tokens * moe.top_k * layout.ep / moe.num_experts
        share = _matmul_share(case, rows, moe.d_expert)
        held = moe.num_experts / layout.ep * expert / layout.tp
        seconds += _product_s(case, tokens * moe.top_k * expert / layout.tp, held, share)
    return seconds


def _product_s(case: _Case, multiplications: float, weights: float, share: float) -> float:
    faster = case.rates.fp8_gain if case.run.fp8 else 1.0
    gpu = case.cluster.gpu
    return max(2 * multiplications / (faster * share * peak_flops(gpu)), 2 * weights / gpu.memory_bytes_per_s)


def _scores_s(case: _Case, config: ModelConfig) -> float:
    """Attention's scores and their product with the values, forward, at the kernel's rate."""
    run, gpu = case.run, case.cluster.gpu
    fused = run.attention == "fused"
    flops = case.tokens / run.layout.tp * attention_flops_per_token(config, run.seq_len, causal=fused and _causal(run))
    if fused:
        return flops / (attention_share(gpu) * peak_flops(gpu))
    scores = case.tokens / run.layout.tp * config.num_heads * run.seq_len
    return flops / (_matmul_share(case) * peak_flops(gpu)) + SCORE_BYTES * scores / 3 / gpu.memory_bytes_per_s


def _causal(run: Run) -> bool:
    return run.config.family != "xlmr"


def _small_s(case: _Case, config: ModelConfig) -> float:
    """Norms, rotations, activations and residuals, forward and backward: times over the bytes that they read."""
    layout, moe = case.run.layout, config.moe
    D, heads = config.d_model, (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    chosen = (moe.top_k + moe.num_shared_experts) if moe else 0
    inside = heads + (4 * chosen * moe.d_expert + 4 * moe.top_k * D if moe else 4 * config.d_ff)
    shared_by = layout.tp if layout.sequence_parallel else 1
    size = 2 * case.tokens * (4 * D / shared_by + inside / layout.tp)
    passes = case.rates.small_passes * (case.rates.fused if case.engine.fused else 1)
    return passes * size / case.cluster.gpu.memory_bytes_per_s


def _repeated(config: ModelConfig) -> float:
    """Products that recomputation of operators repeats, of those in forward: k, o and up."""
    D, K, N, H = config.d_model, config.num_kv_heads, config.num_heads, config.head_dim
    repeated = D * H * (K + N) + mlp_parameters(config) / 3
    return repeated / (attention_parameters(config) + mlp_parameters(config))


def repeated_flops(run: Run) -> int:
    """FLOPs of a step that recomputation of operators does again."""
    linear = 2 * (matmul_parameters(run.config) - head_parameters(run.config))
    return round(run.layout.sequences_per_step * run.seq_len * linear * _repeated(run.config))


# ---- communication inside a layer


def _tp_s(case: _Case, listed: Sequence[Call]) -> tuple[float, float]:
    """Seconds of tp's calls in forward and in backward; over nodes each waits once more for each node."""
    layout, per_node = case.run.layout, case.cluster.gpus_per_node
    forward_s, backward_s = (_seconds(part, layout, case.cluster, "tp", 1.0) for part in _forward_and_backward(listed))
    if layout.tp > per_node:
        hop_s = case.rates.tp_hop_ms / 1000 * layout.tp / per_node
        numbers = [sum(call.count for call in part) for part in _forward_and_backward(listed)]
        forward_s, backward_s = forward_s + hop_s * numbers[0], backward_s + hop_s * numbers[1]
    return forward_s, backward_s


_IN_BACKWARD = ("layers backward", "recomputation", "weights of experts", "combine backward", "dispatch backward")


def _forward_and_backward(listed: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    backward = [call for call in listed if call.place in _IN_BACKWARD]
    return [call for call in listed if call.place not in _IN_BACKWARD], backward


def _by_pass(listed: Sequence[Call], layout: Layout, cluster: Cluster, axis: str) -> tuple[float, float]:
    """Seconds of these calls in forward, and in backward."""
    return tuple(calls_s(part, layout, cluster, axis) for part in _forward_and_backward(listed))


def _seconds(listed: Sequence[Call], layout: Layout, cluster: Cluster, axis: str, share: float) -> float:
    """Seconds of calls along an axis.

    share   of the measured bandwidth
    """
    per_node = ranks_in_a_node(layout, cluster, axis)
    return sum(
        call.count * _collective_s(cluster, call.collective, call.payload_bytes, call.group_size, per_node, share)
        for call in listed
    )


_MEASURED = ("all_reduce", "reduce_scatter", "all_gather")


@lru_cache(maxsize=8192)
def _collective_s(cluster: Cluster, name: str, size: float, ranks: int, per_node: int, share: float) -> float:
    """Seconds of a collective: at the bandwidth that was measured over as many nodes, or as NCCL would do it."""
    nodes = ranks // per_node
    if nodes == 1 or not cluster.between.by_nodes or name not in _MEASURED:
        return collective_s(name, size, ranks, cluster, per_node)
    ports = per_node * cluster.between.achieved_bytes_per_s
    return bus_factor(name, ranks) * size / (share * min(measured_bus_bandwidth(nodes, name), ports))


def _exposed_cp_s(case: _Case, one: Run, shares: Utilisation) -> float:
    """What one layer's attention takes longer on cp ranks than an even share of the work, forward and backward."""
    layout = one.layout
    if layout.cp == 1:
        return 0.0
    if not case.engine.balanced_cp and layout.cp_method == "ring":
        layout = replace(layout, cp_sharding="contiguous")
    time = attention_time(replace(one, layout=layout), case.cluster, shares)
    return time.waiting_s + time.exposed_s


# ------------------------------------------------------------------------------------ once a step
def _exposed_data_s(case: _Case, times: _Times, pp_rank: int) -> float:
    """What a rank waits for gradients and parameters: what neither forward nor backward of a micro-batch hides."""
    layout, zero_stage = case.run.layout, _zero_stage(case)
    seconds = {"gradients": 0.0, "parameters": 0.0, "after": 0.0}
    for experts, numel in enumerate(_numel_of_rank(case, pp_rank)):
        axis = layout.shard_axes[experts]
        ranks = layout.expert_shard_size if experts else layout.shard_size
        for name, collective, size, count in _exchanges(case, numel, zero_stage):
            seconds[name] += count * _exchange_s(case, collective, size, ranks, axis)
        if layout.dp_replicate > 1:
            axis = "expert_replicate" if experts else "replicate"
            size = _grad_bytes(case) * numel / ranks
            seconds["after"] += _exchange_s(case, "all_reduce", size, layout.dp_replicate, axis)
    if not case.engine.hides_data:
        return sum(seconds.values())
    forward_s, backward_s, m = times.forward_s, times.input_s + times.weight_s, layout.micro_batches
    if zero_stage == 3:
        gather_s, reduce_s = seconds["parameters"] / (2 * m), seconds["gradients"] / m
        exposed_s = m * (max(0.0, gather_s - forward_s) + max(0.0, gather_s + reduce_s - backward_s))
        return seconds["after"] + exposed_s
    rounds = m if zero_stage == 2 else 1
    exposed_s = rounds * max(0.0, seconds["gradients"] / rounds - backward_s)
    return seconds["after"] + exposed_s + max(0.0, seconds["parameters"] - forward_s)


def _zero_stage(case: _Case) -> int:
    """ZeRO as it sends: none where there is nobody to shard over, stage 1 where parameters stay gathered."""
    layout = case.run.layout
    if layout.data_size == 1 and case.run.offload.parameters == "device":
        return 0
    whole = case.engine.pipeline_grads_whole and layout.pp > 1
    return min(layout.zero_stage, 1) if whole else layout.zero_stage


def _grad_bytes(case: _Case) -> int:
    return wire_grad_bytes(recipe_of(case.run.recipe))


def _exchanges(case: _Case, numel: float, zero_stage: int) -> list[tuple[str, str, float, int]]:
    """Collectives of one step as `traffic.data.flat_calls` lists them, all buckets as one."""
    m, sent, held = case.run.layout.micro_batches, _grad_bytes(case), recipe_of(case.run.recipe).param_bytes
    if zero_stage == 0:
        return [("gradients", "all_reduce", sent * numel, 1)]
    scatters, gathers = {1: (1, 1), 2: (m, 1), 3: (m, 2 * m)}[zero_stage]
    return [
        ("gradients", "reduce_scatter", sent * numel, scatters),
        ("parameters", "all_gather", held * numel, gathers),
    ]


def _exchange_s(case: _Case, collective: str, size: float, ranks: int, axis: str) -> float:
    if ranks == 1 or not size:
        return 0.0
    layout, cluster = case.run.layout, case.cluster
    per_node = _per_node(layout, cluster, axis, ranks)
    return _collective_s(cluster, collective, size, ranks, per_node, case.rates.network_share)


def _per_node(layout: Layout, cluster: Cluster, axis: str, ranks: int) -> int:
    """Ranks of a group that share a node, by arithmetic where the axes lie in their usual order."""
    if layout.order != AXES:
        return ranks_in_a_node(layout, cluster, axis)
    nearer = layout.tp  # ranks that are nearer to each other than those of the group
    if axis.endswith("replicate"):
        nearer *= layout.shard_size
    elif axis.startswith("expert"):
        nearer *= layout.ep
    here = min(ranks, max(1, cluster.gpus_per_node // nearer))
    return here if ranks % here == 0 else 1


def _numel_of_rank(case: _Case, pp_rank: int) -> tuple[float, float]:
    """Parameters of one rank: of all but experts, and of experts."""
    layout, config = case.run.layout, case.run.config
    layers = stages_of(case.run, case.engine)
    mine = placed_by(layout).stages_of_rank(pp_rank) if layout.stages_per_rank > 1 else (pp_rank,)
    moe, dense, experts = config.moe, 0, 0
    for stage in mine:
        first = sum(layers[:stage])
        with_experts = config.moe_layers_before(first + layers[stage]) - config.moe_layers_before(first)
        dense += layers[stage] * attention_parameters(config) + (layers[stage] - with_experts) * mlp_parameters(config)
        if moe:
            expert = 3 * config.d_model * moe.d_expert
            dense += with_experts * expert * moe.num_shared_experts
            experts += with_experts * expert * moe.num_experts / layout.ep
        end = config.vocab_size * config.d_model
        dense += end * (stage == 0) + end * (stage == len(layers) - 1) * (0 if config.tied and layout.pp == 1 else 1)
    return dense / layout.tp, experts / layout.tp


def _update_s(case: _Case) -> float:
    """The optimizer goes over its states; and the rest of a step that is no training: data, logging."""
    run, layout = case.run, case.run.layout
    shards = layout.data_size if layout.zero_stage else 1
    size = FUSED_UPDATE_BYTES if case.engine.fused else UPDATE_BYTES
    parameters = 0.0 if run.lora else _parameters(run.config) / (layout.tp * layout.pp)
    seconds = STEP_S + size * parameters / shards / case.cluster.gpu.memory_bytes_per_s
    if run.offload.optimizer != "device" or run.offload.parameters != "device":
        seconds += offload_s(offload_link_bytes(_states(run), run.offload, layout.micro_batches))
    return seconds


@lru_cache(maxsize=1024)
def _states(run: Run) -> StateBytes:
    return states_of(run)


@lru_cache(maxsize=256)
def _parameters(config: ModelConfig) -> int:
    """Weights of all layers, embedding and head, all experts among them."""
    moe, ends = config.moe, (1 if config.tied else 2) * config.vocab_size * config.d_model
    layers = config.num_layers * attention_parameters(config)
    layers += (config.num_layers - config.num_moe_layers) * mlp_parameters(config)
    if moe:
        layers += config.num_moe_layers * 3 * config.d_model * moe.d_expert * (moe.num_experts + moe.num_shared_experts)
    return layers + ends
