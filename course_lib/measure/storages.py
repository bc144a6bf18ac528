"""What the tracker needs to know of torch's storages, DTensors and operators."""

import contextlib
import functools
import sys
from collections.abc import Callable

import torch


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List the plain tensors that hold a tensor's bytes on this rank: a DTensor's shard, a wrapper's inner tensors."""
    if is_dtensor(type(tensor)):
        return local_tensors(tensor._local_tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [local for name in names for local in local_tensors(getattr(tensor, name))]
    return [tensor]


def is_dtensor(kind: type) -> bool:
    """Whether a tensor's class is DTensor; asking does not import it."""
    module = sys.modules.get("torch.distributed.tensor")  # imported by whoever makes a DTensor; it costs a second
    return module is not None and issubclass(kind, module.DTensor)


@functools.cache
def returns_fresh_storage(func: torch._ops.OpOverload) -> bool:
    """Whether an operator's outputs lie in storage of their own (or resized), going by its schema.

    A view or an in-place operator returns its input's storage, which was counted when it was made, or existed before.
    """
    if func._schema.name in ("aten::lift_fresh", "aten::resize_"):  # torch.tensor(...) appears with the first
        return True
    if func._schema.name == "aten::_unsafe_view":  # a view whose schema does not say so
        return False
    return any(returned.alias_info is None for returned in func._schema.returns)


def sharding_propagation() -> list[tuple[type, str]]:
    """List the methods in which DTensor tries operators on global shapes, if DTensor is in use."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        return []
    names = ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached")
    return [(module.ShardingPropagator, name) for name in names if hasattr(module.ShardingPropagator, name)]


@contextlib.contextmanager
def replaced(owner: type, name: str, wrap: Callable):
    """Wrap a method of a class for the length of a `with` block."""
    own = name in vars(owner)  # an inherited method must not stay behind as an own one
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
