"""Grader of chapter 09, exercise 6: a layer of experts on ranks, forward and backward, from an empty cell."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from course_lib.checks import Cost, Exercise, fresh_seed, numbers
from course_lib.comm import all_gather, all_to_all
from course_lib.measure import ByteMeter
from course_lib.minimal.experts import Exchange, by_expert, send_rows
from course_lib.minimal.moe import combine, dispatch, run_experts

D, F = 16, 8
_COUNTS_BYTES = 64  # of each pair of rank and expert: what may be sent to say how many rows come


def layer(x_TD, expert_Tk, weight_Tk, experts, num_experts, group, **change):
    """As the lesson's; a mistake changes one step of it."""
    step = {"move": Exchange.apply, "sort": by_expert, "undo": torch.argsort, "weigh": lambda w: w} | change
    x_RD, order_R, rows_E = dispatch(x_TD, expert_Tk, num_experts)
    to_rank = rows_E.view(group.size(), -1)
    from_rank = all_to_all(to_rank, group)
    sent, received = to_rank.sum(1).tolist(), from_rank.sum(1).tolist()
    x_RD = step["move"](x_RD, sent, received, group)
    sort_R = step["sort"](from_rank)
    y_RD = run_experts(experts, x_RD[sort_R], from_rank.sum(0))
    y_RD = step["move"](y_RD[step["undo"](sort_R)], received, sent, group)
    return combine(y_RD, order_R, step["weigh"](weight_Tk))


def _layer_weighted_there(x_TD, expert_Tk, weight_Tk, experts, num_experts, group):
    """The weight travels as one more element of its row, so that the expert's rank multiplies."""
    expert_R, k = expert_Tk.flatten(), expert_Tk.shape[1]
    order_R = expert_R.argsort()
    to_rank = expert_R.bincount(minlength=num_experts).view(group.size(), -1)
    from_rank = torch.empty_like(to_rank)
    dist.all_to_all_single(from_rank, to_rank, group=group)
    sent, received = to_rank.sum(1).tolist(), from_rank.sum(1).tolist()
    rows = torch.cat([x_TD.repeat_interleave(k, 0), weight_Tk.reshape(-1, 1)], 1)[order_R]
    rows = all_to_all_single_autograd(rows, received, sent, group)
    pieces = list(rows.split(from_rank.flatten().tolist()))
    done = [experts[i % len(experts)](piece[:, :-1]) * piece[:, -1:] for i, piece in enumerate(pieces)]
    back = all_to_all_single_autograd(torch.cat(done), sent, received, group)
    return torch.zeros_like(x_TD).index_add(0, order_R // k, back)


def sizes(rng):
    """(ranks, experts of a rank, k, seed), with uneven tokens on each rank."""
    sizes = ((2, rng.choice([2, 3]), rng.choice([2, 3])), (4, 2, 1), (4, rng.choice([1, 2]), 2))
    return [(*size, fresh_seed(rng)) for size in sizes]


def _watch_layer(answer, per_rank, k, seed):
    """y, its graph, the gradients, and what forward sent; the loss is a sum over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    num_experts = size * per_rank
    x_TD, expert_Tk, weight_Tk, c_TD = [_tokens(generator, 5 + 3 * r, num_experts, k) for r in range(size)][rank]
    every = [
        nn.Sequential(nn.Linear(D, F, bias=False), nn.Tanh(), nn.Linear(F, D, bias=False)) for _ in range(num_experts)
    ]
    for param in nn.ModuleList(every).double().parameters():
        param.data = numbers(generator, *param.shape) / 4
    mine = every[rank * per_rank : (rank + 1) * per_rank]
    given, experts = (x_TD.requires_grad_(), expert_Tk.clone(), weight_Tk.requires_grad_()), list(mine)
    with ByteMeter() as meter:
        y_TD = answer(*given, experts, num_experts, dist.group.WORLD)
    has_graph = isinstance(y_TD, Tensor) and y_TD.requires_grad
    if has_graph and y_TD.shape == x_TD.shape:
        (y_TD * c_TD).sum().backward()
    params = [param for expert in mine for param in expert.parameters()]
    return {
        "y_TD": y_TD.detach() if isinstance(y_TD, Tensor) else y_TD,
        "whether y_TD has a graph": has_graph,
        "whether experts get a gradient": any(param.grad is not None and param.grad.any() for param in params),
        "the gradient of weight_Tk": "none" if weight_Tk.grad is None else weight_Tk.grad,
        "the gradient of x_TD": "none" if x_TD.grad is None else x_TD.grad,
        "the gradients of the experts": [torch.zeros_like(p) if p.grad is None else p.grad for p in params],
        "bytes that forward sent": Cost(meter.sent_bytes, 2 * 8 * expert_Tk.numel() + _COUNTS_BYTES * size * per_rank),
        "the number of experts in the list": len(experts),
    }


def _tokens(generator, count, num_experts, k):
    """Tokens, their experts, their weights, and what the loss multiplies outputs by; nobody chooses the last expert."""
    x_TD, c_TD = numbers(generator, 2, count, D)
    logits_TE = numbers(generator, count, num_experts)
    logits_TE[:, -1] = -100.0
    weight_Tk = torch.rand(count, k, generator=generator, dtype=torch.float64)
    return x_TD.clone(), logits_TE.topk(k).indices, weight_Tk, c_TD


def _divided(x_RD, sent, received, group):
    """The exchange, with a gradient that is divided by the number of ranks."""
    part_RD = x_RD / group.size()
    return Exchange.apply(part_RD + (x_RD - part_RD).detach(), sent, received, group)


ROWS = "a row goes to the rank of its expert only, and its result comes back"
WRONG = {
    "the rows are added without their weights": {"weigh": torch.ones_like},
    "the results go back in the wrong order: the order that sorted the rows is applied once more. Index the "
    "results with the inverse of that order, order.argsort()": {"undo": lambda order_R: order_R},
    "the results go back in the wrong order: they are still sorted by expert. Put them into the order in which the "
    "rows arrived: index them with the inverse of the order that sorted them, order.argsort()": {
        "undo": lambda order_R: torch.arange(len(order_R))
    },
    "rows of other ranks go to the wrong expert: rows arrive sorted by source rank. Sort them by expert before the "
    "experts run, and undo the order before the results go back": {
        "sort": lambda from_rank: torch.arange(from_rank.sum())
    },
    "y_TD has no graph; nothing gets a gradient": lambda *given: layer(*given).detach(),
    "the experts get no gradient. Autograd does not see a plain collective; write an autograd.Function whose "
    "backward sends the gradients the way of the rows back": {"move": send_rows},
    "divided by the number of ranks; the loss here is a sum over all ranks": {"move": _divided},
    # right numbers, but rows go to every rank, padded
    ROWS: lambda *given: (all_gather(torch.zeros(64, D, dtype=torch.float64), given[-1]), layer(*given))[1],
}
HANG = "Does every rank call the same exchanges in the same order, also where it has no row to send?"
check_layer = Exercise(
    layer, sizes, WRONG, _watch_layer, {"bytes that forward sent": ROWS}, right=_layer_weighted_there, ranks=HANG
)
