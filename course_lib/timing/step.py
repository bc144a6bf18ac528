"""Modelled seconds of one optimizer step of a whole layout, and what they are spent on.

    cluster = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
    time = step_time(Run(preset("llama-3.1-405b"), layout, 8192), cluster, Utilisation(matmul=0.6))
    time.total_s, time.mfu, time.parts          # {"compute": ..., "tp": ..., "bubble": ..., ...}

It is a model: nothing here is measured, and a test has its error beside published runs. What it puts together are
the models of the chapters:

    compute     FLOPs of a rank's stages (flops.py): products at one share of the GPU's peak, however narrow,
                attention's scores at their kernel's own
    tp, sp      their calls (traffic/) as NCCL would do them, less what weight gradients hide (tensor.py)
    cp          of each layer what the ring does not hide, and what the busiest rank waits (context.py)
    ep          all-to-alls of expected rows, less what `Overlap` hides
    bubble      what the busiest rank waits for others, by the simulator, all of the above counted into the stages
    transfer    what the same step takes longer since messages between stages take time
    data        gradients and parameters of ZeRO, less what computing hides; once a step the other sums of gradients

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
from math import isclose

from course_lib.flops import attention_flops_per_token, flops_per_token, head_parameters, stage_flops
from course_lib.hardware import Cluster, peak_flops
from course_lib.layout import Layout
from course_lib.layout.partition import stage_config
from course_lib.memory.flats import layers_of, placed_by
from course_lib.memory.zero import Offload
from course_lib.run import Run
from course_lib.schedules import make
from course_lib.schedules.simulator import Costs, Simulation, clock
from course_lib.timing.collectives import calls_s
from course_lib.timing.context import attention_time
from course_lib.timing.rates import Utilisation
from course_lib.timing.rates import mfu as mfu_of
from course_lib.timing.tensor import FUSED_BACKWARD, backward_of_scores, hidden_s
from course_lib.traffic import Call, calls, stage_calls
from course_lib.traffic.pipeline import boundary_calls
from course_lib.validate import check_fields, checked


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

    def __post_init__(self) -> None:
        check_fields(self)


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
    def waiting_share(self) -> float:
        """The share of the step (0 to 1) that is no computing: exposed communication, and the pipeline's bubble."""
        return 1 - self.compute_s / self.total_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.num_tokens / self.total_s / self.num_gpus


@checked
def step_time(
    run: Run, cluster: Cluster, utilisation: Utilisation = Utilisation(), overlap: Overlap = Overlap()
) -> StepTime:
    """Model one optimizer step of a run.

    Raises   TypeError if an argument is no such record
    """
    config, layout, seq_len, schedule = run.config, run.layout, run.seq_len, placed_by(run.layout)
    stages = _stage_times(run, cluster, utilisation, overlap)
    costs = _costs(run, cluster, stages)
    pipeline = layout.schedule, layout.pp, layout.micro_batches, layout.v
    alone_s, busy_s = _simulated(*pipeline, replace(costs, transfer_s=0.0))
    makespan_s, _ = _simulated(*pipeline, costs)
    busiest = max(range(layout.pp), key=lambda rank: busy_s[rank])
    spent = {
        name: layout.micro_batches * sum(getattr(stages[stage], name) for stage in schedule.stages_of_rank(busiest))
        for name in ("compute_s", "tp_s", "cp_s", "ep_s")
    }
    layers = layers_of(config, layout)
    unlike = {}  # of ranks whose stages are alike, one
    for rank in range(layout.pp):
        mine = schedule.stages_of_rank(rank)
        parts = tuple((stage_config(config, layers, one), one == 0, one == len(layers) - 1) for one in mine)
        unlike.setdefault((parts, rank in (0, layout.pp - 1)), (rank, _of(stages, mine)))
    data_s = max(_exposed_data_s(run, cluster, overlap, *each) for each in unlike.values())
    num_tokens = layout.sequences_per_step * seq_len
    return StepTime(
        **spent,
        bubble_s=max(0.0, alone_s - sum(spent.values())),
        transfer_s=makespan_s - alone_s,
        data_s=data_s,
        num_tokens=num_tokens,
        num_gpus=layout.world_size,
        model_flops=num_tokens * flops_per_token(config, seq_len),
        causal_flops=num_tokens * flops_per_token(config, seq_len, causal=True),
        peak_flops_per_s=peak_flops(cluster.gpu),
    )


STEADY = 5  # times pp micro-batches: a pipeline of even stages has settled by then, one of uneven stages may drift


def _simulated(name: str, pp: int, micro_batches: int, v: int, costs: Costs) -> tuple[float, tuple[float, ...]]:
    """Seconds of a pipeline, and of these those in which each rank works; a steady state is not walked to its end."""
    rounds = micro_batches // pp - STEADY
    if rounds > 0:
        few = micro_batches - rounds * pp
        makespan_s, busy_s, round_s = _walked(name, pp, few, v, costs)
        if round_s is not None:
            return makespan_s + rounds * round_s, tuple(micro_batches / few * busy for busy in busy_s)
    return _walked(name, pp, micro_batches, v, costs)[:2]


@lru_cache(maxsize=256)  # layouts that differ in ZeRO alone have one pipeline
def _walked(name: str, pp: int, micro_batches: int, v: int, costs: Costs) -> tuple:
    """Seconds of a pipeline, those in which each rank works, and of a round of pp micro-batches if it is steady."""
    found = clock(make(name, pp, micro_batches, v), costs)
    return found.makespan_s, tuple(found.busy_s), _round_s(found)


def _round_s(found: Simulation) -> float | None:
    """Seconds from a round of pp micro-batches to the next, if on all ranks all of it repeats after as long."""
    schedule, seen = found.schedule, []
    for row, times in zip(schedule.instructions, found.times, strict=True):
        size = len(row) * schedule.pp // schedule.num_micro_batches
        first = len(row) - 3 * size
        for place in range(first, first + size) if first >= 0 else ():
            one, next_one = row[place], row[place + size]
            if (one.op, one.micro_batch + schedule.pp, one.stage) != next_one:
                return None
            seen.append(times[place + size][0] - times[place][0])
    return max(seen) if seen and isclose(min(seen), max(seen), rel_tol=1e-9) else None


@checked
def stage_costs(
    run: Run, cluster: Cluster, utilisation: Utilisation = Utilisation(), overlap: Overlap = Overlap()
) -> Costs:
    """Return what the simulator needs: seconds of each stage's F, I and W, and of a transfer between stages."""
    return _costs(run, cluster, _stage_times(run, cluster, utilisation, overlap))


def _costs(run: Run, cluster: Cluster, stages: Sequence[_StageTime]) -> Costs:
    transfer_s = 0.0
    if run.layout.pp > 1:
        activations = replace(boundary_calls(run, pp_rank=0, tp_rank=0)[0], count=1)
        transfer_s = calls_s([activations], run.layout, cluster, "pp")
    columns = zip(*((stage.forward_s, stage.input_s, stage.weight_s) for stage in stages), strict=True)
    return Costs(*columns, transfer_s)


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
    """Return the times of each stage; most are alike, and computed once, also for runs that differ in ZeRO alone."""
    config, layers = run.config, layers_of(run.config, run.layout)
    kinds = [
        (stage_config(config, layers, stage), stage == 0, stage == len(layers) - 1) for stage in range(len(layers))
    ]
    inside = replace(run.layout, zero_stage=0, dp_replicate=1) if run.layout.zero_stage else run.layout
    alike = replace(run, layout=inside, offload=Offload()) if run.layout.zero_stage else run
    first = {kind: stage for stage, kind in reversed(list(enumerate(kinds)))}
    found = {kind: _stage_time(alike, cluster, utilisation, overlap, stage) for kind, stage in first.items()}
    return [found[kind] for kind in kinds]


@lru_cache(maxsize=4096)
def _stage_time(run: Run, cluster: Cluster, utilisation: Utilisation, overlap: Overlap, stage: int) -> _StageTime:
    config, layout, seq_len = run.config, run.layout, run.seq_len
    layers = layers_of(config, layout)
    part, tokens = stage_config(config, layers, stage), layout.micro_batch * seq_len
    shared_by = layout.cp * layout.tp
    flops = stage_flops(config, layout.micro_batch, seq_len, layers, stage, utilisation.causal)
    scores_flops = tokens * attention_flops_per_token(part, seq_len, utilisation.causal)
    matmul_flops_per_s = shared_by * utilisation.matmul_flops_per_s(cluster)
    scores_s = scores_flops / (shared_by * utilisation.attention_flops_per_s(cluster))
    weight_s = flops[2] / matmul_flops_per_s
    forward_s, input_s = weight_s + scores_s, weight_s + backward_of_scores(run) * scores_s
    head_s = tokens * 2 * head_parameters(config) / matmul_flops_per_s if stage == len(layers) - 1 else 0.0
    input_s += {"none": 0.0, "selective": scores_s, "full": forward_s - head_s}[layout.recompute]

    listed = stage_calls(run, stage)
    tp_forward_s, tp_backward_s = _by_pass(listed["tp"], layout, cluster, "tp")
    if overlap.tp and layout.tp > 1 and part.moe is None:
        tp_backward_s -= part.num_layers * hidden_s(run, cluster, utilisation)
    cp_s = part.num_layers * _exposed_cp_s(run, cluster, utilisation)
    cp_forward_s = cp_s / (1 + FUSED_BACKWARD)
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
    backward_s = calls_s((call for call in listed if call.place in _IN_BACKWARD), layout, cluster, axis)
    return calls_s(listed, layout, cluster, axis) - backward_s, backward_s


def _exposed_cp_s(run: Run, cluster: Cluster, utilisation: Utilisation) -> float:
    """What one layer's attention takes longer on cp ranks than an even share of the work, forward and backward."""
    if run.layout.cp == 1:
        return 0.0
    time = attention_time(run, cluster, utilisation)
    return time.waiting_s + time.exposed_s


# ------------------------------------------------------------------------------------ gradients and ZeRO
def _of(stages: Sequence[_StageTime], mine: Sequence[int]) -> tuple[float, float]:
    """Seconds of one micro-batch's forward and backward on these stages."""
    forward_s = sum(stages[stage].forward_s for stage in mine)
    return forward_s, sum(stages[stage].input_s + stages[stage].weight_s for stage in mine)


_AFTER_BACKWARD = (  # sums of gradients that begin when backward is done: nothing hides them
    "gradients of replicas", "gradients of whole parameters", "key/value gradients", "tied weight",
)  # fmt: skip


def _exposed_data_s(run: Run, cluster: Cluster, overlap: Overlap, pp_rank: int, computing_s) -> float:
    """What a rank waits for gradients and parameters: what neither forward nor backward of a micro-batch hides."""
    layout = run.layout
    listed = calls(run, layout.mesh.rank(pp=pp_rank, dp=0, cp=0, tp=0))
    seconds = dict.fromkeys(("gradients", "parameters", "after backward"), 0.0)
    for axis in (*layout.shard_axes, "replicate", "expert_replicate", "tp", "pp"):
        for call in listed[axis]:
            name = "after backward" if call.place in _AFTER_BACKWARD else call.place
            if name in seconds and call.collective != "send":  # between stages gradients of activations are sent
                seconds[name] += calls_s([call], layout, cluster, axis)
    if not overlap.data:
        return sum(seconds.values())
    later_s = seconds["after backward"]
    forward_s, backward_s = computing_s
    times = layout.micro_batches
    if layout.zero_stage == 3:
        gather_s, reduce_s = seconds["parameters"] / (2 * times), seconds["gradients"] / times
        return later_s + times * (max(0.0, gather_s - forward_s) + max(0.0, gather_s + reduce_s - backward_s))
    rounds = times if layout.zero_stage == 2 else 1
    exposed_s = rounds * max(0.0, seconds["gradients"] / rounds - backward_s)
    return later_s + exposed_s + max(0.0, seconds["parameters"] - forward_s)
