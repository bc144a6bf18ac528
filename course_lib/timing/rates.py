"""Rates: which share of its peak a GPU reaches, and how much of it is useful (MFU, HFU); the roofline.

Attention's kernels do not run at the rate of matrix products. What they reach is said here and nowhere else. `Rates`
are the clock's constants, the only ones that are fitted to runs.
"""

from dataclasses import dataclass

from course_lib.hardware import GPU, Cluster, peak_flops
from course_lib.validate import Amount, Positive, Share, Size, check_fields, checked

# Shares of an H100's peak that attention's kernels reach, of the pairs that a causal mask leaves.
# Source: Shah et al. 2024 (arXiv:2407.08608): 35 % in its abstract; up to 75 % forward, less backward.
FLASH_ATTENTION_2, FLASH_ATTENTION_3 = 0.35, 0.65
# The same of FlashAttention-2 on GPUs before Hopper: 50 to 73 % on A100. Source: Dao 2023 (arXiv:2307.08691).
_FLASH_ATTENTION_2_AMPERE = 0.55
_SINCE_HOPPER = ("H100", "H200", "H800", "H20", "GH200", "B200", "GB200", "B300", "MI300X")


def attention_share(gpu: GPU) -> float:
    """Return the share of a GPU's peak that FlashAttention-2 reaches on it, of the pairs that a mask leaves."""
    return FLASH_ATTENTION_2 if any(name in gpu.name for name in _SINCE_HOPPER) else _FLASH_ATTENTION_2_AMPERE


# What each constant may reasonably be; benchmarks/errors.py stays within.
RANGES: dict[str, tuple[float, float]] = {
    "matmul_share": (0.45, 0.85),
    "half_width": (1.0, 1000.0),
    "small_passes": (5.0, 20.0),
    "layer_launch_ms": (1.5, 5.0),
    "tp_wait_ms": (0.5, 5.0),
    "tp_hop_ms": (0.02, 1.5),
    "stall_s": (0.1, 2.0),
}


@dataclass(frozen=True)
class Rates:
    """The clock's constants: seven are fitted to measured runs, each within its range; two are read off pairs of runs.

    fused and fp8_gain: torchtitan's table 1, without and with torch.compile (5,762 and 6,667 tokens/s), and with FP8
    (8,532), casts and scales counted in.
    """

    matmul_share: Amount = 0.6755  # of a GPU's dense peak that products of wide matrices with many rows reach (0 to 1)
    half_width: Amount = 228.5  # rows, or features, with which products reach half of that
    small_passes: Amount = 14.01  # of small operations over what a layer reads, forward and backward, a kernel each
    layer_launch_ms: Amount = 4.107  # least time of a layer, forward and backward: launches, one for each operation
    # of a layer's least time more for each rank of tp, where ranks wait for each other: in a pipeline over nodes of a
    tp_wait_ms: Amount = 2.372  # measured network, and on many nodes of it
    tp_hop_ms: Amount = 0.2851  # that a collective of tp waits for each node of a measured network that it goes over
    stall_s: Amount = 0.5611  # that a micro-batch waits at each neighbour of a stage, on as many nodes as were measured
    fused: Amount = 0.23  # of small operations' bytes and launches that are left where they are fused
    fp8_gain: Amount = 1.5  # of FP8 products over BF16 ones

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; plausible: {least} to {most}")


RATES = Rates()  # docs/PREDICTOR.md


@dataclass(frozen=True)
class Utilisation:
    """Shares of the GPU's peak that products and attention's kernel reach while they run; H100: 0.5 to 0.6 is good."""

    matmul: Share = 0.5
    attention: Share = FLASH_ATTENTION_2
    causal: bool = True  # whether attention's kernel skips the pairs that a causal mask forbids

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("matmul", "attention"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0; give a share of the peak above 0 and at most 1, such as 0.5")

    def matmul_flops_per_s(self, cluster: Cluster) -> float:
        return self.matmul * peak_flops(cluster.gpu)

    def attention_flops_per_s(self, cluster: Cluster) -> float:
        return self.attention * peak_flops(cluster.gpu)


@checked
def mfu(model_flops: Amount, seconds: Positive, num_gpus: Size, peak_flops_per_s: Positive) -> float:
    """Model FLOPs utilisation: FLOPs that the model needs, over what the GPUs could have done in that time (0 to 1)."""
    return model_flops / (seconds * num_gpus * peak_flops_per_s)


@checked
def hfu(hardware_flops: Amount, seconds: Positive, num_gpus: Size, peak_flops_per_s: Positive) -> float:
    """Hardware FLOPs utilisation: as MFU, with the FLOPs of recomputation counted too."""
    return hardware_flops / (seconds * num_gpus * peak_flops_per_s)


@checked
def tokens_per_s(flops_a_token: Positive, num_gpus: Size, peak_flops_per_s: Positive, utilisation: Share) -> float:
    """Tokens per second of all GPUs together at that MFU (utilisation, 0 to 1)."""
    return num_gpus * peak_flops_per_s * utilisation / flops_a_token


@checked
def roofline_s(flops: Amount, moved_bytes: Amount, gpu: GPU, precision: str = "bf16") -> float:
    """At least this long: the FLOPs at peak or the bytes at memory bandwidth, whichever takes longer."""
    return max(flops / peak_flops(gpu, precision), moved_bytes / gpu.memory_bytes_per_s)
