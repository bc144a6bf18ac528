"""What kernels ask memory for, by arithmetic; what a GPU does with it: roofline and occupancy."""

from dataclasses import dataclass

from course_lib.hardware import GPU, HOPPER, Multiprocessor, peak_flops
from course_lib.timing.rates import roofline_s
from course_lib.validate import Amount, Bytes, Checked, Positive, Size, checked


@checked
def softmax_bytes(rows: Size, n: Size, itemsize: Size = 4) -> tuple[int, int]:
    """Bytes by four kernels and by one: 6 R N + 4 R elements (x and e are read twice), and 2 R N."""
    return itemsize * (6 * rows * n + 4 * rows), itemsize * 2 * rows * n


@checked
def product_bytes(M: Size, N: Size, K: Size, tile_m: Size, tile_n: Size, itemsize: Size = 2) -> tuple[int, int]:
    """Bytes loaded and stored by a tiled product: each row of tiles reads all of B, each column all of A.

    M N K (1 / BM + 1 / BN) elements where tiles divide M and N; BK is not in it.
    """
    rows, columns = -(-M // tile_m), -(-N // tile_n)
    return itemsize * (columns * M * K + rows * K * N), itemsize * M * N


@checked
def flash_bytes(heads: Size, seq_len: Size, head_dim: Size, tile: Size, itemsize: Size = 2) -> int:
    """Bytes of FlashAttention's forward under a causal mask: q and o once, log-sum-exps in FP32, and k and v of the
    n (n + 1) / 2 pairs of tiles that the mask leaves."""
    n = seq_len // tile
    pairs = n * (n + 1) // 2
    return heads * (itemsize * (2 * seq_len * head_dim + 2 * tile * head_dim * pairs) + 4 * seq_len)


@checked
def three_kernel_bytes(heads: Size, seq_len: Size, head_dim: Size, tile: Size, itemsize: Size = 2) -> int:
    """Bytes of the same by scores, softmax and product: the scores go to memory and back twice."""
    n = seq_len // tile
    scores, product = n * 2 * seq_len * head_dim + seq_len**2, seq_len**2 + (n + 1) * seq_len * head_dim
    return heads * itemsize * (scores + 2 * seq_len**2 + product)


@dataclass(frozen=True)
class Roof(Checked):
    """A kernel under the roofline of a GPU, with bf16 products: modelled, with peak rates."""

    gpu: GPU
    flops: Amount
    num_bytes: Positive

    @property
    def intensity(self) -> float:  # FLOP a byte
        return self.flops / self.num_bytes

    @property
    def ridge(self) -> float:  # FLOP a byte from which a kernel can be bound by computing
        return peak_flops(self.gpu) / self.gpu.memory_bytes_per_s

    @property
    def bound_by(self) -> str:
        return "computing" if self.intensity >= self.ridge else "memory"

    @property
    def seconds(self) -> float:  # least, as if computing and moving hid each other: that of the clock
        return roofline_s(self.flops, self.num_bytes, self.gpu)


@checked
def busy_share(M: Size, N: Size, tile_m: Size, tile_n: Size, of: Multiprocessor = HOPPER) -> float:
    """Share (0 to 1) of the SMs' time that a product fills, one tile on an SM at a time: the last wave is not full."""
    tiles = -(-M // tile_m) * -(-N // tile_n)
    return tiles / (-(-tiles // of.count) * of.count)


@checked
def occupancy(registers: Size, shared_bytes: Bytes, warps: Size, of: Multiprocessor = HOPPER) -> float:
    """Share (0 to 1) of the threads of a multiprocessor that a kernel fills, by what runs out first.

    A thread's registers are handed out in eights; shared_bytes and warps, 32 threads each, are those of a program.
    """
    threads = 32 * warps
    by_registers = of.registers // (-(-registers // 8) * 8 * threads)
    by_shared = of.shared_bytes // (shared_bytes + of.reserved_bytes)
    return min(by_registers, by_shared, of.threads // threads) * threads / of.threads
