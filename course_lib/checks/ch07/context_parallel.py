"""Graders of chapter 07, exercises 1 to 4: positions, the merge of a softmax, a step's tile, bytes."""

import torch

from course_lib.checks import Exercise, Stops, named, numbers, several
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, tile
from course_lib.parallel.positions import positions
from course_lib.parallel.tiles import standard_forward


# ------------------------------------------------------------------------------------ 1. positions
def _places(sequence_sharding, S, ranks, rank, **believed):
    """The reference, and with a sharding's name what is believed of it."""
    if sequence_sharding in believed:
        return believed[sequence_sharding](torch.arange(S), ranks, rank).tolist()
    return positions(sequence_sharding, S, ranks, rank).tolist()


def _all_ranks(rng):
    for sequence_sharding in SEQUENCE_SHARDINGS:
        ranks = rng.choice([3, 4, 5])
        S = 2 * ranks * rng.randrange(2, 6)
        yield from [(sequence_sharding, S, ranks, rank) for rank in range(ranks)]


def _as_list(answer, sequence_sharding, S, ranks, rank):
    got = answer(sequence_sharding, S, ranks, rank)
    return {sequence_sharding: [int(p) for p in got] if isinstance(got, range | tuple | torch.Tensor) else got}


def _neighbours(all_S, ranks, rank):
    return all_S.chunk(ranks)[rank]


_WRONG_POSITIONS = {
    "zig-zag pairs chunk r with chunk 2 ranks - 1 - r, counted from the end": {
        "zigzag": lambda all_S, ranks, rank: all_S.view(2, ranks, -1)[:, rank].flatten()
    },
    "these are two neighbouring chunks: the rank's work would grow with its number": {"zigzag": _neighbours},
    "the same tokens, but in descending chunks: positions ascend": {
        "zigzag": lambda all_S, ranks, rank: all_S.view(2 * ranks, -1)[[2 * ranks - 1 - rank, rank]].flatten()
    },
    "striped deals tokens out one by one: every ranks-th, beginning with rank": {"striped": _neighbours},
    "contiguous tokens are neighbours": {"contiguous": lambda all_S, ranks, rank: all_S[rank::ranks]},
}
check_positions = Exercise(_places, _all_ranks, _WRONG_POSITIONS, _as_list, right=positions)


# ------------------------------------------------------------------------------------ 2. merge
def merged(parts, weigh=lambda lses: lses.softmax(0), total=lambda lses: lses.logsumexp(0)):
    """The reference, and with an argument another weight of an output, or another log-sum-exp."""
    outs, lses = (torch.stack(column) for column in zip(*parts, strict=True))
    return (weigh(lses).unsqueeze(-1) * outs).sum(0), total(lses)


def _parts(rng):
    """Of different weight, in several numbers, with scores near zero and in the thousands."""
    cases, (B, N, q, H) = [], (2, 3, 5, 4)
    for scale in (1.0, 2000.0):
        for count in (2, rng.randrange(3, 6)):
            sizes = [*(rng.randrange(4, 8) for _ in range(count - 1)), 1]  # the last is never the heaviest
            queries = scale * numbers(rng, B, N, q, H)
            blocks = [(numbers(rng, B, N, size, H), numbers(rng, B, N, size, H)) for size in sizes]
            cases.append(([standard_forward(queries, k, v, causal=False) for k, v in blocks],))
    return cases


WRONG_MERGE = {
    "the outputs were averaged; each counts by its sum of exponentials": {
        "weigh": lambda lses: torch.full_like(lses, 1 / len(lses))
    },
    "the outputs were added; each must be shrunk first by its share": {"weigh": torch.ones_like},
    "the outputs were weighted by lse itself; the weight behind an output is exp(lse)": {
        "weigh": lambda lses: lses / lses.sum(0)
    },
    "out has inf or nan: exp of a large score overflows; take the difference of two lse first": {
        "weigh": lambda lses: lses.exp() / lses.exp().sum(0)
    },
    "what was merged so far must shrink as well when a part is added": {
        "weigh": lambda lses: torch.cat([torch.ones_like(lses[:1]), (lses - lses.logcumsumexp(0)).exp()[1:]])
    },
    "log-sum-exps were added; add their exponentials, and take the logarithm": {"total": lambda lses: lses.sum(0)},
    "the largest log-sum-exp is not that of all": {"total": lambda lses: lses.max(0).values},
    "this is the last part's log-sum-exp": {"total": lambda lses: lses[-1]},
    "this is the sum itself; its logarithm is asked for": {"total": lambda lses: lses.exp().sum(0)},
}
check_merge = Exercise(merged, _parts, WRONG_MERGE, several("a pair (out, lse) is asked for", "out", "lse"))


# ------------------------------------------------------------------------------------ 3. a step's tile
def _tile(s, query_rank, key_rank, **believed):
    """The reference, and with `own`, `earlier` or `later` what is believed of such keys."""
    whose = _whose(query_rank, key_rank)
    if whose in believed:
        rows, columns, causal = believed[whose]  # where queries and keys begin and stop, in halves
        return *(slice(first * s // 2, stop * s // 2) for first, stop in (rows, columns)), causal
    part = tile("zigzag", s, query_rank, key_rank)
    return part.queries, part.keys, part.causal


def _whose(query_rank, key_rank):
    return "own" if key_rank == query_rank else "earlier" if key_rank < query_rank else "later"


def _with_open_slices(s, query_rank, key_rank):
    if query_rank == key_rank:
        return slice(None), slice(None), 1
    return (slice(None), slice(s // 2), 0) if key_rank < query_rank else (slice(s // 2, None), slice(None), 0)


def _every_two(rng):
    ranks, s = rng.choice([3, 4]), 2 * rng.randrange(2, 6)
    return [(s, query_rank, key_rank) for query_rank in range(ranks) for key_rank in range(ranks)]


def _pairs(answer, s, query_rank, key_rank):
    """Watch which pairs of a query and a key are seen; no larger tile has just those."""
    rows, columns, causal = answer(s, query_rank, key_rank)
    seen_ss = torch.zeros(s, s)
    part = torch.ones_like(seen_ss[rows, columns])
    seen_ss[rows, columns] = part.tril() if causal else part
    of = f"of {_whose(query_rank, key_rank)} keys"
    return {f"pairs {of}": seen_ss, f"causal {of}": bool(causal)}


_WHOLE, _LATE = (0, 2), (1, 2)
_TRIANGLE = "the lower triangle is of my own keys alone; of other ranks' a tile is a rectangle"
_WRONG_TILE = {
    "nothing is seen, as if tokens were contiguous; a later rank's late chunk lies before mine": {
        "later": ((0, 0), (0, 0), False)
    },
    "my own keys were seen whole; a query does not see later keys of its own rank": {"own": (_WHOLE, _WHOLE, False)},
    "all was seen; of another rank's keys one half or one half of my queries drops out": {
        "earlier": (_WHOLE, _WHOLE, False),
        "later": (_WHOLE, _WHOLE, False),
    },
    _TRIANGLE: {"earlier": (_WHOLE, _WHOLE, True), "later": (_WHOLE, _WHOLE, True)},
    "halves of keys and of queries are mixed up: a later rank's keys are all seen, by my late queries": {
        "later": (_WHOLE, _LATE, False)
    },
    "this is the earlier rank's late chunk, which lies after both of mine; its early one is seen": {
        "earlier": (_WHOLE, _LATE, False)
    },
    "queries and keys are right, and causal must be False: a triangle is of my own keys alone": {
        "earlier": (_WHOLE, (0, 1), True)
    },
    ": 1 is seen, 0 is not": Stops(lambda s, query_rank, key_rank: (slice(1, s), slice(0, s), False)),
}
_SAYS_TILE = dict.fromkeys((f"pairs of {whose} keys" for whose in ("own", "earlier", "later")), "1 is seen, 0 is not")
check_tile = Exercise(_tile, _every_two, _WRONG_TILE, _pairs, _SAYS_TILE, right=_with_open_slices)


# ------------------------------------------------------------------------------------ 4. bytes
def _ring(sizes, steps=(0, 0, 0), numbers_of=lambda itemsize: (itemsize, itemsize, 4), heads="K"):
    """Bytes of forward's keys and values, backward's, their gradients; `steps`: ring steps more than c - 1 of each."""
    c, B, s, N, K, H, itemsize = sizes
    block = 2 * B * s * {"K": K, "N": N}[heads] * H
    return sum((c - 1 + more) * block * size for more, size in zip(steps, numbers_of(itemsize), strict=True))


def _ulysses(sizes, heads=lambda N, K: 2 * N + 2 * K, ways=2, pieces=-1):
    c, B, s, N, K, H, itemsize = sizes
    return ways * heads(N, K) * B * s * H * itemsize * (c + pieces) // c


def _bytes(method, c, B, s, N, K, H, itemsize):
    return {"ring": _ring, "ulysses": _ulysses}[method]((c, B, s, N, K, H, itemsize))


def _believed(method, **change):
    """An answer that is wrong in one of the two methods."""
    formula = {"ring": _ring, "ulysses": _ulysses}[method]
    return lambda given, *sizes: formula(sizes, **change) if given == method else _bytes(given, *sizes)


def _sizes(rng):
    """With grouped queries, in 4, 1 and 2 bytes: in each other mistakes come to the same number."""
    for method in ("ring", "ulysses"):
        for itemsize in (4, 1, 2):
            c = rng.choice([3, 5])
            K = c * rng.randrange(1, 3)
            sizes = (rng.randrange(2, 5), rng.randrange(6, 30), K * rng.choice([2, 4]), K, 8 * rng.randrange(1, 5))
            yield method, c, *sizes, itemsize


_SAME, _KEPT = {"numbers_of": lambda size: (size, size, size)}, {"numbers_of": lambda size: (size, 0, 4)}
_WRONG_BYTES = {
    "K heads travel, not N: copies are made where they arrive": _believed("ring", heads="N"),
    "block and gradient make c - 1 ring steps: the home's share never travels": _believed("ring", steps=(1, 1, 1)),
    "gradients travel in FP32 while they are summed": _believed("ring", **_SAME),
    "keys and values go around in backward once more: a rank keeps its own only": _believed("ring", **_KEPT),
    "keys and values: that is 2 tensors": _believed("ring", numbers_of=lambda size: (size / 2, size / 2, 2)),
    "a gradient is home after c - 1 ring steps: the first share is the next rank's, the home's never "
    "travels": _believed("ring", steps=(0, 0, 1)),
    "backward has c - 1 ring steps, as forward: of keys, values and gradients": _believed("ring", steps=(0, 1, 1)),
    "c - 1 ring steps, not c; and gradients travel in FP32": _believed("ring", steps=(1, 1, 1), **_SAME),
    "c - 1 ring steps, not c; keys and values go around again in backward": _believed("ring", steps=(1, 1, 1), **_KEPT),
    "a rank keeps one piece of c itself": _believed("ulysses", pieces=0),
    "the output goes back as well, and so does its gradient": _believed("ulysses", heads=lambda N, K: N + 2 * K),
    "keys and values have K heads": _believed("ulysses", heads=lambda N, K: 4 * N),
    "queries and the output travel too, not keys and values alone": _believed("ulysses", heads=lambda N, K: 2 * K),
    "that is the forward pass; backward is asked for as well": [
        _believed("ulysses", ways=1),
        _believed("ring", numbers_of=lambda size: (size, 0, 0)),
    ],
}
check_bytes = Exercise(_bytes, _sizes, _WRONG_BYTES, named("bytes, {}"))
