"""Wrong answers to the exercises of chapter 09, each with what its grader must say about it."""

import math

import torch

from course_lib.checks.ch09 import (
    check_bias_step,
    check_keep,
    check_layer,
    check_route,
    check_sent_bytes,
    check_sum_gradients,
)
from course_lib.checks.ch09.expert_parallel import bytes_of_a_recomputed_layer
from course_lib.comm import all_gather, all_reduce_, all_to_all
from course_lib.minimal.experts import Exchange, by_expert
from course_lib.minimal.moe import combine, dispatch, run_experts
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


# ------------------------------------------------------------------------------------ 3. capacity
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


def without_k_rounded_down(expert_Tk, num_experts, factor):
    return moe.keep(expert_Tk, num_experts, int(factor * len(expert_Tk) / num_experts))


def without_k_token_by_token(expert_Tk, num_experts, factor):
    """Two mistakes at once."""
    room, kept_Tk = factor * len(expert_Tk) / num_experts, torch.zeros_like(expert_Tk, dtype=torch.bool)
    taken = [0] * num_experts
    for token, chosen in enumerate(expert_Tk.tolist()):
        for slot, expert in enumerate(chosen):
            kept_Tk[token, slot] = taken[expert] < room
            taken[expert] += 1
    return kept_Tk


def tokens_dropped_whole(expert_Tk, num_experts, factor):
    kept_Tk = moe.keep(expert_Tk, num_experts, math.ceil(_room(expert_Tk, num_experts, factor)))
    return kept_Tk & kept_Tk.all(1, keepdim=True)


# ------------------------------------------------------------------------------------ 4. bytes of a layer
def _out_and_back(rows, rank):
    return sum(rows[rank]) - rows[rank][rank], sum(row[rank] for row in rows) - rows[rank][rank]


def home_included(rows, rank, d_model, narrow, wide):
    return bytes_of_a_recomputed_layer(sum(rows[rank]), sum(row[rank] for row in rows), d_model, narrow, wide)


def out_both_ways(rows, rank, d_model, narrow, wide):
    out, _ = _out_and_back(rows, rank)
    return bytes_of_a_recomputed_layer(out, out, d_model, narrow, wide)


def forward_once(rows, rank, d_model, narrow, wide):
    out, back = _out_and_back(rows, rank)
    return d_model * (out * narrow + back * wide + (out + back) * wide)


def forward_alone(rows, rank, d_model, narrow, wide):
    out, back = _out_and_back(rows, rank)
    return 2 * d_model * (out * narrow + back * wide)


def all_narrow(rows, rank, d_model, narrow, wide):
    return 3 * d_model * narrow * sum(_out_and_back(rows, rank))


def all_wide(rows, rank, d_model, narrow, wide):
    return 3 * d_model * wide * sum(_out_and_back(rows, rank))


def narrow_gradients(rows, rank, d_model, narrow, wide):
    out, back = _out_and_back(rows, rank)
    return d_model * (2 * (out * narrow + back * wide) + out * wide + back * narrow)


def received_as_well(rows, rank, d_model, narrow, wide):
    out, back = _out_and_back(rows, rank)
    sizes = d_model, narrow, wide
    return bytes_of_a_recomputed_layer(out, back, *sizes) + bytes_of_a_recomputed_layer(back, out, *sizes)


# ------------------------------------------------------------------------------------ 2. a balancing step
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


# ------------------------------------------------------------------------------------ 5. whose gradients
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


# ------------------------------------------------------------------------------------ 6. a layer
def _plain(x, sent, received, group):
    return all_to_all(x, group, sent, received)


def _with(move=Exchange.apply, weighted=True, spread=True, undo=torch.argsort):
    """A layer as the lesson's, with one thing changed."""

    def layer(x_TD, expert_Tk, weight_Tk, experts, num_experts, group):
        x_RD, order_R, rows_E = dispatch(x_TD, expert_Tk, num_experts)
        to_rank = rows_E.view(group.size(), -1)
        from_rank = all_to_all(to_rank, group)
        sent, received = to_rank.sum(1).tolist(), from_rank.sum(1).tolist()
        x_RD = move(x_RD, sent, received, group)
        sort_R = by_expert(from_rank) if spread else torch.arange(len(x_RD))
        y_RD = run_experts(experts, x_RD[sort_R], from_rank.sum(0))
        y_RD = move(y_RD[undo(sort_R)], received, sent, group)
        return combine(y_RD, order_R, weight_Tk if weighted else torch.ones_like(weight_Tk))

    return layer


def lost_gradients(*args):
    return _with(move=_plain)(*args)


def unweighted(*args):
    return _with(weighted=False)(*args)


def not_sorted(*args):
    return _with(spread=False)(*args)


def sorted_twice(*args):
    return _with(undo=lambda sort_R: sort_R)(*args)


def still_sorted(*args):
    return _with(undo=lambda sort_R: torch.arange(len(sort_R)))(*args)


def cut_off(*args):
    return _with()(*args).detach()


class _HalfWay(Exchange):
    @staticmethod
    def backward(ctx, grad_RD):
        grad_RD, *rest = Exchange.backward(ctx, grad_RD)
        return grad_RD / ctx.group.size(), *rest


def averaged(*args):
    return _with(move=_HalfWay.apply)(*args)


def all_tokens_gathered(x_TD, expert_Tk, weight_Tk, experts, num_experts, group):
    """Right numbers: every token goes to every rank, padded; gradients by an all-gather's own backward."""
    y_TD = _with()(x_TD, expert_Tk, weight_Tk, experts, num_experts, group)
    all_gather(torch.zeros(64, x_TD.shape[1], dtype=x_TD.dtype), group)
    return y_TD


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
    "my_keep": {
        "check": check_keep,
        "answers": [
            (capacity_without_k, "only k is missing in the capacity"),
            (without_k_rounded_down, "k is missing in the capacity, and its rounding goes up"),
            (without_k_token_by_token, "k is missing in the capacity, and first choices go before second ones"),
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
            (out_both_ways, "combine returns the rows that came from others"),
            (forward_once, "forward runs twice"),
            (forward_alone, "gradients travel too"),
            (all_narrow, "only rows in dispatch are narrow"),
            (all_wide, "rows in dispatch have narrow_bytes"),
            (narrow_gradients, "the gradients of dispatched rows are wide"),
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
    "my_layer": {
        "check": check_layer,
        "answers": [
            (lost_gradients, "the experts get no gradient"),
            (unweighted, "added without their weights"),
            (not_sorted, "rows arrive sorted by source rank"),
            (sorted_twice, "is applied once more"),
            (still_sorted, "they are still sorted by expert"),
            (cut_off, "has no graph"),
            (averaged, "the gradient of x_TD is wrong"),
            (all_tokens_gathered, "a row goes to the rank of its expert only"),
        ],
    },
}
