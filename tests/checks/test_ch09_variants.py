"""The graders of chapter 09 accept right answers that are arranged otherwise."""

import itertools
import math
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from course_lib.checks import ch09

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ 1 to 3
def route_by_sorting(logits_TE, top_k, score, bias_E):
    score_TE = torch.softmax(logits_TE, 1) if score == "softmax" else 1 / (1 + (-logits_TE).exp())
    expert_Tk = (score_TE + bias_E).argsort(dim=1, descending=True)[:, :top_k]
    chosen_Tk = torch.take_along_dim(score_TE, expert_Tk, 1)
    return expert_Tk, torch.nn.functional.normalize(chosen_Tk, p=1, dim=1)


def route_by_rows(logits_TE, top_k, score, bias_E):
    """A token at a time, in Python."""
    experts, weights = [], []
    for row in logits_TE.tolist():
        if score == "softmax":
            above = [math.exp(logit - max(row)) for logit in row]
            scores = [one / sum(above) for one in above]
        else:
            scores = [1 / (1 + math.exp(-logit)) for logit in row]
        biased = [one + bias for one, bias in zip(scores, bias_E.tolist(), strict=True)]
        best = sorted(range(len(row)), key=lambda e: -biased[e])[:top_k]
        total = sum(scores[e] for e in best)
        experts.append(best)
        weights.append([scores[e] / total for e in best])
    return torch.tensor(experts), torch.tensor(weights, dtype=logits_TE.dtype)


def route_one_best_after_the_other(logits_TE, top_k, score, bias_E):
    """k times the largest that is left, which is then struck out."""
    score_TE = torch.softmax(logits_TE, -1) if score == "softmax" else torch.sigmoid(logits_TE)
    left_TE, chosen = score_TE + bias_E, []
    for _ in range(top_k):
        chosen.append(left_TE.argmax(-1))
        left_TE = left_TE.scatter(1, chosen[-1][:, None], -torch.inf)
    one_hot_TkE = torch.nn.functional.one_hot(torch.stack(chosen, 1), logits_TE.shape[1]).to(score_TE)
    weight_Tk = torch.einsum("tke,te->tk", one_hot_TkE, score_TE)
    return torch.stack(chosen, 1), weight_Tk / weight_Tk.sum(1)[:, None]


def bias_in_place(bias_E, load_E, speed):
    """Steps are added to the tensor that was given."""
    off_E = load_E * len(load_E) - load_E.sum()
    bias_E[off_E > 0] -= speed
    bias_E[off_E < 0] += speed
    return bias_E


def bias_by_clamping(bias_E, load_E, speed):
    """A whole load more or less than the mean is a whole step."""
    below_E = load_E.sum() - load_E * load_E.numel()
    return torch.add(bias_E, below_E.clamp(-1, 1), alpha=speed)


def bias_by_cases(bias_E, load_E, speed):
    mean = load_E.sum().item() / len(load_E)
    steps = [speed * ((load < mean) - (load > mean)) for load in load_E.tolist()]
    return bias_E + torch.tensor(steps, dtype=bias_E.dtype)


def keep_by_cumsum(expert_Tk, num_experts, factor):
    queue_A = expert_Tk.t().flatten()
    one_AE = torch.nn.functional.one_hot(queue_A, num_experts)
    place_A = (one_AE.cumsum(0) * one_AE).sum(1)
    return (place_A - 1 < factor * expert_Tk.numel() / num_experts).view(expert_Tk.t().shape).t()


def keep_by_sorting(expert_Tk, num_experts, factor):
    """The queue of each expert stands together once the assignments are sorted by expert; its first ones are kept."""
    tokens, k = expert_Tk.shape
    room = math.ceil(factor * k * tokens / num_experts)
    sorted_A, order_A = expert_Tk.t().reshape(-1).sort(stable=True)
    begin_E = torch.searchsorted(sorted_A, torch.arange(num_experts))
    kept_A = torch.empty(tokens * k, dtype=torch.bool)
    kept_A[order_A] = torch.arange(tokens * k) - begin_E[sorted_A] < room
    return kept_A.view(k, tokens).t()


def keep_by_queues(expert_Tk, num_experts, factor):
    """A list for each expert, cut at its capacity."""
    tokens, k = expert_Tk.shape
    queues = [[] for _ in range(num_experts)]
    for slot, token in itertools.product(range(k), range(tokens)):
        queues[expert_Tk[token, slot]].append((token, slot))
    room = -int(-(factor * expert_Tk.numel()) // num_experts)
    fit = {place for queue in queues for place in queue[:room]}
    return torch.tensor([[(token, slot) in fit for slot in range(k)] for token in range(tokens)])


# ------------------------------------------------------------------------------------ 4. bytes
def bytes_by_messages(rows, rank, d_model, narrow_bytes, wide_bytes):
    total = 0
    for other in range(len(rows)):
        if other != rank:
            total += rows[rank][other] * (2 * narrow_bytes + wide_bytes) + 3 * rows[other][rank] * wide_bytes
    return total * d_model


def bytes_by_tensor(rows, rank, d_model, narrow_bytes, wide_bytes):
    """As sums of a matrix's row and column without their common place."""
    rows_RR = torch.tensor(rows)
    away_RR = rows_RR - torch.diag(rows_RR.diagonal())
    out, back = int(away_RR[rank].sum()), int(away_RR[:, rank].sum())
    dispatch, combine = out * narrow_bytes, back * wide_bytes
    gradients = {"of results, to the experts": out * wide_bytes, "of rows, back home": back * wide_bytes}
    return d_model * (dispatch + combine + dispatch + combine + sum(gradients.values()))


def bytes_by_passes(rows, rank, d_model, narrow_bytes, wide_bytes):
    """The six exchanges of a layer one by one: whose rows go, and how wide they are."""
    sent = sum(rows[rank]) - rows[rank][rank]
    returned = sum(row[rank] for row in rows) - rows[rank][rank]
    exchanges = [(sent, narrow_bytes), (returned, wide_bytes)] * 2 + [(sent, wide_bytes), (returned, wide_bytes)]
    return sum(count * d_model * itemsize for count, itemsize in exchanges)


# ------------------------------------------------------------------------------------ 5. whose gradients
def sums_by_torch(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    """torch's all-reduce, of gradients that are divided first."""
    for grad in expert_grads:
        grad.div_(dp_group.size())
        dist.all_reduce(grad, group=expert_dp_group)
    for grad in other_grads:
        grad.div_(dp_group.size())
        dist.all_reduce(grad, group=dp_group)


def sums_in_one_flat(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    """All gradients of a kind side by side, in one call."""
    for grads, group in ((expert_grads, expert_dp_group), (other_grads, dp_group)):
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, whole in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(whole.view_as(grad) / dist.get_world_size(dp_group))


def sums_by_gathering(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    """Everybody's gradients are gathered and added up here; experts' means are of ep losses at once."""
    for grad in expert_grads:
        everyone = [torch.empty_like(grad) for _ in range(expert_dp_group.size())]
        dist.all_gather(everyone, grad, group=expert_dp_group)
        grad.copy_(torch.stack(everyone).mean(0) / ep_group.size())
    for grad in other_grads:
        everyone = [torch.empty_like(grad) for _ in range(dp_group.size())]
        dist.all_gather(everyone, grad, group=dp_group)
        grad.copy_(sum(everyone) / len(everyone))


# ------------------------------------------------------------------------------------ 6. a layer
class Swap(torch.autograd.Function):
    """Point to point: every piece is a message of its own."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.args = received, sent, group
        out, me = x.new_empty(sum(received), x.shape[1]), group.rank()
        pieces, places = x.contiguous().split(sent), out.split(received)
        places[me].copy_(pieces[me])
        waits = [dist.isend(pieces[r], r) for r in range(len(sent)) if r != me and sent[r]]
        waits += [dist.irecv(places[r], r) for r in range(len(sent)) if r != me and received[r]]
        for wait in waits:
            wait.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return Swap.apply(grad.contiguous(), *ctx.args), None, None, None


def _counts(rows_E, group):
    to_rank = rows_E.view(group.size(), -1)
    from_rank = torch.empty_like(to_rank)
    dist.all_to_all_single(from_rank, to_rank, group=group)
    return to_rank, from_rank


def layer_point_to_point(x_TD, expert_Tk, weight_Tk, experts, num_experts, group):
    """Weights travel nowhere; rows of one expert are found by a mask."""
    expert_R, k = expert_Tk.flatten(), expert_Tk.shape[1]
    order_R = expert_R.argsort(stable=True)
    to_rank, from_rank = _counts(expert_R.bincount(minlength=num_experts), group)
    sent, received = to_rank.sum(1).tolist(), from_rank.sum(1).tolist()
    x_RD = Swap.apply(x_TD[order_R // k], sent, received, group)
    number_R = torch.arange(len(experts)).repeat(group.size()).repeat_interleave(from_rank.flatten())
    y_RD = torch.zeros_like(x_RD)
    for number, expert in enumerate(experts):
        y_RD = y_RD.index_put((number_R == number,), expert(x_RD[number_R == number]))
    back_RD = Swap.apply(y_RD, received, sent, group)
    at_home = torch.empty_like(back_RD).index_put((order_R,), back_RD)
    return (at_home.view(*expert_Tk.shape, -1) * weight_Tk.unsqueeze(-1)).sum(1)


def layer_expert_by_expert(x_TD, expert_Tk, weight_Tk, experts, num_experts, group):
    """One exchange for each place in the lists of experts."""
    y_TD, each = torch.zeros_like(x_TD), len(experts)
    for place, expert in enumerate(experts):
        token, slot, rank = [], [], []
        for owner in range(group.size()):
            found = (expert_Tk == owner * each + place).nonzero()
            token.append(found[:, 0])
            slot.append(found[:, 1])
            rank.append(len(found))
        token, slot = torch.cat(token), torch.cat(slot)
        _, received = _counts(torch.tensor(rank), group)
        received = received.flatten().tolist()
        rows = all_to_all_single_autograd(x_TD[token], received, rank, group)
        back = all_to_all_single_autograd(expert(rows), rank, received, group)
        y_TD = y_TD.index_add(0, token, back * weight_Tk[token, slot].unsqueeze(1))
    return y_TD


def layer_weighted_there(x_TD, expert_Tk, weight_Tk, experts, num_experts, group):
    """The weight travels as one more element of its row, so that the expert's rank multiplies."""
    expert_R, k = expert_Tk.flatten(), expert_Tk.shape[1]
    order_R = expert_R.argsort()
    to_rank, from_rank = _counts(expert_R.bincount(minlength=num_experts), group)
    sent, received = to_rank.sum(1).tolist(), from_rank.sum(1).tolist()
    rows = torch.cat([x_TD.repeat_interleave(k, 0), weight_Tk.reshape(-1, 1)], 1)[order_R]
    rows = all_to_all_single_autograd(rows, received, sent, group)
    pieces = list(rows.split(from_rank.flatten().tolist()))
    done = [experts[i % len(experts)](piece[:, :-1]) * piece[:, -1:] for i, piece in enumerate(pieces)]
    back = all_to_all_single_autograd(torch.cat(done), sent, received, group)
    return torch.zeros_like(x_TD).index_add(0, order_R // k, back)


RIGHT = {
    "check_route": [route_by_sorting, route_by_rows, route_one_best_after_the_other],
    "check_bias_step": [bias_by_cases, bias_in_place, bias_by_clamping],
    "check_keep": [keep_by_cumsum, keep_by_sorting, keep_by_queues],
    "check_sent_bytes": [bytes_by_messages, bytes_by_tensor, bytes_by_passes],
    "check_sum_gradients": [sums_by_torch, sums_in_one_flat, sums_by_gathering],
    "check_layer": [layer_point_to_point, layer_expert_by_expert, layer_weighted_there],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"),
    [
        pytest.param(check, answer, id=f"{check}-{answer.__name__}")
        for check, answers in RIGHT.items()
        for answer in answers
    ],
)
def test_another_right_answer_passes(check, answer, capsys):
    getattr(ch09, check)(answer, seed=3)
    assert capsys.readouterr().out == f"{check}: passed\n"
