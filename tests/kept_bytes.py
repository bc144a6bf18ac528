"""What autograd keeps for backward, in bytes: each storage once, parameters left out."""

import torch


def kept_bytes(model, forward):
    """Runs `forward()` and returns the bytes that autograd keeps for its backward pass."""
    resident = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, sizes = [], {}

    def pack(tensor):
        kept.append(tensor)  # so that no address is used twice while we count
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(sizes.values())
