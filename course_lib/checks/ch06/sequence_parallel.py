"""Graders of chapter 06, exercises 1, 2 and 6: shapes of regions, bytes kept, the cheapest way that fits."""

from course_lib.checks import Exercise, named
from course_lib.config import ModelConfig
from course_lib.layout.partition import piece_sizes


# ------------------------------------------------------------------------------------ 1. shapes of regions
def _shape(region, sp, config, B, S, t, rank, **mistake):
    """A mistake: regions that are `off`, with one of_sp or both, have other tokens(S, mine, t), and features cut."""
    mine = piece_sizes(S, t)[rank]
    widths = {"queries": config.num_heads // t * config.head_dim, "features": config.d_ff // t}
    width = widths.get(region, config.d_model)
    if region in mistake.get("off", []) and sp in mistake.get("of_sp", [False, True]):
        return B, mistake.get("tokens", lambda S, mine, t: mine)(S, mine, t), width // t if "cut" in mistake else width
    return B, mine if sp and region == "residual" else S, width


def _regions(rng):
    for rest in (0, 1):
        t, head_dim = rng.choice([2, 4]), rng.choice([8, 16])
        heads, d_ff = t * rng.randrange(2, 5), t * rng.randrange(5, 30)
        config = ModelConfig("drawn", 1, 8 * rng.randrange(17, 40), heads, heads, d_ff, 64, 512, head_dim=head_dim)
        sizes = config, rng.randrange(2, 5), t * rng.randrange(5, 30) + rest, t
        regions = ("residual", "column input", "queries", "features", "row output")
        yield from [(region, sp, *sizes, r) for sp in (False, True) for region in regions for r in (0, t - 1)]


_WIDE = ["residual", "column input", "row output"]
_WRONG_SHAPE = {
    "tensor parallelism alone leaves the residual stream whole on every rank": {"off": ["residual"], "of_sp": [False]},
    "with sp the residual stream is in shards along the sequence": {
        "off": ["residual"],
        "tokens": lambda S, mine, t: S,
    },
    "tokens that do not divide: the first ranks have ceil(S / t) each": {
        "off": ["residual"],
        "of_sp": [True],
        "tokens": lambda S, mine, t: S // t,
    },
    "a column's input is gathered first: it needs all tokens": {"off": ["column input"]},
    "it is still a part of a sum over all tokens, and is cut when it leaves": {"off": ["row output"]},
    "a tensor is cut along the sequence or along features, never both": [
        {"off": ["queries", "features"]},
        {"off": _WIDE, "cut": True},
    ],
    "the residual stream is cut along the sequence, not along features": {
        "off": _WIDE,
        "tokens": lambda S, mine, t: S,
        "cut": True,
    },
}
check_shape = Exercise(_shape, _regions, _WRONG_SHAPE, named("{} with sp={}"))


# ------------------------------------------------------------------------------------ 2. bytes kept
_SP = ("tp+sp", "regather")


def _kept(mode, recompute, t, scores):
    """Korthikanti's table 2, with kept inputs of columns and with the shards of full recomputation."""
    if recompute == "full":
        return 2.0 if mode == "tp" else 2 / t
    outside = {"tp": 10, "tp+sp": 4 + 6 / t, "regather": 10 / t}[mode]
    return outside + 24 / t + (scores / t if recompute == "none" else 0)


def _modes(rng):
    return [
        (mode, recompute, rng.choice([2, 4, 8, 16]), rng.randrange(20, 200))
        for mode in ("tp", *_SP)
        for recompute in ("none", "selective", "full")
    ]


def _kept_if(of, modes=("tp", *_SP), recomputes=("none", "selective")):
    """An answer that is wrong in these modes with these recomputations."""
    return lambda *case: (of if case[0] in modes and case[1] in recomputes else _kept)(*case)


_CUT = "of TP's 10 + 24/t only the 10 is still to be divided"
WRONG_KEPT = {
    "tensor parallelism divides only 24 of the 34": _kept_if(lambda _, *case: _kept("regather", *case), ["tp"]),
    "the columns keep their gathered inputs, 4 bytes that nothing divides": _kept_if(
        lambda _, *case: _kept("regather", *case), ["tp+sp"]
    ),
    "here the inputs of columns are kept as shards": _kept_if(lambda _, *case: _kept("tp+sp", *case)),
    f"{_CUT}: 24/t is inside attention and MLP, cut already": _kept_if(
        lambda _, recompute, t, scores: _kept("tp", recompute, t, scores) / t, _SP
    ),
    f"{_CUT}: 24/t, like the scores, is cut already": _kept_if(
        lambda mode, _, t, scores: _kept("tp", "selective", t, scores) / t + scores / t, _SP, ["none"]
    ),
    "scores belong to heads, and heads are divided": _kept_if(
        lambda mode, recompute, t, scores: _kept(mode, recompute, t, scores * t), recomputes=["none"]
    ),
    "selective recomputation keeps no scores": _kept_if(
        lambda mode, _, *case: _kept(mode, "none", *case), recomputes=["selective"]
    ),
    "without sp each rank keeps the whole input of a layer": _kept_if(lambda *case: 2 / case[2], ["tp"], ["full"]),
    "with sp a layer's input is in shards": _kept_if(lambda *case: 2, _SP, ["full"]),
}
check_kept = Exercise(_kept, _modes, WRONG_KEPT, named("bytes with {}, recompute {}"))


# ------------------------------------------------------------------------------------ 6. the cheapest way that fits
def _choice(free_bytes, s, b, h, layers, t, **believed):
    """The reference; a way's name and how many units of s b h / t it is believed to need is one of the mistakes."""
    units = {"keep": lambda layers, t: layers * (30 + 4 * t), "regather": lambda layers, t: 34 * layers}
    units |= {"full": lambda layers, t: 2 * layers + 32} | believed
    for way, needed in units.items():
        if needed(layers, t) * s * b * h <= free_bytes * t:
            return way
    raise ValueError("nothing fits")


def _limits(rng):
    for _ in range(5):
        s, b, h = 512 * rng.randrange(1, 20), rng.randrange(1, 5), 1024 * rng.randrange(1, 9)
        layers, t = rng.randrange(24, 100), rng.choice([2, 4, 8])
        for units in (layers * (30 + 4 * t), layers * 34, 2 * layers + 32):
            yield from [(units * s * b * h // t + more, s, b, h, layers, t) for more in (1, -1)]


def _way(answer, *case):
    ways = []
    for of in (answer, _choice):
        try:
            ways.append(of(*case))
        except ValueError:
            ways.append("ValueError")
    return {"where nothing fits" if ways[1] == "ValueError" else f"what fits, {ways[1]}": ways[0]}


_NEVER = {"keep": lambda layers, t: float("inf"), "regather": lambda layers, t: float("inf")}
_WRONG_CHOICE = {
    "nothing fits: one layer at a time is whole again, so even 'full' needs more than that; raise ValueError": {
        "full": lambda layers, t: 2 * layers
    },
    "ValueError, but 'full' fits: its bytes are divided by t": {"full": lambda layers, t: (2 * layers + 32) * t},
    "another way fits as well, and is cheaper": _NEVER,
    "'keep' needs 30/t + 4 for each layer, and does not fit": {"keep": lambda layers, t: 34 * layers},
    "'regather' needs 34/t for each layer, and does not fit": {"regather": lambda layers, t: 34},
}
check_choice = Exercise(_choice, _limits, _WRONG_CHOICE, _way, {"where nothing fits": "raise ValueError"})
