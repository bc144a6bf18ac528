"""The graders of chapter 02 accept right answers that are arranged otherwise, three of each."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from harness import sampled
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from course_lib.checks import ch02
from course_lib.flops import flops_per_token, step_flops
from course_lib.memory.budget import budget
from course_lib.minimal.recompute import autocast_as_now
from course_lib.timing import hfu, mfu


# ------------------------------------------------------------------------------------ accumulation
def by_weighted_means(model, parts):
    counts = [int((y_BS != -100).sum()) for _, y_BS in parts]
    for (x_BS, y_BS), count in zip(parts, counts, strict=True):
        logits_BSV = model(x_BS)
        if count:
            (F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten()) * count / sum(counts)).backward()


def divided_at_the_end(model, parts):
    total = 0
    for x_BS, y_BS in parts:
        loss = F.cross_entropy(model(x_BS).transpose(1, 2), y_BS, reduction="none")
        loss.sum().backward()
        total += (y_BS >= 0).sum()
    for param in model.parameters():
        param.grad /= total


def with_log_softmax(model, parts):
    total = sum(int((y_BS != -100).sum()) for _, y_BS in parts)
    for x_BS, y_BS in parts:
        log_p_BSV, counts_BS = model(x_BS).log_softmax(-1), y_BS != -100
        picked_BS = log_p_BSV.gather(-1, y_BS.clamp(min=0)[..., None])[..., 0]
        (-(picked_BS * counts_BS).sum() / total).backward()


# ------------------------------------------------------------------------------------ two halves of a softmax
def by_logaddexp(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp() + out_b * (lse_b - lse).exp(), lse


def by_sigmoid(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(lse_a - lse_b)
    return out_a * share + out_b * (1 - share), torch.logaddexp(lse_a, lse_b)


def by_softmax(out_a, lse_a, out_b, lse_b):
    both = torch.cat([lse_a, lse_b], -1)
    share_a, share_b = torch.softmax(both, -1).split(1, -1)
    return share_a * out_a + share_b * out_b, both.logsumexp(-1, keepdim=True)


# ------------------------------------------------------------------------------------ recomputation
class _WithParameters(torch.autograd.Function):
    """The parameters are inputs too, so autograd sees that there is something to do."""

    @staticmethod
    def forward(ctx, block, x, *params):
        ctx.block, ctx.state, ctx.params = block, torch.get_rng_state(), params
        ctx.autocast = autocast_as_now(x)
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), ctx.autocast:
            torch.set_rng_state(ctx.state)
            x = x.detach().requires_grad_()
            out = ctx.block(x)
        return None, *torch.autograd.grad(out, (x, *ctx.params), grad)


def parameters_as_inputs(block, x):
    return _WithParameters.apply(block, x, *block.parameters())


class _WithDummy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, dummy):
        ctx.block, ctx.state, ctx.autocast = block, torch.get_rng_state(), autocast_as_now(x)
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        found = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad(), ctx.autocast:
            out = ctx.block(x)
        torch.set_rng_state(found)
        torch.autograd.backward(out, grad)
        return None, x.grad, None


def a_dummy_that_needs_a_gradient(block, x):
    return _WithDummy.apply(block, x, torch.ones(1, requires_grad=True))


def hooks_of_saved_tensors(block, x):
    state, autocast, again, number = torch.get_rng_state(), autocast_as_now(x), {}, itertools.count()

    def unpack(index):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), autocast:
                torch.set_rng_state(state)
                with saved_tensors_hooks(lambda t: again.setdefault(len(again), t.detach()), lambda t: t):
                    block(x.detach().requires_grad_(x.requires_grad))
        return again[index]

    with saved_tensors_hooks(lambda tensor: next(number), unpack):
        return block(x)


def torchs_own(block, x):
    return checkpoint(block, x, use_reentrant=False)


# ------------------------------------------------------------------------------------ attention over blocks
def _tiles(q, k, window, start, block):
    """Scores of a block of queries with each block of keys that it sees, oldest first, and the keys' slice."""
    S, stop = q.shape[2], min(start + block, q.shape[2])
    times = q.shape[1] // k.shape[1]
    for first in range(max(0, start - window + 1) // block * block, stop, block):
        keys = slice(first, min(first + block, S))
        gap = torch.arange(start, stop)[:, None] - torch.arange(keys.start, keys.stop)
        scores = q[:, :, start:stop] @ k[:, :, keys].repeat_interleave(times, 1).mT / math.sqrt(q.shape[-1])
        yield scores.masked_fill((gap < 0) | (gap >= window), -math.inf), keys


def merges_finished_blocks(q, k, v, window, block):
    """Each block of keys gives an output and a log-sum-exp, which are put together."""
    times, outs, sums = q.shape[1] // k.shape[1], [], []
    for start in range(0, q.shape[2], block):
        out = lse = None
        for scores, keys in _tiles(q, k, window, start, block):
            new = scores.logsumexp(-1, keepdim=True)
            part = (scores - new).exp().nan_to_num() @ v[:, :, keys].repeat_interleave(times, 1)
            if out is None:
                out, lse = part, new
                continue
            both = torch.logaddexp(lse, new)
            out = out * (lse - both).exp().nan_to_num() + part * (new - both).exp().nan_to_num()
            lse = both
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def maximum_first_then_sums(q, k, v, window, block):
    """Two walks over the blocks: more products, within what is allowed, since the second keeps no scores either."""
    times, out, lse = q.shape[1] // k.shape[1], torch.empty_like(q), q[..., :1].clone()
    for start in range(0, q.shape[2], block):
        rows = slice(start, min(start + block, q.shape[2]))
        tiles = list(_tiles(q, k, window, start, block))  # of one row of blocks
        largest = torch.stack([scores.amax(-1) for scores, _ in tiles]).amax(0)[..., None]
        weights = [(scores - largest).exp() for scores, _ in tiles]
        total = sum(each.sum(-1, keepdim=True) for each in weights)
        parts = [w @ v[:, :, keys].repeat_interleave(times, 1) for w, (_, keys) in zip(weights, tiles, strict=True)]
        out[:, :, rows], lse[:, :, rows] = sum(parts) / total, largest + total.log()
    return out, lse


def heads_in_groups(q, k, v, window, block):
    """A group of query heads as one dimension more; a large negative number in place of minus infinity."""
    B, N, S, H = q.shape
    q = q.view(B, k.shape[1], -1, S, H) / math.sqrt(H)
    out, lse = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1)
    for start in range(0, S, block):
        rows = q[..., start : start + block, :]
        m, total, o = rows.new_full((*rows.shape[:-1], 1), -1e30), 0.0, 0.0
        for first in range(max(0, start - window + 1) // block * block, start + 1, block):
            gap = torch.arange(start, min(start + block, S))[:, None] - torch.arange(first, min(first + block, S))
            keys, values = (x[:, :, None, first : first + block] for x in (k, v))
            scores = torch.einsum("bkgqh,bkgsh->bkgqs", rows, keys.expand(-1, -1, rows.shape[2], -1, -1))
            scores = torch.where((gap >= 0) & (gap < window), scores, -math.inf)
            larger = torch.maximum(m, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - larger).exp(), (m - larger).exp()
            total, m = total * shrink + weights.sum(-1, keepdim=True), larger
            o = o * shrink + weights @ values
        out[..., start : start + block, :], lse[..., start : start + block, :] = o / total, m + total.log()
    return out.view(B, N, S, H), lse.view(B, N, S, 1)


# ------------------------------------------------------------------------------------ loss scaling
def scaled_by_the_sum(gradients, scale, good_steps, growth_interval, update):
    """One number that is not finite makes the sum of all not finite; the division is by a power of two."""
    if not math.isfinite(sum(float(gradient.sum()) for gradient in gradients)):
        return scale / 2, 0
    for gradient in gradients:
        gradient.mul_(1 / scale)
    update()
    if good_steps + 1 < growth_interval:
        return scale, good_steps + 1
    return 2 * scale, 0


def scaled_by_torch(gradients, scale, good_steps, growth_interval, update):
    found_inf = torch.zeros(1, dtype=gradients[0].dtype)
    for gradient in gradients:
        found_inf += gradient.isinf().sum() + gradient.isnan().sum()
    if found_inf == 0:
        torch._foreach_div_(gradients, scale)
        update()
    row = good_steps + 1 if found_inf == 0 else 0
    factor = 0.5 if found_inf else 2.0 if row == growth_interval else 1.0
    return [scale * factor, row % growth_interval]


def scaled_before_the_test(gradients, scale, good_steps, growth_interval, update):
    """Divides first: in a step that is left out nobody reads the gradients."""
    for gradient in gradients:
        gradient /= scale
    finite = torch.cat([gradient.flatten() for gradient in gradients]).isfinite().all().item()
    if finite:
        update()
        good_steps += 1
        return (scale * 2, 0) if good_steps >= growth_interval else (scale, good_steps)
    return scale * 0.5, 0


# ------------------------------------------------------------------------------------ LoRA
def merged_in_place_of_a_copy(weight, lora_a, lora_b, alpha):
    return weight.clone().addmm_(lora_b, lora_a, alpha=alpha / lora_a.shape[0])


def merged_rank_by_rank(weight, lora_a, lora_b, alpha):
    merged = weight.clone()
    for row, column in zip(lora_a, lora_b.T, strict=True):
        merged += alpha / lora_b.shape[1] * torch.outer(column, row)
    return merged


def merged_from_outputs(weight, lora_a, lora_b, alpha):
    """What both layers make of the identity, column by column."""
    unit = torch.eye(weight.shape[1], dtype=weight.dtype)
    return (F.linear(unit, weight) + alpha / len(lora_a) * F.linear(F.linear(unit, lora_a), lora_b)).T


def lora_bytes_by_kind(shapes, targets, rank):
    trained = rank * sum(sum(shapes[name]) for name in targets)
    parameters = 2 * (sum(math.prod(shape) for shape in shapes.values()) + trained)
    return parameters + 2 * trained + 12 * trained


def lora_bytes_by_matrix(shapes, targets, rank):
    total = 0
    for name, (d_out, d_in) in shapes.items():
        total += 2 * d_out * d_in
        if name in targets:
            total += 16 * (rank * d_in) + 16 * (d_out * rank)
    return total


def lora_bytes_of_tensors(shapes, targets, rank):
    meta = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    thin = [torch.empty(rank, width, device="meta") for name in targets for width in meta[name].shape]
    return sum(matrix.nbytes for matrix in meta.values()) + 4 * sum(matrix.nbytes for matrix in thin)


# ------------------------------------------------------------------------------------ utilisation
def utilisation_by_the_package(config, seq_len, tokens, seconds, gpus, peak, recompute):
    needed, executed = tokens * flops_per_token(config, seq_len), step_flops(config, tokens, seq_len, recompute)
    return mfu(needed, seconds, gpus, peak), hfu(executed, seconds, gpus, peak)


def utilisation_of_a_gpu(config, seq_len, tokens, seconds, gpus, peak, recompute):
    needed = tokens / gpus / seconds * flops_per_token(config, seq_len)
    return [needed / peak, step_flops(config, tokens, seq_len, recompute) / gpus / seconds / peak]


def utilisation_by_seconds(config, seq_len, tokens, seconds, gpus, peak, recompute):
    """The seconds that a step would take at the peak, over those that it took."""
    modes = ("none", recompute)
    mfu, hfu = (step_flops(config, tokens, seq_len, mode) / (gpus * peak) / seconds for mode in modes)
    return mfu, hfu


# ------------------------------------------------------------------------------------ the ladder
def needed(config, batch_size, seq_len, options):
    return budget(config, batch_size // options.get("micro_batches", 1), seq_len, **options).total_bytes


def first_fit_accumulated(config, batch_size, seq_len, ladder_steps, limit_bytes):
    settings = itertools.accumulate((changes for _, changes in ladder_steps), lambda before, new: {**before, **new})
    for (name, _), options in zip(ladder_steps, settings, strict=True):
        if needed(config, batch_size, seq_len, options) <= limit_bytes:
            return name
    return None


def first_fit_recursively(config, batch_size, seq_len, ladder_steps, limit_bytes, options=None):
    if not ladder_steps:
        return None
    (name, changes), *below = ladder_steps
    options = {**(options or {}), **changes}
    if not needed(config, batch_size, seq_len, options) > limit_bytes:
        return name
    return first_fit_recursively(config, batch_size, seq_len, below, limit_bytes, options)


def first_fit_from_all(config, batch_size, seq_len, ladder_steps, limit_bytes):
    options, fitting = {}, []
    for name, changes in ladder_steps:
        options.update(changes)
        if limit_bytes - needed(config, batch_size, seq_len, options) >= 0:
            fitting.append(name)
    return next(iter(fitting), None)


RIGHT = {
    "check_accumulate": (by_weighted_means, divided_at_the_end, with_log_softmax),
    "check_scaled_step": (scaled_by_the_sum, scaled_by_torch, scaled_before_the_test),
    "check_merge": (by_logaddexp, by_sigmoid, by_softmax),
    "check_recompute": (
        parameters_as_inputs,
        a_dummy_that_needs_a_gradient,
        hooks_of_saved_tensors,
        torchs_own,
    ),
    "check_merged_weight": (merged_in_place_of_a_copy, merged_rank_by_rank, merged_from_outputs),
    "check_lora_bytes": (lora_bytes_by_kind, lora_bytes_by_matrix, lora_bytes_of_tensors),
    "check_utilisation": (utilisation_by_the_package, utilisation_of_a_gpu, utilisation_by_seconds),
    "check_first_fit": (first_fit_accumulated, first_fit_recursively, first_fit_from_all),
    "check_windowed_attention": (merges_finished_blocks, maximum_first_then_sums, heads_in_groups),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "answer"), sampled([(check, answer) for check, answers in RIGHT.items() for answer in answers], 9)
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    for seed in range(5):
        getattr(ch02, check)(answer, seed=seed)
    assert f"{check}: passed" in capsys.readouterr().out
