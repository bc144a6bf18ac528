"""Conjugate pairs: values and gradients against one process that holds everything, bytes against the ring."""

import pytest
import torch
import torch.distributed as dist

from course_lib.comm import copy_in, gather_in, join, my_piece, scatter_sum, split, sum_out
from course_lib.launch import launch
from course_lib.layout import piece_sizes
from course_lib.measure import ByteMeter

SHAPE = (2, 8, 3)


def numbers(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradient(function, x, weight):
    x = x.clone().requires_grad_()
    y = function(x)
    (y * weight).sum().backward()
    return y.detach(), x.grad


def pairs(dim, size):
    """Each function on this rank: its value, its gradient, and the two that one process finds for this rank.

    Ranks weigh what they compute by different numbers where they compute different things, by the same where the same.
    """
    group, rank, parts = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shape = [size if index == dim % len(SHAPE) else length for index, length in enumerate(SHAPE)]
    whole = numbers(0, *shape)
    partials, weights = ([numbers(seed + r, *shape) for r in range(parts)] for seed in (10, 20))
    total, total_weight, weight = sum(partials), sum(weights), numbers(1, *shape)

    def mine(x):
        return my_piece(x, rank, parts, dim)

    return {
        "copy_in": (gradient(lambda x: copy_in(x, group), whole, weights[rank]), (whole, total_weight)),
        "sum_out": (gradient(lambda x: sum_out(x, group), partials[rank], weight), (total, weight)),
        "gather_in": (
            gradient(lambda x: gather_in(x, group, dim, size), mine(whole), weights[rank]),
            (whole, mine(total_weight)),
        ),
        "scatter_sum": (
            gradient(lambda x: scatter_sum(x, group, dim), partials[rank], mine(weight)),
            (mine(total), weight),
        ),
        "split": (gradient(lambda x: split(x, group, dim), whole, mine(weight)), (mine(whole), weight)),
        "join": (gradient(lambda x: join(x, group, dim, size), mine(whole), weight), (whole, mine(weight))),
    }


def differences(cases):
    return {
        (name, case): max((a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(got, expected, strict=True))
        for case in cases
        for name, (got, expected) in pairs(*case).items()
    }


def traffic(size):
    """(collective, bytes sent) of each function, forward and backward, along dimension 1 of `size`."""
    group, parts = dist.group.WORLD, dist.get_world_size()
    whole = numbers(0, 2, size, 3)
    shard = my_piece(whole, dist.get_rank(), parts, 1)
    functions = {
        "copy_in": (lambda x: copy_in(x, group), whole),
        "sum_out": (lambda x: sum_out(x, group), whole),
        "gather_in": (lambda x: gather_in(x, group, 1, size), shard),
        "scatter_sum": (lambda x: scatter_sum(x, group, 1), whole),
        "split": (lambda x: split(x, group, 1), whole),
        "join": (lambda x: join(x, group, 1, size), shard),
    }
    seen = {}
    for name, (function, x) in functions.items():
        with ByteMeter() as meter:
            gradient(function, x, torch.ones(1, dtype=x.dtype))
        seen[name] = [(record.collective, record.sent_bytes) for record in meter.records]
    return seen


def refused():
    x = numbers(0, 2, 6)
    calls = [lambda: split(x, None, 0), lambda: copy_in(x, None), lambda: gather_in(x, dist.group.WORLD, 1, 20)]
    messages = []
    with ByteMeter() as meter:
        for call in calls:
            with pytest.raises(ValueError) as error:
                call()
            messages.append(str(error.value))
    return messages, meter.calls


def strided_and_shared():
    """What autograd hands over may be strided, or be used by others too: nothing may be written into it."""
    group, parts = dist.group.WORLD, dist.get_world_size()
    x = numbers(0, 3, 4).requires_grad_()
    (copy_in(x, group).t() * numbers(1, 4, 3)).sum().backward()
    beside = numbers(2, 3, 4).requires_grad_()
    inside = numbers(3, 3, 4).requires_grad_()
    weight = numbers(4, 3, 4)
    (copy_in(inside, group) + beside).backward(weight)  # an addition hands the same gradient to both
    summed = sum_out(numbers(5, 4, 3).t(), group)
    return [
        torch.equal(x.grad, numbers(1, 4, 3).t() * parts),
        torch.equal(beside.grad, numbers(4, 3, 4)),
        torch.equal(inside.grad, numbers(4, 3, 4) * parts),
        torch.equal(summed, numbers(5, 4, 3).t() * parts),
    ]


def everything():
    cases = [(0, 8), (1, 8), (-1, 8), (1, 7), (-1, 5), (0, 9)]
    return differences(cases), traffic(8), traffic(5), refused(), strided_and_shared()


@pytest.fixture(scope="module", params=[2, 4])
def of_ranks(request):
    return launch(everything, request.param)


def test_values_and_gradients_equal_one_process_along_any_dimension_and_uneven(of_ranks):
    for rank in of_ranks:
        assert max(rank[0].values()) < 1e-12, rank[0]


def test_each_sends_forward_what_its_conjugate_sends_backward(of_ranks):
    size = len(of_ranks)
    for rank in of_ranks:
        for length, seen in ((8, rank[1]), (5, rank[2])):
            width = -(-length // size)
            whole, padded = 2 * length * 3 * 8, 2 * width * size * 3 * 8
            gather, scatter = (
                ("all_gather", padded * (size - 1) // size),
                ("reduce_scatter", padded * (size - 1) // size),
            )
            assert [call for call, _ in seen["copy_in"]] == [call for call, _ in seen["sum_out"]] == ["all_reduce"]
            assert seen["copy_in"] == seen["sum_out"]
            assert abs(seen["copy_in"][0][1] - 2 * whole * (size - 1) / size) <= 2 * 8  # pieces of one number more
            assert seen["gather_in"] == [gather, scatter] and seen["scatter_sum"] == [scatter, gather]
            assert seen["split"] == seen["join"] == [gather]


def test_no_group_and_a_shard_of_the_wrong_length_are_refused_before_anything_is_sent(of_ranks):
    for _, _, _, (messages, calls), _ in of_ranks:
        assert "needs a process group" in messages[0] and "copy_in got None" in messages[1]
        assert "brings 6 of 20 along dimension 1" in messages[2] and "split()" in messages[2]
        assert calls == {}


def test_gradients_that_are_strided_or_shared_stay_as_they_are(of_ranks):
    assert all(all(rank[4]) for rank in of_ranks)


@pytest.mark.parametrize("size, parts", [(8, 4), (7, 4), (9, 4), (5, 2), (3, 4), (1, 2)])
def test_pieces_are_those_of_torch_chunk_and_then_empty(size, parts):
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
    assert piece_sizes(size, parts) == chunks + [0] * (parts - len(chunks))
    assert torch.cat([my_piece(torch.arange(size), part, parts, 0) for part in range(parts)]).tolist() == list(
        range(size)
    )
