"""Pieces of whole tensors to the files of torch.distributed.checkpoint (DCP) and back; no code is run from a file.

A pickle is a program. DCP's `.metadata` is one, and so are its entries that are not tensors, and what its ranks send
each other while they save. Here ranks tell each other in JSON where each piece lies, and so does the manifest; there
are tensors alone, read with `weights_only=True`, which builds nothing else. `.metadata` is written, never read.

To load, each rank asks for the boxes that it needs, whoever wrote them: DCP finds which stored boxes overlap them, and
the overlaps are copied, one stored box (MAX_PIECE_BYTES) after the other.
"""

import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from course_lib.checkpoint import files as folders
from course_lib.checkpoint.files import MANIFEST, advice
from course_lib.comm.records import DTYPES
from course_lib.weights.pieces import Piece

_METADATA = ".metadata"
Place = tuple[str, int, int, tuple[int, ...], str]  # of a stored box: file, first byte, bytes, shape, dtype


def write(final: Path, pieces: list[Piece], about: dict, group: dist.ProcessGroup, keep: int | None = None) -> None:
    """Writes everybody's pieces as the checkpoint `final`, after `clear_way`. All ranks call it; one brings each piece.
    about   what the manifest says besides, of JSON's kinds; that of the first rank counts
    keep    how many complete checkpoints remain, the older are removed once this one is complete; None: all
    Raises   CannotWrite on every rank if one could not write, ValueError if not all wrote to one folder: what is there
             then is a partial folder
    """
    first, partial = group.rank() == 0, folders.partial_of(final)
    file = f"__{group.rank()}_0.distcp"
    mine, of_ranks, failures = folders.outcomes(group, lambda: _write_pieces(partial / file, pieces))
    if failures:
        with folders.writing(partial):
            raise RuntimeError("; ".join(f"rank {rank}: {why}" for rank, (_, why) in failures.items())) from mine
    files = {f"__{rank}_0.distcp": entry for rank, (entry, _) in enumerate(of_ranks)}
    tensors = merged([told for _, told in of_ranks])

    def complete() -> None:
        files[_METADATA] = _write_metadata(partial / _METADATA, tensors)
        folders.put_in_place(final, partial, about, files, tensors, keep)

    with folders.writing(final):
        folders.everywhere(group, lambda: complete() if first else None)


def _write_pieces(path: Path, pieces: list[Piece]) -> tuple[dict, dict]:
    """Writes this rank's pieces, one after the other: (bytes and checksum of the file, where each piece is in it)."""
    path.parent.mkdir(parents=True, exist_ok=True)  # a disk of its own is found when the first rank looks at all
    with open(path, "wb") as file:
        summed, tensors = Summed(file), {}
        try:
            for piece in pieces:
                start = summed.length
                write_tensor(summed, piece.tensor)
                stored = tensors.setdefault(piece.name, {
                    "dtype": str(piece.tensor.dtype).removeprefix("torch."), "shape": list(piece.shape), "boxes": []
                })  # fmt: skip
                box = [list(piece.offsets), list(piece.tensor.shape), path.name, start, summed.length - start]
                stored["boxes"].append(box)
            file.flush()
            os.fsync(file.fileno())
        except RuntimeError as error:
            raise summed.error or error from error  # torch's writer has words of its own for a full disk
    return summed.entry(), tensors


def write_tensor(file: "Summed", x: Tensor) -> None:
    """A view is copied first: torch.save would write all of its storage."""
    torch.save(x.cpu() if x.untyped_storage().nbytes() == x.nbytes else x.to("cpu", copy=True), file)


class Summed:
    """A file that knows the checksum of what was written to it, and why it could not be written."""

    def __init__(self, file: BinaryIO):
        self.file, self.sha256, self.length = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.length += written
        return written

    def flush(self) -> None:
        self.file.flush()

    def entry(self) -> dict:
        return {"bytes": self.length, "sha256": self.sha256.hexdigest()}


def merged(of_ranks: list[dict]) -> dict:
    """Where each piece of all ranks is. Raises ValueError unless the pieces tile each tensor."""
    tensors: dict[str, dict] = {}
    for of_rank in of_ranks:
        for name, told in of_rank.items():
            stored = tensors.setdefault(name, {"dtype": told["dtype"], "shape": told["shape"], "boxes": []})
            if (told["dtype"], told["shape"]) != (stored["dtype"], stored["shape"]):
                raise ValueError(f"ranks do not agree on dtype and shape of {name}: {told}, {stored}")
            stored["boxes"] += told["boxes"]
    for stored in tensors.values():
        stored["boxes"].sort(key=lambda box: box[0])
    described_tensors = {name: described(stored) for name, stored in tensors.items()}
    # Two plans stand for the ranks': of one alone torch does not check that its tensors are complete.
    if wrong := _validate_global_plan([SavePlan([])] * 2, dcp.Metadata(described_tensors)):
        raise ValueError(f"the ranks' pieces do not tile the tensors: {wrong}")
    return tensors


def _write_metadata(path: Path, tensors: dict) -> dict:
    """The same for PyTorch's own tools: what dcp.load looks for. Returns its bytes and checksum."""
    places = {
        dcp.MetadataIndex(name, torch.Size(offsets)): _StorageInfo(file, start, length)
        for name, stored in tensors.items()
        for offsets, _, file, start, length in stored["boxes"]
    }
    with open(path, "wb") as file:
        pickle.dump(dcp.Metadata({name: described(stored) for name, stored in tensors.items()}, None, places), file)
        file.flush()
        os.fsync(file.fileno())
    return folders.file_entry(path)


def read(checkpoint: Path, manifest: dict, pieces: Iterable[Piece]) -> None:
    """Fills the pieces with the numbers of the checkpoint, floats cast. Sends nothing: each rank reads what it needs.
    Bytes    read: the stored boxes that overlap a piece, each once; held: one of them, twice
    Raises   ValueError if something is not there, or cannot be read as a tensor
    """
    pieces = list(pieces)
    _check_pieces(checkpoint, manifest, pieces)
    targets = {dcp.MetadataIndex(piece.name, torch.Size(piece.offsets)): piece.tensor for piece in pieces}
    wanted: dict[Place, list[ReadItem]] = {}
    for name, mine in by_name(pieces).items():
        stored = manifest["tensors"][name]
        places = {torch.Size(offsets): (*at, tuple(sizes), stored["dtype"]) for offsets, sizes, *at in stored["boxes"]}
        chunks = [dcp.ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape) for piece in mine]
        for item in create_read_items_for_chunk_list(name, described(stored), chunks):
            wanted.setdefault(places[item.storage_index.offset], []).append(item)
    found = sum(item.lengths.numel() for items in wanted.values() for item in items)
    if found != sum(x.numel() for x in targets.values()):
        raise ValueError(f"{checkpoint} does not hold all numbers of {sorted(by_name(pieces))}. {advice(checkpoint)}")
    for place, items in sorted(wanted.items()):
        x = _read_tensor(checkpoint, manifest, *place)
        for item in items:
            target = targets[item.dest_index][box(item.dest_offsets, item.lengths)]
            target.copy_(x[box(item.storage_offsets, item.lengths)])


def _check_pieces(checkpoint: Path, manifest: dict, pieces: Iterable[Piece]) -> None:
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
    return [replace(piece, name=_widest_name(piece, manifest["tensors"])) for piece in pieces]


def _widest_name(piece: Piece, stored: Mapping[str, dict]) -> str:
    state, _, name = piece.name.partition(".")
    parameter, master = f"model.{name}", f"master.{name}"
    if state == "master" and master not in stored:
        return parameter
    if (
        state == "model"
        and {parameter, master} <= stored.keys()
        and DTYPES[stored[parameter]["dtype"]] != piece.tensor.dtype
    ):
        return master
    return piece.name


def parameter_dtype(manifest: dict) -> torch.dtype:
    """That of all parameters: an engine has one. Raises ValueError if the checkpoint has none."""
    stored = manifest["tensors"].get("model.embed.weight")
    if stored is None:
        raise ValueError("the checkpoint holds no model.embed.weight; it is of another model")
    return DTYPES[stored["dtype"]]


def _read_tensor(
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
    except Exception:
        raise ValueError(
            f"{checkpoint / name} holds something at byte {offset} that is no tensor, and is not read. "
            f"{advice(checkpoint)}"
        ) from None  # torch's own text says how to run it
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype != DTYPES[dtype]:
        what = f"a tensor {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"{checkpoint / name} holds {what} at byte {offset}, no tensor {shape} of {DTYPES[dtype]}. "
            f"{advice(checkpoint)}"
        )
    return x


def by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    named: dict[str, list[Piece]] = {}
    for piece in pieces:
        named.setdefault(piece.name, []).append(piece)
    return named


def described(stored: dict) -> dcp.TensorStorageMetadata:
    """DCP's description of a tensor, from the manifest's."""
    chunks = [
        dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in stored["boxes"]
    ]
    properties = dcp.TensorProperties(dtype=DTYPES[stored["dtype"]])
    return dcp.TensorStorageMetadata(properties, torch.Size(stored["shape"]), chunks)


def box(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
