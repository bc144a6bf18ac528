"""A world of any size in one process: a fake process group, fake tensors, and whole numbers that stay real.

    with fake_world(rank=5, world_size=16_384):
        ...                              # what rank 5 does, as it stands: its collectives return at once

Three things let one rank run alone:

    fake process group   a collective returns at once; what should have arrived has not
    FakeTensorMode       a tensor has shape, dtype and device, but no numbers: no memory, no arithmetic
    WholeNumbers         except integers and booleans. Tokens, positions and routing are real: programs branch on them,
                         count rows by them, and send as many rows as they say

What other ranks send of whole numbers arrives as if all ranks were as this one: a sum over G ranks is G times mine, and
each rank sends me what I send to the rank at my place. Of all other tensors only the shape arrives.

Source   the fake process group of torch.testing and FakeTensorMode, as PyTorch's own tests use them
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASK_DEVICE = torch.ops.prim.device.default


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[FakeTensorMode]:
    """Inside, this process is that rank, and nobody else exists. All is as before on leaving, also after an error."""
    if dist.is_initialized():
        raise ValueError(
            f"this process is rank {dist.get_rank()} of a process group ({dist.get_backend()}) and can be in one world "
            "only; simulate where there is none, such as a notebook's own process, or destroy the group first"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank ({rank}) must be one of 0..{world_size - 1}: the world has {world_size} ranks")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import makes the backend known

    hook = sys.excepthook  # torch puts its own there, which names the rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode, WholeNumbers():
            yield mode
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


class WholeNumbers(TorchDispatchMode):
    """Operators on whole numbers alone run on real tensors; all others are left to the fake mode below.

    Tensors on the meta device stay as they are too: they have no numbers anyway, and modules are made with them.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__ in a guard that costs as much as the operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ASK_DEVICE and isinstance(args[0], FakeTensor):  # half of all calls: answered here
            return args[0].fake_device
        if FakeTensor in types or not _stays_real(func, args, kwargs):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
            if func.namespace == "c10d":
                let_arrive(func, args, kwargs)
        return out


def _stays_real(func, args: tuple, kwargs: dict) -> bool:
    """Whether a call takes whole numbers alone, or if it takes no tensor, makes them; or whether it stays on meta."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    if tensors and device is None and all(x.is_meta for x in tensors):
        return True
    dtypes = [x.dtype for x in tensors] or [made_by(func, args, kwargs)]
    return not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def made_by(func, args: tuple, kwargs: dict) -> torch.dtype:
    """The dtype of what an operator without tensors makes."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"]
    numbers = args[1:2] if func._schema.name == "aten::full" else args
    counts = func._schema.name in ("aten::arange", "aten::full") and all(isinstance(n, int) for n in numbers)
    return torch.int64 if counts or func._schema.name == "aten::randint" else torch.get_default_dtype()


def let_arrive(func, args: tuple, kwargs: dict) -> None:
    """Puts into the tensors of a collective what arrives if every rank brings what this one does.

    Nothing arrives of a send or a barrier, and what a broadcast brings is here already.
    """
    names = [arg.name for arg in func._schema.arguments]
    call = dict(zip(names, args, strict=False)) | kwargs  # those that are left out have defaults
    group = dist.ProcessGroup.unbox(call["process_group"])
    rank, size = group.rank(), group.size()
    match func._schema.name.removeprefix("c10d::"):
        case "allreduce_":  # as a sum: PyTorch does not tell a mode which reduction it is. (Equal lengths stay equal.)
            for x in call["tensors"]:
                x.mul_(size)
        case "_allgather_base_":
            one = call["input_tensor"].reshape(1, -1).clone()  # it may be a piece of the output
            call["output_tensor"].view(size, -1).copy_(one)
        case "_reduce_scatter_base_":
            piece = call["output_tensor"]
            piece.copy_(call["input_tensor"].reshape(size, -1)[rank].view_as(piece) * size)
        case "alltoall_base_":
            sent, sizes = call["input"], call["input_split_sizes"]
            pieces = sent.split(sizes) if sizes else sent.chunk(size)
            call["output"].copy_(torch.cat([pieces[rank]] * size))
