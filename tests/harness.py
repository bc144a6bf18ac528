"""What tests share: one process that sees all tokens, how far two results are apart, a sample of many cases."""

import math
import random

import pytest

from course_lib import training

EXHAUSTIVE = pytest.mark.exhaustive


def one_process(whole, batches):
    """The mean loss of all tokens, and the gradients by name, of a model in one process."""
    num_tokens = sum(y_BS.numel() for _, y_BS in batches)
    loss = sum(training.loss_of(whole, x_BS, y_BS) * (y_BS.numel() / num_tokens) for x_BS, y_BS in batches)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}


def largest_difference(found, wanted):
    """The largest difference between two dictionaries of tensors; infinite where names differ."""
    if found.keys() != wanted.keys():
        return math.inf
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def distance(gradients, loss, expected_loss, expected):
    """The difference from one process, of the loss and of each gradient; infinite where names differ."""
    if gradients.keys() != expected.keys():
        return {"names": math.inf}
    apart = {name: (gradients[name] - expected[name]).abs().max().item() for name in expected}
    return apart | {"loss": abs(loss - expected_loss).item()}


def sampled(cases, count, seed=0):
    """Cases for `parametrize`: `count` of them, drawn with `seed`, run always; the others in make test-exhaustive."""
    always = random.Random(seed).sample(range(len(cases)), count)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if index in always else EXHAUSTIVE)
        for index, case in enumerate(cases)
    ]
