"""The device of a rank, in one place: model, data, random numbers, meters and checkpoints ask here.

| backend      | device of a rank                   | when                                                             |
|--------------|------------------------------------|------------------------------------------------------------------|
| "nccl"       | a GPU of its own                   | each rank has one                                                |
| "gloo"       | the CPU                            | there are fewer GPUs than ranks, or none; or asked for           |
| "shared-gpu" | a GPU that other ranks use as well | only if asked for; peaks are true (each process has an allocator |
|              |                                    | of its own), times are not                                       |

A process that is no rank, such as a notebook's own, computes on the CPU unless it is told another device.
"""

import resource
import sys

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What torch.distributed is asked for; with NCCL a tensor on the CPU still travels, through gloo.
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "shared-gpu": "gloo"}

_DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm}

_of_this_process = torch.device("cpu")


def choose_backend(backend: str, world_size: int, gpu_count: int) -> tuple[str, str]:
    """Return the backend of BACKENDS to use, and a sentence that says why."""
    enough = gpu_count >= world_size
    gpus = f"{gpu_count or 'no'} GPU{'s' * (gpu_count != 1)} for {world_size} rank{'s' * (world_size != 1)}"
    if backend == "auto":
        if enough:
            return "nccl", f"nccl: {gpus}"
        return "gloo", f"gloo: {gpus}, and NCCL needs one for each rank"
    if backend not in BACKENDS:
        names = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"backend must be one of {names}, got {backend!r}; use 'auto' if in doubt")
    if backend == "shared-gpu" and not gpu_count:
        raise ValueError("backend='shared-gpu' needs a GPU, got none; use backend='gloo'")
    if backend == "shared-gpu":
        return "shared-gpu", f"gloo: {gpus}, shared as asked for"
    if backend == "gloo":
        return "gloo", "gloo: asked for"
    if not enough:
        raise ValueError(f"backend='nccl' needs a GPU for every rank, got {gpus}; use backend='gloo' or fewer ranks")
    return "nccl", "nccl: asked for"


def rank_device() -> torch.device:
    """Return the device of this rank: its GPU if the world has one for each rank, else the CPU."""
    return _of_this_process


def device_for(backend: str, local_rank: int) -> torch.device:
    """Return a rank's device: its own GPU, or the only one that it sees; raises ValueError if none is visible."""
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
        DrawOnCpu().__enter__()  # for as long as the process lives


class DrawOnCpu(TorchFunctionMode):
    """Draws random elements with the CPU's generators and moves them: a seed gives the same ones on every device.

    A call that names a device draws there. Dropout and the initial weights of layers are not touched.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _DRAWING or kwargs.get("device") is not None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        drawn = func(*args, **kwargs, device="cpu")
        return drawn.to(rank_device()).requires_grad_(requires_grad)


def pack(tensor: Tensor) -> tuple:
    """Return a tensor as the arguments with which `unpack` makes it again in a rank."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytearray(flat.view(torch.uint8).numpy()), tensor.dtype, tuple(tensor.shape), tensor.requires_grad


def unpack(elements: bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    """Return the tensor on the device of this rank: what a function brings along from the notebook arrives there."""
    flat = torch.frombuffer(elements, dtype=dtype) if elements else torch.empty(0, dtype=dtype, device="cpu")
    return flat.view(shape).to(rank_device()).requires_grad_(requires_grad)


def peak_memory_bytes(device: str | torch.device = "cpu") -> int:
    """Return a GPU allocator's peak since its last reset; of a CPU the most memory that this process ever held."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
