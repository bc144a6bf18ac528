"""The device of a rank, in one place: model, data, random numbers, meters and checkpoints ask here.

| backend      | device of a rank                   | when                                                             |
|--------------|------------------------------------|------------------------------------------------------------------|
| "nccl"       | a GPU of its own                   | each rank has one                                                |
| "gloo"       | the CPU                            | there are fewer GPUs than ranks, or none; or asked for           |
| "shared-gpu" | a GPU that other ranks use as well | only if asked for; peaks are true (each process has an allocator |
|              |                                    | of its own), times are not                                       |

A process that is no rank, such as a notebook's own, computes on the CPU unless it is told another device.
"""

import torch

BACKENDS = {  # -> what torch.distributed is asked for; with NCCL a tensor on the CPU still travels, through gloo
    "gloo": "gloo",
    "nccl": "cpu:gloo,cuda:nccl",
    "shared-gpu": "gloo",
}

_of_this_process = torch.device("cpu")


def rank_device() -> torch.device:
    """Return the device of this rank: its GPU if the world has one for each rank, else the CPU."""
    return _of_this_process


def device_for(backend: str, local_rank: int) -> torch.device:
    """Return the device on which a rank works: with one visible GPU for each process that one, whatever its number.

    Raises   ValueError if the backend needs a GPU and none is visible
    """
    if backend == "gloo":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 0:
        raise ValueError(f"backend {backend!r} needs a GPU for this rank, and none is visible; use backend='gloo'")
    return torch.device("cuda", local_rank % visible)


def set_rank_device(device: torch.device) -> None:
    """Make this process a rank on that device: there new tensors are made, unless they name another."""
    global _of_this_process
    _of_this_process = device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_default_device(device)
