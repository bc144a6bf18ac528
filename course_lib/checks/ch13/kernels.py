"""Graders of chapter 13, exercises 1 to 4: bytes of a product, the roofline, a norm as a kernel, an order."""

from course_lib.checks.core import fresh_seed
from course_lib.checks.table import Exercise, Stops
from course_lib.checks.watch import Cost, several
from course_lib.hardware import GPUS
from course_lib.kernels.language import jit, tl
from course_lib.kernels.traffic import KernelTraffic, new
from course_lib.timing.kernel import Roof, product_bytes


# ------------------------------------------------------------------------------------ 1. bytes of a product
def _sizes(rng):
    """One that tiles divide, and others."""
    tiles = [16, 32, 64, 128]
    drawn = [tuple(rng.randrange(3, 400) for _ in range(3)) for _ in range(5)]
    return [(256, 128, 64, 32, 64, 2), *((*size, rng.choice(tiles), rng.choice(tiles), 4) for size in drawn)]


_WRONG_BYTES = {
    "a tile at the edge is a program too: round the number of tiles up": lambda M, N, K, BM, BN, b: (
        b * (N // BN * M * K + M // BM * K * N),
        b * M * N,
    ),
    "a mask leaves out what lies outside of the matrices: nothing is loaded there": lambda M, N, K, BM, BN, b: (
        b * -(-M // BM) * -(-N // BN) * (BM + BN) * K,
        b * M * N,
    ),
    "a tile has BM rows and BN columns, so there are N / BN columns of tiles": lambda M, N, K, BM, BN, b: (
        b * (-(-N // BM) * M * K + -(-M // BN) * K * N),
        b * M * N,
    ),
    "these are elements, not bytes": lambda M, N, K, BM, BN, b: product_bytes(M, N, K, BM, BN, 1),
}
check_product_bytes = Exercise(
    product_bytes, _sizes, _WRONG_BYTES, several("return the pair (loaded, stored)", "loaded", "stored")
)


# ------------------------------------------------------------------------------------ 2. the roofline
def _limit(flops, num_bytes, gpu):
    """What limits a kernel, and its least seconds."""
    roof = Roof(gpu, flops, num_bytes)
    return roof.bound_by, roof.seconds


def _around_the_ridge(rng):
    cases = []
    for name in ("a100-80", "h100", "b200", "mi300x"):
        gpu = GPUS[name]
        ridge = gpu.bf16_flops / gpu.memory_bytes_per_s
        for factor in (0.01, 0.7, 1.5, 20.0):
            num_bytes = rng.randrange(10**6, 10**9)
            cases.append((factor * ridge * num_bytes, num_bytes, gpu))
    return cases


_WRONG_LIMIT = {
    "the kernel waits for what takes longer; this is the shorter time": lambda f, b, gpu: (
        _limit(f, b, gpu)[0],
        min(f / gpu.bf16_flops, b / gpu.memory_bytes_per_s),
    ),
    "computing and moving overlap: the longer time, not the sum": lambda f, b, gpu: (
        _limit(f, b, gpu)[0],
        f / gpu.bf16_flops + b / gpu.memory_bytes_per_s,
    ),
    "below the ridge memory decides, above it computing": lambda f, b, gpu: (
        {"memory": "computing", "computing": "memory"}[_limit(f, b, gpu)[0]],
        _limit(f, b, gpu)[1],
    ),
    "products in bf16 run at bf16_flops, not at fp32_flops": lambda f, b, gpu: (
        "computing" if f / b >= gpu.fp32_flops / gpu.memory_bytes_per_s else "memory",
        max(f / gpu.fp32_flops, b / gpu.memory_bytes_per_s),
    ),
}
check_limit = Exercise(
    _limit, _around_the_ridge, _WRONG_LIMIT, several("return the pair (limit, seconds)", "limit", "seconds")
)


# ------------------------------------------------------------------------------------ 3. a norm as a kernel
def _rms_norm(count=lambda n, block: n, root=lambda mean, eps: (mean + eps).sqrt(), reads=1, mask=True):
    """A kernel, right or with a mistake: what the sum of squares is divided by, the root, reads of x, no mask."""

    @jit
    def rms_norm(x_ptr, weight_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
        row, i = tl.program_id(0), tl.arange(0, BLOCK)
        here = i < n if mask else None
        for _ in range(reads):
            x = tl.load(x_ptr + row * n + i, mask=here, other=0.0)
        scale = tl.load(weight_ptr + i, mask=here) / root((x * x).sum() / count(n, BLOCK), eps)
        tl.store(y_ptr + row * n + i, x * scale, mask=here)

    return rms_norm


def _launched(answer, rows, n, seed):
    """Result and bytes of one launch; eps is large, so that it is seen."""
    x, weight, y = new((rows, n), seed=seed), new((n,), seed=seed + 1), new((rows, n))
    with KernelTraffic() as moved:
        answer[(rows,)](x, weight, y, n, 0.25, 1 << (n - 1).bit_length())
    return {"y": y.clone(), "bytes": Cost(moved.bytes)}


_WRONG_NORM = {
    "the mean is over the n elements of the row; BLOCK counts the masked ones too": _rms_norm(lambda n, block: block),
    "divide the sum of squares by n": _rms_norm(lambda n, block: 1),
    "eps belongs under the root": _rms_norm(root=lambda mean, eps: mean.sqrt() + eps),
    "x is read twice; a tile that was loaded stays in registers": _rms_norm(reads=2),
    "places are outside the tensor": Stops(_rms_norm(mask=False)),
}
check_rms_norm = Exercise(
    _rms_norm(),
    lambda rng: [(rng.randrange(2, 5), n, fresh_seed(rng)) for n in (64, 48, 100)],
    _WRONG_NORM,
    _launched,
    says={"bytes": "x, the weights and y go through memory once for each row"},
)


# ------------------------------------------------------------------------------------ 4. the order of tiles
def _order(pid, tiles_m, tiles_n, group):
    """(row, column) of the tile that program pid makes."""
    first, within = pid // (group * tiles_n) * group, pid % (group * tiles_n)
    high = min(tiles_m - first, group)
    return first + within % high, within // high


def _tiles(answer, tiles_m, tiles_n, group):
    return {"tiles": [tuple(map(int, answer(pid, tiles_m, tiles_n, group))) for pid in range(tiles_m * tiles_n)]}


def _equal_groups(pid, tiles_m, tiles_n, group):
    first, within = pid // (group * tiles_n) * group, pid % (group * tiles_n)
    return first + within % group, within // group


def _across(pid, tiles_m, tiles_n, group):
    first, within = pid // (group * tiles_n) * group, pid % (group * tiles_n)
    return first + within // tiles_n, within % tiles_n


_WRONG_ORDER = {
    "the last group may have fewer rows of tiles than the others": _equal_groups,
    "inside a group go down first, then to the next column": _across,
    "this goes down the whole matrix; go down one group of rows": lambda pid, tiles_m, tiles_n, group: (
        pid % tiles_m,
        pid // tiles_m,
    ),
    "return (row, column)": lambda *case: _order(*case)[::-1],
}
check_order = Exercise(
    _order, lambda rng: [(4, 5, 2), (5, 3, 2), (rng.randrange(5, 9), rng.randrange(3, 9), 3)], _WRONG_ORDER, _tiles
)
