"""What a rank holds, as boxes of the whole tensors: the form in which any layout can read what another has written.

    how an engine holds it       what it is of the whole model
    stages, experts              some of the names
    tensor parallel              a part of a tensor along one dimension: one box
    ZeRO                         a range of a flat buffer of such parts: of a matrix at most three boxes

A range of a flattened matrix is the rest of a first row, whole rows, the beginning of a last one:

    numbers 6 to 13 of a part of 4 rows x 5        . . . . .
                                                   . # # # #        row 1, columns 1:5
                                                   # # # . .        row 2, columns 0:3
                                                   . . . . .

Boxes are views: nothing is copied, and what is read into them is in the engine. Where several ranks hold the same box
(data parallel without ZeRO, norms under tp, a tied embedding at both ends of a pipeline) one of them writes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, prod
from zlib import crc32

from torch import Tensor, nn

from course_lib.parallel.expert import my_experts
from course_lib.parallel.five_d import FiveD, cuts_of
from course_lib.parallel.linear import Cut
from course_lib.weights.tensor_files import flat_boxes

MAX_PIECE_BYTES = 64 * 2**20  # a piece is written, and read, as one: what a rank needs beside its own state


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor of `shape`; its sizes are those of `tensor`, the memory in which its numbers are.
    writes   False: another rank, of another place in tp or pp, writes the same
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    writes: bool = True


@dataclass(frozen=True)
class Holding:
    """A tensor of this rank, such as an optimizer updates: the numbers from `start` on of some parts laid end to end.
    copy, copies   of the ranks that hold just the same, which one I am, and how many they are
    """

    tensor: Tensor
    places: tuple[Piece, ...]
    start: int = 0
    copy: int = 0
    copies: int = 1

    def pieces(self, numbers: Tensor, prefix: str) -> list[Piece]:
        """Boxes of whole tensors, with views of `numbers`: the tensor, or an optimizer's state of it."""
        found = pieces_of(self.places, self.start, numbers.detach().view(-1))
        return [replace(piece, name=prefix + piece.name) for piece in found]

    def pieces_to_write(self, numbers: Tensor, prefix: str) -> list[Piece]:
        """Those that this rank writes, none too large: ranks that hold the same share them out by a checksum."""
        large = [piece for piece in self.pieces(numbers, prefix) if piece.writes]
        small = [part for piece in large for part in split_rows(piece, MAX_PIECE_BYTES)]
        return [piece for piece in small if crc32(f"{piece.name}{piece.offsets}".encode()) % self.copies == self.copy]


def place_of(name: str, part: Tensor, cut: Cut | None, tp_rank: int) -> Piece:
    """Where a part lies, which tp has cut, or not (None). Of the ranks with the same one the first writes."""
    shape, offsets = list(part.shape), [0] * part.dim()
    if cut is not None:
        shape[cut.dim], offsets[cut.dim] = cut.size, cut.start_and_length(tp_rank)[0]
    is_first = tp_rank == 0 if cut is None else tp_rank % cut.copies == 0
    return Piece(name, tuple(shape), tuple(offsets), part, is_first)


def pieces_of(places: Iterable[Piece], start: int, numbers_p: Tensor) -> list[Piece]:
    """The boxes of `numbers_p`, which are those from `start` on of the places laid end to end; padding is nobody's."""
    pieces, begin, stop = [], 0, start + len(numbers_p)
    for place in places:
        end = begin + place.tensor.numel()
        done = max(start, begin)
        for box in flat_boxes(tuple(place.tensor.shape), done - begin, min(stop, end) - begin):
            sizes = [high - low for low, high in box]
            view = numbers_p[done - start : done - start + prod(sizes)].view(sizes)
            offsets = tuple(offset + low for offset, (low, _) in zip(place.offsets, box, strict=True))
            pieces.append(replace(place, offsets=offsets, tensor=view))
            done += prod(sizes)
        begin = end
    return pieces


def split_rows(piece: Piece, max_bytes: int) -> list[Piece]:
    """The same in pieces of whole rows, each of at most so many bytes; one row is not split."""
    count = ceil(piece.tensor.nbytes / max_bytes)
    if count <= 1 or piece.tensor.dim() == 0:
        return [piece]
    rows = max(1, len(piece.tensor) // count)
    return [
        replace(piece, offsets=(piece.offsets[0] + row, *piece.offsets[1:]), tensor=piece.tensor[row : row + rows])
        for row in range(0, len(piece.tensor), rows)
    ]


def parameters_of(engine: FiveD) -> list[Holding]:
    """What this rank's optimizer updates, and what is frozen: shards under ZeRO, else parameters."""
    held, seen, cuts = [], set(), cuts_of(engine)
    for number, stage in engine.stages.items():
        flats = engine.data_engines[number].flats if engine.layout.zero_stage else []
        for flat in flats:
            places = tuple(
                _place_in(engine, cuts, name, param) for name, param in zip(flat.names, flat.params, strict=True)
            )
            replicas = engine.groups.expert_replicate if flat.kind == "experts" else engine.groups.replicate
            copy = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
            held.append(Holding(flat.shard_p, places, flat.group.rank() * len(flat.shard_p), *copy))
            seen.update(flat.params)
        experts = my_experts(stage)
        for name, param in stage.named_parameters():
            if param not in seen:
                group = engine.groups.expert_dp if param in experts else engine.groups.data
                place = _place_in(engine, cuts, name, param)
                held.append(Holding(param, (place,), 0, group.rank(), group.size()))
                seen.add(param)
    return held


def buffers_of(engine: FiveD) -> list[Holding]:
    """What is counted beside the parameters and outlives a step: the biases that balance experts."""
    group, cuts = engine.groups.data, cuts_of(engine)
    return [
        Holding(buffer, (_place_in(engine, cuts, name, buffer),), 0, group.rank(), group.size())
        for stage in engine.stages.values()
        for name, buffer in stage.state_dict(keep_vars=True).items()
        if not isinstance(buffer, nn.Parameter)
    ]


def _place_in(engine: FiveD, cuts: dict[str, Cut], name: str, part: Tensor) -> Piece:
    """A tied head is a copy of the embedding: if that is on another rank, the other one writes."""
    if ".mlp.experts." in name and engine.layout.folded:  # whole on every rank that has it; the copies are counted
        return place_of(name, part, None, 0)
    is_copy = name == "head.weight" and engine.config.tied
    name = "embed.weight" if is_copy else name
    place = place_of(name, part, cuts.get(name), engine.groups.tp.rank())
    return replace(place, writes=False) if is_copy and engine.pipeline.tied_ranks is not None else place
