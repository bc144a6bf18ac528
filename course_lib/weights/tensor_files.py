"""Tensors that stay in their files until a piece of them is asked for: safetensors, in one file or in several.

    files = TensorFiles(folder)                       # reads the headers: names, shapes, dtypes
    files["lm_head.weight"].part((0, 1000)).read()    # reads these rows, and nothing else

A safetensors file is a header and then raw numbers, so a piece has a known place and no code of the file is run. A
pickle (.bin, .pt) is a program that builds tensors: reading it runs what its author wrote. Those are refused.

How the memory counts: the library maps a file, so pages that were touched belong to the process's resident memory
until the file is closed, though they are only a cache that all processes share. Here a file is open only while one
piece is copied out of it. Rows lie together; columns are scattered, and taking a few of each row touches every page.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Range = tuple[int, int]


class TensorFiles(Mapping):
    """The tensors of a folder by name, as FileTensors. `read_bytes` counts what was read of their numbers.
    Raises   ValueError if the folder is missing, a file of the index is missing or damaged, or the weights are pickles
    """

    def __init__(self, folder: str | Path):
        self.folder, self.read_bytes = Path(folder), 0
        self._tensors: dict[str, FileTensor] = {}
        for file, promised in _files_of(self.folder).items():
            found = {}
            with _open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    stored = handle.get_slice(name)
                    ranges = tuple((0, size) for size in stored.get_shape())
                    found[name] = FileTensor(name, file, stored.get_dtype(), ranges, self)
            if missing := sorted(promised - set(found)):
                raise ValueError(f"{file} lacks {missing}, which {INDEX} promises; fetch both again")
            self._tensors |= found

    def __getitem__(self, name: str) -> "FileTensor":
        if name not in self._tensors:
            raise ValueError(
                f"there is no tensor {name!r} in {self.folder}, which holds {len(self)}: {_some(self)}; "
                "check that the config belongs to these files"
            )
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.values())


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, or a piece of it, perhaps transposed; `read` brings the numbers. Slicing reads nothing."""

    name: str
    file: Path
    stored_dtype: str  # as the file's header spells it: F32, BF16 ...
    ranges: tuple[Range, ...]  # the piece, along the dimensions of the file
    source: TensorFiles = field(repr=False, compare=False)
    transposed: bool = False

    @property
    def shape(self) -> torch.Size:
        sizes = [stop - start for start, stop in self.ranges]
        return torch.Size(reversed(sizes) if self.transposed else sizes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers in the file.
        Raises   ValueError if they are not floating point of 16, 32 or 64 bits
        """
        if self.stored_dtype not in _FLOATS:
            raise ValueError(
                f"{self.name} in {self.file} is stored as {self.stored_dtype}; required: one of {', '.join(_FLOATS)}. "
                "Quantised weights must be turned back into such numbers first"
            )
        return _FLOATS[self.stored_dtype]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def dim(self) -> int:
        return len(self.ranges)

    def t(self) -> "FileTensor":
        return replace(self, transposed=not self.transposed)

    def part(self, *ranges: Range) -> "FileTensor":
        """The piece from start to stop along each dimension; those not given stay whole.
        Raises   ValueError if a range lies outside
        """
        ranges = ranges + tuple((0, size) for size in self.shape[len(ranges) :])
        for (start, stop), size in zip(ranges, self.shape, strict=True):
            if not 0 <= start <= stop <= size:
                raise ValueError(
                    f"{self.name} has shape {tuple(self.shape)}, so there is no piece {ranges}; stay within 0..{size}"
                )
        inner = reversed(ranges) if self.transposed else ranges
        moved = tuple((base + start, base + stop) for (base, _), (start, stop) in zip(self.ranges, inner, strict=True))
        return replace(self, ranges=moved)

    def chunk(self, pieces: int) -> list["FileTensor"]:
        """The tensor cut along its first dimension, as torch.chunk cuts."""
        size = -(-self.shape[0] // pieces)
        return [self.part((lo, min(lo + size, self.shape[0]))) for lo in range(0, self.shape[0], size)]

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers, in memory of their own on the CPU; in the file's dtype unless another is given."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device="cpu")
        self.read_into(out)
        return out

    def read_into(self, out: Tensor) -> None:
        """Fills a tensor of the same shape, straight from the mapped file."""
        self.source.read_bytes += self.nbytes
        with _open(self.file) as handle, torch.device("cpu"):  # NCCL ranks make new tensors on the GPU otherwise
            piece = handle.get_slice(self.name)[tuple(slice(*one) for one in self.ranges)]
            out.copy_(piece.t() if self.transposed else piece)

    def read_flat_into(self, out_p: Tensor, start: int) -> None:
        """Fills out_p with the numbers from `start` on, counted along the flattened tensor.

        Reads exactly these: what is left of a first row, whole rows, the beginning of a last row.
        """
        done = 0
        for box in flat_boxes(self.shape, start, start + len(out_p)):
            piece = self.part(*box)
            numel = prod(piece.shape)
            piece.read_into(out_p[done : done + numel].view(piece.shape))
            done += numel


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[Range, ...]]:
    """The numbers start..stop of a flattened tensor as boxes, in order: of a matrix at most three.

    flat_boxes((4, 10), 7, 32) -> [((0, 1), (7, 10)), ((1, 3), (0, 10)), ((3, 4), (0, 2))]
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start, stop),)[: len(shape)]]
    width, boxes = prod(shape[1:]), []
    while start < stop:
        row, inside = divmod(start, width)
        whole_rows = (stop - start) // width
        if inside == 0 and whole_rows:
            boxes.append(((row, row + whole_rows), *((0, size) for size in shape[1:])))
            start += whole_rows * width
        else:
            end = min(width, inside + stop - start)
            boxes += [((row, row + 1), *box) for box in flat_boxes(shape[1:], inside, end)]
            start += end - inside
    return boxes


def _files_of(folder: Path) -> dict[Path, set[str]]:
    """Each file of the folder's weights, with the names that the index promises of it."""
    if folder.suffix in _PICKLES:
        raise ValueError(_refusal([folder.name]))
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; required: one that holds {SINGLE} or {INDEX}")
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: set()}
    found = sorted(path.name for path in folder.iterdir())
    if pickles := [name for name in found if name.endswith(_PICKLES)]:
        raise ValueError(_refusal(pickles))
    raise ValueError(
        f"{folder} holds neither {SINGLE} nor {INDEX}, but {found}; save the model with save_pretrained(folder)"
    )


def _indexed(folder: Path) -> dict[Path, set[str]]:
    try:
        placed = list(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items())
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / INDEX} is damaged ({type(error).__name__}: {error}); required: JSON with a weight_map. "
            "Fetch it again"
        ) from error
    files: dict[Path, set[str]] = {}
    for name, file in placed:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{INDEX} says that {name} is in {file!r}; required: a .safetensors file of that folder")
        files.setdefault(folder / file, set()).add(name)
    if missing := sorted(file.name for file in files if not file.is_file()):
        raise ValueError(f"{folder} lacks {missing}, which its {INDEX} names; fetch them too")
    return files


def _open(file: Path):
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}); required: a whole file of that format. Fetch it again"
        ) from error


def _refusal(names: list[str]) -> str:
    return (
        f"{_some(names)} would be read as a pickle, which runs the code in it; required: safetensors. "
        "Convert it where you trust it, with save_pretrained(folder)"
    )


def _some(names) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" ... {names[-1]}" if len(names) > 3 else "")
