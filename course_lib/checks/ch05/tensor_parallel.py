"""Graders of chapter 05, exercises 1 to 3: heads by rank, the share of communication, a row layer."""

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from course_lib.checks.core import expect_close, expect_number, fail, fresh_generator, grader, numbers
from course_lib.checks.observe import Call, Seen, expect_input_kept, run_calls
from course_lib.comm.conjugate import my_piece
from course_lib.traffic import ring_all_reduce_bytes

SAME_CALLS = "Does every rank of the group make the same calls in the same order?"


# ------------------------------------------------------------------------------------ 1. heads by rank
Heads = tuple[list[int], list[int]]
SHAPES = [(8, 8, 4), (8, 4, 2), (8, 4, 8), (12, 3, 6), (16, 4, 8), (32, 8, 16), (6, 2, 2), (8, 1, 4), (24, 6, 3)]
IMPOSSIBLE = [(6, 2, 4), (12, 6, 4), (32, 8, 64), (12, 4, 6), (9, 3, 2)]


@grader
def check_heads(answer, rng):
    """Query heads and key/value heads of a rank, and a ValueError where they cannot be dealt out evenly."""
    factor = rng.choice([1, 2, 3])
    for N, K, tp in rng.sample(SHAPES, len(SHAPES)):
        N = N * factor  # more query heads for each key/value head
        for rank in range(tp):
            got, want = answer(N, K, tp, rank), _heads(N, K, tp, rank)
            where = f"{N} query heads, {K} key/value heads, rank {rank} of {tp}"
            _expect_heads(got, want, where, K, lambda N=N, K=K, tp=tp: _in_turns(answer, N, K, tp))
    for N, K, tp in IMPOSSIBLE:
        try:
            got = answer(N, K, tp, 0)
        except ValueError:
            continue
        reason = f"{tp} does not divide {N}" if N % tp else f"of {K} and {tp} neither divides the other"
        fail(f"{N} query heads, {K} key/value heads, tp {tp}: it returned {got}; {reason}: raise ValueError")


def _heads(N: int, K: int, tp: int, rank: int) -> Heads:
    queries = list(range(rank * N // tp, (rank + 1) * N // tp))
    return queries, sorted({head * K // N for head in queries})


def _in_turns(answer: Callable, N: int, K: int, tp: int) -> bool:
    """Whether key/value heads go to the ranks like cards; one rank alone may have its heads for another reason."""
    return all(list(answer(N, K, tp, rank)[1]) == list(range(rank % K, K, tp)) for rank in range(tp))


def _expect_heads(got: object, want: Heads, where: str, K: int, in_turns: Callable[[], bool]) -> None:
    if not isinstance(got, tuple) or len(got) != 2:
        fail(f"{where}: it returned {got!r}; return two lists, (query heads, key/value heads)")
    queries, kv = list(got[0]), list(got[1])
    if queries != want[0]:
        fail(f"{where}: query heads {queries}; right is {want[0]}, neighbours together, as an equal cut of the weight")
    if kv == want[1]:
        return
    if kv == list(range(K)):
        fail(f"{where}: key/value heads {kv}; a rank needs only those that its own query heads read, {want[1]}")
    if in_turns():
        fail(f"{where}: key/value heads {kv} are dealt out in turns; its query heads read neighbours")
    if not kv:
        fail(f"{where}: no key/value head; with more ranks than heads, tp / K neighbouring ranks hold the same one")
    fail(f"{where}: key/value heads {kv}; its query heads read {want[1]}")


# ------------------------------------------------------------------------------------ 2. the share of communication
@grader
def check_share(answer, rng):
    """Seconds of communication over seconds of computation of tensor parallelism, from data-sheet numbers."""
    for _ in range(20):
        layers, width, tp = rng.randrange(10, 100), 128 * rng.randrange(8, 130), rng.choice([3, 4, 6, 8])
        case = (layers, width, 12 * layers * width**2, tp, rng.uniform(100e9, 900e9), rng.uniform(100e12, 900e12))
        _expect_share(answer(*case), case)


def _expect_share(got: object, case: tuple) -> None:
    layers, width, parameters, tp, both_directions, flops = case
    bytes_sent = 4 * layers * 2 * (tp - 1) / tp * 2 * width
    want = bytes_sent / (both_directions / 2) / (6 * parameters / tp / flops)
    believed = {
        "it is half of what is right. Either the data sheet's number was used as it is (it adds both directions, and "
        "one of them bounds a ring), or only forward's two all-reduces a layer were counted": want / 2,
        "each all-reduce was taken to send its payload once; it is 2 (tp - 1) / tp of it": want / 2 * tp / (tp - 1),
        "each all-reduce was taken to send its payload twice; it is 2 (tp - 1) / tp of it": want * tp / (tp - 1),
        "each GPU computes only 1 / tp of the FLOPs": want / tp,
        "a bf16 number has 2 bytes": want * 2,
        "forward and backward of a token take 6 FLOPs for each parameter, 2 are forward's alone": want * 3,
    }
    where = (
        f"{layers} layers, width {width}, tp {tp}, {both_directions / 1e9:.0f} GB/s as sold, {flops / 1e12:.0f} TFLOP/s"
    )
    expect_number(got, want, where, believed, form=".4f")


# ------------------------------------------------------------------------------------ 3. a row layer
@grader
def check_row(answer, rng):
    """A row layer from the whole weight and bias: my columns of the stored weight, one sum, the bias once."""
    for world_size in (2, rng.choice([3, 4])):
        F_ = D = world_size * rng.randrange(3, 7)  # square: a cut along the wrong dimension has the right shape
        generator = fresh_generator(rng)
        x_BSF = numbers(generator, 2, 5, F_)
        w_DF, b_D = (numbers(generator, *size) for size in ((D, F_), (D,)))
        pieces = [my_piece(x_BSF, rank, world_size, -1).contiguous() for rank in range(world_size)]
        [everybody] = run_calls(functools.partial(_row, answer), [Call(pieces, (w_DF, b_D))], SAME_CALLS)
        for rank, seen in enumerate(everybody):
            _expect_row(seen, rank, pieces, w_DF, b_D, x_BSF)


def _row(answer: Callable, x_BSf: Tensor, w_DF: Tensor, b_D: Tensor, group) -> object:
    return answer(x_BSf, w_DF.clone(), b_D.clone(), group)


def _expect_row(seen: Seen, rank: int, pieces: list[Tensor], w_DF: Tensor, b_D: Tensor, x_BSF: Tensor) -> None:
    tp = len(pieces)
    where = f"rank {rank} of {tp}"
    right = F.linear(x_BSF, w_DF, b_D)
    partial_sums = [F.linear(pieces[r], my_piece(w_DF, r, tp, 1)) for r in range(tp)]
    wrong = {
        f"the bias is in it {tp} times; add it once, after the sum": right + (tp - 1) * b_D,
        "the bias is missing": right - b_D,
        "this is the rank's own partial sum; the ranks' products must be summed": partial_sums[rank] + b_D,
        "this is the rank's own partial sum; the ranks' products must be summed ": partial_sums[rank],
        "the partial sums were averaged": (right - b_D) / tp + b_D,
        "the weight was cut along its outputs (dimension 0 of the stored weight); rows are dimension 1": sum(
            F.linear(pieces[r], my_piece(w_DF, r, tp, 0).t()) for r in range(tp)
        )
        + b_D,
    }
    expect_close(seen.result, right, where, wrong)
    expect_input_kept(seen, where)
    enough = ring_all_reduce_bytes(right.nbytes, tp, rank, itemsize=8)
    if seen.sent_bytes > enough + 64:
        fail(f"{where}: it sent {seen.sent_bytes:,} bytes; one all-reduce of the result sends {enough:,}")
