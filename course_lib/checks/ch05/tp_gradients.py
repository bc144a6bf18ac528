"""Graders of chapter 05, exercises 4 to 6: gathered features, backward of a column layer, a loss from pieces."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib.checks.core import expect_close, expect_equal, fail, fresh_seed, grader, numbers, run_ranks
from course_lib.comm.conjugate import my_piece
from course_lib.layout.partition import piece_sizes
from course_lib.measure.meter import ByteMeter
from course_lib.traffic import ring_all_reduce_bytes


# ------------------------------------------------------------------------------------ 4. gathered features
@dataclass(frozen=True)
class Crossed:
    """What one rank saw: x and the result, the gradient that went in and the one that came out (None: it was lost)."""

    x: Tensor
    y: Tensor
    grad_y: Tensor
    grad_x: Tensor | None
    kept: bool
    sent_forward: int
    backward_calls: dict[str, int]


@grader
def check_gather_features(answer, rng):
    """Features of all ranks side by side forward, my part of the gradient backward."""
    for world_size in (2, rng.choice([3, 4])):
        everybody = run_ranks(_cross, world_size, answer, fresh_seed(rng))
        gathered = torch.cat([seen.x for seen in everybody], dim=-1)
        for rank, seen in enumerate(everybody):
            where = f"rank {rank} of {world_size}"
            wrong = {
                "the parts stand in another order; rank 0's come first": torch.cat(
                    [other.x for other in everybody[::-1]], dim=-1
                ),
                "this is the rank's own part; forward is an all-gather": seen.x,
                "the parts are below each other; features belong side by side, in the last dimension": torch.cat(
                    [other.x for other in everybody]
                ),
            }
            expect_close(seen.y, gathered, f"{where}, forward", wrong)
            _expect_gradient(seen, rank, world_size, where)
            enough = _gather_bytes(seen.y, world_size)
            if seen.sent_forward > enough:
                fail(f"{where}: forward sent {seen.sent_forward:,} bytes; one all-gather sends {enough:,}")
            expect_equal(seen.backward_calls, {}, f"{where}: collectives called backward")


def _gather_bytes(y: Tensor, world_size: int) -> int:
    return y.nbytes // world_size * (world_size - 1)


def _cross(answer: Callable, seed: int) -> Crossed:
    """All ranks go on with the same numbers, so the gradient that arrives is the same on each."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    x_Tf = numbers(seed + rank, 4, 3).requires_grad_()
    grad_y = numbers(seed + 50, 3 * tp, 4).t()  # strided, as gradients may be
    before = x_Tf.detach().clone(), grad_y.clone()
    with ByteMeter() as forward:
        y_TF = answer(x_Tf, dist.group.WORLD)
    if not isinstance(y_TF, Tensor):
        raise TypeError(f"your function must return a tensor, not {type(y_TF).__name__}")
    y, grad_x = y_TF.detach().clone(), None
    kept = torch.equal(x_Tf.detach(), before[0])
    grad_y = grad_y if y.shape == grad_y.shape else torch.ones_like(y)
    before = before[0], grad_y.clone()
    with ByteMeter() as backward:
        if y_TF.requires_grad:
            (grad_x,) = torch.autograd.grad(y_TF, x_Tf, grad_y, allow_unused=True)
    kept = kept and torch.equal(grad_y, before[1])
    grad_x = None if grad_x is None else grad_x.clone()
    return Crossed(before[0], y, before[1], grad_x, kept, forward.sent_bytes, backward.calls)


def _expect_gradient(seen: Crossed, rank: int, world_size: int, where: str) -> None:
    if not seen.kept:
        fail(f"{where}: your function changed x, or backward the gradient that it was given; work on a copy")
    if seen.grad_x is None:
        fail(f"{where}: no gradient reaches x; autograd needs a Function with a backward, applied by `.apply`")
    want = my_piece(seen.grad_y, rank, world_size, -1)
    wrong = {
        f"{world_size} times too large: each rank has the full gradient already, and it was summed again": (
            world_size * want
        ),
        "it was divided by the number of ranks; each rank has the full gradient already": want / world_size,
        "it is the gradient of another rank's features": my_piece(seen.grad_y, (rank + 1) % world_size, world_size, -1),
    }
    expect_close(seen.grad_x, want, f"{where}, gradient", wrong)


# ------------------------------------------------------------------------------------ 5. backward of a column layer
@grader
def check_column_backward(answer, rng):
    """Gradients of x, of my weight and of my bias; only the first is a sum over ranks."""
    for world_size in (2, rng.choice([3, 4])):
        D, f, seed = rng.randrange(4, 9), rng.randrange(2, 7), fresh_seed(rng)
        for rank, (got, own, sent, calls) in enumerate(run_ranks(_column, world_size, answer, D, f, seed)):
            where = f"rank {rank} of {world_size}"
            if not isinstance(got, tuple) or len(got) != 3:
                fail(f"{where}: return three tensors: the gradients of x, of the weight and of the bias")
            _expect_column(got, own, sent, calls, where, world_size, rank)


def _column(answer: Callable, D: int, f: int, seed: int) -> tuple:
    """What the answer gave; x's gradient of this rank and of all, the weight's and the bias's, each also summed."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    x_BSD, w_fD = numbers(seed, 2, 3, D), numbers(seed + 1 + rank, f, D)
    grad_BSf = numbers(seed + 20 + rank, 2, 3, f)
    with ByteMeter() as meter:
        got = answer(grad_BSf.clone(), x_BSD.clone(), w_fD.clone(), dist.group.WORLD)
    whole = []
    for r in range(tp):
        grad, w = numbers(seed + 20 + r, 2, 3, f), numbers(seed + 1 + r, f, D)
        flat = grad.flatten(0, 1)
        whole.append((grad @ w, flat.t() @ x_BSD.flatten(0, 1), flat.sum(0)))
    mine = whole[rank]
    sums = [torch.stack([of[index] for of in whole]).sum(0) for index in range(3)]
    return got, (mine, sums), meter.sent_bytes, meter.calls


def _expect_column(got: tuple, own: tuple, sent: int, calls: dict, where: str, tp: int, rank: int) -> None:
    (x, w, b), (sum_x, sum_w, sum_b) = own
    wrong = {
        "this is the rank's own partial sum; every rank used x for other outputs, so the ranks' must be summed": x,
        "the partial sums were averaged": sum_x / tp,
    }
    expect_close(got[0], sum_x, f"{where}: the gradient of x", wrong)
    message = "summed over the ranks; each rank has another part of the weight, and the whole gradient of its part"
    expect_close(got[1], w, f"{where}: the gradient of the weight", {message: sum_w, "averaged over ranks": sum_w / tp})
    expect_close(got[2], b, f"{where}: the gradient of the bias", {message.replace("weight", "bias"): sum_b})
    enough = ring_all_reduce_bytes(sum_x.nbytes, tp, rank, itemsize=8)
    if sent > enough:
        fail(f"{where}: it sent {sent:,} bytes in {calls}; one all-reduce of x's gradient sends {enough:,}")


# ------------------------------------------------------------------------------------ 6. a loss from pieces
@grader
def check_vocab_loss(answer, rng):
    """Loss of each token and the gradient of its logits, from pieces, never gathered, safe for large logits."""
    for world_size, scale in ((2, 1.0), (rng.choice([3, 4]), 1.0), (2, 800.0)):
        V, seed = rng.randrange(40, 70), fresh_seed(rng)
        for rank, (got, want, believed, sent) in enumerate(run_ranks(_loss, world_size, answer, V, seed, scale)):
            where = f"rank {rank} of {world_size}, logits of scale {scale:g}"
            if not isinstance(got, tuple) or len(got) != 2:
                fail(f"{where}: return two tensors: the loss of each token, and the gradient of my logits")
            _expect_loss(got, want, believed, sent, where, world_size, rank)


def _loss(answer: Callable, V: int, seed: int, scale: float) -> tuple:
    rank, tp = dist.get_rank(), dist.get_world_size()
    logits_BSV = (scale * numbers(seed, 2, 4, V)).requires_grad_()
    y_BS = torch.randint(V, (2, 4), generator=torch.Generator().manual_seed(seed))
    first = sum(piece_sizes(V, tp)[:rank])
    logits_BSv = my_piece(logits_BSV.detach(), rank, tp, 2).contiguous()
    with ByteMeter() as meter:
        got = answer(logits_BSv.clone(), y_BS.clone(), first, dist.group.WORLD)
    want_BS = F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten(), reduction="none").view_as(y_BS)
    want_BS.sum().backward()
    pieces = [my_piece(logits_BSV.detach(), r, tp, 2) for r in range(tp)]
    place_BS = (y_BS - first).clamp(0, logits_BSv.shape[-1] - 1)
    targets_BS = logits_BSV.detach().gather(2, y_BS.unsqueeze(-1)).squeeze(-1)
    softmax_BSv = my_piece(logits_BSV.detach().softmax(-1), rank, tp, 2)
    my_soft_BSv = logits_BSv.softmax(-1)
    is_mine_BS = (y_BS >= first) & (y_BS < first + logits_BSv.shape[-1])
    onehot_BSv = F.one_hot(place_BS, logits_BSv.shape[-1])
    maxima = [piece.amax(-1) for piece in pieces]
    starts = [sum(piece_sizes(V, tp)[:r]) for r in range(tp)]
    own_sums_BS = sum(
        (piece - most.unsqueeze(-1)).exp().sum(-1) for piece, most in zip(pieces, maxima, strict=True)
    ).log()
    owners_max_BS = sum(
        most * ((y_BS >= start) & (y_BS < start + piece.shape[-1]))
        for piece, start, most in zip(pieces, starts, maxima, strict=True)
    )
    first_ones_BS = sum(  # with `where(is_mine, y - first, 0)` and no mask after it
        piece.gather(2, ((y_BS - start) * ((y_BS >= start) & (y_BS < start + piece.shape[-1]))).unsqueeze(-1))[..., 0]
        for piece, start in zip(pieces, starts, strict=True)
    )
    clamped_BS = sum(
        piece.gather(2, (y_BS - start).clamp(0, piece.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        for piece, start in zip(pieces, starts, strict=True)
    )
    spare_BS = (tp - 1) * logits_BSV.detach().amax(-1)  # where z_t - m is summed, each other rank adds an -m as well
    believed = {
        "own max": own_sums_BS + maxima[rank] - targets_BS,
        "own max, and the owner's": own_sums_BS + owners_max_BS - targets_BS,
        "first of mine": want_BS.detach() + targets_BS - first_ones_BS,
        "first of mine - m": want_BS.detach() + targets_BS - first_ones_BS + spare_BS,
        "clamped - m": want_BS.detach() + targets_BS - clamped_BS + spare_BS,
        "own sum": logits_BSv.logsumexp(-1) - targets_BS,
        "clamped": want_BS.detach() + targets_BS - clamped_BS,
        "no target": softmax_BSv,
        "my softmax": my_soft_BSv - onehot_BSv * is_mine_BS.unsqueeze(-1),
        "everybody's target": softmax_BSv - onehot_BSv,
    }
    return got, (want_BS.detach(), my_piece(logits_BSV.grad, rank, tp, 2)), believed, meter.sent_bytes


def _expect_loss(got: tuple, want: tuple, believed: dict, sent: int, where: str, tp: int, rank: int) -> None:
    loss_BS, grad_BSv = got
    if isinstance(loss_BS, Tensor) and not loss_BS.isfinite().all():
        fail(f"{where}: the loss is not finite; take the largest logit, of all ranks, out before exp")
    another_scale = "exponentials of different scales cannot be added"
    of_loss = {
        f"each rank took its own largest logit out; {another_scale}": believed["own max"],
        f"each rank took its own largest logit out, of the target as well; {another_scale}": (
            believed["own max, and the owner's"]
        ),
        "a target that is another rank's was answered with a logit of one's own; answer it with 0": believed["clamped"],
        "a target that is another rank's was answered with a logit of one's own, less m; answer it with 0": (
            believed["clamped - m"]
        ),
        "for a target that is another rank's the logit at place 0 was counted; multiply by is-it-mine": (
            believed["first of mine"]
        ),
        "for a target that is another rank's the logit at place 0, less m, was counted; multiply by is-it-mine": (
            believed["first of mine - m"]
        ),
        "the sum of exponentials is the rank's own; it must run over all ranks' logits": believed["own sum"],
    }
    expect_close(loss_BS, want[0], f"{where}: the loss", of_loss)
    of_gradient = {
        "this is the softmax; at the target 1 is subtracted": believed["no target"],
        "the softmax of the rank's own logits; divide by the sum over all ranks": believed["my softmax"],
        "1 was subtracted on every rank; only the rank that has the target does so": believed["everybody's target"],
    }
    expect_close(grad_BSv, want[1], f"{where}: the gradient", of_gradient)
    enough = 3 * ring_all_reduce_bytes(want[0].nbytes, tp, rank, itemsize=8)
    if sent > enough + 2 * tp * 8:  # two sums in one message are cut into other pieces: a rank may send a little more
        fail(f"{where}: it sent {sent:,} bytes, and {enough:,} are enough: three numbers per token, never the logits")
