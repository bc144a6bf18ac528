"""What kernels ask memory for, counted while a host on the CPU runs them.

Every load and every store tells the addresses that its mask leaves. Bytes are their number times the size of an
element; sectors are the different pieces of 32 bytes that one load touches, the least that a GPU's memory hands out.
With a cache, lines of 128 bytes stay until others push them out: the one that was not used for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from course_lib.validate import Bytes, checked

SECTOR_BYTES, LINE_BYTES = 32, 128
_ALIGNED = 512  # bytes at a multiple of which torch's allocator begins a tensor on a GPU
_open: list[KernelTraffic] = []


class KernelTraffic:
    """Counts what the kernels launched inside `with` ask for.

    loaded, stored   bytes
    loads, sectors   loads of a program, and sectors of 32 bytes that they touch: at least loaded / 32
    missed           bytes of lines that were not in the cache when a load asked for them; 0 without a cache

    What a real GPU does besides is not in it: no L1, no warps, programs one after the other.
    """

    @checked
    def __init__(self, cache_bytes: Bytes = 0) -> None:
        self.loaded = self.stored = self.loads = self.sectors = self.missed = 0
        self._lines: OrderedDict[int, None] = OrderedDict()
        self._capacity = cache_bytes // LINE_BYTES

    @property
    def bytes(self) -> int:
        return self.loaded + self.stored

    def load(self, addresses: Tensor, itemsize: int) -> None:
        """Note one load of a program: addresses [any shape], in bytes."""
        self.loaded += addresses.numel() * itemsize
        self.loads += 1
        self.sectors += len(torch.unique(addresses // SECTOR_BYTES))
        self.missed += LINE_BYTES * self._touch(addresses)

    def store(self, addresses: Tensor, itemsize: int) -> None:
        """Note one store; what is stored stands in the cache afterwards."""
        self.stored += addresses.numel() * itemsize
        self._touch(addresses)

    def _touch(self, addresses: Tensor) -> int:
        """Use the lines of these addresses; return how many were not in the cache."""
        missing = 0
        for line in torch.unique(addresses // LINE_BYTES).tolist() if self._capacity else ():
            missing += line not in self._lines
            self._lines[line] = None
            self._lines.move_to_end(line)
            if len(self._lines) > self._capacity:
                self._lines.popitem(last=False)
        return missing

    def __enter__(self) -> KernelTraffic:
        _open.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _open.remove(self)


def tell(kind: str, addresses: Tensor, itemsize: int) -> None:
    """Let every open count note a "load" or a "store": what a host calls."""
    for counted in _open:
        getattr(counted, kind)(addresses, itemsize)


def new(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int | None = None) -> Tensor:
    """Return a tensor that begins where one on a GPU would, at a multiple of 512 bytes: normal numbers, or zeros.

    Only then do sectors and lines of a cache count as there.
    """
    room = torch.zeros(int(torch.Size(shape).numel()) + _ALIGNED, dtype=dtype)
    start = -room.data_ptr() % _ALIGNED // room.itemsize
    made = room[start : start + torch.Size(shape).numel()].view(*shape)
    if seed is None:
        return made
    return made.copy_(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))
