"""Graders of chapter 07, exercises 5 and 6: the loss of a shard, Ulysses' all-to-all; on real ranks."""

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib import model
from course_lib.checks import Cost, Exercise, Stops, fresh_seed, numbers
from course_lib.checks.watch import crossed, function
from course_lib.comm import all_reduce, all_to_all, join, split
from course_lib.config import ModelConfig
from course_lib.parallel import context
from course_lib.training import loss_of

SMALL = ModelConfig("small", 1, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, vocab_size=29, max_seq_len=64)


# ------------------------------------------------------------------------------------ 5. the loss of a shard
def _loss(engine, tokens_BS1, positions_s, at=None, places=None, labels=None, divisor=None):
    """The reference. A mistake takes tokens elsewhere, tells other places, has other labels, divides otherwise."""
    x_BS, y_BS, at_s = tokens_BS1[:, :-1], tokens_BS1[:, 1:], at(positions_s) if at else positions_s
    x_Bs, y_Bs = x_BS[:, at_s], y_BS[:, at_s]
    logits_BsV = engine(x_Bs, places(positions_s) if places else positions_s)
    labels_Bs = labels(x_Bs, y_Bs) if labels else y_Bs
    losses = F.cross_entropy(logits_BsV.flatten(0, 1), labels_Bs.flatten(), reduction="sum")
    return losses / (divisor(y_BS.numel(), y_Bs.numel(), len(y_BS)) if divisor else y_BS.numel())


def _loss_of_logsumexp(engine, tokens_BS1, positions_s):
    logits_BsV = engine(tokens_BS1[:, positions_s], positions_s).float()
    chosen_Bs = logits_BsV.gather(-1, tokens_BS1[:, positions_s + 1].unsqueeze(-1)).squeeze(-1)
    return (logits_BsV.logsumexp(-1) - chosen_Bs).sum() / tokens_BS1[:, 1:].numel()


def _cut_then_shifted(engine, tokens_BS1, positions_s):
    mine_Bs = tokens_BS1[:, positions_s]
    logits_BsV = engine(mine_Bs[:, :-1], positions_s[:-1])
    return F.cross_entropy(logits_BsV.flatten(0, 1), mine_Bs[:, 1:].flatten())


def _texts(rng):
    sizes = (2, rng.choice([3, 4]))
    return [(size, 2 if size == 3 else 3, 2 * size * rng.randrange(2, 5), fresh_seed(rng)) for size in sizes]


def _lose(answer, B, S, seed):
    """Watch the sum over ranks of the losses, and of the gradients of the embedding beside one process's."""
    tokens_BS1 = torch.randint(29, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    whole = model.build(SMALL, seed % 1000, torch.float64)
    for param in whole.parameters():
        param.data *= 4 if param.dim() > 1 else 1  # so that attention, and positions with it, count
    engine = context.build(copy.deepcopy(whole), dist.group.WORLD)
    mine_s, widths = engine.context.positions(S), []
    engine.register_forward_pre_hook(lambda _, arguments: widths.append(arguments[0].shape[1]))
    try:
        loss = torch.as_tensor(answer(engine, tokens_BS1.clone(), mine_s.clone()))
    except Exception:
        if widths != [len(mine_s) - 1]:
            raise
        return {"tokens of a row that the engine got": widths}
    if loss.requires_grad:
        loss.backward()
    loss_of(whole, tokens_BS1[:, :-1], tokens_BS1[:, 1:]).backward()
    grad, want = engine.module.embed.weight.grad, whole.embed.weight.grad
    off = None if grad is None else (all_reduce(grad, dist.group.WORLD) - want).abs().max() / want.abs().max()
    total = all_reduce(loss.detach().double(), dist.group.WORLD).float()  # as exact as the chapter's own loss
    return {
        "tokens of a row that the engine got": widths,
        "the sum of the ranks' losses": total,
        "how far the sum of the ranks' gradients is off": None if off is None else Cost(off.item(), slack=1e-5),
    }


def _after(x_Bs: Tensor, last: Tensor | int) -> Tensor:
    """Each token's label is the next of my tokens; what somebody gives to my last, which has none."""
    return torch.cat([x_Bs[:, 1:], last * torch.ones_like(x_Bs[:, :1])], 1)


_CUT = "labels were {} after the cut: the next of my tokens is not the next token"
WRONG_LOSS = {
    "cut first, shifted then: the engine got one token of a row too few; make inputs and labels before the "
    "cut": _cut_then_shifted,
    "divided by the rank's own number of tokens, not by that of all": {"divisor": lambda everyone, mine, rows: mine},
    "divided by the number of ranks twice": {"divisor": lambda everyone, mine, rows: everyone * everyone / mine},
    "this is a sum, divided by no number of tokens": {"divisor": lambda everyone, mine, rows: 1},
    "divided by the tokens of one row; there are B rows": {"divisor": lambda everyone, mine, rows: everyone // rows},
    _CUT.format("shifted"): {"labels": lambda x_Bs, y_Bs: _after(x_Bs, y_Bs[:, -1:])},
    _CUT.format("rolled"): {"labels": lambda x_Bs, y_Bs: x_Bs.roll(-1, 1)},
    _CUT.format("shifted, the last one twice,"): {"labels": lambda x_Bs, y_Bs: _after(x_Bs, x_Bs[:, -1:])},
    _CUT.format("shifted, and filled with 0,"): {"labels": lambda x_Bs, y_Bs: _after(x_Bs, 0)},
    _CUT.format("shifted, and filled with 1,"): {"labels": lambda x_Bs, y_Bs: _after(x_Bs, 1)},
    _CUT.format("shifted, and filled with 28,"): {"labels": lambda x_Bs, y_Bs: _after(x_Bs, 28)},
    _CUT.format("shifted twice, before and"): {"labels": lambda x_Bs, y_Bs: _after(y_Bs, y_Bs[:, -1:])},
    _CUT.format("shifted before the cut, and rolled"): {"labels": lambda x_Bs, y_Bs: y_Bs.roll(-1, 1)},
    "my last token has no label: shift labels before the cut": {"labels": lambda x_Bs, y_Bs: _after(x_Bs, -100)},
    "my last token was left out, having no label: shift labels before the cut": {
        "labels": lambda x_Bs, y_Bs: _after(x_Bs, -100),
        "divisor": lambda everyone, mine, rows: everyone * (1 - rows / mine),
    },
    "the labels are the inputs themselves; a token's label is the one after it": {"labels": lambda x_Bs, y_Bs: x_Bs},
    "positions were counted from 0; give the engine positions_s": {"places": lambda at_s: torch.arange(len(at_s))},
    "these are contiguous tokens; mine stand at positions_s": {
        "at": lambda positions_s: torch.arange(len(positions_s)) + dist.get_rank() * len(positions_s)
    },
    "no gradient reached the model; do not detach the loss or take its .item()": lambda *given: _loss(*given).detach(),
}
check_loss = Exercise(_loss, _texts, WRONG_LOSS, _lose, right=_loss_of_logsumexp, ranks=True)


# ------------------------------------------------------------------------------------ 6. tokens for heads
def _exchanged(x, group, cut, put, dealt_out=False):
    """An all-to-all of the pieces of dimension `cut`, what comes put together along dimension `put`."""
    pieces = x.unflatten(cut, (-1, group.size()) if dealt_out else (group.size(), -1)).movedim(cut + dealt_out, 0)
    return all_to_all(pieces.contiguous(), group).movedim(0, put).flatten(put, put + 1)


def _in(x_BNsH, group):
    return _exchanged(x_BNsH, group, cut=1, put=2)


def _back(grad_BnSH, group):
    return _exchanged(grad_BnSH, group, cut=2, put=1)


def _shapes(rng):
    sizes = [rng.choice([(2, 2, 3, 5), (3, 2, 4, 2), (2, 3, 5, 4)]) for _ in range(2)]
    return [(size, *of, fresh_seed(rng)) for size, of in zip((2, rng.choice([3, 4])), sizes, strict=True)]


def _exchange(answer, B, n, s, H, seed):
    rank, size = dist.get_rank(), dist.get_world_size()
    x_BNsH, weight_BnSH = numbers(seed + rank, B, n * size, s, H), numbers(seed + 100 + rank, B, n, s * size, H)
    seen, told = crossed(lambda x: answer.apply(x, dist.group.WORLD), x_BNsH, weight_BnSH), {}
    for what in ("forward", "the gradient"):
        result = seen.pop(what)
        if what == "the gradient" or isinstance(result, Tensor):
            told[f"elements of {what}"] = None if result is None else result.flatten().sort().values
        told[what] = result
    return told | seen


_OTHERS = "elements of other heads or tokens came; which dimension is cut into pieces for all_to_all?"
_PLACES = "the right elements in wrong places; where does the dimension of ranks go after all_to_all?"
_ONE = "one all-to-all, no all-gather"
WRONG_HEADS = {
    "tokens of the ranks are dealt out one by one; rank 0's come first, all of them": function(
        lambda x, group: _in(x, group).unflatten(2, (group.size(), -1)).transpose(2, 3).flatten(2, 3), _back
    ),
    "heads were dealt out one by one; rank j gets heads j n to (j + 1) n - 1": function(
        partial(_exchanged, cut=1, put=2, dealt_out=True), _back
    ),
    "pieces lie in reverse order": function(
        lambda x, group: _in(x, group).unflatten(2, (group.size(), -1)).flip(2).flatten(2, 3), _back
    ),
    "still every head of my tokens: nothing was exchanged": function(lambda x, group: x.clone(), _back),
    "pieces were put side by side as heads; they are more tokens": function(partial(_exchanged, cut=1, put=1), _back),
    _OTHERS: function(
        lambda x, group: (
            all_to_all(x.reshape(group.size(), len(x), -1, *x.shape[2:]), group).movedim(0, 2).flatten(2, 3)
        ),
        _back,
    ),
    _PLACES: function(
        lambda x, group: _in(x, group).unflatten(2, (group.size(), -1)).movedim(2, 0).reshape(_in(x, group).shape),
        _back,
    ),
    "no gradient arrived at x_BNsH; backward must return it first, and None for the group": function(
        _in, lambda grad, group: None
    ),
    "averaged over ranks: each number went to one rank and comes back from it": function(
        _in, lambda grad, group: _back(grad, group) / group.size()
    ),
    "summed over ranks: each number went to one rank and comes back from it": function(
        _in, lambda grad, group: all_reduce(_back(grad, group).contiguous(), group)
    ),
    "the gradient's numbers are there, but cut into heads the way forward was; cut them by tokens": function(
        _in, lambda grad, group: grad.reshape(len(grad), -1, grad.shape[2] // group.size(), grad.shape[3])
    ),
    _ONE: Stops(function(lambda x, group: split(join(x, group, 2), group, 1), _back)),
}
SAYS_HEADS = {"elements of forward": _OTHERS, "forward": _PLACES, "the gradient": _PLACES}
SAYS_HEADS |= {"bytes sent forward": _ONE, "bytes sent backward": _ONE}
check_heads_for_tokens = Exercise(function(_in, _back), _shapes, WRONG_HEADS, _exchange, SAYS_HEADS, ranks=True)
