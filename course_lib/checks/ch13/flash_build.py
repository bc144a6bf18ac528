"""Table of chapter 13, exercise 5: FlashAttention's forward pass as a kernel, by result, bytes and masked edges."""

from course_lib.checks.core import fresh_seed
from course_lib.checks.table import Exercise, Stops
from course_lib.checks.watch import Cost
from course_lib.kernels.language import cdiv, jit, tl
from course_lib.kernels.traffic import KernelTraffic, new


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


def _launched(answer, heads, S, tiles, seed):
    """Output, log-sum-exps and bytes of one launch; the scores are large, so that a forgotten factor is seen."""
    (BQ, BK), H = tiles, 16
    q, k, v = (new((heads, S, H), seed=seed + place) for place in range(3))
    o, lse = new((heads, S, H)), new((heads, S))
    with KernelTraffic() as moved:
        answer[(cdiv(S, BQ), heads)](q, k, v, o, lse, S, 0.5, H, BQ, BK)
    return {"o": o.clone(), "lse": lse.clone(), "bytes": Cost(moved.bytes)}


WRONG = {
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
    WRONG,
    _launched,
    says={"bytes": "load q once, each tile of k and v once, and store o and lse once"},
)
