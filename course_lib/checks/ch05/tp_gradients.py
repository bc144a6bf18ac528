"""Graders of chapter 05, exercises 4 to 6: gathered features, backward of a column layer, a loss from pieces."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib.checks import Exercise, Stops, agree, fresh_seed, numbers, on_ranks, ranks_and_seeds, several
from course_lib.checks.watch import crossed, function
from course_lib.comm import all_gather, all_reduce
from course_lib.comm.conjugate import my_piece
from course_lib.layout.partition import piece_sizes


# ------------------------------------------------------------------------------------ 4. gathered features
def _side_by_side(x_Tf, group):
    return all_gather(x_Tf.t().contiguous(), group).t().contiguous()


def _mine(grad_TF, group, after=0):
    return my_piece(grad_TF, (group.rank() + after) % group.size(), group.size(), -1).contiguous()


def _gathered(forward=_side_by_side, backward=_mine):
    return lambda x_Tf, group: function(forward, backward).apply(x_Tf, group)


def _gather(answer, seed):
    """All ranks go on with the same numbers, so the gradient that arrives is the same on each; it is strided."""
    x_Tf, grad_TF = numbers(seed + dist.get_rank(), 4, 3), numbers(seed + 50, 3 * dist.get_world_size(), 4).t()
    before = x_Tf.clone(), grad_TF.clone()
    seen = crossed(lambda x_Tf: answer(x_Tf, dist.group.WORLD), x_Tf, grad_TF)
    return {"x or the gradient of y changed": not agree((x_Tf, grad_TF), before)} | seen


WRONG_GATHER = {
    "the parts stand in another order; rank 0's come first": _gathered(
        lambda x_Tf, group: torch.cat(_side_by_side(x_Tf, group).chunk(group.size(), -1)[::-1], -1)
    ),
    "this is the rank's own part; forward is an all-gather": _gathered(lambda x_Tf, group: x_Tf.clone()),
    "the parts are below each other; features belong side by side, in the last dimension": _gathered(all_gather),
    "no gradient reaches x; autograd needs a Function with a backward, applied by `.apply`": _side_by_side,
    "each rank has the full gradient already, and it was summed again": _gathered(
        backward=lambda grad_TF, group: _mine(all_reduce(grad_TF, group), group)
    ),
    "it was divided by the number of ranks; each rank has the full gradient already": _gathered(
        backward=lambda grad_TF, group: _mine(grad_TF, group) / group.size()
    ),
    "gradient of another rank's features": _gathered(backward=lambda grad_TF, group: _mine(grad_TF, group, after=1)),
    "one all-gather sends": Stops(_gathered(lambda x_Tf, group: all_reduce(_side_by_side(x_Tf, group), group, "mean"))),
}
SAYS_GATHER = {
    "x or the gradient of y changed": "work on a copy",
    "bytes sent forward": "one all-gather sends no more",
    "bytes sent backward": "each rank has the full gradient already, so backward sends nothing",
}
check_gather_features = Exercise(_gathered(), ranks_and_seeds, WRONG_GATHER, _gather, SAYS_GATHER, ranks=True)


# ------------------------------------------------------------------------------------ 5. backward of a column layer
def _own(grad, group):
    return grad


def _column(grad_BSf, x_BSD, w_fD, group, of_x=all_reduce, of_w=_own, of_b=_own):
    """The reference, and with an argument what else is done with one of the gradients."""
    rows = grad_BSf.flatten(0, 1)
    grad_w = (rows.t() @ x_BSD.flatten(0, 1)).contiguous()
    return of_x((grad_BSf @ w_fD).contiguous(), group), of_w(grad_w, group), of_b(rows.sum(0), group)


_three_gradients = several(
    "return three tensors: the gradients of x, of the weight and of the bias",
    *("the gradient of x", "the gradient of the weight", "the gradient of the bias"),
)


def _backward(answer, D, f, seed):
    rank = dist.get_rank()
    given = numbers(seed + 20 + rank, 2, 3, f), numbers(seed, 2, 3, D), numbers(seed + 1 + rank, f, D)
    seen = on_ranks(answer, *given)
    return _three_gradients(lambda: seen["the result"]) | {"bytes sent": seen["bytes sent"]}


_ANOTHER = "summed over the ranks; each rank has another part of the {0}, and the whole gradient of its part"
_WRONG_COLUMN = {
    "this is the rank's own partial sum; every rank used x for other outputs, so the ranks' must be summed": {
        "of_x": _own
    },
    "the partial sums were averaged": {"of_x": partial(all_reduce, op="mean")},
    _ANOTHER.format("weight"): {"of_w": all_reduce},
    "averaged over ranks": {"of_w": partial(all_reduce, op="mean")},
    _ANOTHER.format("bias"): {"of_b": all_reduce},
    "it has shape (S, f); the bias was added in every sequence and at every position": (
        lambda grad_BSf, x_BSD, w_fD, group: (*_column(grad_BSf, x_BSD, w_fD, group)[:2], grad_BSf.sum(0))
    ),
    "one all-reduce of x's gradient sends": Stops({"of_w": lambda grad, group: all_reduce(grad, group) * 0 + grad}),
}
_SAYS_COLUMN = {"bytes sent": "one all-reduce of x's gradient sends no more"}
check_column_backward = Exercise(
    _column,
    lambda rng: [(size, rng.randrange(4, 9), rng.randrange(2, 7), seed) for size, seed in ranks_and_seeds(rng)],
    _WRONG_COLUMN,
    _backward,
    _SAYS_COLUMN,
    ranks=True,
)


# ------------------------------------------------------------------------------------ 6. a loss from pieces
def _pieces(largest="all", sums="all", masked=True, less_m=False, one="mine", softmax="all", messages=3):
    """Return the loss and the gradient of this rank's logits; an argument is a mistake, or saves a message."""

    def loss(logits_BSv, y_BS, first, group):
        v = logits_BSv.shape[-1]
        is_mine_BS = (y_BS >= first) & (y_BS < first + v)
        place_BS = (y_BS - first).clamp(0, v - 1) if masked in ("clamp", "clamped") else (y_BS - first) * is_mine_BS
        own_BS = logits_BSv.amax(-1)
        max_BS = {"all": all_reduce(own_BS.clone(), group, op="max"), "own": own_BS, "none": 0 * own_BS}[largest]
        exp_BSv = (logits_BSv - max_BS.unsqueeze(-1)).exp()
        target_BS = logits_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1) - (max_BS if less_m else 0)
        target_BS = target_BS * is_mine_BS if masked in (True, "clamped") else target_BS
        if messages == 2:
            sum_BS, target_BS = all_reduce(torch.stack([exp_BSv.sum(-1), target_BS]), group)
        else:
            sum_BS = all_reduce(exp_BSv.sum(-1), group) if sums == "all" else exp_BSv.sum(-1)
            target_BS = all_reduce(target_BS, group)
        grad_BSv = exp_BSv / sum_BS.unsqueeze(-1) if softmax == "all" else logits_BSv.softmax(-1)
        ones_BS = {"mine": is_mine_BS, "all": torch.ones_like(is_mine_BS), "none": torch.zeros_like(is_mine_BS)}[one]
        grad_BSv = grad_BSv - F.one_hot(place_BS, v) * ones_BS.unsqueeze(-1)
        return sum_BS.log() + (0 if less_m else max_BS) - target_BS, grad_BSv

    return loss


def _gathers_the_logits(logits_BSv, y_BS, first, group):
    all_reduce(torch.zeros(*y_BS.shape, 80, dtype=torch.float64), group)  # as long as all logits
    return _pieces()(logits_BSv, y_BS, first, group)


_two_tensors = several(
    "return two tensors: the loss of each token, and the gradient of my logits", "the loss", "the gradient"
)


def _loss(answer, V, scale, seed):
    rank, size = dist.get_rank(), dist.get_world_size()
    y_BS = torch.randint(V, (2, 4), generator=torch.Generator().manual_seed(seed))
    logits_BSv = my_piece(scale * numbers(seed, 2, 4, V), rank, size, 2).contiguous()
    first = sum(piece_sizes(V, size)[:rank])
    seen = on_ranks(answer, logits_BSv, y_BS, first, slack=2 * size * 8)  # two sums in one message are cut otherwise
    of_tokens = _two_tensors(lambda: seen["the result"])
    if isinstance(loss := of_tokens.get("the loss"), Tensor):
        of_tokens = {"the loss is finite": bool(loss.isfinite().all())} | of_tokens
    return of_tokens | {"bytes sent": seen["bytes sent"]}


_SCALES = "each rank took its own largest logit out{}; exponentials of different scales cannot be added"
_OTHERS = "a target that is another rank's was answered with a logit of one's own{}; answer it with 0"
_PLACE_0 = "for a target that is another rank's the logit at place 0{} was counted; multiply by is-it-mine"
WRONG_LOSS = {
    "the loss is not finite; take the largest logit, of all ranks, out before exp": _pieces(largest="none"),
    _SCALES.format(""): _pieces(largest="own"),
    _SCALES.format(", of the target as well"): _pieces(largest="own", less_m=True),
    _OTHERS.format(""): _pieces(masked="clamp"),
    _OTHERS.format(", less m"): _pieces(masked="clamp", less_m=True),
    _PLACE_0.format(""): _pieces(masked=False),
    _PLACE_0.format(", less m,"): _pieces(masked=False, less_m=True),
    "the sum of exponentials is the rank's own; it must run over all ranks' logits": _pieces(sums="own"),
    "this is the softmax; at the target 1 is subtracted": _pieces(one="none"),
    "the softmax of the rank's own logits; divide by the sum over all ranks": _pieces(softmax="own"),
    "1 was subtracted on every rank; only the rank that has the target does so": [
        _pieces(one="all"),
        _pieces(one="all", masked="clamped"),
    ],
    "three numbers per token, never the logits": Stops(_gathers_the_logits),
}
_SAYS_LOSS = {
    "the loss is finite": "take the largest logit, of all ranks, out before exp",
    "bytes sent": "three numbers per token, never the logits",
}
check_vocab_loss = Exercise(
    _pieces(),
    lambda rng: [
        (size, rng.randrange(40, 70), scale, fresh_seed(rng))
        for size, scale in ((2, 1.0), (rng.choice([3, 4]), 1.0), (2, 800.0))
    ],
    WRONG_LOSS,
    _loss,
    _SAYS_LOSS,
    right=_pieces(messages=2),
    ranks=True,
)
