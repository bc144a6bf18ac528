"""The loss in chunks: gradients of the ordinary loss, no product twice, and the bytes of its formula."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib.compare.one_gpu import DROPOUT_CONFIG, TINY, OnePass
from course_lib.measure import MemoryTracker
from course_lib.model import build
from course_lib.training import chunked_loss_of, loss_of
from course_lib.training.chunked_loss import ChunkedLoss


def in_chunks(model, x_BS, y_BS, chunk):
    chunked_loss_of(model, x_BS, y_BS, chunk).backward()


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=True), replace(DROPOUT_CONFIG, dropout=0.0)])
def test_gradients_are_those_of_the_ordinary_loss(config, chunk):
    run = OnePass(backward=partial(in_chunks, chunk=chunk), config=config, sequences=2, seq_len=128)
    assert run.difference < 1e-15


def head(dtype, T=96, V=400, D=16):
    torch.manual_seed(0)
    x_TD, w_VD = torch.randn(T, D), torch.randn(V, D) / 4
    return x_TD.to(dtype).requires_grad_(), w_VD.to(dtype).requires_grad_(), torch.randint(V, (T,))


def test_in_bf16_the_weights_gradient_is_summed_in_fp32():
    def error(chunk):
        (x_TD, w_VD, y_T), (_, right_VD, _) = head(torch.bfloat16), head(torch.bfloat16)
        F.cross_entropy(x_TD.detach().float() @ right_VD.float().t(), y_T).backward()
        ChunkedLoss.apply(x_TD, w_VD, y_T, chunk).backward()
        return ((w_VD.grad - right_VD.grad).float().norm() / right_VD.grad.float().norm()).item()

    assert error(1) < 1.5 * error(96) < 0.01  # sums in bf16 would make one token at a time five times worse


def test_a_scaled_loss_has_scaled_gradients():
    plain, scaled = head(torch.float64), head(torch.float64)
    ChunkedLoss.apply(*plain, 10).backward()
    (8 * ChunkedLoss.apply(*scaled, 10)).backward()
    for one, other in zip(plain[:2], scaled[:2], strict=True):
        torch.testing.assert_close(8 * one.grad, other.grad)


@pytest.mark.parametrize("chunk", [16, 64])
def test_the_peak_is_the_formulas_and_no_product_runs_twice(chunk):
    T, V, D = 512, 4000, 32
    linear, (x_TD, _, y_T) = nn.Linear(D, V, bias=False), head(torch.float32, T, V, D)
    with FlopCounterMode(display=False) as flops, MemoryTracker(linear) as tracker:
        ChunkedLoss.apply(x_TD, linear.weight, y_T, chunk).backward()
    assert flops.get_total_flops() == 4 * T * V * D  # torch 2.13 does not count addmm_, the third product
    formula = 4 * (chunk * V + V * D + T * D)
    assert formula < tracker.peak_bytes - linear.weight.nbytes < formula + 4 * chunk * (D + 8)


def test_ignored_targets_are_refused():
    model, (x_BS, y_BS) = build(TINY), OnePass(config=TINY, sequences=1, seq_len=8).batch
    y_BS = y_BS.masked_fill(y_BS == y_BS[0, 0], -100)
    assert loss_of(model, x_BS, y_BS).isfinite()
    with pytest.raises(ValueError, match="a target is -100; the loss in chunks counts every token, so use loss_of"):
        chunked_loss_of(model, x_BS, y_BS, 4)
