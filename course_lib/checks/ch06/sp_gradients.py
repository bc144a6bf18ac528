"""Graders of chapter 06, exercises 3 to 5: gather_in and its backward pass, the forgotten sum, half a block."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checks.core import expect_close, fail, fresh_seed, grader, numbers, run_ranks
from course_lib.checks.observe import Crossed, cross
from course_lib.layout import piece_sizes
from course_lib.measure.meter import ByteMeter
from course_lib.traffic import all_gather_bytes, reduce_scatter_bytes


# ------------------------------------------------------------------------------------ 3. gather_in
@grader
def check_gather_in(answer, rng):
    """Tokens together along the sequence, equal shards and others; backward sums and keeps mine; bytes both ways."""
    for world_size in (2, rng.choice([3, 4])):
        for short_by in (0, 1):  # tokens that the last rank has fewer
            B, most, D = rng.choice([(2, 3, 5), (3, 2, 4), (4, 6, 3)])
            S, seed = most * world_size - short_by, fresh_seed(rng)
            ranks = run_ranks(_cross, world_size, answer, seed, (B, S, D))
            x_BSD = numbers(seed, B, S, D)
            weights = [numbers(seed + 100 + rank, B, S, D) for rank in range(world_size)]
            for rank, seen in enumerate(ranks):
                _expect_crossed(seen, x_BSD, weights, rank)
            padded_bytes = 8 * B * most * world_size * D
            for rank, seen in enumerate(ranks):
                _expect_half_an_all_reduce(seen, padded_bytes, rank, world_size)


def _cross(answer: type, seed: int, shape: tuple[int, int, int]) -> Crossed:
    group, rank = dist.group.WORLD, dist.get_rank()
    x_BsD = numbers(seed, *shape).split(piece_sizes(shape[1], group.size()), dim=1)[rank].clone()
    return cross(lambda x: answer.apply(x, group, shape[1]), x_BsD, numbers(seed + 100 + rank, *shape))


def _expect_crossed(seen: Crossed, x_BSD: Tensor, weights: list[Tensor], rank: int) -> None:
    world_size, sizes = len(weights), piece_sizes(x_BSD.shape[1], len(weights))
    where = f"rank {rank} of {world_size}, {x_BSD.shape[1]} tokens"
    wrong_forward = {}
    if len(set(sizes)) == 1:
        along_batch = torch.cat(x_BSD.split(sizes, dim=1), dim=0)
        wrong_forward = {
            "the pieces were put together along the batch; tokens are dimension 1": along_batch,
            "the pieces came one below the other, along the batch, and were reshaped: that mixes sequences and tokens; "
            "transpose before the gather and after it": along_batch.reshape(x_BSD.shape),
        }
    expect_close(seen.out, x_BSD, f"{where}, forward", wrong_forward)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    total = sum(weights)
    wrong = {
        "only my columns' part of the gradient: each token met the columns of every rank, so sum": weights[rank][
            :, mine
        ],
        "averaged over the ranks; the ranks' parts must be summed": total[:, mine] / world_size,
        "these are the first rank's tokens": total[:, : sizes[rank]],
    }
    if len(set(sizes)) == 1:
        flat = total.flatten().chunk(world_size)[rank].view_as(total[:, mine])
        wrong["backward cut the sum along the batch and reshaped it: that mixes sequences and tokens; transpose"] = flat
    if seen.grad is None:
        fail(f"{where}: no gradient arrived at x_BsD; backward must return it first, and None for group and S")
    expect_close(seen.grad, total[:, mine], f"{where}, gradient of my tokens", wrong)


def _expect_half_an_all_reduce(seen: Crossed, padded_bytes: int, rank: int, world_size: int) -> None:
    for way, sent, enough in (
        ("forward", seen.sent_forward, all_gather_bytes(padded_bytes, world_size, rank, itemsize=8)),
        ("backward", seen.sent_backward, reduce_scatter_bytes(padded_bytes, world_size, rank, itemsize=8)),
    ):
        if sent > enough:
            fail(
                f"rank {rank} of {world_size}: it sent {sent:,} bytes {way}, and {enough:,} are enough: "
                "half an all-reduce; a whole one sums tokens that are not yours"
            )


# ------------------------------------------------------------------------------------ 4. the forgotten sum
CUT = (
    "attention.q.weight",
    "attention.q.bias",
    "attention.o.weight",
    "mlp.up.weight",
    "mlp.up.bias",
    "mlp.down.weight",
)
WHOLE = ("attention_norm.weight", "attention_norm.bias", "attention.o.bias", "mlp_norm.weight", "mlp.down.bias")


@dataclass(frozen=True)
class Summed:
    """The gradients that one rank was left with, and its calls."""

    gradients: dict[str, Tensor]
    calls: dict[str, int]


@grader
def check_sum_of_my_tokens(answer, rng):
    """What is not cut is summed, in place, in one all-reduce; what is cut stays."""
    for world_size in (2, rng.choice([3, 4])):
        seed, width = fresh_seed(rng), rng.randrange(4, 9)
        ranks = run_ranks(_sum_gradients, world_size, answer, seed, width)
        before = [_gradients(seed, rank, width) for rank in range(world_size)]
        for rank, seen in enumerate(ranks):
            _expect_summed(seen, before, rank)


def _gradients(seed: int, rank: int, width: int) -> dict[str, Tensor]:
    shapes = {name: (width, 3) if name in CUT and "weight" in name else (width,) for name in CUT + WHOLE}
    return {name: numbers(seed + 50 * rank + at, *shape) for at, (name, shape) in enumerate(sorted(shapes.items()))}


def _sum_gradients(answer: Callable, seed: int, width: int) -> Summed:
    gradients = _gradients(seed, dist.get_rank(), width)
    kept = dict(gradients)  # the very tensors: the answer works in place
    with ByteMeter() as meter:
        answer(gradients, set(CUT), dist.group.WORLD)
    return Summed(kept, dict(meter.calls))


def _expect_summed(seen: Summed, before: list[dict[str, Tensor]], rank: int) -> None:
    world_size = len(before)
    for name in WHOLE:
        total = sum(gradients[name] for gradients in before)
        kind = "norm" if "norm" in name else "bias"
        own = {
            "norm": "this rank's part is left as it was; if you made a new tensor, write into the old one (`copy_`)",
            "bias": "left out, though it is added behind the sum, to my tokens alone: not norms only",
        }[kind]
        wrong = {own: before[rank][name], "averaged; the parts of a sum must be summed": total / world_size}
        expect_close(seen.gradients[name], total, f"rank {rank}, {name}", wrong)
    for name in CUT:
        total = sum(gradients[name] for gradients in before)
        wrong = {"summed, but every rank has another part of this tensor": total}
        expect_close(seen.gradients[name], before[rank][name], f"rank {rank}, {name}", wrong)
    if sum(seen.calls.values()) != 1:
        fail(f"rank {rank}: {seen.calls or 'no calls'}; put them into one flat tensor and send one all-reduce")


# ------------------------------------------------------------------------------------ 5. half a block
@dataclass(frozen=True)
class HalfBlock:
    """One rank's result and gradients, the tokens that its norm saw, and bytes."""

    out: Tensor
    grads: dict[str, Tensor | None]
    tokens_normed: list[int]
    sent_bytes: int


@grader
def check_mlp_block(answer, rng):
    """Values and gradients of one process; the norm on my tokens; a gather and a scatter each way."""
    for world_size in (2, rng.choice([3, 4])):
        seed = fresh_seed(rng)
        sizes = (rng.randrange(2, 4), rng.randrange(2, 5) * world_size, rng.randrange(5, 9), 4 * world_size)
        ranks = run_ranks(_half_block, world_size, answer, seed, sizes)
        for rank, seen in enumerate(ranks):
            _expect_half_block(seen, seed, sizes, rank, world_size)


def _half_block_inputs(seed: int, sizes: tuple[int, int, int, int]) -> dict[str, Tensor]:
    B, S, D, ff = sizes
    shapes = {"x": (B, S, D), "norm": (D,), "up": (ff, D), "down": (D, ff), "bias": (D,)}
    tensors = {name: numbers(seed + at, *shape) for at, (name, shape) in enumerate(shapes.items())}
    return {name: x.requires_grad_() for name, x in tensors.items()}


def _norm_of(weight_D: Tensor) -> nn.RMSNorm:
    norm = nn.RMSNorm(weight_D.numel(), eps=1e-5, dtype=torch.float64)
    norm.weight = nn.Parameter(weight_D.detach().clone())
    return norm


def _half_block(answer: Callable, seed: int, sizes: tuple[int, int, int, int]) -> HalfBlock:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole, normed = _half_block_inputs(seed, sizes), []
    norm = _norm_of(whole["norm"])
    norm.register_forward_hook(lambda module, inputs, output: normed.append(output.shape[1]))
    cut = {"x": 1, "up": 0, "down": 1}
    mine = {name: whole[name].detach().chunk(world_size, dim)[rank].clone() for name, dim in cut.items()}
    mine["bias"] = whole["bias"].detach().clone()
    for x in mine.values():
        x.requires_grad_()
    with ByteMeter() as meter:
        out = answer(mine["x"], norm, mine["up"], mine["down"], mine["bias"], dist.group.WORLD)
        if isinstance(out, Tensor) and out.requires_grad:
            (out * _loss_weights(seed, out.shape)).sum().backward()
    grads = {name: x.grad for name, x in mine.items()} | {"norm": norm.weight.grad}
    return HalfBlock(out, grads, normed, meter.sent_bytes)


def _loss_weights(seed: int, shape: tuple[int, ...]) -> Tensor:
    """The same for every token, so that shards of any rank have theirs."""
    return numbers(seed + 77, shape[-1])


def _expect_half_block(seen: HalfBlock, seed: int, sizes: tuple, rank: int, world_size: int) -> None:
    where, (B, S, D, _) = f"rank {rank} of {world_size}", sizes
    whole = _half_block_inputs(seed, sizes)
    x, bias = whole["x"], whole["bias"]
    normed = _norm_of(whole["norm"])(x)
    out = x + F.linear(F.gelu(F.linear(normed, whole["up"])), whole["down"]) + bias
    (out * _loss_weights(seed, out.shape)).sum().backward()

    def mine(tensor: Tensor, dim: int = 1) -> Tensor:
        return tensor.detach().chunk(world_size, dim)[rank]

    wrong = {
        "the bias is in it once for every rank; add it after the sum": mine(out + (world_size - 1) * bias),
        "the residual is in it once for every rank; add it after the sum": mine(out + (world_size - 1) * x),
        "the residual is missing": mine(out - x),
        "the bias is missing": mine(out - bias),
        "this is the whole sequence; a rank returns its own tokens": out.detach(),
    }
    expect_close(seen.out, mine(out), f"{where}, the result", wrong)
    if seen.tokens_normed != [S // world_size]:
        fail(
            f"{where}: the norm saw {seen.tokens_normed} tokens, and my {S // world_size} are enough; "
            "normalise before the gather"
        )
    for name, dim in (("x", 1), ("up", 0), ("down", 1)):
        if seen.grads[name] is None:
            fail(f"{where}: no gradient of {name} arrived")
        got, want = seen.grads[name], mine(whole[name].grad, dim)
        if not torch.allclose(got, want, rtol=1e-6, atol=1e-9):
            fail(
                f"{where}: the result is right, the gradient of {name} is not; what goes into columns needs gather_in, "
                "whose backward sums, and what leaves a row scatter_sum"
            )
    payload = B * S * D * 8
    enough = 2 * (all_gather_bytes(payload, world_size, rank, 8) + reduce_scatter_bytes(payload, world_size, rank, 8))
    if seen.sent_bytes > enough:
        fail(f"{where}: it sent {seen.sent_bytes:,} bytes forward and backward, and {enough:,} are enough")
