"""Pieces of whole tensors to files and back through torch.distributed.checkpoint (DCP); no code is run from a file.

A pickle is a program. DCP's `.metadata` is one, and so are its entries that are not tensors. Here the manifest says
where each piece lies, there are tensors alone, and these are read with `weights_only=True`, which builds nothing else.

To load, each rank asks for the boxes that it needs, whoever wrote them: DCP finds which stored boxes overlap them, and
the overlaps are copied, one stored box (MAX_PIECE_BYTES) after the other.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from course_lib.checkpoint.files import MANIFEST, advice, everywhere, file_entry, partial_of, put_in_place, together
from course_lib.weights.pieces import Piece

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
                  torch.bool)
}  # fmt: skip
Place = tuple[str, int, int, tuple[int, ...], str]  # of a stored box: file, first byte, bytes, shape, dtype


# --- writing


def write(final: Path, pieces: list[Piece], about: dict, group: dist.ProcessGroup, keep: int | None = None) -> None:
    """Writes everybody's pieces as the checkpoint `final`, after `clear_way`. All ranks call it; one brings each piece.

    about   what the manifest says besides, of JSON's kinds; that of the first rank counts
    keep    how many complete checkpoints remain, the older are removed once this one is complete; None: all

    Raises   RuntimeError on every rank if one could not write, ValueError if not all wrote to one folder: what is there
             then is a partial folder
    """
    first, partial = group.rank() == 0, partial_of(final)
    writer = TensorWriter(partial, group.rank())
    try:
        dcp.save(by_name(pieces), storage_writer=writer, planner=PiecesToWrite(), process_group=group)
    except dcp.CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise RuntimeError(
            f"{partial} could not be written ({reasons}); the checkpoints before are as they were"
        ) from error
    of_all = [".metadata"] if first else []
    written = together(group, lambda: writer.files | {name: file_entry(partial / name) for name in of_all})
    files = {name: entry for of_rank in written for name, entry in of_rank.items()}
    everywhere(group, lambda: put_in_place(final, partial, about, files, writer.tensors, keep) if first else None)


class PiecesToWrite(dcp.DefaultSavePlanner):
    """DCP's plan of a save, from pieces: {name: [Piece]}. Its global plan checks that they tile each tensor."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.tensors = {index_of(piece): piece.tensor for pieces in self.state_dict.values() for piece in pieces}
        return SavePlan([write_item(piece) for pieces in self.state_dict.values() for piece in pieces])

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.tensors[write_item.index]


class Summed:
    """A file that knows the checksum of what was written to it."""

    def __init__(self, file: BinaryIO):
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def entry(self) -> dict:
        return {"bytes": self.file.tell(), "sha256": self.sha256.hexdigest()}


class TensorWriter(FileSystemWriter):
    """DCP's writer, but for two things: a rank copies one piece at a time, and what the manifest needs is kept.

    files     of what this rank wrote: bytes and checksum
    tensors   on the first rank at the end: where each piece of all ranks is
    """

    def __init__(self, folder: Path, rank: int):
        super().__init__(folder)
        self.name, self.files, self.tensors = f"__{rank}_0.distcp", {}, {}

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """As DCP's, which keeps every piece that it had to copy until the file is done."""
        results: Future[list[WriteResult]] = Future()
        with open(Path(self.path) / self.name, "wb") as file:
            summed = Summed(file)
            results.set_result([self.write_item(summed, item, planner.resolve_data(item)) for item in plan.items])
            file.flush()
            os.fsync(file.fileno())
            self.files[self.name] = summed.entry()
        return results

    def write_item(self, file: Summed, item: WriteItem, x: Tensor) -> WriteResult:
        """A view is copied first: torch.save would write all of its storage."""
        start = file.file.tell()
        torch.save(x.cpu() if x.untyped_storage().nbytes() == x.nbytes else x.to("cpu", copy=True), file)
        length = file.file.tell() - start
        return WriteResult(item.index, length, _StorageInfo(self.name, start, length))

    def finish(self, metadata: Metadata, results: list[list]) -> None:
        super().finish(metadata, results)
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        for name, tensor in metadata.state_dict_metadata.items():
            boxes = []
            for chunk in tensor.chunks:
                at = stored[MetadataIndex(name, chunk.offsets)]
                boxes.append([list(chunk.offsets), list(chunk.sizes), at.relative_path, at.offset, at.length])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            self.tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "boxes": boxes}


# --- reading


def read(checkpoint: Path, manifest: dict, pieces: Iterable[Piece]) -> None:
    """Fills the pieces with the numbers of the checkpoint, floats cast. Sends nothing: each rank reads what it needs.

    Bytes    read: the stored boxes that overlap a piece, each once; held: one of them, twice
    Raises   ValueError if something is not there, or cannot be read as a tensor
    """
    pieces = list(pieces)
    check_pieces(checkpoint, manifest, pieces)
    targets = {index_of(piece): piece.tensor for piece in pieces}
    wanted: dict[Place, list[ReadItem]] = {}
    for name, mine in by_name(pieces).items():
        stored = manifest["tensors"][name]
        places = {torch.Size(offsets): (*at, tuple(sizes), stored["dtype"]) for offsets, sizes, *at in stored["boxes"]}
        for item in create_read_items_for_chunk_list(name, described(stored), [chunk_of(piece) for piece in mine]):
            wanted.setdefault(places[item.storage_index.offset], []).append(item)
    found = sum(item.lengths.numel() for items in wanted.values() for item in items)
    if found != sum(x.numel() for x in targets.values()):
        raise ValueError(f"{checkpoint} does not hold all numbers of {sorted(by_name(pieces))}. {advice(checkpoint)}")
    for place, items in sorted(wanted.items()):
        x = read_tensor(checkpoint, manifest, *place)
        for item in items:
            target = targets[item.dest_index][box(item.dest_offsets, item.lengths)]
            target.copy_(x[box(item.storage_offsets, item.lengths)])


def check_pieces(checkpoint: Path, manifest: dict, pieces: Iterable[Piece]) -> None:
    """Raises ValueError if a piece is not in the checkpoint, or has another shape, or other than floats, there."""
    for piece in pieces:
        stored = manifest["tensors"].get(piece.name)
        if stored is None:
            raise ValueError(f"{checkpoint} holds no {piece.name}; it is of another model")
        dtypes = {DTYPES[stored["dtype"]], piece.tensor.dtype}
        fits = len(dtypes) == 1 or all(dtype.is_floating_point for dtype in dtypes)
        if tuple(stored["shape"]) != tuple(piece.shape) or not fits:
            raise ValueError(
                f"{piece.name} in {checkpoint} is {stored['dtype']} {tuple(stored['shape'])}; required: "
                f"{piece.tensor.dtype} {tuple(piece.shape)}. Build the engine of the same model"
            )


def widest(pieces: Iterable[Piece], manifest: dict) -> list[Piece]:
    """Pieces of parameters and master weights by the names of the stored tensors with the most exact numbers for them.

    A parameter of another dtype than the stored one is to be that one's master, cast; a master that was not stored is
    the parameter.
    """
    return [replace(piece, name=widest_name(piece, manifest["tensors"])) for piece in pieces]


def widest_name(piece: Piece, stored: Mapping[str, dict]) -> str:
    state, _, name = piece.name.partition(".")
    parameter, master = f"model.{name}", f"master.{name}"
    if state == "master" and master not in stored:
        return parameter
    if state == "model" and master in stored and DTYPES[stored[parameter]["dtype"]] != piece.tensor.dtype:
        return master
    return piece.name


def parameter_dtype(manifest: dict) -> torch.dtype:
    """That of all parameters: an engine has one."""
    return DTYPES[manifest["tensors"]["model.embed.weight"]["dtype"]]


def read_tensor(
    checkpoint: Path, manifest: dict, name: str, offset: int, length: int, shape: tuple[int, ...], dtype: str
) -> Tensor:
    """One stored box: a tensor, or an error; nothing else that a file might ask for is done.

    Raises   ValueError if it is in a file that the manifest does not name, or is no tensor of that shape and dtype
    """
    if name not in manifest["files"] or Path(name).name != name:
        raise ValueError(f"{MANIFEST} of {checkpoint} points to {name!r}, which is no file of it. {advice(checkpoint)}")
    with open(checkpoint / name, "rb") as file:
        file.seek(offset)
        stored = io.BytesIO(file.read(length))
    try:
        with torch.device("cpu"):  # NCCL ranks make new tensors on the GPU otherwise
            x = torch.load(stored, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{checkpoint / name} holds something at byte {offset} that is no tensor, and is not read: {error} "
            f"{advice(checkpoint)}"
        ) from error
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype != DTYPES[dtype]:
        what = f"a tensor {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"{checkpoint / name} holds {what} at byte {offset}, no tensor {shape} of {DTYPES[dtype]}. "
            f"{advice(checkpoint)}"
        )
    return x


# --- as DCP says it


def by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    named: dict[str, list[Piece]] = {}
    for piece in pieces:
        named.setdefault(piece.name, []).append(piece)
    return named


def index_of(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, torch.Size(piece.offsets))


def chunk_of(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)


def write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties.create_from_tensor(piece.tensor)
    data = TensorWriteData(chunk_of(piece), properties, torch.Size(piece.shape))
    return WriteItem(index_of(piece), WriteItemType.SHARD, tensor_data=data)


def described(stored: dict) -> TensorStorageMetadata:
    """DCP's description of a tensor, from the manifest's."""
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in stored["boxes"]]
    properties = TensorProperties(dtype=DTYPES[stored["dtype"]])
    return TensorStorageMetadata(properties, torch.Size(stored["shape"]), chunks)


def box(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
