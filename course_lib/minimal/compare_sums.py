"""One line each: is an all-reduce right, and what does each rank send.

`all_reduce` is a function as in ring.py: all_reduce(x_P, group) returns the sum over the group.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.validate import Size, checked


@checked
def compare_with_sum(all_reduce: Callable, world_size: Size = 4, num_elements: Size = 10) -> float:
    """Return the largest difference of any rank's result from the sum that one process computes, in float64.

    Raises   ValueError if a rank returns no tensor of the same shape, or changes its input
    """
    expected_P = sum(_numbers_of(rank, num_elements) for rank in range(world_size))
    results = launch(_result_and_input, world_size, all_reduce, num_elements)
    for rank, (result_P, input_P) in enumerate(results):
        if not isinstance(result_P, Tensor) or result_P.shape != expected_P.shape:
            got = tuple(result_P.shape) if isinstance(result_P, Tensor) else type(result_P).__name__
            raise ValueError(f"rank {rank} returned {got}; return a tensor of shape {tuple(expected_P.shape)}")
        if not torch.equal(input_P, _numbers_of(rank, num_elements)):
            raise ValueError(f"rank {rank} has another input than before the call; add to a copy, x_P.clone()")
    return max((result_P - expected_P).abs().max().item() for result_P, _ in results)


@checked
def sent_by_each_rank(all_reduce: Callable, world_size: Size = 4, num_elements: Size = 1_000_000) -> list[int]:
    """Return the bytes that each rank sends in one all-reduce of `num_elements` elements of float32."""
    return list(launch(_sent, world_size, all_reduce, num_elements))


def _numbers_of(rank: int, num_elements: int) -> Tensor:
    return torch.randint(1000, (num_elements,), generator=torch.Generator().manual_seed(rank)).double()


def _result_and_input(all_reduce: Callable, num_elements: int) -> tuple[Tensor, Tensor]:
    x_P = _numbers_of(dist.get_rank(), num_elements)
    return all_reduce(x_P, dist.group.WORLD), x_P


def _sent(all_reduce: Callable, num_elements: int) -> int:
    x_P = torch.ones(num_elements)
    with ByteMeter() as meter:
        all_reduce(x_P, dist.group.WORLD)
    return meter.sent_bytes
