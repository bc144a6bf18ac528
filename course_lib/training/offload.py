"""Activation offload: what the forward pass keeps for backward waits somewhere cheaper than the device.

On a GPU that place is the host's memory (pinned, so that the copy runs at the bus's full speed). On a CPU no memory is
cheaper, so there the bytes really leave it: they go to files of a temporary folder and are read back. Either way the
tensors on the device are freed between forward and backward: a memory tracker sees the saving, and the bytes are
counted exactly. PyTorch's own `torch.autograd.graph.save_on_cpu` copies parameters too, and on a CPU saves nothing.

Copies run on the stream that computes, which hides none of them: this shows memory and bytes, not the best speed.
"""

import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
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
            (nbytes, load), dtype, view = kept
            record.returned_bytes += nbytes
            return load().view(dtype).as_strided(*view)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield record
        record._known.clear()


def _move_once(
    storage: torch.UntypedStorage, version: int, record: OffloadRecord, folder: Path
) -> tuple[int, Callable[[], Tensor]]:
    """How many bytes were moved, and what brings them back: of a copy made now, or earlier and unchanged since."""
    key, known = (storage._cdata, version), record._known
    if key in known:
        return known[key][1]
    flat_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if flat_bytes.is_cuda:
        pinned = torch.empty(flat_bytes.numel(), dtype=torch.uint8, pin_memory=True)
        load = partial(pinned.copy_(flat_bytes, non_blocking=True).to, storage.device, non_blocking=True)
    else:
        path = folder / str(record.tensors)
        path.write_bytes(flat_bytes.numpy().data)
        load = partial(_read_bytes, path)
    # Addresses are used again, so the copy counts only as long as this storage lives.
    known[key] = (weakref.ref(storage, lambda _: known.pop(key, None)), (storage.nbytes(), load))
    record.moved_bytes += storage.nbytes()
    record.tensors += 1
    return known[key][1]


def _read_bytes(path: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))
