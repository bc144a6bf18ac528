"""Wrong answers to the exercises of chapter 05, each with what its grader must say about it."""

import torch
import torch.nn.functional as F

from course_lib.checks.ch05 import (
    check_column_backward,
    check_gather_features,
    check_heads,
    check_row,
    check_share,
    check_tensor_parallel,
    check_vocab_loss,
)
from course_lib.comm import all_gather, all_reduce, join, my_piece
from course_lib.minimal.tensor import ColumnParallelLinear, TensorParallel, copy_in, put_before, sum_out
from course_lib.training import loss_of


# ------------------------------------------------------------------------------------ 1. heads by rank
def _refuse(num_heads, num_kv_heads, tp_size):
    if num_heads % tp_size or (num_kv_heads % tp_size and tp_size % num_kv_heads):
        raise ValueError("does not divide")


def _neighbours(num_heads, tp_size, tp_rank):
    each = num_heads // tp_size
    return list(range(tp_rank * each, (tp_rank + 1) * each))


def every_kv_head(num_heads, num_kv_heads, tp_size, tp_rank):
    _refuse(num_heads, num_kv_heads, tp_size)
    return _neighbours(num_heads, tp_size, tp_rank), list(range(num_kv_heads))


def never_refuses(num_heads, num_kv_heads, tp_size, tp_rank):
    queries = _neighbours(num_heads, tp_size, tp_rank)
    return queries, sorted({head * num_kv_heads // num_heads for head in queries})


def queries_in_turns(num_heads, num_kv_heads, tp_size, tp_rank):
    _refuse(num_heads, num_kv_heads, tp_size)
    queries = list(range(tp_rank, num_heads, tp_size))
    return queries, sorted({head * num_kv_heads // num_heads for head in queries})


def kv_heads_in_turns(num_heads, num_kv_heads, tp_size, tp_rank):
    _refuse(num_heads, num_kv_heads, tp_size)
    kv = list(range(tp_rank % num_kv_heads, num_kv_heads, tp_size))
    return _neighbours(num_heads, tp_size, tp_rank), kv


def last_kv_head_for_the_rest(num_heads, num_kv_heads, tp_size, tp_rank):
    """Of one rank it may look as if heads were dealt out in turns; of all ranks it does not."""
    _refuse(num_heads, num_kv_heads, tp_size)
    each = max(1, num_kv_heads // tp_size)
    first = min(tp_rank * each, num_kv_heads - each)
    return _neighbours(num_heads, tp_size, tp_rank), list(range(first, first + each))


def kv_heads_run_out(num_heads, num_kv_heads, tp_size, tp_rank):
    _refuse(num_heads, num_kv_heads, tp_size)
    bounds = [rank * num_kv_heads // tp_size for rank in (tp_rank, tp_rank + 1)]
    return _neighbours(num_heads, tp_size, tp_rank), list(range(*bounds))


# ------------------------------------------------------------------------------------ 2. the share of communication
def _share(bytes_sent, rate, flops, flops_per_s):
    return (bytes_sent / rate) / (flops / flops_per_s)


def both_directions(num_layers, d_model, num_parameters, tp, sold, flops_per_s):
    return _share(16 * num_layers * (tp - 1) / tp * d_model, sold, 6 * num_parameters / tp, flops_per_s)


def payload_once(num_layers, d_model, num_parameters, tp, sold, flops_per_s):
    return _share(8 * num_layers * d_model, sold / 2, 6 * num_parameters / tp, flops_per_s)


def payload_twice(num_layers, d_model, num_parameters, tp, sold, flops_per_s):
    return _share(16 * num_layers * d_model, sold / 2, 6 * num_parameters / tp, flops_per_s)


def computes_everything(num_layers, d_model, num_parameters, tp, sold, flops_per_s):
    return _share(16 * num_layers * (tp - 1) / tp * d_model, sold / 2, 6 * num_parameters, flops_per_s)


def in_fp32(num_layers, d_model, num_parameters, tp, sold, flops_per_s):
    return _share(32 * num_layers * (tp - 1) / tp * d_model, sold / 2, 6 * num_parameters / tp, flops_per_s)


def computes_forward_only(num_layers, d_model, num_parameters, tp, sold, flops_per_s):
    return _share(16 * num_layers * (tp - 1) / tp * d_model, sold / 2, 2 * num_parameters / tp, flops_per_s)


# ------------------------------------------------------------------------------------ 3. a row layer
def _mine(w_DF, group, dim=1):
    return my_piece(w_DF, group.rank(), group.size(), dim)


def bias_of_every_rank(x_BSf, w_DF, b_D, group):
    return all_reduce(F.linear(x_BSf, _mine(w_DF, group), b_D), group)


def no_bias(x_BSf, w_DF, b_D, group):
    return all_reduce(F.linear(x_BSf, _mine(w_DF, group)), group)


def own_partial_sum(x_BSf, w_DF, b_D, group):
    return F.linear(x_BSf, _mine(w_DF, group)) + b_D


def average(x_BSf, w_DF, b_D, group):
    return all_reduce(F.linear(x_BSf, _mine(w_DF, group)), group, op="mean") + b_D


def cuts_the_outputs(x_BSf, w_DF, b_D, group):
    return all_reduce(x_BSf @ _mine(w_DF, group, 0), group) + b_D


def gathers_the_input(x_BSf, w_DF, b_D, group):
    for _ in range(3):
        x_BSF = join(x_BSf, group, dim=-1)
    return F.linear(x_BSF, w_DF, b_D)


# ------------------------------------------------------------------------------------ 4. gathered features
class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.backward_step = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_step(grad, ctx.group), None, None, None


def _side_by_side(x, group):
    return all_gather(x.t().contiguous(), group).t().contiguous()


def _part(grad, group):
    return my_piece(grad, group.rank(), group.size(), -1).contiguous()


def below_each_other(x, group):
    return _Gathered.apply(x, group, all_gather, lambda grad, group: my_piece(grad, group.rank(), group.size(), 0))


def own_part(x, group):
    return _Gathered.apply(x, group, lambda x, group: x.clone(), lambda grad, group: grad)


def last_rank_first(x, group):
    def forward(x, group):
        return torch.cat(_side_by_side(x, group).chunk(group.size(), -1)[::-1], -1)

    return _Gathered.apply(x, group, forward, _part)


def sums_then_takes_the_part(x, group):
    def backward(grad, group):
        return _part(all_reduce(grad.contiguous(), group), group)

    return _Gathered.apply(x, group, _side_by_side, backward)


def averages_the_gradient(x, group):
    return _Gathered.apply(x, group, _side_by_side, lambda grad, group: _part(grad, group) / group.size())


def gathers_without_autograd(x, group):
    return _side_by_side(x.detach(), group)


def gathers_by_an_all_reduce(x, group):
    def forward(x, group):
        full = torch.zeros(*x.shape[:-1], x.shape[-1] * group.size(), dtype=x.dtype)
        my_piece(full, group.rank(), group.size(), -1).copy_(x)
        return all_reduce(full, group)

    return _Gathered.apply(x, group, forward, _part)


# ------------------------------------------------------------------------------------ 5. backward of a column layer
def _column(grad_BSf, x_BSD, w_fD):
    rows = grad_BSf.flatten(0, 1)
    return (grad_BSf @ w_fD).contiguous(), rows.t() @ x_BSD.flatten(0, 1), rows.sum(0)


def own_gradient_of_x(grad_BSf, x_BSD, w_fD, group):
    return _column(grad_BSf, x_BSD, w_fD)


def average_of_x(grad_BSf, x_BSD, w_fD, group):
    grad_x, grad_w, grad_b = _column(grad_BSf, x_BSD, w_fD)
    return all_reduce(grad_x, group, op="mean"), grad_w, grad_b


def sums_the_weight(grad_BSf, x_BSD, w_fD, group):
    grad_x, grad_w, grad_b = _column(grad_BSf, x_BSD, w_fD)
    return all_reduce(grad_x, group), all_reduce(grad_w.contiguous(), group), grad_b


def sums_the_bias(grad_BSf, x_BSD, w_fD, group):
    grad_x, grad_w, grad_b = _column(grad_BSf, x_BSD, w_fD)
    return all_reduce(grad_x, group), grad_w, all_reduce(grad_b, group)


def bias_of_each_position(grad_BSf, x_BSD, w_fD, group):
    grad_x, grad_w, _ = _column(grad_BSf, x_BSD, w_fD)
    return all_reduce(grad_x, group), grad_w, grad_BSf.sum(0)


def sums_again(grad_BSf, x_BSD, w_fD, group):
    grad_x, grad_w, grad_b = _column(grad_BSf, x_BSD, w_fD)
    return all_reduce(grad_x, group), all_reduce(grad_w.contiguous(), group) * 0 + grad_w, grad_b


# ------------------------------------------------------------------------------------ 6. a loss from pieces
def _pieces(logits_BSv, y_BS, first, group, largest=True, everybody=True, masked=True, one="mine"):
    v = logits_BSv.shape[-1]
    is_mine_BS = (y_BS >= first) & (y_BS < first + v)
    place_BS = (y_BS - first).clamp(0, v - 1)
    max_BS = all_reduce(logits_BSv.amax(-1), group, op="max") if largest else torch.zeros(y_BS.shape).double()
    exp_BSv = (logits_BSv - max_BS.unsqueeze(-1)).exp()
    sum_BS = all_reduce(exp_BSv.sum(-1), group) if everybody else exp_BSv.sum(-1)
    target_BS = logits_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1)
    target_BS = all_reduce(target_BS * is_mine_BS if masked else target_BS, group)
    grad_BSv = exp_BSv / sum_BS.unsqueeze(-1)
    onehot_BSv = F.one_hot(place_BS, v)
    if one != "none":
        grad_BSv = grad_BSv - (onehot_BSv if one == "all" else onehot_BSv * is_mine_BS.unsqueeze(-1))
    return sum_BS.log() + max_BS - target_BS, grad_BSv


def overflows(logits_BSv, y_BS, first, group):
    return _pieces(logits_BSv, y_BS, first, group, largest=False)


def own_sum(logits_BSv, y_BS, first, group):
    return _pieces(logits_BSv, y_BS, first, group, everybody=False)


def everybody_answers(logits_BSv, y_BS, first, group):
    return _pieces(logits_BSv, y_BS, first, group, masked=False)


def own_max(logits_BSv, y_BS, first, group):
    max_BS = logits_BSv.amax(-1)
    sum_BS = all_reduce((logits_BSv - max_BS.unsqueeze(-1)).exp().sum(-1), group)
    _, grad_BSv = _pieces(logits_BSv, y_BS, first, group)
    v = logits_BSv.shape[-1]
    is_mine_BS = (y_BS >= first) & (y_BS < first + v)
    mine_BS = logits_BSv.gather(-1, (y_BS - first).clamp(0, v - 1).unsqueeze(-1)).squeeze(-1) - max_BS
    return sum_BS.log() - all_reduce(mine_BS * is_mine_BS, group), grad_BSv


def first_of_mine_without_a_mask(logits_BSv, y_BS, first, group):
    right_BS, grad_BSv = _pieces(logits_BSv, y_BS, first, group)
    v = logits_BSv.shape[-1]
    is_mine_BS = (y_BS >= first) & (y_BS < first + v)
    place_BS = torch.where(is_mine_BS, y_BS - first, 0)
    max_BS = all_reduce(logits_BSv.amax(-1), group, op="max")
    mine_BS = logits_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1) - max_BS
    return right_BS + all_reduce(mine_BS * is_mine_BS - mine_BS, group), grad_BSv


def gradient_without_target(logits_BSv, y_BS, first, group):
    return _pieces(logits_BSv, y_BS, first, group, one="none")


def target_on_every_rank(logits_BSv, y_BS, first, group):
    return _pieces(logits_BSv, y_BS, first, group, one="all")


def own_softmax(logits_BSv, y_BS, first, group):
    loss_BS, _ = _pieces(logits_BSv, y_BS, first, group)
    v = logits_BSv.shape[-1]
    is_mine_BS = (y_BS >= first) & (y_BS < first + v)
    onehot_BSv = F.one_hot((y_BS - first).clamp(0, v - 1), v)
    return loss_BS, logits_BSv.softmax(-1) - onehot_BSv * is_mine_BS.unsqueeze(-1)


def gathers_the_logits(logits_BSv, y_BS, first, group):
    all_reduce(torch.zeros(*y_BS.shape, 80, dtype=torch.float64), group)  # as long as all logits
    return _pieces(logits_BSv, y_BS, first, group)


# ------------------------------------------------------------------------------------ 7. a tensor-parallel Llama
class ForgetsSameTokens(TensorParallel):
    same_tokens = False


class WithoutF(TensorParallel):
    enter = staticmethod(lambda x, group: x)


class SumsNorms(TensorParallel):
    def update(self):
        for name, param in self.model.named_parameters():
            if "norm" in name:
                param.grad = all_reduce(param.grad, self.group)
        super().update()


class ForgetsMicroBatches(TensorParallel):
    def backward(self, micro_batches):
        for x_BS, y_BS in micro_batches:
            self.loss(x_BS, y_BS).backward()


class CountsTargetsOfOtherRanks(TensorParallel):
    """Each rank adds a logit for every target, also where the target is another rank's."""

    def loss(self, x_BS, y_BS):
        logits_BSv = self.model(x_BS)
        v = logits_BSv.shape[-1]
        place_BS = (y_BS - self.group.rank() * v).clamp(0, v - 1)
        sum_BS = sum_out(logits_BSv.exp().sum(-1), self.group)
        target_BS = logits_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1)
        return (sum_BS.log() - sum_out(target_BS, self.group)).mean()


class HeadStaysFull(TensorParallel):
    """Right, but the head is on every rank in full."""

    def __init__(self, model, make_optimizer, group):
        head = model.head
        super().__init__(model, make_optimizer, group)
        model.head = head
        self.optimizer = make_optimizer(model.parameters())

    def loss(self, x_BS, y_BS):
        return loss_of(self.model, x_BS, y_BS)


class FBeforeEachColumn(TensorParallel):
    """Right, but it sends more."""

    enter = staticmethod(lambda x, group: x)

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for layer in model.modules():
            if isinstance(layer, ColumnParallelLinear):
                put_before(layer, copy_in, group)


WRONG = {
    "my_heads": {
        "check": check_heads,
        "answers": [
            (every_kv_head, "a rank needs only those that its own query heads read"),
            (never_refuses, ": raise ValueError"),
            (queries_in_turns, "neighbours together"),
            (kv_heads_in_turns, "are dealt out in turns"),
            (last_kv_head_for_the_rest, "; its query heads read ["),
            (kv_heads_run_out, "no key/value head"),
        ],
    },
    "my_share": {
        "check": check_share,
        "answers": [
            (both_directions, "adds both directions"),
            (payload_once, "taken to send its payload once"),
            (payload_twice, "taken to send its payload twice"),
            (computes_everything, "each GPU computes only 1 / tp"),
            (in_fp32, "a bf16 number has 2 bytes"),
            (computes_forward_only, "2 are forward's alone"),
        ],
    },
    "my_row": {
        "check": check_row,
        "answers": [
            (bias_of_every_rank, "add it once, after the sum"),
            (no_bias, "the bias is missing"),
            (own_partial_sum, "this is the rank's own partial sum"),
            (average, "the partial sums were averaged"),
            (cuts_the_outputs, "cut along its outputs"),
            (gathers_the_input, "one all-reduce of the result sends"),
        ],
    },
    "my_gather": {
        "check": check_gather_features,
        "answers": [
            (below_each_other, "features belong side by side"),
            (own_part, "forward is an all-gather"),
            (last_rank_first, "another order"),
            (sums_then_takes_the_part, "it was summed again"),
            (averages_the_gradient, "divided by the number of ranks"),
            (gathers_without_autograd, "no gradient reaches x"),
            (gathers_by_an_all_reduce, "one all-gather sends"),
        ],
    },
    "my_column_backward": {
        "check": check_column_backward,
        "answers": [
            (own_gradient_of_x, "every rank used x for other outputs"),
            (average_of_x, "the partial sums were averaged"),
            (sums_the_weight, "the gradient of the weight: summed over the ranks"),
            (sums_the_bias, "the gradient of the bias: summed over the ranks"),
            (bias_of_each_position, "has shape"),
            (sums_again, "one all-reduce of x's gradient sends"),
        ],
    },
    "my_vocab_loss": {
        "check": check_vocab_loss,
        "answers": [
            (overflows, "the loss is not finite"),
            (own_sum, "must run over all ranks' logits"),
            (everybody_answers, "answer it with 0"),
            (first_of_mine_without_a_mask, "place 0, less m, was counted"),
            (own_max, "exponentials of different scales"),
            (gradient_without_target, "at the target 1 is subtracted"),
            (own_softmax, "divide by the sum over all ranks"),
            (target_on_every_rank, "1 was subtracted on every rank"),
            (gathers_the_logits, "three numbers per token, never the logits"),
        ],
    },
    "MyTensorParallel": {
        "check": check_tensor_parallel,
        "answers": [
            (ForgetsSameTokens, "needs `same_tokens = True`"),
            (WithoutF, "the first is embed.weight, and the last, which backward reaches first, is norm.weight"),
            (SumsNorms, "9 of 39 parameters are wrong, the first is blocks.0.attention_norm.weight"),
            (CountsTargetsOfOtherRanks, "so the loss itself is wrong, or the forward pass before it"),
            (ForgetsMicroBatches, "is each loss divided by the number of micro-batches"),
            (HeadStaysFull, "bytes of parameters, and its part is"),
            (FBeforeEachColumn, "bytes, and "),
        ],
    },
}
