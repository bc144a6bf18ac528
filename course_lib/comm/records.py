"""What ranks tell each other besides tensors of a known shape: JSON, and tensors by name, never a pickle.

`all_gather_object` unpickles what arrives, and unpickling runs code that the sender chose. gloo's sockets ask nobody
who he is: on a machine with several users another one may take the place of a rank. JSON can hold nothing but data.
"""

import json
import math

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.collectives import all_gather
from course_lib.devices import rank_device

_NAMES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
DTYPES = {name: getattr(torch, name) for name in _NAMES}
_MAX_BYTES = 1 << 34  # of one rank: more is a mistake, or comes from somebody who is no rank


def all_gather_json(value: object, group: dist.ProcessGroup) -> list:
    """Everybody's value, by rank. It is made of JSON's kinds: numbers, text, lists, dictionaries with text as keys.

    Bytes    sent per rank: (G - 1) * (8 + the length of the longest JSON)
    Raises   TypeError if JSON cannot say the value, ValueError if what arrives is no JSON
    """
    return [_read(text, rank) for rank, text in enumerate(_all_gather_bytes(json.dumps(value).encode(), group))]


def all_gather_tensors(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> list[dict[str, Tensor]]:
    """Everybody's tensors by their names, by rank, on the CPU: for tests and for looking.

    Bytes    sent per rank: (G - 1) * (16 + the longest list of shapes + the most bytes of one rank)
    Raises   ValueError for a dtype that is not sent, or if what arrives is not what was announced
    """
    for name, x in tensors.items():
        if x.dtype not in DTYPES.values():
            raise ValueError(f"{name} is {x.dtype}; required: one of {', '.join(DTYPES)}")
    shapes = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()]
    raw = [x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in tensors.values()]
    raw_P = torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *raw])
    gathered = zip(all_gather_json(shapes, group), _all_gather_raw(raw_P, group), strict=True)
    return [_cut(shapes, raw_P, rank) for rank, (shapes, raw_P) in enumerate(gathered)]


def _cut(shapes: list, raw_P: Tensor, rank: int) -> dict[str, Tensor]:
    """One rank's tensors out of its bytes."""
    try:
        sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in shapes]
        pieces = raw_P.split(sizes)
        found = zip(shapes, pieces, strict=True)
        return {name: piece.clone().view(DTYPES[dtype]).view(shape) for (name, dtype, shape), piece in found}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"rank {rank} did not send the tensors that it announced ({error!r}); start anew") from error


def _read(text: bytes, rank: int) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"what came from rank {rank} is no JSON ({error!r}); do all ranks call the same function?"
        ) from error


def _all_gather_bytes(text: bytes, group: dist.ProcessGroup) -> list[bytes]:
    raw_P = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    return [raw_P.numpy().tobytes() for raw_P in _all_gather_raw(raw_P, group)]


def _all_gather_raw(raw_P: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Everybody's bytes, of any length: lengths first, then all as long as the longest."""
    device = device_of(group)
    with torch.device("cpu"):
        lengths = all_gather(torch.tensor([len(raw_P)], device=device), group).tolist()
        if not 0 <= max(lengths) <= _MAX_BYTES or min(lengths) < 0:
            raise ValueError(
                f"ranks announced messages of {lengths} bytes; at most {_MAX_BYTES:,} are taken: do all ranks call the "
                "same function?"
            )
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=device)
        padded[: len(raw_P)] = raw_P.to(device)
        rows = all_gather(padded, group).view(len(lengths), -1).cpu()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must be to travel through this group: the CPU, unless it has NCCL alone."""
    return torch.device("cpu") if "gloo" in str(dist.get_backend_config(group)) else rank_device()
