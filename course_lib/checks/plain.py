"""Values as bytes that hold data and no code: numbers, texts, lists, dicts, tensors, the course's own records.

What an answer gives back is read with this, never with pickle, which runs what its author wrote. A value of any other
kind arrives as `Foreign`, equal to nothing.
"""

import dataclasses
import json
import sys
from typing import Any

import torch

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
    """JSON: None, truths and texts as they are, all else a list that begins with its kind."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return ["int", format(int(value), "x")]
    if isinstance(value, float):
        return ["float", float(value).hex()]
    if isinstance(value, bytes):
        return ["bytes", *_placed(bytes(value), blobs)]
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        plain = value.detach().cpu().contiguous()
        elements = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", str(plain.dtype).removeprefix("torch."), list(plain.shape), *_placed(elements, blobs)]
    if isinstance(value, dict):
        return ["dict", [[_tree(key, blobs), _tree(one, blobs)] for key, one in value.items()]]
    for kind in (tuple, list, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [_tree(one, blobs) for one in value]]
    if isinstance(value, slice | range):
        return [type(value).__name__, *(_tree(one, blobs) for one in (value.start, value.stop, value.step))]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _of_the_course(type(value).__module__):
        fields = [[field.name, _tree(getattr(value, field.name), blobs)] for field in dataclasses.fields(value)]
        return ["record", type(value).__module__, type(value).__qualname__, fields]
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _tree(value.item(), blobs)
    return ["foreign", type(value).__name__]


def _placed(data: bytes, blobs: list[bytes]) -> tuple[int, int]:
    start = sum(map(len, blobs))
    blobs.append(data)
    return start, start + len(data)


def _value(tree: Any, blobs: memoryview) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *parts = tree
    if kind == "int":
        return int(parts[0], 16)
    if kind == "float":
        return float.fromhex(parts[0])
    if kind == "bytes":
        return bytes(blobs[parts[0] : parts[1]])
    if kind == "tensor":
        name, shape, start, stop = parts
        elements = torch.frombuffer(bytearray(blobs[start:stop] or b"\0"), dtype=torch.uint8)[: stop - start]
        return elements.view(DTYPES[name]).reshape(shape)
    if kind == "dict":
        return {_value(key, blobs): _value(one, blobs) for key, one in parts[0]}
    if kind in ("tuple", "list", "set", "frozenset"):
        make = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}[kind]
        return make(_value(one, blobs) for one in parts[0])
    if kind in ("slice", "range"):
        return {"slice": slice, "range": range}[kind](*(_value(one, blobs) for one in parts))
    if kind == "dtype":
        return DTYPES[parts[0]]
    if kind == "record":
        return _record(parts[0], parts[1], {name: _value(one, blobs) for name, one in parts[2]})
    if kind == "foreign":
        return Foreign(str(parts[0]))
    raise ValueError(f"{kind!r} is no kind of plain data")


def _record(module: str, name: str, fields: dict[str, Any]) -> Any:
    """Build a dataclass of the course through its own constructor, which checks the fields."""
    kind = getattr(sys.modules.get(module), name, None) if _of_the_course(module) else None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{module}.{name} is no record of the course")
    given = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{name: value for name, value in fields.items() if name in given})


def _of_the_course(module: str) -> bool:
    return module.split(".")[0] == "course_lib"
