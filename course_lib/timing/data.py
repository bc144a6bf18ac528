"""Time of data parallelism: buckets beside the backward pass, tokens that hide a gather, offloaded states."""

from collections.abc import Mapping

from course_lib.hardware import GPU, Link, link, peak_flops
from course_lib.timing.collectives import collective_s
from course_lib.timing.timelines import dp_spans
from course_lib.validate import Amount, Bytes, Positive, Share, Size, checked


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

    compute_s   the optimizer's part is in it; of the rest a third is forward
    link        the slowest of the ring, at the bandwidth that it really gives at this size (hardware.published_link)
    """
    comm_s = 25 * collective_s("all_reduce", grad_bytes / 25, dp_size, link)
    return tokens_per_gpu / dp_step_s(compute_s / 3, compute_s * 2 / 3, comm_s, 25)


@checked
def accumulation_steps(global_batch_size: Size, micro_batch_size: Size, dp_size: Size) -> int:
    """Micro-batches that each rank runs before the optimizer steps: global batch / (micro-batch * dp_size)."""
    together = micro_batch_size * dp_size
    if global_batch_size % together != 0:
        raise ValueError(
            f"global_batch_size ({global_batch_size}) must be a multiple of micro_batch_size ({micro_batch_size}) * "
            f"dp_size ({dp_size}) = {together}; change one of the three"
        )
    return global_batch_size // together


@checked
def tokens_that_hide_a_gather(dp_size: Size, bytes_per_s: Positive, gpu: GPU, utilisation: Share) -> float:
    """Tokens a GPU from which on computing a block takes as long as gathering it: the model's size cancels.

    Bytes    a parameter costs 2 (dp - 1) / dp sent and 2 FLOPs a token forward; backward costs twice of both
    """
    return (dp_size - 1) / dp_size / bytes_per_s * utilisation * peak_flops(gpu)


@checked
def crossing_s(
    link_bytes: Mapping[str, Bytes], pcie: str = "pcie4", drive: str = "nvme", ranks_per_drive: Size = 1
) -> dict[str, float]:
    """Seconds of each crossing of one rank's offloaded bytes, as `memory.states.offload_link_bytes` predicts them.

    Each GPU has a PCIe link of its own; a drive's rate is divided among `ranks_per_drive`. Latency is left out, and so
    is that many drives write at half the rate at which they read. One after the other they take the sum; at best as
    long as the slowest link: PCIe carries both directions at once, a drive reads and writes by turns.
    """
    to_host, to_disk = link(pcie).bytes_per_s, link(drive).bytes_per_s / ranks_per_drive
    return {name: size / (to_disk if "disk" in name else to_host) for name, size in link_bytes.items()}
