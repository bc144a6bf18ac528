"""Time of data parallelism: buckets beside the backward pass, ZeRO-3's gathers beside computing, offloaded states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course_lib.flops import layer_matmul_parameters
from course_lib.hardware import GPU, Cluster, Link, link, peak_flops
from course_lib.memory.states import recipe_of
from course_lib.memory.zero import wire_grad_bytes
from course_lib.run import Run
from course_lib.span import Span
from course_lib.timing.collectives import collective_s, ranks_in_a_node
from course_lib.timing.rates import Utilisation
from course_lib.timing.tensor import layer_parts
from course_lib.validate import Amount, Bytes, Positive, Share, Size, checked


# ------------------------------------------------------------------------------------ buckets
@checked
def dp_spans(
    forward_s: Amount, backward_s: Amount, bucket_comm_s: Sequence[Amount], overlap: bool = True
) -> list[Span]:
    """One data-parallel step on rank 0: forward and backward in one lane, an all-reduce for each bucket in another.

    Bucket i is ready when (i + 1) / K of the backward is done, and waits for the bucket before it. Without overlap all
    wait for the end of the backward.
    """
    spans = [Span(0, "compute", "forward", 0.0, forward_s)]
    spans.append(Span(0, "compute", "backward", forward_s, forward_s + backward_s))
    free_s = 0.0
    for index, comm_s in enumerate(bucket_comm_s):
        done = (index + 1) / len(bucket_comm_s) if overlap else 1.0
        start_s = max(forward_s + done * backward_s, free_s)
        free_s = start_s + comm_s
        spans.append(Span(0, "communication", f"all-reduce {index}", start_s, free_s))
    return spans


@checked
def exposed_s(spans: Sequence[Span]) -> float:
    """Seconds of communication that no computation hides: from the end of the compute lane to the end of all."""
    compute_stop_s = max(span.stop_s for span in spans if span.lane == "compute")
    return max(span.stop_s for span in spans) - compute_stop_s


@checked
def dp_step_s(
    forward_s: Amount, backward_s: Amount, comm_s: Amount, num_buckets: Size = 1, overlap: bool = True
) -> float:
    """Seconds of one step whose all-reduce takes comm_s in all, cut into equal buckets."""
    spans = dp_spans(forward_s, backward_s, [comm_s / num_buckets] * num_buckets, overlap)
    return max(span.stop_s for span in spans)


@checked
def dp_throughput(dp_size: Size, tokens_per_gpu: Amount, compute_s: Amount, grad_bytes: Amount, link: Link) -> float:
    """Return tokens per second and GPU of data parallelism with 25 buckets that overlap.

    Assumes: compute_s does not depend on dp_size; a third of it is forward, two thirds backward; `link` is the slowest
    of the ring, at the bandwidth it really gives at this size (see hardware.published_link); no rank is late; the
    optimizer's time is within compute_s.
    """
    comm_s = 25 * collective_s("all_reduce", grad_bytes / 25, dp_size, link)
    return tokens_per_gpu / dp_step_s(compute_s / 3, compute_s * 2 / 3, comm_s, 25)


@checked
def accumulation_steps(global_batch_size: Size, micro_batch_size: Size, dp_size: Size) -> int:
    """Micro-batches that each rank runs before the optimizer steps: global batch / (micro-batch * dp_size).

    Raises   ValueError if that is not a whole number
    """
    together = micro_batch_size * dp_size
    if global_batch_size % together != 0:
        raise ValueError(
            f"global_batch_size ({global_batch_size}) must be a multiple of micro_batch_size ({micro_batch_size}) * "
            f"dp_size ({dp_size}) = {together}; change one of the three"
        )
    return global_batch_size // together


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


@checked
def zero3_layer(run: Run, cluster: Cluster, utilisation: Utilisation = Utilisation()) -> ZeroLayer:
    """Model one block of stage 3 (matrices alone: norms are too small to matter here)."""
    recipe, numel = recipe_of(run.recipe), layer_matmul_parameters(run.config) // run.layout.tp
    ranks, per_node = run.layout.data_size, ranks_in_a_node(run.layout, cluster, "data")
    parts = layer_parts(run, cluster, utilisation)
    return ZeroLayer(
        sum(part.forward_s for part in parts),
        sum(part.backward_s for part in parts),
        collective_s("all_gather", numel * recipe.param_bytes, ranks, cluster, per_node),
        collective_s("reduce_scatter", numel * wire_grad_bytes(recipe), ranks, cluster, per_node),
    )


@checked
def tokens_that_hide_a_gather(dp_size: Size, bytes_per_s: Positive, gpu: GPU, utilisation: Share) -> float:
    """Tokens a GPU from which on computing a block takes as long as gathering it: the model's size cancels.

    Bytes    a parameter costs 2 (dp - 1) / dp sent and 2 FLOPs a token forward; backward costs twice of both
    """
    return (dp_size - 1) / dp_size / bytes_per_s * utilisation * peak_flops(gpu)


@checked
def zero3_spans(layer: ZeroLayer, num_layers: Size, prefetch: bool = True) -> list[Span]:
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
@checked
def crossing_s(
    link_bytes: Mapping[str, Bytes], pcie: str = "pcie4", drive: str = "nvme", ranks_per_drive: Size = 1
) -> dict[str, float]:
    """Seconds of each crossing of one rank's offloaded bytes, as `memory.zero.offload_link_bytes` predicts them.

    Each GPU has a PCIe link of its own. A drive's rate is divided among `ranks_per_drive`: it is the node's, not the
    GPU's. Latency is left out: pieces are megabytes. One rate serves both directions; many drives write at half the
    rate at which they read.

    Raises   ValueError if a link is unknown, or ranks_per_drive is below 1
    """
    to_host, to_disk = link(pcie).bytes_per_s, link(drive).bytes_per_s / ranks_per_drive
    return {name: size / (to_disk if "disk" in name else to_host) for name, size in link_bytes.items()}


def offload_s(
    link_bytes: Mapping[str, Bytes],
    pcie: str = "pcie4",
    drive: str = "nvme",
    ranks_per_drive: Size = 1,
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


@checked
def copy_spans(layer_s: Positive, copy_s: Amount, num_layers: Size, side_stream: bool = True) -> list[Span]:
    """A forward pass on rank 0 whose layers copy what they saved to the host, in the same stream or in one beside it.

    In the same stream the next layer waits for the copy. Beside it a copy waits for its layer and for the copy before.
    """
    spans, compute_s, copied_s = [], 0.0, 0.0
    for layer in range(num_layers):
        start_s = compute_s if side_stream else max(compute_s, copied_s)
        compute_s = start_s + layer_s
        spans.append(Span(0, "compute", f"forward {layer}", start_s, compute_s))
        ready_s = max(compute_s, copied_s)
        copied_s = ready_s + copy_s
        spans.append(Span(0, "copy", f"out {layer}", ready_s, copied_s))
    return spans
