"""Wrong answers to the exercises of chapter 09, each with what its grader must say about it."""

import math

import torch

from course_lib.checks.ch09 import (
    check_bias_step,
    check_combine,
    check_dispatch,
    check_keep,
    check_route,
    check_sent_bytes,
    check_sum_gradients,
)
from course_lib.comm import all_reduce_
from course_lib.model import moe
from course_lib.model.moe import scores


# ------------------------------------------------------------------------------------ 1. the router
def _routed(score_TE, choice_TE, top_k):
    expert_Tk = choice_TE.topk(top_k).indices
    chosen_Tk = score_TE.gather(1, expert_Tk)
    return expert_Tk, chosen_Tk / chosen_Tk.sum(-1, keepdim=True)


def no_bias(logits_TE, top_k, score, bias_E):
    score_TE = scores(logits_TE, score)
    return _routed(score_TE, score_TE, top_k)


def bias_on_logits(logits_TE, top_k, score, bias_E):
    return _routed(scores(logits_TE, score), scores(logits_TE + bias_E, score), top_k)


def always_softmax(logits_TE, top_k, score, bias_E):
    score_TE = logits_TE.softmax(-1)
    return _routed(score_TE, score_TE + bias_E, top_k)


def bias_weighs(logits_TE, top_k, score, bias_E):
    biased_TE = scores(logits_TE, score) + bias_E
    return _routed(biased_TE, biased_TE, top_k)


def not_normalised(logits_TE, top_k, score, bias_E):
    score_TE = scores(logits_TE, score)
    expert_Tk = (score_TE + bias_E).topk(top_k).indices
    return expert_Tk, score_TE.gather(1, expert_Tk)


def softmax_of_scores(logits_TE, top_k, score, bias_E):
    expert_Tk, weight_Tk = not_normalised(logits_TE, top_k, score, bias_E)
    return expert_Tk, weight_Tk.softmax(-1)


def weights_alone(logits_TE, top_k, score, bias_E):
    return not_normalised(logits_TE, top_k, score, bias_E)[0]


def softmax_of_logits(logits_TE, top_k, score, bias_E):
    expert_Tk, _ = not_normalised(logits_TE, top_k, score, bias_E)
    return expert_Tk, logits_TE.gather(1, expert_Tk).softmax(-1)


# ------------------------------------------------------------------------------------ 2. dispatch
def _dispatched(x_TD, expert_Tk, num_experts, num_ranks):
    assignment_R = expert_Tk.flatten().argsort(stable=True)
    rows_E = expert_Tk.flatten().bincount(minlength=num_experts)
    return x_TD[assignment_R // expert_Tk.shape[1]], assignment_R, rows_E.view(num_ranks, -1).sum(1).tolist()


def tokens_for_choices(x_TD, expert_Tk, num_experts, num_ranks):
    x_RD, assignment_R, rows = _dispatched(x_TD, expert_Tk, num_experts, num_ranks)
    return x_RD, assignment_R // expert_Tk.shape[1], rows


def not_sorted(x_TD, expert_Tk, num_experts, num_ranks):
    _, assignment_R, rows = _dispatched(x_TD, expert_Tk, num_experts, num_ranks)
    return x_TD.repeat_interleave(expert_Tk.shape[1], 0), torch.arange(len(assignment_R)), rows


def by_slot(x_TD, expert_Tk, num_experts, num_ranks):
    x_RD, _, rows = _dispatched(x_TD, expert_Tk, num_experts, num_ranks)
    return x_RD, expert_Tk.t().flatten().argsort(stable=True), rows


def token_by_remainder(x_TD, expert_Tk, num_experts, num_ranks):
    _, assignment_R, rows = _dispatched(x_TD, expert_Tk, num_experts, num_ranks)
    return x_TD[assignment_R % len(x_TD)], assignment_R, rows


def rows_of_experts(x_TD, expert_Tk, num_experts, num_ranks):
    x_RD, assignment_R, _ = _dispatched(x_TD, expert_Tk, num_experts, num_ranks)
    return x_RD, assignment_R, expert_Tk.flatten().bincount(minlength=num_experts).tolist()


def rows_of_choices(x_TD, expert_Tk, num_experts, num_ranks):
    x_RD, assignment_R, rows = _dispatched(x_TD, expert_Tk, num_experts, num_ranks)
    return x_RD, assignment_R.argsort(), rows


def experts_dealt_out(x_TD, expert_Tk, num_experts, num_ranks):
    x_RD, assignment_R, _ = _dispatched(x_TD, expert_Tk, num_experts, num_ranks)
    return x_RD, assignment_R, (expert_Tk.flatten() % num_ranks).bincount(minlength=num_ranks).tolist()


# ------------------------------------------------------------------------------------ 3. combine
def _added(y_RD, assignment_R, weight_Tk):
    y_TD = torch.zeros(len(weight_Tk), y_RD.shape[1], dtype=y_RD.dtype)
    return y_TD.index_add(0, assignment_R // weight_Tk.shape[1], y_RD)


def without_weights(y_RD, assignment_R, weight_Tk):
    return _added(y_RD, assignment_R, weight_Tk)


def weights_in_order(y_RD, assignment_R, weight_Tk):
    return _added(y_RD * weight_Tk.flatten()[: len(y_RD), None], assignment_R, weight_Tk)


def last_row_wins(y_RD, assignment_R, weight_Tk):
    y_TD = torch.zeros(len(weight_Tk), y_RD.shape[1], dtype=y_RD.dtype)
    for row, choice in enumerate(assignment_R.tolist()):
        y_TD[choice // weight_Tk.shape[1]] = y_RD[row] * weight_Tk.flatten()[choice]
    return y_TD


def mean_of_choices(y_RD, assignment_R, weight_Tk):
    return _added(y_RD * weight_Tk.flatten()[assignment_R, None], assignment_R, weight_Tk) / weight_Tk.shape[1]


def weights_cut_off(y_RD, assignment_R, weight_Tk):
    return _added(y_RD * weight_Tk.detach().flatten()[assignment_R, None], assignment_R, weight_Tk)


def renormalised(y_RD, assignment_R, weight_Tk):
    weight_R1 = weight_Tk.flatten()[assignment_R, None]
    return _added(y_RD * weight_R1, assignment_R, weight_Tk) / _added(weight_R1, assignment_R, weight_Tk).clamp(
        min=1e-9
    )


def added_by_remainder(y_RD, assignment_R, weight_Tk):
    y_TD = torch.zeros(len(weight_Tk), y_RD.shape[1], dtype=y_RD.dtype)
    return y_TD.index_add(0, assignment_R % len(weight_Tk), y_RD * weight_Tk.flatten()[assignment_R, None])


# ------------------------------------------------------------------------------------ 4. capacity
def _room(expert_Tk, num_experts, factor):
    return factor * expert_Tk.numel() / num_experts


def capacity_without_k(expert_Tk, num_experts, factor):
    return moe.keep(expert_Tk, num_experts, math.ceil(factor * len(expert_Tk) / num_experts))


def rounded_down(expert_Tk, num_experts, factor):
    return moe.keep(expert_Tk, num_experts, math.floor(_room(expert_Tk, num_experts, factor)))


def one_too_many(expert_Tk, num_experts, factor):
    return moe.keep(expert_Tk, num_experts, math.ceil(_room(expert_Tk, num_experts, factor)) + 1)


def token_by_token(expert_Tk, num_experts, factor):
    room, taken, kept = math.ceil(_room(expert_Tk, num_experts, factor)), [0] * num_experts, []
    for expert in expert_Tk.flatten().tolist():
        kept.append(taken[expert] < room)
        taken[expert] += 1
    return torch.tensor(kept).view_as(expert_Tk)


def down_and_one_more(expert_Tk, num_experts, factor):
    return moe.keep(expert_Tk, num_experts, math.floor(_room(expert_Tk, num_experts, factor)) + 1)


def tokens_dropped_whole(expert_Tk, num_experts, factor):
    kept_Tk = moe.keep(expert_Tk, num_experts, math.ceil(_room(expert_Tk, num_experts, factor)))
    return kept_Tk & kept_Tk.all(1, keepdim=True)


# ------------------------------------------------------------------------------------ 5. bytes of a layer
def _out_and_back(rows, rank):
    return sum(rows[rank]) - rows[rank][rank], sum(row[rank] for row in rows) - rows[rank][rank]


def home_included(rows, rank, d_model, itemsize):
    return 2 * (sum(rows[rank]) + sum(row[rank] for row in rows)) * d_model * itemsize


def four_times_out(rows, rank, d_model, itemsize):
    return 4 * _out_and_back(rows, rank)[0] * d_model * itemsize


def forward_alone(rows, rank, d_model, itemsize):
    return sum(_out_and_back(rows, rank)) * d_model * itemsize


def dispatch_alone(rows, rank, d_model, itemsize):
    return 2 * _out_and_back(rows, rank)[0] * d_model * itemsize


def numbers_for_bytes(rows, rank, d_model, itemsize):
    return 2 * sum(_out_and_back(rows, rank)) * d_model


def backward_twice(rows, rank, d_model, itemsize):
    return 3 * sum(_out_and_back(rows, rank)) * d_model * itemsize


def received_as_well(rows, rank, d_model, itemsize):
    return 4 * sum(_out_and_back(rows, rank)) * d_model * itemsize


# ------------------------------------------------------------------------------------ 6. a balancing step
def wrong_way(bias_E, load_E, speed):
    return bias_E - speed * (load_E.double().mean() - load_E).sign()


def proportional(bias_E, load_E, speed):
    return bias_E + speed * (load_E.double().mean() - load_E)


def relative(bias_E, load_E, speed):
    return bias_E + speed * (1 - load_E / load_E.double().mean())


def up_at_the_mean(bias_E, load_E, speed):
    return bias_E + torch.where(load_E > load_E.double().mean(), -speed, speed)


def down_at_the_mean(bias_E, load_E, speed):
    return bias_E + torch.where(load_E < load_E.double().mean(), speed, -speed)


def anew(bias_E, load_E, speed):
    return speed * (load_E.double().mean() - load_E).sign()


def from_the_median(bias_E, load_E, speed):
    return bias_E + speed * (load_E.median() - load_E).sign()


# ------------------------------------------------------------------------------------ 7. whose gradients
def _sum(grads, group, divisor):
    for grad in grads:
        all_reduce_(grad, group)
        grad /= divisor


def mean_of_own_group(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    _sum(expert_grads, expert_dp_group, expert_dp_group.size())
    _sum(other_grads, dp_group, dp_group.size())


def all_over_all(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    _sum([*expert_grads, *other_grads], dp_group, dp_group.size())


def over_ep(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    _sum(expert_grads, ep_group, dp_group.size())
    _sum(other_grads, dp_group, dp_group.size())


def experts_left(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    for grad in expert_grads:
        grad /= dp_group.size()
    _sum(other_grads, dp_group, dp_group.size())


def never_divided(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    _sum(expert_grads, expert_dp_group, 1)
    _sum(other_grads, dp_group, 1)


def rest_over_few(expert_grads, other_grads, ep_group, expert_dp_group, dp_group):
    _sum([*expert_grads, *other_grads], expert_dp_group, dp_group.size())


WRONG = {
    "my_route": {
        "check": check_route,
        "answers": [
            (no_bias, "the bias is missing"),
            (bias_on_logits, "not to the logits"),
            (always_softmax, "a sigmoid of each logit by itself"),
            (bias_weighs, "the bias chooses, it does not weigh"),
            (not_normalised, "these do not add up to 1"),
            (softmax_of_scores, "a softmax of scores"),
            (softmax_of_logits, "a softmax of the chosen logits"),
            (weights_alone, "return expert_Tk, weight_Tk"),
        ],
    },
    "my_dispatch": {
        "check": check_dispatch,
        "answers": [
            (tokens_for_choices, "these are the tokens"),
            (not_sorted, "sort them by expert"),
            (by_slot, "flatten expert_Tk token by token"),
            (token_by_remainder, "not % T"),
            (rows_of_experts, "each rank has several experts"),
            (rows_of_choices, "in which row each assignment is"),
            (experts_dealt_out, "not every N-th"),
        ],
    },
    "my_combine": {
        "check": check_combine,
        "answers": [
            (without_weights, "the weights are missing"),
            (weights_in_order, "these are the weights of the first rows"),
            (last_row_wins, "kept only the last"),
            (mean_of_choices, "a mean over assignments"),
            (weights_cut_off, "the weights get no gradient"),
            (renormalised, "to add up to 1 again"),
            (added_by_remainder, "not % T"),
        ],
    },
    "my_keep": {
        "check": check_keep,
        "answers": [
            (capacity_without_k, "the capacity counts assignments"),
            (rounded_down, "the capacity is rounded up"),
            (one_too_many, "one too many"),
            (token_by_token, "all first assignments come before any second one"),
            (down_and_one_more, "stays what it is when rounded up"),
            (tokens_dropped_whole, "keeps its others"),
        ],
    },
    "my_sent_bytes": {
        "check": check_sent_bytes,
        "answers": [
            (home_included, "what stays on the rank is not sent"),
            (four_times_out, "combine returns the rows that came from others"),
            (forward_alone, "this is the forward pass alone"),
            (dispatch_alone, "the results travel as well"),
            (numbers_for_bytes, "each has itemsize bytes"),
            (backward_twice, "backward sends as much as forward"),
            (received_as_well, "received rows are counted"),
        ],
    },
    "my_bias_step": {
        "check": check_bias_step,
        "answers": [
            (wrong_way, "the wrong way"),
            (proportional, "every step has the same size"),
            (relative, "only its direction counts"),
            (up_at_the_mean, "an expert at the mean stays where it is"),
            (down_at_the_mean, "it went down"),
            (anew, "the new bias starts from the old one"),
            (from_the_median, "away from the median"),
        ],
    },
    "my_sum_gradients": {
        "check": check_sum_gradients,
        "answers": [
            (mean_of_own_group, "ep times too large"),
            (all_over_all, "those with other experts too"),
            (over_ep, "summed over the ranks that exchange tokens"),
            (experts_left, "not summed: the same expert"),
            (never_divided, "not divided: each rank's loss"),
            (rest_over_few, "not only on those with the same experts"),
        ],
    },
}
