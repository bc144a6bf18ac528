"""Techniques of one GPU under autocast, with ignored targets and without gradients."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.compare.one_gpu import DROPOUT_CONFIG, PASS_CONFIG, OnePass, full_batch, no_change
from course_lib.minimal.accumulate import accumulate
from course_lib.minimal.recompute import (
    Recomputed,
    recompute,
    recompute_cores,
    recompute_norms,
    recompute_products,
    recompute_segments,
)
from course_lib.training import loss_of

# ------------------------------------------------------------------------------------ recomputation


def test_after_backward_the_generator_stands_where_it_would_without_recomputation():
    drawn = []
    for run in (lambda block, x: block(x), Recomputed.apply):
        torch.manual_seed(0)
        block = nn.Dropout(0.5)
        run(block, torch.ones(8, requires_grad=True)).sum().backward()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def torchs_checkpoint(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def gradients_under_autocast(change, config=PASS_CONFIG, dtype=torch.bfloat16, backward_inside=False):
    """Return the gradients of a float32 model; forward runs under autocast, and backward inside it or after it."""
    short = OnePass(change, config=config, seq_len=64)
    model, (x_BS, y_BS) = short.model(), short.batch
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype):
        loss = loss_of(model, x_BS, y_BS)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize(
    ("change", "config"),
    [*product([recompute_segments, torchs_checkpoint], [PASS_CONFIG, DROPOUT_CONFIG]), (recompute_cores, PASS_CONFIG)],
)
def test_under_autocast_gradients_are_those_without_recomputation_to_the_bit(change, config, backward_inside):
    right = gradients_under_autocast(no_change, config, backward_inside=backward_inside)
    assert torch.equal(gradients_under_autocast(change, config, backward_inside=backward_inside), right)


@pytest.mark.parametrize("backward_under", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forward_under", [None, torch.bfloat16, torch.float16])
def test_the_second_run_has_the_autocast_of_the_first_whatever_backward_has(forward_under, backward_under):
    def autocast(dtype):
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=dtype is None)

    def function(x):
        on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        seen.append((on, dtype, torch.is_autocast_cache_enabled(), (x @ x).dtype))
        return x @ x

    seen = []
    with autocast(forward_under):
        out = recompute(function, torch.ones(2, 2, requires_grad=True))
    with autocast(backward_under):
        out.backward(torch.ones_like(out))
    assert seen[0] == seen[1] and seen[0][3] == (forward_under or torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(mode):
    layer, saved = nn.Linear(4, 4), []
    with mode(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        out = recompute(layer, torch.ones(2, 4, requires_grad=mode is torch.no_grad))
    assert not saved and out.grad_fn is None and torch.equal(out, layer(torch.ones(2, 4)))


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_get_their_gradients_where_the_input_needs_none(autocast):
    found = []
    for run in (lambda block, x: block(x), recompute, partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = run(block, torch.ones(3, 4))
        out.float().sum().backward()
        found.append([param.grad for param in block.parameters()])
    assert all(torch.equal(plain, other) for others in found[1:] for plain, other in zip(found[0], others, strict=True))


def cheap_operators(model):
    recompute_norms(model), recompute_products(model)


NORMS, PRODUCT = 2 * PASS_CONFIG.d_model + 2, 2 * PASS_CONFIG.d_ff  # elements a token: outputs and 1/rms; silu, product
FREED = [(recompute_norms, NORMS), (recompute_products, PRODUCT), (cheap_operators, NORMS + PRODUCT)]


@pytest.mark.slow
@pytest.mark.parametrize("change, elements", FREED)
def test_recomputed_cheap_operators_keep_their_inputs_and_repeat_no_product(change, elements):
    plain, cheap = OnePass(attention="fused"), OnePass(change, attention="fused")
    assert plain.kept_bytes - cheap.kept_bytes == PASS_CONFIG.num_layers * 4 * 256 * elements * 4
    assert cheap.flops == plain.flops and cheap.difference < 1e-15


@pytest.mark.parametrize("change", [recompute_norms, recompute_products])
def test_cheap_operators_are_right_under_autocast(change):
    none, some = (gradients_under_autocast(one, PASS_CONFIG) for one in (no_change, change))
    torch.testing.assert_close(some, none, rtol=0, atol=2e-3 * none.abs().max().item())


# ------------------------------------------------------------------------------------ accumulation


def gradients_with_padding(backward):
    """Return the gradients where rows have 1, 1/2, 1/4 and 1/8 of their targets; the other targets are -100."""
    short = OnePass(seq_len=64, dtype=torch.float64)
    model, (x_BS, y_BS) = short.model(), short.batch
    y_BS = y_BS.clone()
    for row in range(len(y_BS)):
        y_BS[row, y_BS.shape[1] >> row :] = -100
    backward(model, x_BS, y_BS)
    return torch.cat([param.grad.flatten() for param in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ignored_targets_do_not_count(count):
    found = gradients_with_padding(partial(accumulate, num_micro_batches=count))
    assert (found - gradients_with_padding(full_batch)).abs().max() < 1e-14
