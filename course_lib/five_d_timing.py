"""Modelled seconds of one optimizer step of a whole layout, and what they are spent on.

    cluster = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
    time = step_time(Run(preset("llama-3.1-405b"), layout, 8192), cluster, Utilisation(matmul=0.6))
    time.total_s, time.mfu, time.parts          # {"compute": ..., "tp": ..., "bubble": ..., ...}

It is a model: nothing here is measured, and a test has its error beside published runs. What it puts together are
the models of the chapters:

    compute     FLOPs of a rank's stages (pipeline_timing.py): products at one share of the GPU's peak, however narrow,
                attention's scores at their kernel's own
    tp, sp      their calls (traffic/) as NCCL would do them, less what weight gradients hide (sharded_timing.py)
    cp          of each layer what the ring does not hide, and what the busiest rank waits (context_timing.py)
    ep          all-to-alls of expected rows, less what `Overlap` hides
    bubble      what the busiest rank waits for others, by the simulator, all of the above counted into the stages
    transfer    what the same step takes longer since messages between stages take time
    data        gradients and parameters of ZeRO, less what computing hides

Assumed, once for all: a collective takes the time of the fastest algorithm and protocol of NCCL's own model; each GPU
has its own port to the network, and its groups do not disturb each other; computing and communicating do not slow each
other down; no rank is late, no expert is more popular than others. Left out: the optimizer's own work, data from disk,
the two numbers of the whole world, kernels' launches. So a modelled step is a fast one.

Source   Narayanan et al. 2021 (arXiv:2104.04473), section 3; Llama Team 2024 (arXiv:2407.21783), table 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from course_lib.config import ModelConfig
from course_lib.context_timing import BACKWARD_FLOPS, attention_time
from course_lib.hardware import Cluster, peak_flops
from course_lib.layout import Layout
from course_lib.memory.context import tokens_of_rank
from course_lib.memory.flats import layers_of, schedule_of, stage_config
from course_lib.memory.states import Recipe, recipe_of
from course_lib.pipeline_timing import stage_flops, transfer_s
from course_lib.run import Run
from course_lib.schedules.simulator import Costs, simulate
from course_lib.sharded_timing import tensor_parallel_step
from course_lib.timing import attention_flops_per_token, collective_s, flops_per_token
from course_lib.timing import mfu as mfu_of
from course_lib.traffic import Call, calls, stage_calls
from course_lib.validate import Share, check_fields, instance


@dataclass(frozen=True)
class Utilisation:
    """Shares of the GPU's peak that kernels reach while they run; waiting is not in them.

    matmul      matrix products; good runs on H100 compute at 0.5 to 0.6
    attention   the kernel of scores and values, of which a causal mask leaves half: 0.35 is FlashAttention-2's on an
                H100, FlashAttention-3 reaches up to 0.75
    Source      Shah et al. 2024 (arXiv:2407.08608), abstract
    """

    matmul: Share = 0.5
    attention: Share = 0.35
    causal: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("matmul", "attention"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0; give a share of the peak above 0 and at most 1, such as 0.5")


@dataclass(frozen=True)
class Overlap:
    """What computing hides, as far as it lasts.

    tp     backward's sums behind weight gradients
    ep     rows behind the computing of the same micro-batch: two micro-batches at once, as DualPipe has them
    data   gradients behind backward; parameters behind forward, with ZeRO-3 behind backward too
    """

    tp: bool = True
    ep: bool = False
    data: bool = True


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, as the busiest rank spends them; `parts` add up to total_s."""

    compute_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    bubble_s: float
    transfer_s: float
    data_s: float
    num_tokens: int
    num_gpus: int
    model_flops: float  # of the whole step: 6 N + 12 L h s a token, without recomputation
    causal_flops: float  # the same, of attention's scores the half that a causal mask leaves
    peak_flops_per_s: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they are spent on; all but compute is exposed: nothing hides it."""
        names = ("compute", "tp", "cp", "ep", "bubble", "transfer", "data")
        return {name: getattr(self, f"{name}_s") for name in names}

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
    def tokens_per_s_per_gpu(self) -> float:
        return self.num_tokens / self.total_s / self.num_gpus


def step_time(
    run: Run, cluster: Cluster, utilisation: Utilisation = Utilisation(), overlap: Overlap = Overlap()
) -> StepTime:
    """Model one optimizer step of a run.

    Raises   TypeError if an argument is no such record
    """
    for name, value, kind in (
        ("run", run, Run), ("cluster", cluster, Cluster), ("utilisation", utilisation, Utilisation),
        ("overlap", overlap, Overlap),
    ):  # fmt: skip
        instance(name, value, kind)
    config, layout, seq_len, recipe = run.config, run.layout, run.seq_len, recipe_of(run.recipe)
    schedule = schedule_of(layout)
    stages = _stage_times(run, cluster, utilisation, overlap)
    costs = Costs(
        tuple(stage.forward_s for stage in stages),
        tuple(stage.input_s for stage in stages),
        tuple(stage.weight_s for stage in stages),
        0.0 if layout.pp == 1 else _transfer_s(run, cluster, recipe),
    )
    without_transfers = simulate(schedule, replace(costs, transfer_s=0.0))
    makespan_s = simulate(schedule, costs).makespan_s if layout.pp > 1 else without_transfers.makespan_s
    busiest = max(range(layout.pp), key=lambda rank: without_transfers.busy_s[rank])
    spent = {
        name: layout.micro_batches * sum(getattr(stages[stage], name) for stage in schedule.stages_of_rank(busiest))
        for name in ("compute_s", "tp_s", "cp_s", "ep_s")
    }
    data_s = max(
        _exposed_data_s(run, cluster, overlap, rank, _of(stages, schedule.stages_of_rank(rank)))
        for rank in range(layout.pp)
    )
    num_tokens = layout.sequences_per_step * seq_len
    return StepTime(
        **spent,
        bubble_s=max(0.0, without_transfers.makespan_s - sum(spent.values())),
        transfer_s=makespan_s - without_transfers.makespan_s,
        data_s=data_s,
        num_tokens=num_tokens,
        num_gpus=layout.world_size,
        model_flops=num_tokens * flops_per_token(config, seq_len),
        causal_flops=num_tokens * flops_per_token(config, seq_len, causal=True),
        peak_flops_per_s=peak_flops(cluster.gpu),
    )


# ------------------------------------------------------------------------------------ one micro-batch on one stage
@dataclass(frozen=True)
class _StageTime:
    """Seconds of one micro-batch: F, I and W as the simulator has them, and of these what is communication."""

    forward_s: float
    input_s: float
    weight_s: float
    tp_s: float
    cp_s: float
    ep_s: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s - self.tp_s - self.cp_s - self.ep_s


def _stage_times(run: Run, cluster: Cluster, utilisation: Utilisation, overlap: Overlap) -> list[_StageTime]:
    """Return the times of each stage; most are alike, and computed once."""
    config, layers, known = run.config, layers_of(run.config, run.layout), {}
    kinds = [
        (stage_config(config, layers, stage), stage == 0, stage == len(layers) - 1) for stage in range(len(layers))
    ]
    for stage, kind in enumerate(kinds):
        if kind not in known:
            known[kind] = _stage_time(run, cluster, utilisation, overlap, stage)
    return [known[kind] for kind in kinds]


def _stage_time(run: Run, cluster: Cluster, utilisation: Utilisation, overlap: Overlap, stage: int) -> _StageTime:
    config, layout, seq_len = run.config, run.layout, run.seq_len
    layers = layers_of(config, layout)
    part, tokens = stage_config(config, layers, stage), layout.micro_batch * seq_len
    peak = layout.cp * layout.tp * peak_flops(cluster.gpu)
    flops = stage_flops(config, layout.micro_batch, seq_len, layers, stage, utilisation.causal)
    scores_flops = tokens * attention_flops_per_token(part, seq_len, utilisation.causal)
    products_s = [each / (utilisation.matmul * peak) for each in (flops[0] - scores_flops, flops[2])]
    scores_s = scores_flops / (utilisation.attention * peak)
    again = BACKWARD_FLOPS if run.attention == "fused" else 2  # a fused kernel computes the scores again in backward
    forward_s, input_s, weight_s = products_s[0] + scores_s, products_s[1] + again * scores_s, products_s[1]
    on_last = stage == len(layers) - 1
    head_s = tokens * 2 * config.vocab_size * config.d_model / (utilisation.matmul * peak) if on_last else 0.0
    input_s += {"none": 0.0, "selective": scores_s, "full": forward_s - head_s}[layout.recompute]

    listed = stage_calls(run, stage)
    tp_forward_s, tp_backward_s = _by_pass(listed["tp"], layout, cluster, "tp")
    if overlap.tp and layout.tp > 1 and part.moe is None:
        tp_backward_s -= _hidden_tp_s(part, run, cluster, utilisation)
    cp_s = part.num_layers * _exposed_cp_s(part, run, cluster, utilisation)
    cp_forward_s = cp_s / (1 + BACKWARD_FLOPS)
    cp_s += cp_forward_s if layout.recompute != "none" else 0.0
    ep_forward_s, ep_backward_s = _by_pass(listed["ep"], layout, cluster, "ep")
    if layout.recompute == "full":  # rows go out and back again: half of these are in backward
        again_s = ep_forward_s / 2
        ep_forward_s, ep_backward_s = ep_forward_s - again_s, ep_backward_s + again_s
    if overlap.ep:
        ep_forward_s, ep_backward_s = max(0.0, ep_forward_s - forward_s), max(0.0, ep_backward_s - input_s - weight_s)
    return _StageTime(
        forward_s=forward_s + tp_forward_s + cp_forward_s + ep_forward_s,
        input_s=input_s + tp_backward_s + cp_s - cp_forward_s + ep_backward_s,
        weight_s=weight_s,
        tp_s=tp_forward_s + tp_backward_s,
        cp_s=cp_s,
        ep_s=ep_forward_s + ep_backward_s,
    )


_IN_BACKWARD = ("layers backward", "recomputation", "weights of experts", "combine backward", "dispatch backward")


def _by_pass(listed: Sequence[Call], layout: Layout, cluster: Cluster, axis: str) -> tuple[float, float]:
    """Seconds of these calls in forward, and in backward."""
    backward_s = sum((_call_s(call, layout, cluster, axis) for call in listed if call.place in _IN_BACKWARD), 0.0)
    return sum((_call_s(call, layout, cluster, axis) for call in listed), 0.0) - backward_s, backward_s


def _hidden_tp_s(part: ModelConfig, run: Run, cluster: Cluster, utilisation: Utilisation) -> float:
    """What weight gradients hide of a stage's sums, as `tensor_parallel_step` has it; latent attention as heads."""
    layout, tokens = run.layout, tokens_of_rank(run.seq_len, run.layout.cp)
    return tensor_parallel_step(
        replace(part, mla=None), layout.micro_batch, tokens, layout.tp, _seen_by(layout, cluster, "tp"),
        utilisation.matmul, layout.sequence_parallel, layout.regather,
        itemsize=recipe_of(run.recipe).compute_bytes, overlap=True,
    ).hidden_s  # fmt: skip


def _exposed_cp_s(part: ModelConfig, run: Run, cluster: Cluster, utilisation: Utilisation) -> float:
    """What one layer's attention takes longer on cp ranks than an even share of the work, forward and backward."""
    layout = run.layout
    if layout.cp == 1:
        return 0.0
    time = attention_time(
        replace(part, moe=None, mla=None), layout.micro_batch, run.seq_len, layout.cp, cluster, utilisation.attention,
        layout.cp_method, layout.cp_sharding, per_node=ranks_in_a_node(layout, cluster, "cp"), tp=layout.tp,
        itemsize=recipe_of(run.recipe).compute_bytes,
    )  # fmt: skip
    return time.waiting_s + time.exposed_s


def _transfer_s(run: Run, cluster: Cluster, recipe: Recipe) -> float:
    layout = run.layout
    link = cluster.inside if ranks_in_a_node(layout, cluster, "pp") == layout.pp else cluster.between
    share = layout.tp if layout.sequence_parallel else 1
    return transfer_s(run.config, layout.micro_batch, run.seq_len, link, recipe.compute_bytes, layout.cp, share)


# ------------------------------------------------------------------------------------ where groups lie
@lru_cache(maxsize=64)
def ranks_in_a_node(layout: Layout, cluster: Cluster, axis: str) -> int:
    """How many ranks of rank 0's group along `axis` share its node; 1 where nodes would have unequal numbers."""
    members = layout.members(0)[axis]
    here = sum(rank < cluster.gpus_per_node for rank in members)
    return here if len(members) % here == 0 else 1


def _seen_by(layout: Layout, cluster: Cluster, axis: str) -> Cluster:
    """The same cluster, with as many GPUs in a node as a group along `axis` has there."""
    return replace(cluster, gpus_per_node=ranks_in_a_node(layout, cluster, axis))


def _call_s(call: Call, layout: Layout, cluster: Cluster, axis: str) -> float:
    per_node = ranks_in_a_node(layout, cluster, axis)
    return call.count * collective_s(call.collective, call.payload_bytes, call.group_size, cluster, per_node)


# ------------------------------------------------------------------------------------ gradients and ZeRO
def _of(stages: Sequence[_StageTime], mine: Sequence[int]) -> tuple[float, float]:
    """Seconds of one micro-batch's forward and backward on these stages."""
    forward_s = sum(stages[stage].forward_s for stage in mine)
    return forward_s, sum(stages[stage].input_s + stages[stage].weight_s for stage in mine)


def _exposed_data_s(run: Run, cluster: Cluster, overlap: Overlap, pp_rank: int, computing_s) -> float:
    """What a rank waits for gradients and parameters: what neither forward nor backward of a micro-batch hides."""
    layout = run.layout
    listed = calls(run, layout.mesh.rank(pp=pp_rank, dp=0, cp=0, tp=0))
    seconds = {"gradients": 0.0, "parameters": 0.0, "gradients of replicas": 0.0}
    for axis in (*layout.shard_axes, "replicate", "expert_replicate"):
        for call in listed[axis]:
            if call.place in seconds:
                seconds[call.place] += _call_s(call, layout, cluster, axis)
    if not overlap.data:
        return sum(seconds.values())
    replicas_s = seconds["gradients of replicas"]  # summed after backward, which hides nothing of it
    forward_s, backward_s = computing_s
    times = layout.micro_batches
    if layout.zero_stage == 3:
        gather_s, reduce_s = seconds["parameters"] / (2 * times), seconds["gradients"] / times
        return replicas_s + times * (max(0.0, gather_s - forward_s) + max(0.0, gather_s + reduce_s - backward_s))
    rounds = times if layout.zero_stage == 2 else 1
    exposed_s = rounds * max(0.0, seconds["gradients"] / rounds - backward_s)
    return replicas_s + exposed_s + max(0.0, seconds["parameters"] - forward_s)
