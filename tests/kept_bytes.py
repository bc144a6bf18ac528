"""What autograd keeps for backward, in bytes: each storage once, parameters left out."""

from dataclasses import replace

import torch

from course_lib.layout import Layout
from course_lib.memory.budget import saved_for_backward
from course_lib.run import Run


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


def saved_by_a_layer(config, seq_len, recipe="fp32", attention="fused", tp_rank=0, **layout):
    """What the formula saves of one layer, for a micro-batch: of two layers less one."""
    one, two = (
        saved_for_backward(
            Run(replace(config, num_layers=layers), Layout(**layout), seq_len, recipe, attention, "cpu"), 0, tp_rank
        ).activations
        for layers in (1, 2)
    )
    return two - one
