"""Boxes of whole tensors: they tile, carry the right numbers, and writing into them writes into the engine's memory."""

import random
from math import prod

import pytest
import torch

from course_lib.parallel.linear import Cut
from course_lib.parallel.shards import flatten_and_pad
from course_lib.weights.pieces import Piece, pieces_of, place_of, split_rows


def box_of(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(piece.offsets, piece.tensor.shape, strict=True))


def some_wholes(chance: random.Random) -> dict[str, torch.Tensor]:
    """One to four tensors of one to three dimensions; each number is unlike all others."""
    shapes = [[chance.randint(1, 7) for _ in range(chance.randint(1, 3))] for _ in range(chance.randint(1, 4))]
    numbers = torch.arange(float(sum(map(prod, shapes)))).split([prod(shape) for shape in shapes])
    return {f"w{index}": x.view(shape) for index, (x, shape) in enumerate(zip(numbers, shapes, strict=True))}


def cut_for(chance: random.Random, x: torch.Tensor, tp_size: int) -> Cut | None:
    dim = chance.randrange(x.dim())
    copies = chance.choice([c for c in (1, 2) if tp_size % c == 0])
    return None if chance.random() < 0.3 else Cut(dim, x.shape[dim], tp_size, copies)


@pytest.mark.parametrize("seed", range(60))
def test_flat_ranges_of_cut_tensors_tile_the_whole_ones_and_carry_their_numbers(seed):
    chance = random.Random(seed)
    wholes, tp_size, num_shards = some_wholes(chance), chance.choice([1, 2, 4]), chance.randint(1, 5)
    cuts = {name: cut_for(chance, x, tp_size) for name, x in wholes.items()}
    times = {name: torch.zeros_like(x) for name, x in wholes.items()}
    written = {name: torch.zeros_like(x) for name, x in wholes.items()}
    for tp_rank in range(tp_size):
        parts = [x if cuts[name] is None else cuts[name].part(x, tp_rank) for name, x in wholes.items()]
        places = [place_of(name, part, cuts[name], tp_rank) for name, part in zip(wholes, parts, strict=True)]
        flat_P = flatten_and_pad(parts, num_shards)
        for shard, shard_p in enumerate(flat_P.chunk(num_shards)):
            pieces = pieces_of(places, shard * len(shard_p), shard_p)
            for name, x in wholes.items():
                mine = [piece for piece in pieces if piece.name == name]
                assert len(mine) <= 2 * x.dim() - 1
                for piece in mine:
                    assert piece.shape == x.shape and torch.equal(piece.tensor, x[box_of(piece)])
                    times[name][box_of(piece)] += 1
                    written[name][box_of(piece)] += piece.writes
            assert sum(piece.tensor.numel() for piece in pieces) == max(
                0, min(len(shard_p), sum(map(torch.Tensor.numel, parts)) - shard * len(shard_p))
            )
    for name, cut in cuts.items():  # each number once for every rank that is to have it, and written by one of them
        assert torch.all(times[name] == (tp_size if cut is None else cut.copies)), name
        assert torch.all(written[name] == 1), name


def test_what_is_read_into_a_piece_is_in_the_flat_buffer():
    flat_p = torch.zeros(14)
    places = [place_of("w", torch.empty(4, 5), None, 0)]
    pieces = pieces_of(places, 6, flat_p)
    assert [(piece.offsets, tuple(piece.tensor.shape)) for piece in pieces] == [((1, 1), (1, 4)), ((2, 0), (2, 5))]
    for piece in pieces:
        piece.tensor.copy_(torch.arange(20.0).view(4, 5)[box_of(piece)])
    assert flat_p.tolist() == list(range(6, 20))


def test_large_pieces_are_split_into_rows_that_tile_them():
    x = torch.arange(70.0).view(7, 10)
    whole = Piece("w", (9, 10), (2, 0), x)
    small = split_rows(whole, max_bytes=100)  # two rows of 40 bytes each
    assert [piece.offsets for piece in small] == [(2, 0), (4, 0), (6, 0), (8, 0)]
    assert torch.equal(torch.cat([piece.tensor for piece in small]), x)
    assert split_rows(whole, max_bytes=280) == [whole]
    assert len(split_rows(whole, max_bytes=1)) == 7, "a row is not split"
