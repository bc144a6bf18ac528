"""What a rank holds, as boxes of the whole tensors: the form in which every layout can be said, and read by any other.

    engine's way of holding                            what it is of the whole model
    stages, experts                                    some of the names
    tensor parallel                                    a part of a tensor along one dimension        one box
    ZeRO                                               a range of a flat buffer of several parts     boxes of each

A range of a flattened matrix is at most three boxes: the rest of a first row, whole rows, the beginning of a last one.

    flat_p      ......|#### ##########|##..        numbers 6..20 of a part of 4 rows x 5
                                                   = (1, 1:5), (2:4, 0:5), ...

Boxes are views: nothing is copied, and what is read into them is in the engine. Several ranks may hold the same box
(data parallel without ZeRO, norms under tp, tied embeddings at both ends of a pipeline); one of them writes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from torch import Tensor, nn

from course_lib.parallel.linear import Cut
from course_lib.tensor_files import flat_boxes

MAX_PIECE_BYTES = 64 * 2**20  # a piece is read and written as one: what a rank needs beside its own state


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a parameter lies in the whole one: `sizes` numbers from `offsets` on."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor; its sizes are those of `tensor`, the memory in which its numbers are."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Holding:
    """A parameter that an optimizer updates: the numbers from `start` on of some parts laid end to end.

    writer    which of the `copies` ranks that hold the same I am; None: another kind of copy, which writes nothing
    """

    parameter: nn.Parameter
    places: tuple[Place, ...]
    start: int = 0
    writer: int | None = 0
    copies: int = 1

    def pieces(self, numbers: Tensor) -> list[Piece]:
        """Boxes of whole tensors, with views of `numbers`: the parameter, or a state of it that has its shape."""
        return pieces_of(self.places, self.start, numbers.detach().view(-1))

    def pieces_to_write(self, numbers: Tensor) -> list[Piece]:
        """Those that this rank writes: copies take turns."""
        if self.writer is None:
            return []
        small = [part for piece in self.pieces(numbers) for part in split_rows(piece)]
        return small[self.writer :: self.copies]


def place_of(name: str, sizes: Sequence[int], cut: Cut | None, tp_rank: int) -> Place:
    """Of a parameter that is cut over tp, or whole (None)."""
    shape, offsets = list(sizes), [0] * len(sizes)
    if cut is not None:
        shape[cut.dim], offsets[cut.dim] = cut.size, cut.start_and_length(tp_rank)[0]
    return Place(name, tuple(shape), tuple(offsets), tuple(sizes))


def pieces_of(places: Iterable[Place], start: int, numbers_p: Tensor) -> list[Piece]:
    """The boxes of `numbers_p`, which are those from `start` on of the places laid end to end; padding is nobody's."""
    pieces, begin, stop = [], 0, start + len(numbers_p)
    for place in places:
        end = begin + prod(place.sizes)
        done = max(start, begin)
        for box in flat_boxes(place.sizes, done - begin, min(stop, end) - begin):
            sizes = [high - low for low, high in box]
            view = numbers_p[done - start : done - start + prod(sizes)].view(sizes)
            offsets = tuple(offset + low for offset, (low, _) in zip(place.offsets, box))
            pieces.append(Piece(place.name, place.shape, offsets, view))
            done += prod(sizes)
        begin = end
    return pieces


def split_rows(piece: Piece, max_bytes: int = MAX_PIECE_BYTES) -> list[Piece]:
    """The same in pieces of whole rows, each of at most so many bytes; one row is not split."""
    count = ceil(piece.tensor.nbytes / max_bytes)
    if count <= 1 or piece.tensor.dim() == 0:
        return [piece]
    rows = max(1, len(piece.tensor) // count)
    return [
        replace(piece, offsets=(piece.offsets[0] + row, *piece.offsets[1:]), tensor=piece.tensor[row : row + rows])
        for row in range(0, len(piece.tensor), rows)
    ]
