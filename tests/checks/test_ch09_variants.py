"""The graders of chapter 09 accept right answers that are arranged otherwise: three layers of experts."""

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


def bias_by_cases(bias_E, load_E, speed):
    mean = load_E.sum().item() / len(load_E)
    steps = [speed * ((load < mean) - (load > mean)) for load in load_E.tolist()]
    return bias_E + torch.tensor(steps, dtype=bias_E.dtype)


def keep_by_cumsum(expert_Tk, num_experts, factor):
    queue_A = expert_Tk.t().flatten()
    one_AE = torch.nn.functional.one_hot(queue_A, num_experts)
    place_A = (one_AE.cumsum(0) * one_AE).sum(1)
    return (place_A - 1 < factor * expert_Tk.numel() / num_experts).view(expert_Tk.t().shape).t()


# ------------------------------------------------------------------------------------ 4. bytes
def bytes_by_messages(rows, rank, d_model, narrow_bytes, wide_bytes):
    total = 0
    for other in range(len(rows)):
        if other != rank:
            total += rows[rank][other] * (2 * narrow_bytes + wide_bytes) + 3 * rows[other][rank] * wide_bytes
    return total * d_model


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


RIGHT = [
    (ch09.check_route, [route_by_sorting]),
    (ch09.check_bias_step, [bias_by_cases]),
    (ch09.check_keep, [keep_by_cumsum]),
    (ch09.check_sent_bytes, [bytes_by_messages]),
    (ch09.check_layer, [layer_point_to_point, layer_expert_by_expert, layer_weighted_there]),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"),
    [pytest.param(check, answer, id=answer.__name__) for check, answers in RIGHT for answer in answers],
)
def test_another_right_answer_passes(check, answer, capsys):
    check(answer, seed=3)
    assert capsys.readouterr().out == f"{check.__name__}: passed\n"
