"""Folders of pieces, written through torch.distributed.checkpoint: complete or not there, checked, and never executed.

    checkpoints/step-00000120            a complete checkpoint: it got this name by one rename, when all stood in it
        __0_0.distcp, __1_0.distcp ...   what each rank wrote: DCP's data files, of tensors alone
        manifest.json                    what is in them, and of each file its bytes and checksum
        .metadata                        the same for PyTorch's own tools: a pickle, which this course never opens
    checkpoints/step-00000140.partial    under way, or what a killed save has left

A pickle is a program. DCP's `.metadata` is one, and so are its entries that are not tensors. Here the manifest says
where each piece lies, there are tensors alone, and these are read with `weights_only=True`, which builds nothing else.

To load, each rank asks for the boxes that it needs, whoever wrote them: DCP finds which stored boxes overlap them and
copies the overlaps, one stored box (MAX_PIECE_BYTES) after the other.
"""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

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
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from course_lib.parallel.pieces import Piece

FORMAT = 1
MANIFEST, PARTIAL = "manifest.json", ".partial"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
                  torch.bool)
}  # fmt: skip

Result = TypeVar("Result")


def together(group: dist.ProcessGroup | None, act: Callable[[], Result]) -> list[Result]:
    """Calls act on each rank; gives every rank what all returned, or raises on every rank if it failed on one.

    group    None: this process is alone
    """
    mine, error = None, None
    try:
        mine = act()
    except Exception as caught:
        error = caught
    told = (mine, None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}"))
    everybodys = [told]
    if group is not None:
        everybodys = [None] * group.size()
        dist.all_gather_object(everybodys, told, group=group)
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(everybodys):
        if failure is not None:
            raise (ValueError if failure[0] else RuntimeError)(f"rank {rank}: {failure[1]}")
    return [result for result, _ in everybodys]


# --- which checkpoints there are


def name_of(step: int) -> str:
    """What the folder of that step is called: sorted by name is sorted by step."""
    return f"step-{step:08d}"


def complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first. What has another name, or is partial, is none."""
    folder = Path(folder)
    return sorted(filter(is_name, folder.iterdir()), key=step_of) if folder.is_dir() else []


def is_name(path: Path) -> bool:
    """Whether a path is called as a complete checkpoint is."""
    return re.fullmatch(r"step-\d{8,}", path.name) is not None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def latest(folder: str | Path) -> Path | None:
    """The last complete checkpoint in a folder, whatever a killed save has left there; None if there is none."""
    return next(reversed(complete(folder)), None)


# --- writing


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


def index_of(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, torch.Size(piece.offsets))


def chunk_of(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)


def write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties.create_from_tensor(piece.tensor)
    data = TensorWriteData(chunk_of(piece), properties, torch.Size(piece.shape))
    return WriteItem(index_of(piece), WriteItemType.SHARD, tensor_data=data)


def by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    named: dict[str, list[Piece]] = {}
    for piece in pieces:
        named.setdefault(piece.name, []).append(piece)
    return named


def write(final: Path, pieces: list[Piece], about: dict, group: dist.ProcessGroup, keep: int | None = None) -> None:
    """Writes everybody's pieces as the checkpoint `final`, after `clear_way`. All ranks call it; one brings each piece.

    about   what the manifest says besides, of JSON's kinds; that of the first rank counts
    keep    how many complete checkpoints remain, the older are removed once this one is complete; None: all

    Raises   RuntimeError on every rank if one could not write: what is there then is a partial folder
    """
    first, partial = group.rank() == 0, partial_of(final)
    writer = TensorWriter(partial, group.rank())
    try:
        dcp.save(by_name(pieces), storage_writer=writer, planner=PiecesToWrite(), process_group=group)
    except dcp.CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise RuntimeError(
            f"{partial} could not be written ({reasons}); the checkpoints before are as they were"
        ) from (error)
    written = together(
        group, lambda: writer.files | ({".metadata": file_entry(partial / ".metadata")} if first else {})
    )
    files = {name: entry for of_rank in written for name, entry in of_rank.items()}
    together(group, lambda: put_in_place(final, partial, about, files, writer.tensors, keep) if first else None)


def clear_way(final: Path) -> None:
    """Removes what killed saves have left, and makes the new partial folder.

    Raises   ValueError if the folder has this step or a later one, which a restart would take for the last
    """
    last = latest(final.parent)
    if last is not None and step_of(last) >= step_of(final):
        raise ValueError(
            f"{final.parent} has {last.name} already, and {final.name} is not after it; save into another folder, or "
            "remove those that are no longer to be the last"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    for path in final.parent.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path)
    partial_of(final).mkdir()


def partial_of(final: Path) -> Path:
    return final.with_name(final.name + PARTIAL)


def file_entry(path: Path) -> dict:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def put_in_place(final: Path, partial: Path, about: dict, files: dict, tensors: dict, keep: int | None) -> None:
    """The end of a save, on one rank: the manifest, the rename that makes it complete, and the old ones go."""
    manifest = about | {"format": FORMAT, "files": files, "tensors": tensors}
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest | {"sha256": digest(manifest)}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    os.rename(partial, final)
    sync_folder(final.parent)
    for old in complete(final.parent)[: -keep if keep else 0]:
        os.rename(old, partial_of(old))  # so that what a killed removal leaves is not taken for complete
        shutil.rmtree(partial_of(old))


def sync_folder(folder: Path) -> None:
    """Makes sure that names of files, not only what they hold, survive a power cut (not on Windows, which cannot)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def digest(manifest: dict) -> str:
    """Checksum of a manifest without its checksum, however it is spaced."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# --- reading


def find(folder: Path) -> Path:
    """The folder itself, if it is a checkpoint, or the last complete one in it."""
    if (folder / MANIFEST).is_file() or is_name(folder):
        return folder
    found = latest(folder)
    if found is None:
        raise ValueError(f"{folder} holds no complete checkpoint; save one first, or give the folder that has them")
    return found


def read_manifest(checkpoint: Path) -> dict:
    """What a checkpoint says of itself.

    Raises   ValueError if it is no checkpoint, or torn: which file, and what to do
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise ValueError(f"{checkpoint} has no {MANIFEST}, so it is no complete checkpoint. {advice(checkpoint)}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        written = manifest.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}). {advice(checkpoint)}") from error
    if digest(manifest) != written:
        raise ValueError(f"{path} is damaged: its checksum is not that of what it says. {advice(checkpoint)}")
    if manifest["format"] != FORMAT:
        raise ValueError(f"{path} has format {manifest['format']}; this version of the course reads {FORMAT}")
    return manifest


def verify(checkpoint: Path, manifest: dict, part: int = 0, parts: int = 1) -> None:
    """Checks the size of every file, and the checksum of each `parts`-th one.

    Bytes    read: 1 / parts of the checkpoint
    Raises   ValueError if a file is missing, cut off or changed: which, and what to do
    """
    for index, (name, entry) in enumerate(manifest["files"].items()):
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{path} is missing. {advice(checkpoint)}")
        if path.stat().st_size != entry["bytes"]:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, {MANIFEST} says {entry['bytes']}: torn. {advice(checkpoint)}"
            )
        if index % parts == part and file_entry(path) != entry:
            raise ValueError(f"{path} is damaged: its checksum is not that in {MANIFEST}. {advice(checkpoint)}")


def advice(checkpoint: Path) -> str:
    """What to do about a torn checkpoint: which one to load instead."""
    others = [path for path in complete(checkpoint.parent) if path != checkpoint and (path / MANIFEST).is_file()]
    instead = f"load {others[-1]}" if others else "there is no other checkpoint beside it: start anew"
    return f"Copy it again from where it came, or remove {checkpoint} and {instead}"


def check_pieces(checkpoint: Path, manifest: dict, pieces: Iterable[Piece]) -> None:
    """Raises ValueError if a piece is not in the checkpoint, or has another shape or dtype there."""
    for piece in pieces:
        stored = manifest["tensors"].get(piece.name)
        if stored is None:
            raise ValueError(f"{checkpoint} holds no {piece.name}; it is of another model")
        if tuple(stored["shape"]) != tuple(piece.shape) or DTYPES.get(stored["dtype"]) != piece.tensor.dtype:
            raise ValueError(
                f"{piece.name} in {checkpoint} is {stored['dtype']} {tuple(stored['shape'])}; required: "
                f"{piece.tensor.dtype} {tuple(piece.shape)}. Build the engine of the same model, in the same dtype"
            )


def read(checkpoint: Path, manifest: dict, pieces: Iterable[Piece]) -> None:
    """Fills the pieces with the numbers of the checkpoint. Sends nothing: each rank reads what it needs.

    Bytes    read: the stored boxes that overlap a piece, each once; held: one of them, twice
    Raises   ValueError if something is not there, or cannot be read as a tensor
    """
    pieces = list(pieces)
    check_pieces(checkpoint, manifest, pieces)
    targets = {index_of(piece): piece.tensor for piece in pieces}
    wanted: dict[tuple[str, int, int], list[ReadItem]] = {}  # by place: file, first byte, bytes
    for name, mine in by_name(pieces).items():
        stored = manifest["tensors"][name]
        places = {torch.Size(box[0]): tuple(box[2:]) for box in stored["boxes"]}
        for item in create_read_items_for_chunk_list(name, stored_boxes(stored), [chunk_of(piece) for piece in mine]):
            wanted.setdefault(places[item.storage_index.offset], []).append(item)
    found = sum(item.lengths.numel() for items in wanted.values() for item in items)
    if found != sum(x.numel() for x in targets.values()):
        raise ValueError(f"{checkpoint} does not hold all numbers of {sorted(by_name(pieces))}. {advice(checkpoint)}")
    for place, items in sorted(wanted.items()):
        x = read_tensor(checkpoint, manifest, *place)
        for item in items:
            target = targets[item.dest_index][box(item.dest_offsets, item.lengths)]
            target.copy_(x[box(item.storage_offsets, item.lengths)])


def stored_boxes(stored: dict) -> TensorStorageMetadata:
    """DCP's description of a tensor, from the manifest's."""
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in stored["boxes"]]
    properties = TensorProperties(dtype=DTYPES[stored["dtype"]])
    return TensorStorageMetadata(properties, torch.Size(stored["shape"]), chunks)


def box(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(offsets, sizes))


def read_tensor(checkpoint: Path, manifest: dict, name: str, offset: int, length: int) -> Tensor:
    """One stored box: a tensor, or an error; nothing else that a file might ask for is done.

    Raises   ValueError if it is in a file that the manifest does not name, or is no tensor
    """
    if name not in manifest["files"] or Path(name).name != name:
        raise ValueError(f"{MANIFEST} of {checkpoint} points to {name!r}, which is no file of it. {advice(checkpoint)}")
    with open(checkpoint / name, "rb") as file:
        file.seek(offset)
        stored = io.BytesIO(file.read(length))
    try:
        x = torch.load(stored, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{checkpoint / name} holds something at byte {offset} that is no tensor, and is not read: {error} "
            f"{advice(checkpoint)}"
        ) from error
    if not isinstance(x, Tensor):
        raise ValueError(f"{checkpoint / name} holds a {type(x).__name__} at byte {offset}, no tensor")
    return x
