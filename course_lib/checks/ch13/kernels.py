"""Graders of chapter 13, exercises 1 to 5: bytes of a product, the roofline, a norm and FlashAttention as kernels."""

from course_lib.checks import Cost, Exercise, Stops, fresh_seed, several
from course_lib.hardware import GPUS
from course_lib.kernels.language import cdiv, jit, tl
from course_lib.kernels.traffic import KernelTraffic, new
from course_lib.timing.kernel import product_bytes


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
def _limit(flops, num_bytes, gpu, of=max, peak="bf16_flops", names=("computing", "memory")):
    """What limits a kernel, and its least seconds. A mistake: another of both times, another peak, names exchanged."""
    times = flops / getattr(gpu, peak), num_bytes / gpu.memory_bytes_per_s
    return names[times[0] < times[1]], of(times)


def _around_the_ridge(rng):
    for name in ("a100-80", "h100", "b200", "mi300x"):
        gpu = GPUS[name]
        ridge = gpu.bf16_flops / gpu.memory_bytes_per_s
        for factor in (0.01, 0.7, 1.5, 20.0):
            num_bytes = rng.randrange(10**6, 10**9)
            yield factor * ridge * num_bytes, num_bytes, gpu


_WRONG_LIMIT = {
    "the kernel waits for what takes longer; this is the shorter time": {"of": min},
    "computing and moving overlap: the longer time, not the sum": {"of": sum},
    "below the ridge memory decides, above it computing": {"names": ("memory", "computing")},
    "products in bf16 run at bf16_flops, not at fp32_flops": {"peak": "fp32_flops"},
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


def _launched_norm(answer, rows, n, seed):
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
    _launched_norm,
    says={"bytes": "x, the weights and y go through memory once for each row"},
)


# ------------------------------------------------------------------------------------ 4. the order of tiles
def _order(pid, tiles_m, tiles_n, group, place=lambda within, rows, group, tiles_n: (within % rows, within // rows)):
    """(row, column) of the tile that program pid makes. A mistake: another place within the rows of a group."""
    first, within = pid // (group * tiles_n) * group, pid % (group * tiles_n)
    row, column = place(within, min(tiles_m - first, group), group, tiles_n)
    return first + row, column


def _tiles(answer, tiles_m, tiles_n, group):
    return {"tiles": [tuple(map(int, answer(pid, tiles_m, tiles_n, group))) for pid in range(tiles_m * tiles_n)]}


_WRONG_ORDER = {
    "the last group may have fewer rows of tiles than the others": {
        "place": lambda within, rows, group, tiles_n: (within % group, within // group)
    },
    "inside a group go down first, then to the next column": {
        "place": lambda within, rows, group, tiles_n: divmod(within, tiles_n)
    },
    "this goes down the whole matrix; go down one group of rows": lambda pid, tiles_m, tiles_n, group: (
        pid % tiles_m,
        pid // tiles_m,
    ),
    "return (row, column)": lambda *case: _order(*case)[::-1],
}
check_order = Exercise(
    _order, lambda rng: [(4, 5, 2), (5, 3, 2), (rng.randrange(5, 9), rng.randrange(3, 9), 3)], _WRONG_ORDER, _tiles
)


# ------------------------------------------------------------------------------------ 5. FlashAttention
def _flash(rescale=True, causal=True, scaled=True, all_keys=False, add_top=True, mask=True):
    """A kernel with one of the mistakes, or none."""

    @jit
    def flash(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, S, scale, H: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
        first, head = tl.program_id(0) * BQ, tl.program_id(1) * S * H
        row, col, h = (first + tl.arange(0, BQ))[:, None], tl.arange(0, BK), tl.arange(0, H)[None, :]
        here = row < S if mask else None
        q = tl.load(q_ptr + head + row * H + h, mask=here, other=0.0)
        top, total = tl.full((BQ, 1), -float("inf"), tl.float32), tl.zeros((BQ, 1), tl.float32)
        o = tl.zeros((BQ, H), tl.float32)
        for start in range(0, S if all_keys else min(first + BQ, S), BK):
            key = (start + col)[:, None]
            inside = key < S if mask else None
            k = tl.load(k_ptr + head + key * H + h, mask=inside, other=0.0)
            v = tl.load(v_ptr + head + key * H + h, mask=inside, other=0.0)
            x = tl.dot(q, tl.trans(k)) * (scale if scaled else 1.0)
            seen = (row >= key.T) if causal else (key.T < S) & (row >= 0)
            x = tl.where(seen, x, -float("inf"))
            new_top = tl.maximum(top, tl.max(x, 1)[:, None])
            shrink, p = tl.exp(top - new_top) if rescale else 1.0, tl.exp(x - new_top)
            total, o, top = total * shrink + tl.sum(p, 1)[:, None], o * shrink + tl.dot(p, v), new_top
        tl.store(o_ptr + head + row * H + h, o / total, mask=here)
        lse = tl.log(total) + (top if add_top else 0.0)
        tl.store(lse_ptr + tl.program_id(1) * S + row, lse, mask=here)

    return flash


def _launched_flash(answer, heads, S, tiles, seed):
    """Output, log-sum-exps and bytes of one launch; the scores are large, so that a forgotten factor is seen."""
    (BQ, BK), H = tiles, 16
    q, k, v = (new((heads, S, H), seed=seed + place) for place in range(3))
    o, lse = new((heads, S, H)), new((heads, S))
    with KernelTraffic() as moved:
        answer[(cdiv(S, BQ), heads)](q, k, v, o, lse, S, 0.5, H, BQ, BK)
    return {"o": o.clone(), "lse": lse.clone(), "bytes": Cost(moved.bytes)}


_WRONG_FLASH = {
    "what was summed belongs to the old largest score: multiply o and the sum by exp(old - new)": _flash(rescale=False),
    "a query sees no later key: set these scores to minus infinity": _flash(causal=False, all_keys=True),
    "multiply the scores by scale": _flash(scaled=False),
    "lse is the largest score plus the logarithm of the sum": _flash(add_top=False),
    "keys after the last query of the tile are loaded, and then masked: end the loop before them": _flash(
        all_keys=True
    ),
    "places are outside the tensor": Stops(_flash(mask=False)),
}
check_flash = Exercise(
    _flash(),
    lambda rng: [
        (1, 32, (16, 16), fresh_seed(rng)),
        (2, 40, (16, 16), fresh_seed(rng)),
        (2, rng.randrange(50, 90), (32, 16), fresh_seed(rng)),
    ],
    _WRONG_FLASH,
    _launched_flash,
    says={"bytes": "load q once, each tile of k and v once, and store o and lse once"},
)
