"""Arithmetic of time: seconds a collective takes, FLOPs of a step, MFU and HFU, overlap.

Plain functions of numbers: nothing here runs or measures anything. Two models carry it:
- alpha-beta: a message of n bytes takes alpha + n * beta seconds (latency, and the inverse of bandwidth);
- roofline: work takes as long as its FLOPs at peak, or its bytes at memory bandwidth, whichever is longer.
"""

from collections.abc import Sequence

from course_lib.config import ModelConfig, require_dense
from course_lib.hardware import GPU, Link, peak_flops
from course_lib.memory.moe import active_matmul_parameters
from course_lib.span import Span


# ------------------------------------------------------------------------------------ seconds of a collective
def collective_steps(name: str, world_size: int) -> int:
    """How many messages follow one another in a ring of world_size ranks."""
    _check_world(world_size)
    if name in ("all_reduce", "ring_all_reduce"):
        return 2 * (world_size - 1)
    if name in ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter"):
        return world_size - 1
    if name == "send":
        return 1
    raise ValueError(f"collective {name!r} is unknown; choose all_reduce, reduce_scatter, all_gather, all_to_all, ...")


def bus_factor(name: str, world_size: int) -> float:
    """Payloads that cross one link: 2 (N - 1) / N for all_reduce, (N - 1) / N for its halves, 1 for a chain."""
    steps = collective_steps(name, world_size)
    if name in ("broadcast", "reduce", "send"):  # a chain passes the whole payload on, in small pieces at once
        return 1.0 if steps else 0.0
    return steps / world_size


def collective_s(name: str, payload_bytes: float, world_size: int, link: Link) -> float:
    """Alpha-beta time of a ring: steps * alpha + bus_factor * payload * beta.

    Source   Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH"
    """
    latency_s = collective_steps(name, world_size) * link.latency_s
    return latency_s + bus_factor(name, world_size) * payload_bytes / link.bytes_per_s


def hierarchical_all_reduce_s(
    payload_bytes: float, num_nodes: int, gpus_per_node: int, inside: Link, between: Link
) -> float:
    """All-reduce over nodes: reduce-scatter inside each, all-reduce of 1 / gpus_per_node between, all-gather inside.

    All GPUs of a node use their own port to the network at the same time.
    """
    reduce_scatter_s = collective_s("reduce_scatter", payload_bytes, gpus_per_node, inside)
    between_s = collective_s("all_reduce", payload_bytes / gpus_per_node, num_nodes, between)
    all_gather_s = collective_s("all_gather", payload_bytes, gpus_per_node, inside)
    return reduce_scatter_s + between_s + all_gather_s


def bus_bandwidth(name: str, payload_bytes: float, seconds: float, world_size: int) -> float:
    """Bytes per second over one link, as nccl-tests prints it: comparable with the link, whatever the world size."""
    return bus_factor(name, world_size) * payload_bytes / seconds


def _check_world(world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size ({world_size}) must be 1 or more")


# ------------------------------------------------------------------------------------ FLOPs
def matmul_parameters(config: ModelConfig) -> int:
    """Weights that a token is multiplied with: attention, feed-forward, head; not the embedding, a look-up.

    Of experts: the router, the top_k chosen ones and the shared ones.
    """
    if config.moe or config.mla:
        return active_matmul_parameters(config)
    return config.num_layers * layer_matmul_parameters(config) + config.vocab_size * config.d_model


def layer_matmul_parameters(config: ModelConfig) -> int:
    """Weights of one layer's matrix multiplications: q, k, v, o, and two feed-forward matrices (three in Llama).

    Raises   ValueError if the model has experts: its layers are not alike
    """
    require_dense(config, "layer_matmul_parameters")
    attention = config.d_model * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    return attention + (3 if config.family == "llama" else 2) * config.d_model * config.d_ff


def attention_flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> int:
    """Forward FLOPs of scores and of their product with the values: 4 L h s a token; half of it if causal.

    With latent attention, whose heads are whole again in training, keys are longer than values.
    """
    score_dim = value_dim = config.head_dim
    if config.mla:
        score_dim, value_dim = config.mla.nope_dim + config.mla.rope_dim, config.mla.value_dim
    flops = 2 * config.num_layers * config.num_heads * (score_dim + value_dim) * seq_len
    return flops // 2 if causal else flops


def forward_flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> int:
    """2 N + 4 L h s, where N counts the weights that a token is multiplied with.

    Most published MFU figures do not halve the attention of a causal model; that is the default here.
    Source   Narayanan et al. 2021 (arXiv:2104.04473), section 5.1; Kaplan et al. 2020 (arXiv:2001.08361)
    """
    return 2 * matmul_parameters(config) + attention_flops_per_token(config, seq_len, causal)


def flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> int:
    """Model FLOPs of forward and backward, three times the forward: 6 N + 12 L h s. No recomputation."""
    return 3 * forward_flops_per_token(config, seq_len, causal)


def step_flops(
    config: ModelConfig, num_tokens: int, seq_len: int, recompute: str = "none", causal: bool = False
) -> int:
    """FLOPs that the hardware does in one step; with recompute="none" they are the model FLOPs.

    "full" repeats the forward of every layer (not of the head), "selective" that of the attention scores.
    Source   Korthikanti et al. 2022 (arXiv:2205.05198), sections 5 and 6.3
    """
    again = {
        "none": 0,
        "selective": attention_flops_per_token(config, seq_len, causal),
        "full": forward_flops_per_token(config, seq_len, causal) - 2 * config.vocab_size * config.d_model,
    }
    if recompute not in again:
        raise ValueError(f"recompute {recompute!r} is not one of {', '.join(again)}")
    return num_tokens * (flops_per_token(config, seq_len, causal) + again[recompute])


def mfu(model_flops: float, seconds: float, num_gpus: int, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation: FLOPs that the model needs, over what the GPUs could have done in that time (0 to 1)."""
    return model_flops / (seconds * num_gpus * peak_flops_per_s)


def hfu(hardware_flops: float, seconds: float, num_gpus: int, peak_flops_per_s: float) -> float:
    """Hardware FLOPs utilisation: as MFU, with the FLOPs of recomputation counted too."""
    return hardware_flops / (seconds * num_gpus * peak_flops_per_s)


def tokens_per_s(flops_a_token: float, num_gpus: int, peak_flops_per_s: float, utilisation: float) -> float:
    """Tokens per second of all GPUs together at that MFU (utilisation, 0 to 1)."""
    return num_gpus * peak_flops_per_s * utilisation / flops_a_token


def training_s(
    num_tokens: float, flops_a_token: float, num_gpus: int, peak_flops_per_s: float, utilisation: float
) -> float:
    """Seconds to train on num_tokens."""
    return num_tokens / tokens_per_s(flops_a_token, num_gpus, peak_flops_per_s, utilisation)


# ------------------------------------------------------------------------------------ roofline
def roofline_s(flops: float, moved_bytes: float, gpu: GPU, precision: str = "bf16") -> float:
    """At least this long: the FLOPs at peak or the bytes at memory bandwidth, whichever takes longer."""
    return max(flops / peak_flops(gpu, precision), moved_bytes / gpu.memory_bytes_per_s)


def ridge_flops_per_byte(gpu: GPU, precision: str = "bf16") -> float:
    """FLOPs per byte moved from which on the GPU is busy computing rather than waiting for memory."""
    return peak_flops(gpu, precision) / gpu.memory_bytes_per_s


def matmul_s(rows: int, inner: int, columns: int, gpu: GPU, precision: str = "bf16", itemsize: int = 2) -> float:
    """Roofline time of (rows x inner) @ (inner x columns), each matrix moved once."""
    moved_bytes = itemsize * (rows * inner + inner * columns + rows * columns)
    return roofline_s(2 * rows * inner * columns, moved_bytes, gpu, precision)


# ------------------------------------------------------------------------------------ data parallelism
def dp_spans(forward_s: float, backward_s: float, bucket_comm_s: Sequence[float], overlap: bool = True) -> list[Span]:
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


def exposed_s(spans: Sequence[Span]) -> float:
    """Seconds of communication that no computation hides: from the end of the compute lane to the end of all."""
    compute_stop_s = max(span.stop_s for span in spans if span.lane == "compute")
    return max(span.stop_s for span in spans) - compute_stop_s


def dp_step_s(forward_s: float, backward_s: float, comm_s: float, num_buckets: int = 1, overlap: bool = True) -> float:
    """Seconds of one step whose all-reduce takes comm_s in all, cut into equal buckets."""
    spans = dp_spans(forward_s, backward_s, [comm_s / num_buckets] * num_buckets, overlap)
    return max(span.stop_s for span in spans)


def dp_throughput(
    dp_size: int,
    tokens_per_gpu: float,
    compute_s: float,
    grad_bytes: float,
    link: Link,
    overlap: bool = True,
    num_buckets: int = 25,
) -> float:
    """Tokens per second and GPU of data parallelism, by alpha-beta.

    Assumes: compute_s does not depend on dp_size; a third of it is forward, two thirds backward; `link` is the slowest
    of the ring, at the bandwidth it really gives at this size (see hardware.published_link); no rank is late; the
    optimizer's time is within compute_s.
    """
    comm_s = num_buckets * collective_s("all_reduce", grad_bytes / num_buckets, dp_size, link)
    step_s = dp_step_s(compute_s / 3, compute_s * 2 / 3, comm_s, num_buckets, overlap)
    return tokens_per_gpu / step_s


def accumulation_steps(global_batch_size: int, micro_batch_size: int, dp_size: int) -> int:
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
