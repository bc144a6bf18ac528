"""Graders of chapter 06, exercises 1, 2 and 6: shapes of regions, bytes kept, the cheapest way that fits."""

from collections.abc import Callable

from course_lib.checks.core import expect_equal, expect_number, fail, grader
from course_lib.config import ModelConfig
from course_lib.layout.partition import piece_sizes

REGIONS = ("residual", "column input", "queries", "features", "row output")


# ------------------------------------------------------------------------------------ 1. shapes of regions
@grader
def check_shape(answer, rng):
    """The shape of each region on each rank, under TP and under TP + SP, for tokens that divide and that do not."""
    for divides in (True, False):
        t, head_dim = rng.choice([2, 4]), rng.choice([8, 16])
        heads, d_ff = t * rng.randrange(2, 5), t * rng.randrange(5, 30)
        config = ModelConfig("drawn", 1, 8 * rng.randrange(17, 40), heads, heads, d_ff, 64, 512, head_dim=head_dim)
        B, S = rng.randrange(2, 5), t * rng.randrange(5, 30) + (0 if divides else 1)
        for sp in (False, True):
            for region in REGIONS:
                for rank in (0, t - 1):
                    _expect_region(answer, region, sp, config, B, S, t, rank)


def _expect_region(answer: Callable, region: str, sp: bool, config: ModelConfig, B: int, S: int, t: int, rank: int):
    D, mine = config.d_model, piece_sizes(S, t)[rank]
    whole, shard = (B, S, D), (B, mine, D)
    want = {
        "residual": shard if sp else whole,
        "column input": whole,
        "queries": (B, S, config.num_heads // t * config.head_dim),
        "features": (B, S, config.d_ff // t),
        "row output": whole,
    }[region]
    where = f"{region!r} with sp={sp}, {S} tokens, {D} features, rank {rank} of {t}"
    got = answer(region, sp, config, B, S, t, rank)
    if not isinstance(got, (tuple, list)):
        fail(f"{where}: a tuple of three sizes is asked for, got {got!r}")
    cut_both = (*want[:1], mine, want[2]) if region in ("queries", "features") else (B, mine, D // t)
    of_residual = (
        {"with sp the residual stream is in shards along the sequence": whole}
        if sp
        else {"tensor parallelism alone leaves the residual stream whole on every rank": shard}
    )
    believed = {
        "residual": of_residual | {"tokens that do not divide: the first ranks have ceil(S / t) each": (B, S // t, D)},
        "column input": {"a column's input is gathered first: it needs all tokens": shard},
        "row output": {"it is still a part of a sum over all tokens, and is cut when it leaves": shard},
    }.get(region, {}) | {
        "a tensor is cut along the sequence or along features, never both": cut_both,
        "the residual stream is cut along the sequence, not along features": (B, S, D // t),
    }
    expect_equal(tuple(got), want, where, believed)


# ------------------------------------------------------------------------------------ 2. bytes kept
@grader
def check_kept(answer, rng):
    """Korthikanti's table 2, with kept inputs of columns and with the shards of full recomputation."""
    for mode in ("tp", "tp+sp", "regather"):
        for recompute in ("none", "selective", "full"):
            t, scores = rng.choice([2, 4, 8, 16]), rng.randrange(20, 200)
            _expect_kept(answer, mode, recompute, t, scores)


def _kept(mode: str, recompute: str, t: int, scores: float) -> float:
    if recompute == "full":
        return 2 if mode == "tp" else 2 / t
    outside = {"tp": 10, "tp+sp": 4 + 6 / t, "regather": 10 / t}[mode]
    return outside + 24 / t + (scores / t if recompute == "none" else 0)


def _expect_kept(answer: Callable, mode: str, recompute: str, t: int, scores: int) -> None:
    want, got = _kept(mode, recompute, t, scores), answer(mode, recompute, t, scores)
    where = f"{mode!r}, recompute {recompute!r}, t = {t}, scores = {scores}"
    sp, kept = mode != "tp", recompute == "none"
    believed = {
        "tensor parallelism divides only 24 of the 34": (34 + (scores if kept else 0)) / t if not sp else None,
        "the columns keep their gathered inputs, 4 bytes that nothing divides": _kept("regather", recompute, t, scores)
        if mode == "tp+sp"
        else None,
        "here the inputs of columns are kept as shards": _kept("tp+sp", recompute, t, scores) if sp else None,
        "of TP's 10 + 24/t only the 10 is still to be divided: 24/t is inside attention and MLP, cut already": (
            _kept("tp", recompute, t, scores) / t if sp and recompute != "full" else None
        ),
        "of TP's 10 + 24/t only the 10 is still to be divided: 24/t, like the scores, is cut already": (
            _kept("tp", "selective", t, scores) / t + scores / t if sp and kept else None
        ),
        "scores belong to heads, and heads are divided": want + scores - scores / t if kept else None,
        "selective recomputation keeps no scores": _kept(mode, "none", t, scores) if recompute == "selective" else None,
        "without sp each rank keeps the whole input of a layer": 2 / t if recompute == "full" and not sp else None,
        "with sp a layer's input is in shards": 2 if recompute == "full" and sp else None,
    }
    told = {message: value for message, value in believed.items() if value is not None}
    expect_number(got, want, where, told, form="g")


# ------------------------------------------------------------------------------------ 6. the cheapest way that fits
@grader
def check_choice(answer, rng):
    """The first of three ways that fits, on both sides of each limit; ValueError below the last."""
    for _ in range(5):
        s, b, h = 512 * rng.randrange(1, 20), rng.randrange(1, 5), 1024 * rng.randrange(1, 9)
        case = (s, b, h, rng.randrange(24, 100), rng.choice([2, 4, 8]))
        needed = _needed(*case)
        fitting = list(needed)
        for index, way in enumerate(fitting):
            after = fitting[index + 1] if index + 1 < len(fitting) else None
            _expect_choice(answer, needed[way] + 1, case, way, needed)
            _expect_choice(answer, needed[way] - 1, case, after, needed)


def _needed(s: int, b: int, h: int, layers: int, t: int) -> dict[str, int]:
    unit = s * b * h // t
    return {"keep": layers * (30 + 4 * t) * unit, "regather": layers * 34 * unit, "full": (2 * layers + 32) * unit}


def _expect_choice(answer: Callable, free_bytes: int, case: tuple, want: str | None, needed: dict[str, int]) -> None:
    s, b, h, layers, t = case
    where = f"s {s}, b {b}, h {h}, {layers} layers, t {t}, {free_bytes:,} bytes free"
    try:
        got = answer(free_bytes, *case)
    except ValueError:
        if want is None:
            return
        fail(f"{where}: it raised ValueError, but {want!r} needs {needed[want]:,} bytes and fits")
    if want is None:
        fail(
            f"{where}: it returned {got!r}, but nothing fits: one layer at a time is whole again, so even 'full' needs "
            f"{needed['full']:,} bytes; raise ValueError"
        )
    if got not in needed:
        fail(f"{where}: it returned {got!r}; return one of {', '.join(needed)}")
    if got == want:
        return
    if list(needed).index(got) > list(needed).index(want):
        fail(
            f"{where}: it returned {got!r}, but {want!r} fits as well, and is cheaper: it needs {needed[want]:,} bytes"
        )
    why = "30/t + 4 for each layer" if got == "keep" else "34/t for each layer"
    fail(f"{where}: it returned {got!r}, which needs {needed[got]:,} bytes ({why}) and does not fit; {want!r} does")
