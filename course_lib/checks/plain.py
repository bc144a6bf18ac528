"""Values as bytes that hold data and no code: numbers, texts, lists, dicts, tensors, costs.

What an answer gives back is read with this, never with pickle, which runs what its author wrote. A value of any other
kind arrives as `Foreign`, equal to nothing.
"""

import base64
import dataclasses
import json
from typing import Any

import torch

from course_lib.checks.watch import Cost

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclasses.dataclass(frozen=True, eq=False)
class Foreign:
    """A value that is no plain data; its kind is all that is known of it."""

    kind: str

    def __repr__(self) -> str:
        return f"an object of class {self.kind}"


def dumps(value: Any) -> bytes:
    """Return the bytes of a value: a JSON text, with the bytes of tensors in base 64."""
    return json.dumps(_tree(value)).encode()


def loads(data: bytes) -> Any:
    """Return the value.

    Raises   ValueError (or another error of reading) if these are no bytes of `dumps`
    """
    return _value(json.loads(data.decode()))


def _tree(value: Any) -> Any:
    """JSON: None, truths, numbers and texts as they are, all else a list that begins with its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        plain = value.detach().cpu().contiguous()
        elements = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", str(plain.dtype).removeprefix("torch."), list(plain.shape), _tree(elements)[1]]
    if isinstance(value, dict):
        return ["dict", *([_tree(key), _tree(one)] for key, one in value.items())]
    if isinstance(value, Cost):
        return ["cost", _tree(value.value), _tree(value.slack)]
    for kind in (tuple, list):
        if isinstance(value, kind):
            return [kind.__name__, *map(_tree, value)]
    return ["foreign", type(value).__name__]


def _value(tree: Any) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *parts = tree
    if kind == "bytes":
        return base64.b64decode(parts[0])
    if kind == "tensor":
        name, shape, text = parts
        data, dtype = bytearray(base64.b64decode(text)), DTYPES[name]
        return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)
    if kind == "dict":
        return {_value(key): _value(one) for key, one in parts}
    if kind == "cost":
        return Cost(*map(_number, parts))
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](map(_value, parts))
    if kind == "foreign":
        return Foreign(str(parts[0]))
    raise ValueError(f"{kind!r} is no kind of plain data")


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return value
