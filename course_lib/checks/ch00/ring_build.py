"""The grader of exercise 8, a ring all-reduce from an empty cell: any direction, any order of the pieces is right."""

import math

import torch
from torch import Tensor

from course_lib.checks.ch00.ranks import ITEMSIZE, one_each
from course_lib.checks.core import expect_close, expect_shape, fail, grader
from course_lib.checks.observe import Call, Seen, expect_input_kept, expect_only_messages, run_calls

HANG = (
    "If all ranks begin with send, nobody receives: let both messages start at once, or let one rank begin with recv."
)


@grader
def check_ring_all_reduce(answer, rng):
    """The sum on every rank, from messages between neighbours, with at most 2 (G - 1) pieces sent by each rank."""
    for world_size in (4, rng.choice([2, 3])):
        whole = world_size * rng.randrange(4, 20)
        lengths = [whole, whole + rng.randrange(1, world_size), world_size + 1, world_size - 1]
        calls = [Call(one_each(rng, world_size, length)) for length in lengths]
        for call, everybody in zip(calls, run_calls(answer, calls, HANG), strict=True):
            for rank, seen in enumerate(everybody):
                where = f"rank {rank} of {world_size}, {len(call.inputs[0])} elements"
                _expect_sum(seen, rank, call.inputs, where)
                expect_input_kept(seen, where)
                _expect_ring(seen, rank, call.inputs, where)


def _expect_sum(seen: Seen, rank: int, inputs: list[Tensor], where: str) -> None:
    total = torch.stack(inputs).sum(0)
    expect_only_messages(seen, where)
    expect_shape(seen.result, total.shape, where)
    wrong = {
        "it has its own tensor; nothing was added": inputs[rank],
        "averaged, not summed": total / len(inputs),
    }
    if not torch.equal(seen.result, total):
        _expect_partial_sums(seen, rank, inputs, where)
        _expect_no_early_gather(seen, inputs, rank, where)
    if not any(torch.allclose(seen.result, value) for value in wrong.values()):
        _expect_all_pieces(seen.result, total, rank, len(inputs), where)
    expect_close(seen.result, total, where, wrong)


def _expect_partial_sums(seen: Seen, rank: int, inputs: list[Tensor], where: str) -> None:
    """Name a reduce-scatter phase without a sum, by its messages: the results alone are those of other mistakes."""
    size = len(inputs)
    in_phase_1 = [x for x in seen.sent[: size - 1] if x.numel()]
    if size == 2 or len(in_phase_1) < size - 1:  # the first message is never a sum
        return
    pieces = [x.tensor_split(size) for x in inputs]
    owners = [[r for r in range(size) if any(torch.equal(x, piece) for piece in pieces[r])] for x in in_phase_1]
    if all(rank in of_one for of_one in owners):
        fail(f"{where}: no piece was changed: `a = a + b` makes a new tensor, and `a += b` writes into the view")
    if all(owners):
        fail(
            f"{where}: every message of the reduce-scatter phase was a piece of one rank, and none a sum: add what "
            "arrives to your own piece, do not store it"
        )


def _expect_no_early_gather(seen: Seen, inputs: list[Tensor], rank: int, where: str) -> None:
    """Name the lesson's ring with phases that do not fit together: the second passes on partial sums."""
    pieces = [x.tensor_split(len(inputs)) for x in inputs]
    unchanged = torch.cat([pieces[piece][piece] for piece in range(len(inputs))])
    if seen.sent and torch.equal(seen.sent[0], pieces[rank][rank]) and torch.equal(seen.result, unchanged):
        fail(
            f"{where}: the reduce-scatter phase began with piece r (here {rank}), so it cannot finish that piece on "
            "rank r, and the all-gather phase passed on piece r first: begin the reduce-scatter phase with piece "
            "r - 1, or the all-gather phase with the piece that rank r finishes (r + 1 if you send to the right)"
        )
    for shift in (-1, 1):
        if torch.equal(seen.result, _gathered_from(inputs, rank, shift)):
            fail(
                f"{where}: the all-gather phase starts with a wrong piece: in step 0 rank r must send the piece that "
                f"it has finished (in the lesson's ring piece r, here {rank}), and {'r + 1' if shift > 0 else 'r - 1'} "
                "was sent, which is a partial sum"
            )


def _gathered_from(inputs: list[Tensor], rank: int, shift: int) -> Tensor:
    """Return what the lesson's ring leaves on a rank if step s of its all-gather phase sends piece r + shift - s."""
    size = len(inputs)
    held = [[piece.clone() for piece in x.tensor_split(size)] for x in inputs]
    for step in range(2 * (size - 1)):
        first = -1 if step < size - 1 else shift + size - 1
        sent = {r: (r + first - step) % size for r in range(size)}
        carried = {r: held[r][piece].clone() for r, piece in sent.items()}
        for r in range(size):
            left = (r - 1) % size
            arrived = carried[left]
            held[r][sent[left]] = held[r][sent[left]] + arrived if step < size - 1 else arrived
    return torch.cat(held[rank])


def _expect_all_pieces(result: Tensor, total: Tensor, rank: int, size: int, where: str) -> None:
    """Say which part of the sum is missing, where some elements have it."""
    right, rest = result == total, len(total) % size
    if rest and right[:-rest].all() and not right[-rest:].any():
        fail(f"{where}: the last {rest} elements are not summed; the length does not divide by {size}, so pad or split")
    if right.any() and not right.all():
        pieces = torch.arange(len(total)).tensor_split(size)
        piece = next(index for index, elements in enumerate(pieces) if not right[elements].all())
        elements = (
            f"piece {piece} of the tensor (elements {pieces[piece][0]} to {pieces[piece][-1]}, as tensor_split cuts)"
        )
        fail(f"{where}: {elements} is not the full sum; {_when_it_is_due(piece, rank, size)}")


def _when_it_is_due(piece: int, rank: int, size: int) -> str:
    """Say in which step of the lesson's ring a rank gets a finished piece; other orders are right too."""
    if piece == rank:
        return f"in the lesson's ring rank {rank} finishes it in the last step ({size - 2}) of the reduce-scatter phase"
    step = (rank - 1 - piece) % size
    return (
        f"a finished piece must reach every rank: in the lesson's ring this one comes from rank {(rank - 1) % size}, "
        f"in step {step} of the all-gather phase, whose steps are 0 to {size - 2}"
    )


def _expect_ring(seen: Seen, rank: int, inputs: list[Tensor], where: str) -> None:
    """A padded tensor is allowed, so each piece may have ceil(P / G) elements."""
    size, length = len(inputs), len(inputs[0])
    neighbours = {(rank + 1) % size, (rank - 1) % size}
    strangers = sorted(set(seen.sent_to) - neighbours)
    if strangers:
        fail(f"{where}: it sent to {strangers}; in a ring a rank sends only to its neighbours, {sorted(neighbours)}")
    enough = 2 * (size - 1) * math.ceil(length / size) * ITEMSIZE
    if seen.sent_bytes > enough:
        in_pieces = seen.sent_bytes <= 1.5 * length / size * ITEMSIZE * len(seen.sent_to)
        why = (
            "stop after G - 1 steps of each phase" if in_pieces else "cut the tensor into G pieces, and send one a step"
        )
        fail(f"{where}: it sent {seen.sent_bytes:,} bytes, and {enough:,} are enough: {why}")
