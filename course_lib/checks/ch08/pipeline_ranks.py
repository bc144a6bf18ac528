"""Graders of chapter 08, exercises 5 and 6: backward in two halves, and messages to both neighbours at once."""

from collections.abc import Callable
from itertools import pairwise
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ch08.nccl_order import expect_order_of_nccl, recorded_calls
from course_lib.checks.core import (
    CheckFailed,
    expect_close,
    fail,
    fresh_generator,
    fresh_seed,
    grader,
    numbers,
    observed,
    run_ranks,
)

DEADLOCK_S = 6.0  # a launch takes under a second


# ------------------------------------------------------------------------------------ 5. backward in two halves
@grader
def check_split_backward(answer, rng):
    """dx from the first half, every weight's gradient from the second, and nothing done twice."""
    while True:
        x, linears, grad = _drawn_stage(rng)
        want, no_relu = _gradients(x, linears, grad, True), _gradients(x, linears, grad, False)
        if not _tells_nothing(want, no_relu):
            break
    tokens = len(x)
    wrong_x = {
        "relu passes no gradient where it gave 0": no_relu[0],
        "relu's zeros are those of its output; these are of the input of the linear before it": want[4],
    }
    given = x, linears, grad
    grad_x, kept = observed(_input_half, answer, *given)
    expect_close(grad_x, want[0], "the gradient of x", wrong_x)
    _expect_no_weight_gradient(kept, want[1])
    products = observed(_weight_half, answer, *given)
    if not isinstance(products, list | tuple) or len(products) != len(linears):
        fail(f"weight_half: return {len(linears)} gradients, one for each weight")
    if all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(products, reversed(want[1]), strict=True)):
        fail("weight_half: the gradients come in the order of backward; return them in the order of the weights")
    for index, (mine, right) in enumerate(zip(products, want[1], strict=True)):
        wrong = {
            "this is its transpose; a gradient has the shape of its weight": right.T,
            "it has dy where dz belongs: relu's zeros are missing": want[2][index],
            "averaged over tokens; it is their sum": right / tokens,
            "it has the output of its linear where the input belongs": want[3][index],
        }
        expect_close(mine, right, f"the gradient of weight {index}", wrong)


def _input_half(answer, x: Tensor, linears: list[Tensor], grad: Tensor) -> tuple:
    with patch.object(torch.autograd, "grad", _refused), patch.object(Tensor, "backward", _refused):
        got = answer.input_half(x.clone(), [W.clone() for W in linears], grad.clone())
    if not isinstance(got, tuple) or len(got) != 2:
        fail("input_half: return two things: the gradient of x, and what weight_half needs")
    return got


def _weight_half(answer, *given) -> object:
    _, kept = _input_half(answer, *given)
    with patch.object(torch.autograd, "grad", _refused), patch.object(Tensor, "backward", _refused):
        return answer.weight_half(kept)


def _drawn_stage(rng) -> tuple[Tensor, list[Tensor], Tensor]:
    generator, tokens = fresh_generator(rng), rng.randrange(5, 9)
    widths = [rng.randrange(3, 7) for _ in range(rng.choice([3, 4]))]
    x = numbers(generator, tokens, widths[0])
    linears = [numbers(generator, b, a) for a, b in pairwise(widths)]
    return x, linears, numbers(generator, tokens, widths[-1])


def _tells_nothing(want: tuple, no_relu: tuple) -> bool:
    """Whether relu lets nothing or everything through somewhere: mistakes do not show then."""
    nothing = any(not part.any() for part in (want[0], *want[1]))
    everything = any(torch.equal(*pair) for pair in zip((want[0], *want[1]), (no_relu[0], *want[2]), strict=True))
    return nothing or everything or torch.equal(want[0], want[4])


def _refused(*args, **kwargs):
    raise CheckFailed("autograd does both halves at once; write the products yourself")


def _expect_no_weight_gradient(kept, gradients: list[Tensor]) -> None:
    for tensor in _tensors(kept):
        if any(tensor.shape == grad.shape and torch.allclose(tensor, grad) for grad in gradients):
            fail("input_half: it has computed the gradient of a weight already; nothing is delayed then")


def _tensors(kept):
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, dict):
        yield from _tensors(list(kept.values()))
    elif isinstance(kept, list | tuple):
        for part in kept:
            yield from _tensors(part)


def _gradients(x: Tensor, linears: list[Tensor], grad: Tensor, relu: bool) -> tuple:
    """By hand: of x, of the weights; of the weights with dy for dz, and with outputs for inputs; of x with the zeros of
    each linear's input for those of its output. `relu` False forgets its zeros."""
    inputs, outputs = [], []
    for W in linears:
        inputs.append(x)
        x = torch.relu(x @ W.T)
        outputs.append(x)
    products, with_dy, with_output, one_before = [], [], [], grad
    for W, h, y in zip(reversed(linears), reversed(inputs), reversed(outputs), strict=True):
        with_dy.append(grad.T @ h)
        grad = grad * (y > 0) if relu else grad
        products.append(grad.T @ h)
        with_output.append(grad.T @ y)
        grad, one_before = grad @ W, (one_before @ W) * (h > 0)
    return grad, products[::-1], with_dy[::-1], with_output[::-1], one_before


# ------------------------------------------------------------------------------------ 6. both neighbours
@grader
def check_exchange(answer, rng):
    """Large messages both ways along a chain of ranks: on gloo, and with the same calls in NCCL's order."""
    for world_size in (2, rng.choice([4, 5])):
        seed = fresh_seed(rng)
        try:
            results = run_ranks(_exchange, world_size, answer, seed, timeout=DEADLOCK_S, backend="gloo")
        except CheckFailed as failure:
            if "time limit" in str(failure):
                fail(f"{world_size} ranks wait for each other: a blocking call waits for one that nobody has reached")
            raise
        everybody, calls = zip(*results, strict=True)
        for rank, got in enumerate(everybody):
            where = f"rank {rank} of {world_size}"
            if not isinstance(got, tuple) or len(got) != 2:
                fail(f"{where}: return two things, from the rank before and from the rank behind")
            neighbours = (("before", rank - 1, 0), ("behind", rank + 1, 1))
            for (name, other, way), mine in zip(neighbours, got, strict=True):
                _expect_message(mine, other, way, seed, world_size, f"{where}, from the rank {name}")
        rounds = expect_order_of_nccl(calls, f"{world_size} ranks")
        if rounds > 2:  # even ranks first, then odd ones: 2
            fail(
                f"{world_size} ranks: messages go one after the other along the chain, in {rounds} rounds; start all "
                "before you wait for any"
            )


def _expect_message(got, other: int, way: int, seed: int, world_size: int, where: str) -> None:
    if other not in range(world_size):
        if got is not None:
            fail(f"{where}: there is no such rank; return None (the chain is no ring)")
        return
    right, not_waited = _message(other, way, seed), "or whatever stood in the buffer; wait for the receive"
    if isinstance(got, Tensor) and got.shape == right.shape and 0.001 < (got == right).double().mean() < 1:
        fail(f"{where}: a part is that rank's message, the rest zeros {not_waited}")
    wrong = {
        f"these are the zeros {not_waited}": torch.zeros(_shape(way)),
        "this is what that rank sends the other way": _message(other, 1 - way, seed),
    }
    expect_close(got, right, where, wrong)


def _exchange(answer: Callable, seed: int):
    rank = dist.get_rank()
    with recorded_calls() as calls:
        received = answer(_message(rank, 0, seed), _message(rank, 1, seed))
    return received, calls


def _shape(way: int) -> tuple[int, ...]:
    return (400_000 + 1000 * way,)


def _message(rank: int, way: int, seed: int) -> Tensor:
    return torch.randn(_shape(way), generator=torch.Generator().manual_seed(seed + 10 * rank + way))
