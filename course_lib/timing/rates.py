"""Rates: which share of its peak a GPU reaches, and how much of it is useful (MFU, HFU); the roofline.

Attention's kernels do not run at the rate of matrix products. What they reach is said here and nowhere else.
"""

from dataclasses import dataclass

from course_lib.hardware import GPU, Cluster, peak_flops
from course_lib.validate import Amount, Positive, Share, Size, check_fields, checked

# Shares of an H100's peak that attention's kernels reach, of the pairs that a causal mask leaves.
# Source: Shah et al. 2024 (arXiv:2407.08608): 35 % in its abstract; up to 75 % forward, less backward.
FLASH_ATTENTION_2, FLASH_ATTENTION_3 = 0.35, 0.65


@dataclass(frozen=True)
class Utilisation:
    """Shares of the GPU's peak that kernels reach while they run; waiting is not in them.

    matmul      matrix products; good runs on H100 compute at 0.5 to 0.6
    attention   the kernel of scores and values
    causal      whether this kernel skips the pairs that a causal mask forbids
    """

    matmul: Share = 0.5
    attention: Share = FLASH_ATTENTION_2
    causal: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("matmul", "attention"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0; give a share of the peak above 0 and at most 1, such as 0.5")

    def matmul_flops_per_s(self, cluster: Cluster) -> float:
        """Return the FLOP/s of one GPU in matrix products."""
        return self.matmul * peak_flops(cluster.gpu)

    def attention_flops_per_s(self, cluster: Cluster) -> float:
        """Return the FLOP/s of one GPU in attention's kernel."""
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
