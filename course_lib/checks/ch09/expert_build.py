"""Grader of chapter 09, exercise 6: a layer of experts on ranks, forward and backward, from an empty cell."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.core import expect_close, expect_equal, fail, fresh_seed, grader, numbers, run_ranks
from course_lib.measure import ByteMeter

D, F = 16, 8
COUNTS_BYTES = 64  # of each pair of rank and expert: what may be sent to say how many rows come
SORTED_TWICE = (
    "the results go back in the wrong order: the order that sorted the rows is applied once more. Index the results "
    "with the inverse of that order, order.argsort()"
)
STILL_SORTED = (
    "the results go back in the wrong order: they are still sorted by expert. Put them into the order in which the "
    "rows arrived: index them with the inverse of the order that sorted them, order.argsort()"
)
NOT_SORTED = (
    "rows of other ranks go to the wrong expert: rows arrive sorted by source rank. Sort them by expert before the "
    "experts run, and undo the order before the results go back"
)


@grader
def check_layer(answer, rng):
    """Outputs and all gradients of one process, with uneven tokens on each rank, and no more rows than are needed."""
    cases = ((2, rng.choice([2, 3]), rng.choice([2, 3])), (4, 2, 1), (4, rng.choice([1, 2]), 2))
    for world_size, per_rank, k in cases:
        where = f"{world_size} ranks, {world_size * per_rank} experts, k = {k}"
        for rank, seen in enumerate(run_ranks(_layer, world_size, answer, per_rank, k, fresh_seed(rng))):
            _expect(seen, f"{where}: rank {rank}")


def _expect(seen: dict, where: str) -> None:
    want_y, want_x, want_w = seen["want"][:3]
    got_y, got_x, got_w = seen["got"][:3]
    expect_close(got_y, want_y, f"{where}: y_TD", seen["misconceptions"])
    if not seen["has_graph"]:
        fail(f"{where}: y_TD has no graph; nothing gets a gradient")
    grads = zip(seen["got"][3:], seen["want"][3:], strict=True)
    if all(got is None for got in seen["got"][3:]) and any(want.any() for want in seen["want"][3:]):
        fail(
            f"{where}: the experts get no gradient. Autograd does not see a plain collective; write an "
            "autograd.Function whose backward sends the gradients the way of the rows back"
        )
    for name, got, want in (("weight_Tk", got_w, want_w), ("x_TD", got_x, want_x)):
        if got is None:
            fail(f"{where}: {name} gets no gradient")
        expect_close(got, want, f"{where}: the gradient of {name}")
    for got, want in grads:
        halved = {"divided by the number of ranks; the loss here is a sum over all ranks": want / seen["ranks"]}
        own = torch.zeros_like(want) if got is None else got  # an expert without rows may have none
        expect_close(own, want, f"{where}: the gradient of an expert's matrix", halved)
    if seen["ranks"] > 2 and seen["sent"] > seen["enough"]:
        fail(
            f"{where}: forward sent {seen['sent']:,} bytes, and {seen['enough']:,} are enough: a row goes to the rank "
            "of its expert only, and its result comes back"
        )
    expect_equal(seen["experts after"], seen["experts before"], f"{where}: the number of experts in the list")


def _layer(answer: Callable, per_rank: int, k: int, seed: int) -> dict:
    """In a rank: y, then the gradients of x, the weights and this rank's experts, mine and those of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    inputs = [_tokens(generator, 5 + 3 * r, size * per_rank, k) for r in range(size)]
    everybody = [_expert(generator) for _ in range(size * per_rank)]
    mine = everybody[rank * per_rank : (rank + 1) * per_rank]
    (x_TD, expert_Tk, weight_Tk), c_TD = inputs[rank][:3], inputs[rank][3]
    x_TD, weight_Tk = x_TD.clone().requires_grad_(), weight_Tk.clone().requires_grad_()
    experts = list(mine)
    with ByteMeter() as meter:
        y_TD = answer(x_TD, expert_Tk.clone(), weight_Tk, experts, size * per_rank, dist.group.WORLD)
    sent, is_tensor = meter.sent_bytes, isinstance(y_TD, Tensor)
    has_graph = is_tensor and y_TD.requires_grad
    if has_graph and y_TD.shape == x_TD.shape:
        (y_TD * c_TD).sum().backward()
    params = [param for expert in mine for param in expert.parameters()]
    got = [y_TD.detach() if is_tensor else y_TD, x_TD.grad, weight_Tk.grad, *(param.grad for param in params)]
    for param in params:
        param.grad = None
    unweighted, want = _one_process(inputs, everybody, rank)
    misconceptions = {
        "the rows are added without their weights": unweighted,
        SORTED_TWICE: _in_wrong_order(inputs, everybody, rank, times=2),
        STILL_SORTED: _in_wrong_order(inputs, everybody, rank, times=1),
        NOT_SORTED: _in_wrong_order(inputs, everybody, rank, times=0),
    }
    want += [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    return {
        "got": got, "want": want, "misconceptions": misconceptions, "has_graph": has_graph, "ranks": size, "sent": sent,
        "enough": _enough_bytes(inputs, rank, per_rank), "experts before": per_rank, "experts after": len(experts),
    }  # fmt: skip


def _tokens(generator: torch.Generator, count: int, num_experts: int, k: int) -> tuple[Tensor, ...]:
    """Tokens, their experts, their weights, and what the loss multiplies outputs by; nobody chooses the last expert."""
    x_TD, c_TD = numbers(generator, 2, count, D)
    logits_TE = numbers(generator, count, num_experts)
    logits_TE[:, -1] = -100.0
    return x_TD, logits_TE.topk(k).indices, torch.rand(count, k, generator=generator, dtype=torch.float64), c_TD


def _expert(generator: torch.Generator) -> nn.Module:
    expert = nn.Sequential(nn.Linear(D, F, bias=False), nn.Tanh(), nn.Linear(F, D, bias=False)).double()
    for param in expert.parameters():
        param.data = numbers(generator, *param.shape) / 4
    return expert


def _one_process(inputs: list, experts: list[nn.Module], rank: int) -> tuple[Tensor, list[Tensor]]:
    """This rank's y without weights; y, and the gradients of its x and weights, of the loss of all ranks."""
    results, loss = None, 0.0
    for source, (x_TD, expert_Tk, weight_Tk, c_TD) in enumerate(inputs):
        x_TD, weight_Tk = x_TD.clone().requires_grad_(), weight_Tk.clone().requires_grad_()
        rows_TkD = torch.stack(
            [torch.stack([experts[e](x) for e in row]) for x, row in zip(x_TD, expert_Tk, strict=True)]
        )
        y_TD = (rows_TkD * weight_Tk[..., None]).sum(1)
        loss = loss + (y_TD * c_TD).sum()
        if source == rank:
            results = rows_TkD.sum(1).detach(), y_TD.detach(), x_TD, weight_Tk
    loss.backward()
    unweighted, y_TD, x_TD, weight_Tk = results
    return unweighted, [y_TD, x_TD.grad, weight_Tk.grad]


def _in_wrong_order(inputs: list, experts: list[nn.Module], rank: int, times: int) -> Tensor:
    """This rank's y if ranks sort the arrived rows so many times (0: never), and return the results without undoing it.

    Rows that were never sorted are cut into the experts' pieces all the same.
    """
    per_rank, size = len(experts) // len(inputs), len(inputs)
    y_TD = torch.zeros_like(inputs[rank][0])
    for away in range(size):
        arrived = []  # (source, token, slot, expert), by source, then by expert
        for source, (_, expert_Tk, *_) in enumerate(inputs):
            order, k = expert_Tk.flatten().argsort(stable=True).tolist(), expert_Tk.shape[1]
            rows = [(source, i // k, i % k, int(expert_Tk[i // k, i % k])) for i in order]
            arrived += [row for row in rows if row[3] // per_rank == away]
        sorted_R, order = torch.tensor([row[3] for row in arrived], dtype=torch.long).sort(stable=True)
        results = (torch.arange(len(order)), order, order[order])[times]
        for (home, token, slot, _), result in zip(arrived, results.tolist(), strict=True):
            if home == rank:
                source, other, _, expert = arrived[result]
                expert = int(sorted_R[result]) if times == 0 else expert
                y_TD[token] += inputs[rank][2][token, slot] * experts[expert](inputs[source][0][other]).detach()
    return y_TD


def _enough_bytes(inputs: list, rank: int, per_rank: int) -> int:
    """Bytes of the rows that leave this rank and of the results that it returns, with room for weights and counts."""
    ranks = [expert_Tk // per_rank for _, expert_Tk, _, _ in inputs]
    out = int((ranks[rank] != rank).sum())
    back = sum(int((of_rank == rank).sum()) for source, of_rank in enumerate(ranks) if source != rank)
    return (out + back) * (D + 2) * 8 + COUNTS_BYTES * len(inputs) * per_rank
