"""Triton's words by torch, as far as the course's kernels use them; the programs of a grid run one after the other.

A pointer is a tensor and places in it, so that a load gathers and a store scatters. In two things this host is kinder
than a GPU: a place outside the tensor is an error, and no two programs run at once, so that no race shows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor

from course_lib.kernels.traffic import tell

constexpr, float32, float16 = object, torch.float32, torch.float16
arange, exp, log, maximum, sigmoid, where, max, sum, trans = (
    torch.arange, torch.exp, torch.log, torch.maximum, torch.sigmoid, torch.where, torch.amax, torch.sum, torch.t,
)  # fmt: skip
_now = [0, 0, 0]  # which program of the grid runs


@dataclass(frozen=True)
class Pointer:
    """Places in a tensor, counted in elements from its first."""

    base: Tensor
    at: int | Tensor = 0

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.base.dtype)

    def __add__(self, offset: int | Tensor) -> Pointer:
        return Pointer(self.base, self.at + offset)


def program_id(axis: int) -> int:
    """Which program this is, along an axis of the grid."""
    return _now[axis]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def full(shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def dot(a: Tensor, b: Tensor, acc: Tensor | None = None, input_precision: str | None = None) -> Tensor:
    """The product of two tiles, summed in FP32 at the least, as tensor cores do."""
    wide = torch.promote_types(a.dtype, torch.float32)
    made = a.to(wide) @ b.to(wide)
    return made if acc is None else acc + made


def _places(kind: str, pointer: Pointer, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Places of all lanes, and which of them the mask leaves; told to those who count.

    Raises   IndexError where a lane that is left lies outside the tensor: a GPU would read or write what is there
    """
    at = torch.as_tensor(pointer.at)
    left = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).broadcast_to(at.shape)
    size = pointer.base.numel()
    if outside := int(((at < 0) | (at >= size))[left].sum()):
        raise IndexError(f"{outside} places are outside the tensor of {size:,} elements; a mask must leave them out")
    tell(kind, pointer.base.data_ptr() + at[left] * pointer.base.itemsize, pointer.base.itemsize)
    return at, left


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    """Return the numbers at these places; where the mask is false, `other`, and nothing is read."""
    at, left = _places("load", pointer, mask)
    out = torch.full(at.shape, other, dtype=pointer.base.dtype)
    out[left] = pointer.base.view(-1)[at[left]]
    return out


def store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    """Write to the places that the mask leaves."""
    at, left = _places("store", pointer, mask)
    value = torch.as_tensor(value).broadcast_to(at.shape)
    pointer.base.view(-1)[at[left]] = value[left].to(pointer.base.dtype)


class jit:
    """kernel[grid](*arguments): one program for each place of the grid, with tensors as pointers to their first."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel = kernel
        self.arg_names = list(inspect.signature(kernel).parameters)
        functools.update_wrapper(self, kernel)

    def __call__(self, *arguments: object) -> None:
        raise TypeError(f"{self.kernel.__name__} is a kernel; give the places of its grid: kernel[grid](...)")

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            if len(arguments) != len(self.arg_names):
                raise TypeError(f"{self.kernel.__name__} takes {', '.join(self.arg_names)}; got {len(arguments)}")
            if not all(one.is_contiguous() for one in arguments if isinstance(one, Tensor)):
                raise ValueError("a kernel of the course takes contiguous tensors; call .contiguous() first")
            given = [Pointer(one.detach()) if isinstance(one, Tensor) else one for one in arguments]
            for place in product(*map(range, (*grid, 1, 1)[:3])):
                _now[:] = place
                self.kernel(*given)

        return run
