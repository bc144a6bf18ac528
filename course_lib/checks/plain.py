"""Values as bytes that hold data and no code: numbers, texts, lists, dicts, tensors, costs.

What an answer gives back is read with this, never with pickle, which runs what its author wrote. A value of any other
kind arrives as `Foreign`, equal to nothing.
"""

import dataclasses
import json
from typing import Any

import torch

from course_lib.checks.watch import Cost

LENGTH = 8  # bytes of the number before the text
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclasses.dataclass(frozen=True, eq=False)
class Foreign:
    """A value that is no plain data; its kind is all that is known of it."""

    kind: str

    def __repr__(self) -> str:
        return f"an object of class {self.kind}"


def dumps(value: Any) -> bytes:
    """Return the bytes of a value: the length of a JSON text, the text, then the elements of all tensors."""
    blobs: list[bytes] = []
    text = json.dumps(_tree(value, blobs)).encode()
    return b"".join([len(text).to_bytes(LENGTH, "big"), text, *blobs])


def loads(data: bytes) -> Any:
    """Return the value.

    Raises   ValueError (or another error of reading) if these are no bytes of `dumps`
    """
    stop = LENGTH + int.from_bytes(data[:LENGTH], "big")
    blobs = memoryview(data)[stop:]
    return _value(json.loads(data[LENGTH:stop].decode()), blobs)


def _tree(value: Any, blobs: list[bytes]) -> Any:
    """JSON: None, truths, numbers and texts as they are, all else a list that begins with its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return ["bytes", *_placed(bytes(value), blobs)]
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        plain = value.detach().cpu().contiguous()
        elements = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", str(plain.dtype).removeprefix("torch."), list(plain.shape), *_placed(elements, blobs)]
    if isinstance(value, dict):
        return ["dict", *([_tree(key, blobs), _tree(one, blobs)] for key, one in value.items())]
    if isinstance(value, Cost):
        return ["cost", _tree(value.value, blobs), _tree(value.slack, blobs)]
    for kind in (tuple, list):
        if isinstance(value, kind):
            return [kind.__name__, *(_tree(one, blobs) for one in value)]
    return ["foreign", type(value).__name__]


def _placed(data: bytes, blobs: list[bytes]) -> tuple[int, int]:
    start = sum(map(len, blobs))
    blobs.append(data)
    return start, start + len(data)


def _value(tree: Any, blobs: memoryview) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *parts = tree
    if kind == "bytes":
        return bytes(blobs[parts[0] : parts[1]])
    if kind == "tensor":
        name, shape, start, stop = parts
        elements = torch.frombuffer(bytearray(blobs[start:stop] or b"\0"), dtype=torch.uint8)[: stop - start]
        return elements.view(DTYPES[name]).reshape(shape)
    if kind == "dict":
        return {_value(key, blobs): _value(one, blobs) for key, one in parts}
    if kind == "cost":
        return Cost(*(_number(one) for one in parts))
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](_value(one, blobs) for one in parts)
    if kind == "foreign":
        return Foreign(str(parts[0]))
    raise ValueError(f"{kind!r} is no kind of plain data")


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return value
