"""Time of data parallelism and ZeRO: gradients, parameters, the update; buckets, tokens that hide a gather, offload."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from course_lib.config import ModelConfig
from course_lib.flops import attention_parameters, mlp_parameters
from course_lib.hardware import GPU, Link, link, peak_flops
from course_lib.memory.budget import states_of
from course_lib.memory.states import offload_link_bytes, wire_grad_bytes
from course_lib.run import Run, recipe_of
from course_lib.timing.collectives import bus_factor, collective_s, ranks_in_a_node
from course_lib.timing.layer import Case, Times, network_s, stages_of
from course_lib.timing.timelines import dp_spans
from course_lib.traffic.data import flat_calls
from course_lib.validate import Amount, Bytes, Positive, Share, Size, checked

STEP_S = 0.05  # of every step: data, logging
# Bytes of a parameter that an update goes over, counted: PyTorch's foreach AdamW reads and writes each state several
# times, a fused one once.
UPDATE_BYTES, FUSED_UPDATE_BYTES = 70, 30
# Read off measured runs that differ in ZeRO alone: sums of gradients beside tp's messages take so many times
# as long on the most nodes that were measured. (80B, tp 32: 42 s a step with ZeRO-0, 8 s with ZeRO-1.)
_CONTENTION = 8


def exposed_data_s(case: Case, times: Times, pp_rank: int) -> float:
    """What a rank waits for gradients and parameters: what neither forward nor backward of a micro-batch hides."""
    layout, zero_stage = case.run.layout, _zero_stage(case)
    seconds = {"gradients": 0.0, "parameters": 0.0, "after": 0.0}

    def exchange_s(collective: str, size: float, ranks: int, axis: str) -> float:
        per_node, share = ranks_in_a_node(layout, case.cluster, axis), case.engine.port_share
        by_all_ports = network_s(case.cluster, collective, size, ranks, per_node)
        if not share or zero_stage < 3 or per_node == ranks:
            return by_all_ports
        return max(by_all_ports, bus_factor(collective, ranks) * size / (share * case.cluster.between.bytes_per_s))

    for experts, numel in enumerate(numel_of_rank(case.run, stages_of(case.run, case.engine), pp_rank)):
        if not numel:
            continue
        axis = layout.shard_axes[experts]
        ranks = layout.expert_shard_size if experts else layout.shard_size
        for call in flat_calls(case.run, round(numel), ranks, zero_stage):  # all buckets as one
            seconds[call.place] += call.count * exchange_s(call.collective, call.payload_bytes, ranks, axis)
        if layout.dp_replicate > 1:
            axis = "expert_replicate" if experts else "replicate"
            size = wire_grad_bytes(recipe_of(case.run.recipe)) * numel / ranks
            seconds["after"] += exchange_s("all_reduce", size, layout.dp_replicate, axis)
    if zero_stage == 0:
        seconds["gradients"] *= 1 + (_CONTENTION - 1) * case.slowness**2
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


def _zero_stage(case: Case) -> int:
    """ZeRO as it sends: none where there is nobody to shard over, stage 1 where parameters stay gathered."""
    layout = case.run.layout
    if layout.data_size == 1 and case.run.offload.parameters == "device":
        return 0
    whole = case.engine.pipeline_grads_whole and layout.pp > 1
    return min(layout.zero_stage, 1) if whole else layout.zero_stage


def numel_of_rank(run: Run, layers: Sequence[int], pp_rank: int) -> tuple[float, float]:
    """Numbers of the matrices of one rank: of all but experts, and of experts; `layers` of each stage."""
    layout, config = run.layout, run.config
    dense, experts = 0, 0
    for stage in layout.stages_of_rank(pp_rank):
        first = sum(layers[:stage])
        of_layers = _numel_of_layers(config, first, first + layers[stage])
        ends = (stage == 0) + (stage == len(layers) - 1) * (not config.tied or layout.pp > 1)
        dense += of_layers[0] + ends * config.vocab_size * config.d_model
        experts += of_layers[1] / layout.ep
    return dense / layout.tp, experts / (1 if layout.folded else layout.tp)


@lru_cache(maxsize=1024)
def _numel_of_layers(config: ModelConfig, first: int, end: int) -> tuple[int, int]:
    """Weights of matrices of the layers from `first` to `end`: all but routed experts, and these."""
    moe, with_experts = config.moe, config.moe_layers_before(end) - config.moe_layers_before(first)
    dense = (end - first) * attention_parameters(config) + (end - first - with_experts) * mlp_parameters(config)
    expert = with_experts * 3 * config.d_model * moe.d_expert if moe else 0
    return dense + expert * (moe.num_shared_experts if moe else 0), expert * (moe.num_experts if moe else 0)


def update_s(case: Case) -> float:
    """The optimizer goes over its states; and the rest of a step that is no training: data, logging."""
    run, layout = case.run, case.run.layout
    shards = layout.data_size if layout.zero_stage else 1
    size = FUSED_UPDATE_BYTES if case.engine.fused else UPDATE_BYTES
    ends = (1 if run.config.tied else 2) * run.config.vocab_size * run.config.d_model
    parameters = sum(_numel_of_layers(run.config, 0, run.config.num_layers)) + ends
    parameters = 0.0 if run.lora else parameters / (layout.tp * layout.pp)
    seconds = STEP_S + size * parameters / shards / case.cluster.gpu.memory_bytes_per_s
    if run.offload.optimizer != "device" or run.offload.parameters != "device":
        seconds += sum(crossing_s(offload_link_bytes(states_of(run), run.offload, layout.micro_batches)).values())
    return seconds


@checked
def dp_step_s(forward_s: Amount, backward_s: Amount, comm_s: Amount, num_buckets: Size = 1) -> float:
    """Seconds of one step whose all-reduce takes comm_s in all, cut into equal buckets beside backward."""
    spans = dp_spans(forward_s, backward_s, [comm_s / num_buckets] * num_buckets)
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
