"""Graders of chapter 07, exercises 5 and 6: the loss of a shard, Ulysses' all-to-all; on real ranks."""

import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib import model
from course_lib.checks.core import expect_close, expect_shape, fail, fresh_seed, grader, numbers, run_ranks
from course_lib.checks.observe import Crossed, cross
from course_lib.config import ModelConfig
from course_lib.parallel import context
from course_lib.traffic import all_to_all_bytes
from course_lib.training import loss_of

SMALL = ModelConfig("small", 1, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, vocab_size=29, max_seq_len=64)


# ------------------------------------------------------------------------------------ 5. the loss of a shard
@dataclass(frozen=True)
class Lost:
    """What one rank returned, its gradient of the embedding, and what its believers would have returned.

    loss   None: the engine got one token too few
    """

    loss: Tensor | None
    grad: Tensor | None
    believed: dict[str, Tensor]
    whole: Tensor
    whole_grad: Tensor


@grader
def check_loss(answer, rng):
    """The sum over ranks is one process's mean loss, and so are the gradients."""
    for world_size in (2, rng.choice([3, 4])):
        B, S = 3 if world_size != 3 else 2, 2 * world_size * rng.randrange(2, 5)
        ranks = _lose_apart(world_size, answer, rng, B, S)
        where = f"{world_size} ranks, {B} rows of {S} tokens"
        if any(lost.loss is None for lost in ranks):
            fail(
                f"{where}: the engine got {S // world_size - 1} tokens of a row, and a rank has {S // world_size}: "
                "cut first, shifted then; make inputs and labels before the cut"
            )
        for rank, lost in enumerate(ranks):
            expect_shape(lost.loss, (), f"{where}, the loss of rank {rank}")
        total = sum(lost.loss.double() for lost in ranks)  # float32 is right as well: the chapter's own loss is
        expect_close(total, ranks[0].whole, f"{where}, the sum of the ranks' losses", _summed(ranks), rtol=1e-5)
        if any(lost.grad is None for lost in ranks):
            fail(f"{where}: no gradient arrived at the model; do not detach the loss or take its .item()")
        grad = sum(lost.grad for lost in ranks)
        expect_close(grad, ranks[0].whole_grad, f"{where}, the sum of the ranks' gradients", rtol=1e-4, atol=1e-7)


def _summed(ranks: list[Lost]) -> dict[str, Tensor]:
    return {message: sum(lost.believed[message] for lost in ranks) for message in ranks[0].believed}


def _lose_apart(world_size: int, answer, rng, B: int, S: int) -> list[Lost]:
    """Draw a text on which no wrong answer has the right loss by chance."""
    while True:
        ranks = run_ranks(_lose, world_size, answer, fresh_seed(rng), B, S)
        right = ranks[0].whole
        if any(lost.loss is None for lost in ranks) or all(
            abs(wrong - right) > 1e-4 * right for wrong in _summed(ranks).values()
        ):
            return ranks


def _lose(answer, seed: int, B: int, S: int) -> Lost:
    group = dist.group.WORLD
    tokens_BS1 = torch.randint(29, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    whole = model.build(SMALL, seed % 1000, torch.float64)
    for param in whole.parameters():
        param.data *= 4 if param.dim() > 1 else 1  # so that attention, and positions with it, count
    engine = context.build(copy.deepcopy(whole), group)
    mine_s, widths = engine.context.positions(S), []
    hook = engine.register_forward_pre_hook(lambda _, arguments: widths.append(arguments[0].shape[1]))
    try:
        loss = answer(engine, tokens_BS1.clone(), mine_s.clone())
    except Exception:
        if widths != [len(mine_s) - 1]:
            raise
        return Lost(None, None, {}, torch.tensor(0.0), torch.tensor(0.0))
    finally:
        hook.remove()
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    want = loss_of(whole, tokens_BS1[:, :-1], tokens_BS1[:, 1:])
    want.backward()
    with torch.no_grad():
        believed = _believed(engine, tokens_BS1, mine_s)
    loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
    return Lost(loss, engine.module.embed.weight.grad, believed, want.detach(), whole.embed.weight.grad)


def _believed(engine: torch.nn.Module, tokens_BS1: Tensor, mine_s: Tensor) -> dict[str, Tensor]:
    x_BS, y_BS = tokens_BS1[:, :-1], tokens_BS1[:, 1:]
    x_Bs, y_Bs = x_BS[:, mine_s], y_BS[:, mine_s]
    world_size, rank, s = dist.get_world_size(), dist.get_rank(), len(mine_s)
    neighbours_s = torch.arange(rank * s, (rank + 1) * s)

    mean = partial(_mean, world_size=world_size)
    right_BsV = engine(x_Bs, mine_s)
    return {
        "each rank divided by its own number of tokens; divide by that of all": mean(right_BsV, y_Bs) * world_size,
        "divided by the number of ranks twice": mean(right_BsV, y_Bs) / world_size,
        "this is a sum, divided by no number of tokens": mean(right_BsV, y_Bs) * y_BS.numel(),
        "divided by the tokens of one row; there are B rows": mean(right_BsV, y_Bs) * y_BS.shape[0],
        **_shifted(right_BsV, x_Bs, y_Bs, world_size),
        "the labels are the inputs themselves; a token's label is the one after it": mean(right_BsV, x_Bs),
        "positions were counted from 0; give the engine positions_s": mean(engine(x_Bs, torch.arange(s)), y_Bs),
        "these are contiguous tokens; mine stand at positions_s": mean(
            engine(x_BS[:, neighbours_s], mine_s), y_BS[:, neighbours_s]
        ),
    }


def _mean(logits_BsV: Tensor, labels_Bs: Tensor, world_size: int) -> Tensor:
    return F.cross_entropy(logits_BsV.flatten(0, 1), labels_Bs.flatten()).double() / world_size


def _shifted(right_BsV: Tensor, x_Bs: Tensor, y_Bs: Tensor, world_size: int) -> dict[str, Tensor]:
    """Labels from my own tokens, and what somebody may do with the last, which has none."""
    told = "after the cut: the next of my tokens is not the next token"
    lasts = {"shifted": y_Bs[:, -1:], "rolled": x_Bs[:, :1], "shifted, the last one twice,": x_Bs[:, -1:]}
    lasts |= {f"shifted, and filled with {fill},": torch.full_like(x_Bs[:, :1], fill) for fill in (0, 1, 28)}
    labels = {name: torch.cat([x_Bs[:, 1:], last_B1], dim=1) for name, last_B1 in lasts.items()}
    labels["shifted twice, before and"] = torch.cat([y_Bs[:, 1:], y_Bs[:, -1:]], dim=1)
    labels["shifted before the cut, and rolled"] = y_Bs.roll(-1, 1)
    found = {
        f"labels were {name} {told}": _mean(right_BsV, labels_Bs, world_size) for name, labels_Bs in labels.items()
    }
    without_last, kept = _mean(right_BsV[:, :-1], x_Bs[:, 1:], world_size), 1 - 1 / x_Bs.shape[1]
    return found | {
        "my last token has no label: shift labels before the cut": without_last * kept,
        "my last token was left out, having no label: shift labels before the cut": without_last,
    }


# ------------------------------------------------------------------------------------ 6. tokens for heads
@grader
def check_heads_for_tokens(answer, rng):
    """My heads of all tokens in order; backward brings every number home; bytes both ways."""
    for world_size in (2, rng.choice([3, 4])):
        B, n, s, H = rng.choice([(2, 2, 3, 5), (3, 2, 4, 2), (2, 3, 5, 4)])
        seed = fresh_seed(rng)
        ranks = run_ranks(_cross, world_size, answer, seed, (B, n * world_size, s, H))
        shards = [numbers(seed + rank, B, n * world_size, s, H) for rank in range(world_size)]
        weights = [numbers(seed + 100 + rank, B, n, s * world_size, H) for rank in range(world_size)]
        for rank, seen in enumerate(ranks):
            _expect_crossed(seen, shards, weights, rank)


def _expect_own(got: Tensor, want: Tensor, everything: Tensor, where: str, wrong: dict[str, Tensor]) -> None:
    """Equal, or a misconception; or the right elements in wrong places, or those of other heads and tokens."""
    moved = isinstance(got, Tensor) and got.shape == want.shape and torch.isin(got, everything).all()
    if moved and not any(torch.equal(got, value) for value in (want, *wrong.values())):
        if torch.equal(got.flatten().sort().values, want.flatten().sort().values):
            fail(f"{where}: the right elements in wrong places; where does the dimension of ranks go after all_to_all?")
        fail(f"{where}: elements of other heads or tokens came; which dimension is cut into pieces for all_to_all?")
    expect_close(got, want, where, wrong)


def _cross(answer: type, seed: int, shape: tuple[int, int, int, int]) -> Crossed:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    B, N, s, H = shape
    weight = numbers(seed + 100 + rank, B, N // world_size, s * world_size, H)
    return cross(lambda x: answer.apply(x, dist.group.WORLD), numbers(seed + rank, *shape), weight)


def _expect_crossed(seen: Crossed, shards: list[Tensor], weights: list[Tensor], rank: int) -> None:
    world_size, (B, N, s, H) = len(shards), shards[0].shape
    where, n = f"rank {rank} of {world_size}", N // world_size
    mine = slice(rank * n, (rank + 1) * n)
    heads = [shard[:, mine] for shard in shards]
    dealt = [shard[:, rank::world_size] for shard in shards]
    wrong = {
        "tokens of the ranks are dealt out one by one; rank 0's come first, all of them": torch.stack(heads, 3).flatten(
            2, 3
        ),
        "heads were dealt out one by one; rank j gets heads j n to (j + 1) n - 1": torch.cat(dealt, 2),
        "pieces lie in reverse order": torch.cat(heads[::-1], 2),
        "still every head of my tokens: nothing was exchanged": shards[rank],
        "pieces were put side by side along heads; they are more tokens": torch.cat(heads, 1),
    }
    _expect_own(seen.out, torch.cat(heads, 2), torch.cat(shards), f"{where}, forward", wrong)
    want = torch.cat([weight[:, :, rank * s : (rank + 1) * s] for weight in weights], 1)
    wrong_grad = {
        "averaged over ranks: each number went to one rank and comes back from it": want / world_size,
        "the gradient's numbers are there, but cut into heads the way forward was; cut them by tokens": weights[
            rank
        ].reshape(B, N, s, H),
    }
    if seen.grad is None:
        fail(f"{where}: no gradient arrived at x_BNsH; backward must return it first, and None for the group")
    _expect_own(seen.grad, want, torch.cat(weights), f"{where}, gradient of x_BNsH", wrong_grad)
    enough = all_to_all_bytes(shards[0].nbytes, world_size, rank, 8)
    for way, sent in (("forward", seen.sent_forward), ("backward", seen.sent_backward)):
        if sent > enough:
            fail(f"{where}: it sent {sent:,} bytes {way}, and {enough:,} are enough: one all-to-all, no all-gather")
