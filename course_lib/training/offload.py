"""Activation offload: what the forward pass keeps for backward waits somewhere cheaper than the device.

On a GPU that place is the host's memory (pinned, so that the copy runs at the bus's full speed). On a CPU no memory is
cheaper, so there the bytes really leave it: they go to files of a temporary folder and are read back. Either way the
tensors on the device are freed between forward and backward: a memory tracker sees the saving, and the bytes are
counted exactly. PyTorch's own `torch.autograd.graph.save_on_cpu` copies parameters too, and on a CPU saves nothing.

Copies run on the stream that computes, which hides none of them: this shows memory and bytes, not the best speed.
"""

import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from course_lib.validate import Index, checked


@dataclass
class OffloadRecord:
    """Bytes that left the device, and came back; a tensor that is used twice comes back twice."""

    moved_bytes: int = 0
    returned_bytes: int = 0
    tensors: int = 0
    _known: dict = field(default_factory=dict, repr=False)


@checked
@contextmanager
def offload_activations(model: nn.Module, min_bytes: Index = 4096) -> Iterator[OffloadRecord]:
    """Within this context what autograd keeps is moved off the device; run the forward pass and `backward()` in it.

    Left where they are: parameters (saved too, but there anyway) and tensors below `min_bytes`. What several operators
    keep is moved once.
    Source   Rhu et al. 2016 (arXiv:1602.08124); torch.autograd.graph.saved_tensors_hooks
    """
    record = OffloadRecord()
    resident = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:

        def pack(tensor: Tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() < min_bytes or storage._cdata in resident:
                return tensor
            view = (tensor.shape, tensor.stride(), tensor.storage_offset())
            return _move_once(storage, tensor._version, record, Path(folder)), tensor.dtype, view

        def unpack(kept):
            if isinstance(kept, Tensor):
                return kept
            moved, dtype, view = kept
            record.returned_bytes += moved.nbytes
            return moved.load().view(dtype).as_strided(*view)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield record
        record._known.clear()


def _move_once(storage: torch.UntypedStorage, version: int, record: OffloadRecord, folder: Path):
    """Moves the bytes of a storage, or finds the copy that was made of it, unchanged since."""
    key, known = (storage._cdata, version), record._known
    if key in known:
        return known[key][1]
    flat_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    moved = InHostMemory(flat_bytes) if flat_bytes.is_cuda else InFile(flat_bytes, folder / str(record.tensors))
    # Addresses are used again, so the copy counts only as long as this storage lives.
    known[key] = (weakref.ref(storage, lambda _: known.pop(key, None)), moved)
    record.moved_bytes += moved.nbytes
    record.tensors += 1
    return moved


class InHostMemory:
    """Bytes of a GPU tensor, in pinned host memory."""

    def __init__(self, flat_bytes: Tensor):
        self.device, self.nbytes = flat_bytes.device, flat_bytes.numel()
        self.copy = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        self.copy.copy_(flat_bytes, non_blocking=True)

    def load(self) -> Tensor:
        return self.copy.to(self.device, non_blocking=True)


class InFile:
    """Bytes of a CPU tensor, in a file."""

    def __init__(self, flat_bytes: Tensor, path: Path):
        self.path, self.nbytes = path, flat_bytes.numel()
        path.write_bytes(flat_bytes.numpy().data)

    def load(self) -> Tensor:
        flat_bytes = torch.empty(self.nbytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.readinto(flat_bytes.numpy().data)
        return flat_bytes
