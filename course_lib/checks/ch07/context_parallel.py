"""Graders of chapter 07, exercises 1 to 4: positions, the merge of a softmax, a step's tile, bytes."""

from collections.abc import Callable

import torch
from torch import Tensor

from course_lib.checks.core import expect_close, expect_equal, fail, fresh_generator, grader, numbers
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, tile
from course_lib.parallel.positions import positions
from course_lib.parallel.tiles import standard_forward


# ------------------------------------------------------------------------------------ 1. positions
@grader
def check_positions(answer, rng):
    """Each rank's tokens under the three sequence shardings."""
    for sequence_sharding in SEQUENCE_SHARDINGS:
        ranks = rng.choice([3, 4, 5])
        S = 2 * ranks * rng.randrange(2, 6)
        for rank in range(ranks):
            _expect_positions(answer, sequence_sharding, S, ranks, rank)


def _expect_positions(answer: Callable, sequence_sharding: str, S: int, ranks: int, rank: int) -> None:
    want, got = positions(sequence_sharding, S, ranks, rank).tolist(), answer(sequence_sharding, S, ranks, rank)
    where = f"{sequence_sharding!r}, {S} tokens, rank {rank} of {ranks}"
    if isinstance(got, (range, tuple, Tensor)):
        got = [int(place) for place in got]
    if not isinstance(got, list):
        fail(f"{where}: a list of positions is asked for, got {got!r}")
    chunks = torch.arange(S).chunk(2 * ranks)
    neighbours, dealt = list(range(rank * S // ranks, (rank + 1) * S // ranks)), list(range(rank, S, ranks))

    def both(first: int, second: int) -> list[int]:
        return torch.cat([chunks[first], chunks[second]]).tolist()

    believed = {
        "zigzag": {
            "zig-zag pairs chunk r with chunk 2 ranks - 1 - r, counted from the end": both(rank, ranks + rank),
            "these are two neighbouring chunks: the rank's work would grow with its number": both(
                2 * rank, 2 * rank + 1
            ),
            "the same tokens, but in descending chunks: positions ascend": both(2 * ranks - 1 - rank, rank),
        },
        "striped": {"striped deals tokens out one by one: every ranks-th, beginning with rank": neighbours},
        "contiguous": {"contiguous tokens are neighbours": dealt},
    }
    expect_equal(got, want, where, believed[sequence_sharding])


# ------------------------------------------------------------------------------------ 2. merge
@grader
def check_merge(answer, rng):
    """Parts of different weight, in several numbers, with scores near zero and in the thousands."""
    generator = fresh_generator(rng)
    for scale in (1.0, 2000.0):
        for count in (2, rng.randrange(3, 6)):
            _expect_merged(answer, generator, scale, count)


def _expect_merged(answer: Callable, generator: torch.Generator, scale: float, count: int) -> None:
    B, N, q, H = 2, 3, 5, 4
    queries = scale * numbers(generator, B, N, q, H)
    sizes = [*torch.randint(4, 8, (count - 1,), generator=generator).tolist(), 1]  # the last is never the heaviest
    k, v = (numbers(generator, B, N, sum(sizes), H) for _ in range(2))
    want, want_lse = standard_forward(queries, k, v, causal=False)
    blocks = zip(k.split(sizes, dim=2), v.split(sizes, dim=2), strict=True)
    parts = [standard_forward(queries, k_part, v_part, causal=False) for k_part, v_part in blocks]
    got = answer([(out.clone(), lse.clone()) for out, lse in parts])
    if not isinstance(got, tuple) or len(got) != 2:
        fail(f"a pair (out, lse) is asked for, got {type(got).__name__}")
    outs, lses = (torch.stack(column) for column in zip(*parts, strict=True))
    where = f"{count} parts" + (", scores in the thousands" if scale > 1 else "")
    if isinstance(got[0], Tensor) and not got[0].isfinite().all():
        fail(f"{where}: out has inf or nan: exp of a large score overflows; take the difference of two lse first")
    running, running_lse = parts[0]
    for out, lse in parts[1:]:  # who shrinks the new part, not what is there
        running_lse = torch.logaddexp(running_lse, lse)
        running = running + out * (lse - running_lse).exp().unsqueeze(-1)
    wrong = {
        "the outputs were averaged; each counts by its sum of exponentials": outs.mean(0),
        "the outputs were added; each must be shrunk first by its share": outs.sum(0),
        "the outputs were weighted by lse itself; the weight behind an output is exp(lse)": (
            outs * (lses / lses.sum(0)).unsqueeze(-1)
        ).sum(0),
        "what was merged so far must shrink as well when a part is added": running,
    }
    expect_close(got[0], want, f"{where}, out", wrong, rtol=1e-9)
    wrong_lse = {
        "log-sum-exps were added; add their exponentials, and take the logarithm": lses.sum(0),
        "the largest log-sum-exp is not that of all": lses.max(0).values,
        "this is the last part's log-sum-exp": lses[-1],
        "this is the sum itself; its logarithm is asked for": lses.exp().sum(0),
    }
    expect_close(got[1], want_lse, f"{where}, lse", wrong_lse, rtol=1e-9)


# ------------------------------------------------------------------------------------ 3. a step's tile
@grader
def check_tile(answer, rng):
    """Zig-zag: the pairs of every two ranks, as positions allow them, in no larger tile than it takes."""
    ranks, s = rng.choice([3, 4]), 2 * rng.randrange(2, 6)
    for query_rank in range(ranks):
        for key_rank in range(ranks):
            _expect_tile(answer, s, ranks, query_rank, key_rank)


def _seen(s: int, rows: slice, columns: slice, causal: bool) -> Tensor:
    seen = torch.zeros(s, s)
    part = torch.ones_like(seen[rows, columns])
    seen[rows, columns] = part.tril() if causal else part
    return seen.bool()


def _expect_tile(answer: Callable, s: int, ranks: int, query_rank: int, key_rank: int) -> None:
    where = f"s = {s}, queries of rank {query_rank}, keys of rank {key_rank}"
    got = answer(s, query_rank, key_rank)
    if not isinstance(got, tuple) or len(got) != 3 or not all(isinstance(part, slice) for part in got[:2]):
        fail(f"{where}: a tuple (slice, slice, bool) is asked for, got {got!r}")
    query_positions, key_positions = (positions("zigzag", s * ranks, ranks, rank) for rank in (query_rank, key_rank))
    allowed, seen = query_positions[:, None] >= key_positions[None, :], _seen(s, *got)
    if torch.equal(seen, allowed):
        best = tile("zigzag", s, query_rank, key_rank)
        if bool(got[2]) == best.causal:
            return
    half, whole = slice(s // 2, s), slice(0, s)
    later = key_rank > query_rank
    if later and not seen.any():
        fail(f"{where}: nothing is seen, as if tokens were contiguous; a later rank's late chunk lies before mine")
    if query_rank == key_rank and torch.equal(seen, _seen(s, whole, whole, False)):
        fail(f"{where}: my own keys were seen whole; a query does not see later keys of its own rank")
    if query_rank != key_rank and torch.equal(seen, _seen(s, whole, whole, False)):
        fail(f"{where}: all was seen; of another rank's keys one half or one half of my queries drops out")
    if query_rank != key_rank and torch.equal(seen, _seen(s, whole, whole, True)):
        fail(f"{where}: the lower triangle is of my own keys alone; of other ranks' a tile is a rectangle")
    if later and torch.equal(seen, _seen(s, whole, half, False)):
        fail(
            f"{where}: halves of keys and of queries are mixed up: a later rank's keys are all seen, by my late queries"
        )
    if not later and torch.equal(seen, _seen(s, whole, half, False)):
        fail(f"{where}: this is the earlier rank's late chunk, which lies after both of mine; its early one is seen")
    if torch.equal(_seen(s, *got[:2], not got[2]), allowed):
        cause = (
            "all my own keys lie in one triangle" if query_rank == key_rank else "a triangle is of my own keys alone"
        )
        fail(f"{where}: queries and keys are right, and causal must be {not got[2]}: {cause}")
    forbidden, missing = (seen & ~allowed).sum().item(), (allowed & ~seen).sum().item()
    fail(f"{where}: {forbidden} pairs are seen that the mask forbids, {missing} are missing")


# ------------------------------------------------------------------------------------ 4. bytes
@grader
def check_bytes(answer, rng):
    """Ring and Ulysses, with grouped queries, in 4, 1 and 2 bytes: in each other mistakes come to the same number."""
    for method in ("ring", "ulysses"):
        for itemsize in (4, 1, 2):
            c = rng.choice([3, 5])
            B, s, H = rng.randrange(2, 5), rng.randrange(6, 30), 8 * rng.randrange(1, 5)
            K = c * rng.randrange(1, 3)
            _expect_bytes(answer, method, (c, B, s, K * rng.choice([2, 4]), K, H, itemsize))


def _sent(method: str, c: int, B: int, s: int, N: int, K: int, H: int, itemsize: int) -> int:
    if method == "ring":
        return (c - 1) * 2 * B * s * K * H * (2 * itemsize + 4)
    return 2 * (2 * N + 2 * K) * B * s * H * itemsize * (c - 1) // c


def _expect_bytes(answer: Callable, method: str, sizes: tuple[int, ...]) -> None:
    c, B, s, N, K, H, itemsize = sizes
    want, block = _sent(method, *sizes), 2 * B * s * K * H
    head_bytes, again = B * s * H * itemsize, (c - 1) * block * (itemsize + 4)
    believed = {
        "ring": {
            "K heads travel, not N: copies are made where they arrive": want * N // K,
            "a block makes c - 1 ring steps, its gradient too: what the home adds itself never travels": (
                want * c // (c - 1)
            ),
            "gradients travel in FP32 while they are summed": (c - 1) * block * 3 * itemsize,
            "keys and values go around in backward once more: a rank keeps its own only": again,
            "keys and values: that is 2 tensors": want // 2,
            "that is the forward pass; backward is asked for as well": (c - 1) * block * itemsize,
            "a gradient is home after c - 1 ring steps: the first share is the next rank's, the home's never travels": (
                block * ((c - 1) * 2 * itemsize + c * 4)
            ),
            "backward has c - 1 ring steps, as forward: of keys and values, and of their gradients": (
                block * ((c - 1) * itemsize + c * (itemsize + 4))
            ),
            "c - 1 ring steps, not c; and gradients travel in FP32": c * block * 3 * itemsize,
            "c - 1 ring steps, not c; and keys and values go around once more in backward": c * block * (itemsize + 4),
        },
        "ulysses": {
            "a rank keeps one piece of c itself": want * c // (c - 1),
            "the output goes back as well, and so does its gradient": 2 * (N + 2 * K) * head_bytes * (c - 1) // c,
            "keys and values have K heads": 2 * 4 * N * head_bytes * (c - 1) // c,
            "queries and the output travel too, not keys and values alone": 2 * 2 * K * head_bytes * (c - 1) // c,
            "that is the forward pass; backward is asked for as well": want // 2,
        },
    }[method]
    where = f"{method!r}, c={c}, B={B}, s={s}, N={N}, K={K}, H={H}, itemsize={itemsize}"
    got = answer(method, *sizes)
    got = round(got) if isinstance(got, float) and abs(got - round(got)) < 1e-6 else got
    expect_equal(got, want, where, {message: value for message, value in believed.items() if value != want})
