"""Wrong answers to the exercises of chapter 02; each name says what is wrong."""

import math

import torch
import torch.nn.functional as F

from course_lib.checks.ch02 import (
    check_accumulate,
    check_first_fit,
    check_lora_bytes,
    check_merge,
    check_merged_weight,
    check_recompute,
    check_scaled_step,
    check_utilisation,
    check_windowed_attention,
)
from course_lib.flops import flops_per_token, step_flops
from course_lib.memory.budget import budget


# ------------------------------------------------------------------------------------ 1. accumulation
def _loss(model, x_BS, y_BS, reduction="mean"):
    return F.cross_entropy(model(x_BS).flatten(0, 1), y_BS.flatten(), reduction=reduction)


def summed(model, parts):
    for x_BS, y_BS in parts:
        _loss(model, x_BS, y_BS).backward()


def mean_of_means(model, parts):
    for x_BS, y_BS in parts:
        (_loss(model, x_BS, y_BS) / len(parts)).backward()


def weighted_by_positions(model, parts):
    total = sum(y_BS.numel() for _, y_BS in parts)
    for x_BS, y_BS in parts:
        (_loss(model, x_BS, y_BS) * (y_BS.numel() / total)).backward()


def cleared_in_the_loop(model, parts):
    total = sum((y_BS != -100).sum() for _, y_BS in parts)
    for x_BS, y_BS in parts:
        model.zero_grad()
        (_loss(model, x_BS, y_BS, "sum") / total).backward()


def all_at_once(model, parts):
    longest = max(x_BS.shape[1] for x_BS, _ in parts)
    x_BS = torch.cat([F.pad(x_BS, (0, longest - x_BS.shape[1])) for x_BS, _ in parts])
    y_BS = torch.cat([F.pad(y_BS, (0, longest - y_BS.shape[1]), value=-100) for _, y_BS in parts])
    _loss(model, x_BS, y_BS).backward()


def one_backward(model, parts):
    total = sum((y_BS != -100).sum() for _, y_BS in parts)
    sum(_loss(model, x_BS, y_BS, "sum") / total for x_BS, y_BS in parts).backward()


def never_divided(model, parts):
    for x_BS, y_BS in parts:
        _loss(model, x_BS, y_BS, "sum").backward()


def no_backward(model, parts):
    for x_BS, y_BS in parts:
        _loss(model, x_BS, y_BS)


# ------------------------------------------------------------------------------------ 2. loss scaling
def _scaled_step(gradients, scale, good_steps, interval, update, finite=None, divide=True):
    finite = all(gradient.isfinite().all() for gradient in gradients) if finite is None else finite
    if not finite:
        return scale / 2, 0
    for gradient in gradients if divide else []:
        gradient /= scale
    update()
    good_steps += 1
    return (scale * 2, 0) if good_steps == interval else (scale, good_steps)


def looks_at_the_first(gradients, scale, good_steps, interval, update):
    finite = bool(gradients[0].isfinite().all())
    return _scaled_step(gradients, scale, good_steps, interval, update, finite)


def looks_for_infinities(gradients, scale, good_steps, interval, update):
    finite = not any(gradient.isinf().any() for gradient in gradients)
    return _scaled_step(gradients, scale, good_steps, interval, update, finite)


def not_unscaled(gradients, scale, good_steps, interval, update):
    return _scaled_step(gradients, scale, good_steps, interval, update, divide=False)


def keeps_counting_after_a_skip(gradients, scale, good_steps, interval, update):
    new_scale, count = _scaled_step(gradients, scale, good_steps, interval, update)
    return (new_scale, good_steps) if new_scale < scale else (new_scale, count)


def never_grows(gradients, scale, good_steps, interval, update):
    new_scale, count = _scaled_step(gradients, scale, good_steps, 10**9, update)
    return new_scale, count


def grows_without_starting_anew(gradients, scale, good_steps, interval, update):
    new_scale, count = _scaled_step(gradients, scale, good_steps, interval, update)
    return (new_scale, interval) if new_scale > scale else (new_scale, count)


def scale_kept_after_a_skip(gradients, scale, good_steps, interval, update):
    new_scale, count = _scaled_step(gradients, scale, good_steps, interval, update)
    return max(new_scale, scale), count


def never_updates(gradients, scale, good_steps, interval, update):
    return _scaled_step(gradients, scale, good_steps, interval, lambda: None)


# ------------------------------------------------------------------------------------ 3. two halves of a softmax
def _merged(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp() + out_b * (lse_b - lse).exp(), lse


def averaged(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


def added(out_a, lse_a, out_b, lse_b):
    return out_a + out_b, torch.logaddexp(lse_a, lse_b)


def swapped_weights(out_a, lse_a, out_b, lse_b):
    return _merged(out_b, lse_a, out_a, lse_b)


def exponentials_as_they_are(out_a, lse_a, out_b, lse_b):
    total = lse_a.exp() + lse_b.exp()
    return (out_a * lse_a.exp() + out_b * lse_b.exp()) / total, total.log()


def log_sum_exps_added(out_a, lse_a, out_b, lse_b):
    return _merged(out_a, lse_a, out_b, lse_b)[0], lse_a + lse_b


def larger_log_sum_exp(out_a, lse_a, out_b, lse_b):
    return _merged(out_a, lse_a, out_b, lse_b)[0], torch.maximum(lse_a, lse_b)


def weighted_without_exponential(out_a, lse_a, out_b, lse_b):
    return (lse_a * out_a + lse_b * out_b) / (lse_a + lse_b), torch.logaddexp(lse_a, lse_b)


def minus_infinity_times_zero(out_a, lse_a, out_b, lse_b):
    out, lse = _merged(out_a, lse_a, out_b, lse_b)
    return out + 0 * lse_b, lse


# ------------------------------------------------------------------------------------ 4. recomputation with dropout
class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, repeat, restore):
        ctx.block, ctx.state, ctx.repeat, ctx.restore = block, torch.get_rng_state(), repeat, restore
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        found = torch.get_rng_state()
        if getattr(ctx, "repeat", True):
            torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            out = ctx.block(x)
        if getattr(ctx, "restore", True):
            torch.set_rng_state(found)
        torch.autograd.backward(out, grad)
        return None, x.grad, None, None


def other_dropout(block, x):
    return _Again.apply(block, x, False, True)


def autocast_forgotten(block, x):
    return _WithItsParameters.apply(block, x, *block.parameters())


class _WithItsParameters(torch.autograd.Function):
    """Right but for autocast, which is off when backward comes."""

    @staticmethod
    def forward(ctx, block, x, *params):
        ctx.block, ctx.state, ctx.params = block, torch.get_rng_state(), params
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            out = ctx.block(x)
        return None, *torch.autograd.grad(out, (x, *ctx.params), grad)


def generator_left_behind(block, x):
    return _Again.apply(block, x, True, False)


class _KeepsTheGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.save_for_backward(x, x.repeat(4, 1))
        ctx.block, ctx.state = block, torch.get_rng_state()
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        return _Again.backward(ctx, grad)[:2]


def more_than_the_input_kept(block, x):
    return _KeepsTheGraph.apply(block, x)


class _GraphBuiltInForward(torch.autograd.Function):
    """Builds the block's graph at once, and walks it in backward."""

    @staticmethod
    def forward(ctx, block, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.out = block(ctx.x)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        torch.autograd.backward(ctx.out, grad)
        return None, ctx.x.grad


def graph_built_in_forward(block, x):
    return _GraphBuiltInForward.apply(block, x)


def runs_twice_in_forward(block, x):
    block(x.detach())
    return block(x)


class _NoInputGradient(_Again):
    @staticmethod
    def backward(ctx, grad):
        _Again.backward(ctx, grad)
        return None, None, None, None


def no_input_gradient(block, x):
    return _NoInputGradient.apply(block, x, True, True)


class _NoParameterGradients(_Again):
    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        found = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            out = ctx.block(x)
        torch.set_rng_state(found)
        return None, torch.autograd.grad(out, x, grad)[0], None, None


def no_parameter_gradients(block, x):
    return _NoParameterGradients.apply(block, x, True, True)


def detached(block, x):
    with torch.no_grad():
        return block(x)


def only_where_x_needs_a_gradient(block, x):
    return _Again.apply(block, x, True, True)


# ------------------------------------------------------------------------------------ 8. attention over blocks
def _attention(q, k, v, window, block, wrong=""):
    """Right unless `wrong` says what is not: the diagonal first, so that every row sees a key at once."""
    B, N, S, H = q.shape
    times = N // k.shape[1]
    k, v = (x.repeat(1, times, 1, 1) if wrong == "heads" else x.repeat_interleave(times, 1) for x in (k, v))
    window += wrong == "one more"
    window = S if wrong == "no window" else window
    out, lse = torch.empty_like(q), q.new_empty(B, N, S, 1)
    for start in range(0, S, block):
        rows = q[:, :, start : start + block] / (1 if wrong == "root" else math.sqrt(H))
        m, total, o = q.new_full((*rows.shape[:3], 1), -math.inf), 0, 0
        first = 0 if wrong == "all blocks" else max(0, start - window + 1) // block
        tiles = range(first, start // block + 1)
        for tile in tiles if wrong == "oldest first" else reversed(tiles):
            keys = slice(tile * block, (tile + 1) * block)
            gap = torch.arange(start, min(start + block, S))[:, None] - torch.arange(S)[keys]
            scores = (rows @ k[:, :, keys].mT).masked_fill((gap < 0) | (gap >= window), -math.inf)
            larger = torch.maximum(m, scores.amax(-1, keepdim=True))
            shrink = 1 if wrong == "never shrunk" else (m - larger).exp()
            weights = (scores - larger).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            o = o * shrink + weights @ v[:, :, keys]
            m = larger
        out[:, :, start : start + block] = o / total
        lse[:, :, start : start + block] = m + (0 if wrong == "only the maximum" else total.log())
    return out, lse


def no_window(*given):
    return _attention(*given, "no window")


def one_key_too_many(*given):
    return _attention(*given, "one more")


def heads_in_turn(*given):
    return _attention(*given, "heads")


def not_divided_by_the_root(*given):
    return _attention(*given, "root")


def never_shrunk(*given):
    return _attention(*given, "never shrunk")


def oldest_block_first(*given):
    return _attention(*given, "oldest first")


def every_block(*given):
    return _attention(*given, "all blocks")


def only_the_maximum(*given):
    return _attention(*given, "only the maximum")


def output_alone(*given):
    return _attention(*given)[0]


def whole_matrix(q, k, v, window, block):
    N, S = q.shape[1:3]
    k, v = (x.repeat_interleave(N // x.shape[1], 1) for x in (k, v))
    gap = torch.arange(S)[:, None] - torch.arange(S)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill((gap < 0) | (gap >= window), -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1, keepdim=True)


# ------------------------------------------------------------------------------------ 5. LoRA
def alpha_not_divided(weight, lora_a, lora_b, alpha):
    return weight + alpha * (lora_b @ lora_a)


def not_scaled(weight, lora_a, lora_b, alpha):
    return weight + lora_b @ lora_a


def alpha_over_width(weight, lora_a, lora_b, alpha):
    return weight + alpha / weight.shape[1] * (lora_b @ lora_a)


def transposed(weight, lora_a, lora_b, alpha):
    return weight + alpha / len(lora_a) * (lora_b @ lora_a).t()


def adapter_alone(weight, lora_a, lora_b, alpha):
    return alpha / len(lora_a) * (lora_b @ lora_a)


def merged_in_place(weight, lora_a, lora_b, alpha):
    weight += alpha / len(lora_a) * (lora_b @ lora_a)
    return weight


def _counts(shapes, targets, rank):
    frozen = sum(d_out * d_in for d_out, d_in in shapes.values())
    return frozen, sum(rank * sum(shapes[name]) for name in targets)


def base_not_resident(shapes, targets, rank):
    return 16 * _counts(shapes, targets, rank)[1]


def all_trained(shapes, targets, rank):
    return 16 * sum(_counts(shapes, targets, rank))


def base_with_gradients(shapes, targets, rank):
    frozen, trained = _counts(shapes, targets, rank)
    return 4 * frozen + 16 * trained


def rank_times_area(shapes, targets, rank):
    frozen, _ = _counts(shapes, targets, rank)
    return 2 * frozen + 16 * sum(rank * shapes[name][0] * shapes[name][1] for name in targets)


def one_matrix_an_adapter(shapes, targets, rank):
    frozen, _ = _counts(shapes, targets, rank)
    return 2 * frozen + 16 * sum(rank * shapes[name][1] for name in targets)


def adapters_without_states(shapes, targets, rank):
    return 2 * sum(_counts(shapes, targets, rank))


def no_masters(shapes, targets, rank):
    frozen, trained = _counts(shapes, targets, rank)
    return 2 * frozen + 12 * trained


def adapters_everywhere(shapes, targets, rank):
    frozen, trained = _counts(shapes, shapes, rank)
    return 2 * frozen + 16 * trained


def a_gradient_forgotten(shapes, targets, rank):
    frozen, trained = _counts(shapes, targets, rank)
    return 2 * frozen + 14 * trained


def base_without_targets(shapes, targets, rank):
    others = {name: shape for name, shape in shapes.items() if name not in targets}
    return 2 * _counts(others, (), rank)[0] + 16 * _counts(shapes, targets, rank)[1]


# ------------------------------------------------------------------------------------ 6. utilisation
def _utilisation(config, seq_len, tokens, seconds, gpus, peak, recompute):
    possible = seconds * gpus * peak
    needed, executed = tokens * flops_per_token(config, seq_len), step_flops(config, tokens, seq_len, recompute)
    return needed / possible, executed / possible


def swapped(*run):
    return _utilisation(*run)[::-1]


def recomputation_in_both(*run):
    return (_utilisation(*run)[1],) * 2


def recomputation_in_none(*run):
    return (_utilisation(*run)[0],) * 2


def one_gpu(config, seq_len, tokens, seconds, gpus, peak, recompute):
    return _utilisation(config, seq_len, tokens, seconds, 1, peak, recompute)


def without_seconds(config, seq_len, tokens, seconds, gpus, peak, recompute):
    return _utilisation(config, seq_len, tokens, 1, gpus, peak, recompute)


def percent(*run):
    return tuple(100 * share for share in _utilisation(*run))


def head_recomputed(config, seq_len, tokens, seconds, gpus, peak, recompute):
    needed = _utilisation(config, seq_len, tokens, seconds, gpus, peak, "none")[0]
    return needed, needed * 4 / 3


# ------------------------------------------------------------------------------------ 7. the ladder
def _first_fit(config, batch_size, seq_len, ladder_steps, limit, added=True, divided=True, strict=False):
    options, fitting = dict(ladder_steps[0][1]), []
    for name, changes in ladder_steps:
        options = options | changes if added else dict(ladder_steps[0][1]) | changes
        rows = batch_size // options.get("micro_batches", 1) if divided else batch_size
        needed = budget(config, rows, seq_len, **options).total_bytes
        if needed < limit or (needed == limit and not strict):
            fitting.append(name)
    return fitting


def each_step_alone(*setting):
    return next(iter(_first_fit(*setting, added=False)), None)


def changes_not_kept(config, batch_size, seq_len, ladder_steps, limit):
    for name, changes in ladder_steps:
        rows = batch_size // changes.get("micro_batches", 1)
        if budget(config, rows, seq_len, **changes).total_bytes <= limit:
            return name
    return None


def batch_not_divided(*setting):
    return next(iter(_first_fit(*setting, divided=False)), None)


def last_that_fits(*setting):
    return next(reversed(_first_fit(*setting)), None)


def strictly_less(*setting):
    return next(iter(_first_fit(*setting, strict=True)), None)


def always_a_name(config, batch_size, seq_len, ladder_steps, limit):
    return next(iter(_first_fit(config, batch_size, seq_len, ladder_steps, limit)), ladder_steps[-1][0])


WRONG = {
    "my_accumulate": {
        "check": check_accumulate,
        "answers": [
            (summed, "summed, not averaged"),
            (mean_of_means, "the mean of the micro-batches' means"),
            (weighted_by_positions, "weighted by all positions"),
            (cleared_in_the_loop, "the last micro-batch's alone"),
            (all_at_once, "one forward pass for each micro-batch"),
            (one_backward, "one backward for the sum of the losses"),
            (never_divided, "and never divided by their number"),
            (no_backward, "the model has no gradient"),
        ],
    },
    "my_scaled_step": {
        "check": check_scaled_step,
        "answers": [
            (looks_at_the_first, "of the last tensor is inf:"),
            (looks_for_infinities, "of the last tensor is nan:"),
            (not_unscaled, "still multiplied by the scale"),
            (keeps_counting_after_a_skip, "are counted in a row"),
            (never_grows, "the scale never grows"),
            (grows_without_starting_anew, "count the next row of good steps from 0"),
            (scale_kept_after_a_skip, "so halve it"),
            (never_updates, "update() ran 0 times"),
        ],
    },
    "my_merge": {
        "check": check_merge,
        "answers": [
            (averaged, "averaged: a half with larger scores"),
            (added, "the two outputs added"),
            (swapped_weights, "the weights are swapped"),
            (exponentials_as_they_are, "the result overflows"),
            (log_sum_exps_added, "the two were added: add their exponentials"),
            (larger_log_sum_exp, "the larger of the two: the other"),
            (weighted_without_exponential, "and not by their exponentials"),
            (minus_infinity_times_zero, "saw no key at all"),
        ],
    },
    "my_recompute": {
        "check": check_recompute,
        "answers": [
            (autocast_forgotten, "autocast is off in backward"),
            (other_dropout, "did dropout draw other numbers"),
            (generator_left_behind, "is elsewhere than without recomputation"),
            (graph_built_in_forward, "the block ran 1 times"),
            (more_than_the_input_kept, "what is inside the block must not be recorded"),
            (runs_twice_in_forward, "the output is wrong"),
            (no_input_gradient, "the input got no gradient"),
            (no_parameter_gradients, "parameters got no gradient"),
            (detached, "the output requires no gradient"),
            (only_where_x_needs_a_gradient, "where x needs no gradient, your output needs none either"),
        ],
    },
    "my_windowed_attention": {
        "check": check_windowed_attention,
        "answers": [
            (no_window, "there is no window"),
            (one_key_too_many, "the window is one key too wide"),
            (heads_in_turn, "query head n reads key/value head n // (N / K)"),
            (not_divided_by_the_root, "not divided by the square root"),
            (never_shrunk, "the output is wrong: it differs"),
            (oldest_block_first, "minus infinity is taken off minus infinity"),
            (every_block, "leave out blocks behind the window"),
            (only_the_maximum, "the largest score of each row"),
            (output_alone, "return two tensors: the output and the log-sum-exp of each row"),
            (whole_matrix, "no tensor may be larger than both"),
        ],
    },
    "my_merged_weight": {
        "check": check_merged_weight,
        "answers": [
            (alpha_not_divided, "alpha was not divided by the rank"),
            (not_scaled, "was not scaled by alpha / rank"),
            (alpha_over_width, "alpha was divided by d_in"),
            (transposed, "the product is transposed"),
            (adapter_alone, "the adapter alone"),
            (merged_in_place, "changed the frozen weight"),
        ],
    },
    "my_lora_bytes": {
        "check": check_lora_bytes,
        "answers": [
            (base_not_resident, "the frozen weights are missing"),
            (all_trained, "every weight was counted as trained"),
            (base_with_gradients, "frozen weights have no gradients"),
            (rank_times_area, "not rank d_in d_out"),
            (one_matrix_an_adapter, "and one is missing"),
            (adapters_without_states, "the adapters need gradients"),
            (no_masters, "FP32 master weights are missing"),
            (adapters_everywhere, "beside the targets only"),
            (a_gradient_forgotten, "2 bytes are missing"),
            (base_without_targets, "the targets' own matrices are missing"),
        ],
    },
    "my_utilisation": {
        "check": check_utilisation,
        "answers": [
            (swapped, "the two are swapped"),
            (recomputation_in_both, "recomputation is not a part of it"),
            (recomputation_in_none, "the second forward is missing"),
            (one_gpu, "and there are several"),
            (without_seconds, "divide by the seconds too"),
            (percent, "in percent"),
            (head_recomputed, "only the layers run twice"),
        ],
    },
    "my_first_fit": {
        "check": check_first_fit,
        "answers": [
            (each_step_alone, "each step was tried alone"),
            (changes_not_kept, "the changes of the steps above were not kept"),
            (batch_not_divided, "has batch_size // micro_batches rows"),
            (last_that_fits, "the last step that fits costs most"),
            (strictly_less, "what needs exactly the limit fits"),
            (always_a_name, "where no step fits, return None"),
        ],
    },
}
