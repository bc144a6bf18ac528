"""What a GPU's memory holds besides tensors: the allocator's rounding and cache, and the CUDA context."""

from dataclasses import dataclass

import torch

from course_lib.validate import Bytes, checked

# Source: PyTorch's c10/cuda CUDACachingAllocator: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer
_ALLOCATOR_ROUNDING_BYTES = 512
SMALL_TENSOR_BYTES, SMALL_SEGMENT_BYTES = 2**20, 2 * 2**20
LARGE_TENSOR_BYTES, LARGE_SEGMENT_BYTES = 10 * 2**20, 20 * 2**20


@dataclass(frozen=True)
class CudaMemory:
    """One look at a GPU. allocated <= reserved <= used on the device; the rest is context and other processes."""

    allocated_bytes: int
    reserved_bytes: int
    device_used_bytes: int
    device_total_bytes: int

    @property
    def outside_allocator_bytes(self) -> int:
        """Used on the device outside PyTorch's allocator: CUDA context, NCCL's buffers, other processes."""
        return self.device_used_bytes - self.reserved_bytes

    @property
    def cached_bytes(self) -> int:
        """Reserved, but in no tensor: kept for reuse, or stuck between tensors (fragmentation)."""
        return self.reserved_bytes - self.allocated_bytes


def cuda_memory(device: int | str | torch.device | None = None) -> CudaMemory:
    """Look at a GPU's memory now.

    Raises   ValueError without a CUDA GPU
    """
    if not torch.cuda.is_available():
        raise ValueError("no CUDA GPU is visible, required: one; on a CPU use MemoryTracker")
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return CudaMemory(allocated, reserved, device_used_bytes=total - free, device_total_bytes=total)


def rounded_bytes(nbytes: int) -> int:
    """The size that PyTorch's CUDA allocator gives a tensor of that many bytes."""
    return -(-nbytes // _ALLOCATOR_ROUNDING_BYTES) * _ALLOCATOR_ROUNDING_BYTES


@checked
def segment_bytes(nbytes: Bytes, expandable: bool = False) -> int:
    """Return what PyTorch asks the driver for when a tensor finds no room in its cache.

    expandable   with expandable segments, which grow by units: 2 MiB for small tensors, 20 MiB for all others
    """
    has_own = not expandable and nbytes >= LARGE_TENSOR_BYTES  # a segment of its own, rounded up to 2 MiB
    unit = SMALL_SEGMENT_BYTES if nbytes <= SMALL_TENSOR_BYTES or has_own else LARGE_SEGMENT_BYTES
    return max(1, -(-nbytes // unit)) * unit


def fragment(piece_bytes: int = 16 * 2**20, pieces: int = 32, device: str = "cuda") -> tuple[CudaMemory, CudaMemory]:
    """Show fragmentation: fill memory with pieces, free every second one, then ask for two pieces at once.

    Returns a look at the fragmented memory, and one after the larger tensor: half of the memory is idle, yet more is
    reserved.

    Raises   ValueError without a CUDA GPU
    """
    if not torch.cuda.is_available():
        raise ValueError("no CUDA GPU is visible, required: one; fragmentation is the CUDA allocator's")
    torch.cuda.empty_cache()
    whole = torch.empty(piece_bytes * pieces, dtype=torch.uint8, device=device)  # one segment, then cut into pieces
    del whole
    held = [torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(pieces)]
    del held[::2]
    fragmented = cuda_memory(device)
    held.append(torch.empty(2 * piece_bytes, dtype=torch.uint8, device=device))
    return fragmented, cuda_memory(device)
