"""Modelled time of ZeRO, tensor and sequence parallelism: what communication costs, and what hides it.

Everything here is modelled, nothing measured. The assumptions, once for all functions:
- computing runs at one share of the GPU's peak (`utilisation`), however narrow the matrices become;
- a collective takes the time of the fastest algorithm and protocol, as NCCL's own model has it;
- computing and communicating do not slow each other down, and no rank is late.
Real clusters are slower; next to published figures the gap is what these assumptions leave out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from course_lib.config import ModelConfig
from course_lib.hardware import GPU, Cluster, link, peak_flops
from course_lib.layout import Layout
from course_lib.memory.states import Recipe, recipe_of
from course_lib.memory.zero import wire_grad_bytes
from course_lib.run import Run
from course_lib.span import Span
from course_lib.timing import collective_s, layer_matmul_parameters, step_flops
from course_lib.traffic import Call, calls


# ------------------------------------------------------------------------------------ collectives
def calls_s(calls: Iterable[Call], cluster: Cluster, per_node: int | None = None) -> float:
    """Seconds of all these calls, one after the other."""
    return sum(
        call.count * collective_s(call.collective, call.payload_bytes, call.group_size, cluster, per_node)
        for call in calls
    )


# ------------------------------------------------------------------------------------ tensor and sequence parallelism
@dataclass(frozen=True)
class TensorParallelStep:
    """One micro-batch, forward and backward, of one tp group."""

    num_tokens: int
    tp: int
    compute_s: float
    comm_s: float
    hidden_s: float  # the part of comm_s behind which the GPU computes

    @property
    def step_s(self) -> float:
        return self.compute_s + self.comm_s - self.hidden_s

    @property
    def comm_share(self) -> float:
        """Share of the step in which the GPU waits for communication (0 to 1)."""
        return (self.comm_s - self.hidden_s) / self.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.num_tokens / self.step_s / self.tp


def tensor_parallel_step(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    tp: int,
    cluster: Cluster,
    utilisation: float,
    sequence_parallel: bool = False,
    regather: bool = False,
    recompute: str = "none",
    itemsize: int = 2,
    overlap: bool = False,
) -> TensorParallelStep:
    """Model one micro-batch's forward and backward pass under tensor parallelism.

    overlap   hide backward's sums behind the weight gradients of the same column-parallel matrices, and a gather made
              again behind the gradients of their input; a forward sum cannot be hidden, as what follows needs it
    """
    flops = step_flops(config, batch_size * seq_len, seq_len, recompute)
    compute_s = flops / tp / (utilisation * peak_flops(cluster.gpu))
    layout = Layout(
        tp=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        regather=regather and tp > 1,
        micro_batch=batch_size,
        recompute=recompute,
    )
    run = Run(config, layout, seq_len, {2: "bf16-master", 4: "fp32"}[itemsize])
    comm_s, hidden_s = calls_s(calls(run)["tp"], cluster), 0.0
    if overlap and tp > 1:
        payload_bytes = batch_size * seq_len * config.d_model * itemsize
        hideable_s = [collective_s("reduce_scatter" if sequence_parallel else "all_reduce", payload_bytes, tp, cluster)]
        if regather:
            hideable_s.append(collective_s("all_gather", payload_bytes, tp, cluster))
        parts = _layer_parts_s(config, batch_size, seq_len, tp, cluster, utilisation)
        hidden_s = config.num_layers * sum(min(each_s, part.column_s) for part in parts for each_s in hideable_s)
    return TensorParallelStep(batch_size * seq_len, tp, compute_s, comm_s, hidden_s)


@dataclass(frozen=True)
class _Part:
    """Seconds of attention's or the MLP's forward pass on one rank, and of its column-parallel matrices in it."""

    name: str
    forward_s: float
    column_s: float


def _layer_parts_s(config, batch_size, seq_len, tp, cluster, utilisation) -> list[_Part]:
    D, H = config.d_model, config.head_dim
    tokens, rate = batch_size * seq_len, tp * utilisation * peak_flops(cluster.gpu)
    column = {
        "attention": D * H * (config.num_heads + 2 * config.num_kv_heads),
        "MLP": (2 if config.family == "llama" else 1) * D * config.d_ff,
    }
    whole = {"attention": column["attention"] + D * H * config.num_heads, "MLP": column["MLP"] + D * config.d_ff}
    assert sum(whole.values()) == layer_matmul_parameters(config)
    scores_flops = {"attention": 4 * config.num_heads * H * seq_len, "MLP": 0}
    return [
        _Part(name, tokens * (2 * whole[name] + scores_flops[name]) / rate, tokens * 2 * column[name] / rate)
        for name in ("attention", "MLP")
    ]


def tensor_parallel_layer_spans(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    tp: int,
    cluster: Cluster,
    utilisation: float,
    overlap: bool = True,
    sequence_parallel: bool = False,
    regather: bool = False,
    itemsize: int = 2,
) -> list[Span]:
    """One layer on one rank, forward then backward, on the lanes "compute" and "communication".

    Backward of a part: gradients of its row-parallel matrix and of its input; then the sum of the input's gradient over
    the ranks, and beside it (overlap) or after it the weight gradients of the column-parallel matrices. With sequence
    parallelism a sum is a reduce-scatter, and what the next part reads is gathered first.
    """
    payload_bytes = batch_size * seq_len * config.d_model * itemsize
    gather_s = collective_s("all_gather", payload_bytes, tp, cluster)
    scatter_s = collective_s("reduce_scatter", payload_bytes, tp, cluster)
    sum_s = scatter_s if sequence_parallel else collective_s("all_reduce", payload_bytes, tp, cluster)
    parts = _layer_parts_s(config, batch_size, seq_len, tp, cluster, utilisation)
    spans, now_s = [], 0.0

    def add(lane: str, name: str, start_s: float, seconds: float) -> float:
        spans.append(Span(0, lane, name, start_s, start_s + seconds))
        return start_s + seconds

    for part in parts:
        if sequence_parallel:
            now_s = add("communication", f"gather {part.name}'s input", now_s, gather_s)
        now_s = add("compute", f"forward {part.name}", now_s, part.forward_s)
        now_s = add("communication", f"sum {part.name}'s output", now_s, sum_s)
    for part in reversed(parts):
        if sequence_parallel:
            now_s = add("communication", f"gather {part.name}'s output gradient", now_s, gather_s)
        now_s = add("compute", f"backward of {part.name}'s rows", now_s, 2 * (part.forward_s - part.column_s))
        network_s = now_s
        if regather:
            network_s = add("communication", f"gather {part.name}'s input again", now_s, gather_s)
        now_s = add("compute", f"{part.name}'s input gradient", now_s if overlap else network_s, part.column_s)
        summed_s = add("communication", f"sum {part.name}'s input gradient", max(now_s, network_s), sum_s)
        weights_from_s = max(now_s, network_s) if overlap else summed_s
        now_s = max(summed_s, add("compute", f"{part.name}'s weight gradients", weights_from_s, part.column_s))
    return spans


def waiting_s(spans: Sequence[Span]) -> float:
    """Seconds in which the compute lane is idle, from the first span's start to the last one's end."""
    whole_s = max(span.stop_s for span in spans) - min(span.start_s for span in spans)
    return whole_s - sum(span.seconds for span in spans if span.lane == "compute")


# ------------------------------------------------------------------------------------ ZeRO
@dataclass(frozen=True)
class ZeroLayer:
    """Seconds of one block under stage 3: computing, gathering its parameters, reduce-scattering its gradients."""

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float

    @property
    def hidden(self) -> bool:
        """Whether prefetching hides it all: each pass computes at least as long as it communicates."""
        return self.gather_s <= self.forward_s and self.gather_s + self.reduce_s <= self.backward_s


def zero3_layer(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    dp_size: int,
    cluster: Cluster,
    utilisation: float,
    recipe: Recipe | str = "bf16-master",
    per_node: int | None = None,
) -> ZeroLayer:
    """Model one block of stage 3 (matrices alone: norms are too small to matter here)."""
    recipe, numel = recipe_of(recipe), layer_matmul_parameters(config)
    flops = batch_size * seq_len * (2 * numel + 4 * config.num_heads * config.head_dim * seq_len)
    forward_s = flops / (utilisation * peak_flops(cluster.gpu))
    return ZeroLayer(
        forward_s,
        2 * forward_s,
        collective_s("all_gather", numel * recipe.param_bytes, dp_size, cluster, per_node),
        collective_s("reduce_scatter", numel * wire_grad_bytes(recipe), dp_size, cluster, per_node),
    )


def tokens_that_hide_a_gather(
    dp_size: int, bytes_per_s: float, gpu: GPU, utilisation: float, param_bytes: int = 2
) -> float:
    """Tokens a GPU from which on computing a block takes as long as gathering it: the model's size cancels.

    Bytes    a parameter costs param_bytes (N - 1) / N sent and 2 FLOPs a token forward; backward costs twice of both
    """
    return param_bytes * (dp_size - 1) / dp_size / bytes_per_s * utilisation * peak_flops(gpu) / 2


def zero3_spans(layer: ZeroLayer, num_layers: int, prefetch: bool = True) -> list[Span]:
    """A sequence of equal blocks on one rank, forward then backward; one lane computes, one communicates.

    With prefetch a block's gather starts when the block before it starts computing, without when that has ended. In
    backward a reduce-scatter follows its block, behind the gather of the next.
    """
    spans: list[Span] = []
    network_s = compute_s = allowed_s = 0.0  # when each lane is free, and from when on the next gather may start

    def send(name: str, earliest_s: float, seconds: float) -> float:
        nonlocal network_s
        spans.append(Span(0, "communication", name, max(network_s, earliest_s), max(network_s, earliest_s) + seconds))
        network_s = spans[-1].stop_s
        return network_s

    waiting: tuple[str, float] | None = None  # the reduce-scatter of the block before, and when it is ready
    passes = [("forward", range(num_layers), layer.forward_s), ("backward", range(num_layers)[::-1], layer.backward_s)]
    for name, indices, seconds in passes:
        for index in indices:
            gathered_s = send(f"gather {index}", allowed_s, layer.gather_s)
            if waiting:
                send(*waiting, layer.reduce_s)
            start_s = max(compute_s, gathered_s)
            compute_s = start_s + seconds
            spans.append(Span(0, "compute", f"{name} {index}", start_s, compute_s))
            allowed_s = start_s if prefetch else compute_s
            waiting = (f"reduce {index}", compute_s) if name == "backward" else None
    send(*waiting, layer.reduce_s)
    return spans


# ------------------------------------------------------------------------------------ offload
def crossing_s(
    link_bytes: Mapping[str, int], pcie: str = "pcie4", drive: str = "nvme", ranks_per_drive: int = 1
) -> dict[str, float]:
    """Seconds of each crossing of one rank's offloaded bytes, as `memory.zero.offload_link_bytes` predicts them.

    Each GPU has a PCIe link of its own. A drive's rate is divided among `ranks_per_drive`: it is the node's, not the
    GPU's. Latency is left out: pieces are megabytes. One rate serves both directions; many drives write at half the
    rate at which they read.

    Raises   ValueError if a link is unknown, or ranks_per_drive is below 1
    """
    if ranks_per_drive < 1:
        raise ValueError(f"ranks_per_drive is {ranks_per_drive}; required: 1 or more, such as the GPUs of a node")
    to_host, to_disk = link(pcie).bytes_per_s, link(drive).bytes_per_s / ranks_per_drive
    return {name: size / (to_disk if "disk" in name else to_host) for name, size in link_bytes.items()}


def offload_s(
    link_bytes: Mapping[str, int],
    pcie: str = "pcie4",
    drive: str = "nvme",
    ranks_per_drive: int = 1,
    overlap: bool = False,
) -> float:
    """Seconds that one step's crossings take one after the other; with `overlap` those of the slowest link alone.

    PCIe carries both directions at once, a drive reads and writes by turns. Left out: the arithmetic on the host, and
    what the step itself would hide.
    """
    seconds = crossing_s(link_bytes, pcie, drive, ranks_per_drive)
    if not overlap:
        return sum(seconds.values())
    return max(seconds["device to host"], seconds["host to device"], seconds["disk to host"] + seconds["host to disk"])
