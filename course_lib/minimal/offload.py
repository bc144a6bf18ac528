"""Activation offload without options: what autograd saves waits in the host's memory.

Here the host's memory is a NumPy array beside PyTorch's tensors, so that a CPU can play the GPU. The engine in
training/offload.py moves what several operators save only once, and runs on GPUs.

Source   Rhu et al. 2016 (arXiv:1602.08124); torch.autograd.graph.saved_tensors_hooks
"""

import torch
from torch import Tensor


class HostOffload:
    """Two hooks: `pack` moves a saved tensor to the host, `unpack` brings it back."""

    def __init__(self, model):
        self.resident = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.moved_bytes = 0

    def pack(self, tensor):
        """Autograd calls this in forward, for each tensor that it saves."""
        if tensor.untyped_storage().data_ptr() in self.resident:
            return tensor  # a parameter: it is there anyway
        self.moved_bytes += tensor.nbytes
        return tensor.detach().numpy().copy()

    def unpack(self, kept):
        """Autograd calls this in backward, with what `pack` returned."""
        return kept if isinstance(kept, Tensor) else torch.from_numpy(kept).clone()
