"""What stands in a manifest, field by field: a file may have the right checksum and still say what no save says.

step        steps done
layout      of the run that saved, as `Layout.to_dict` says it; model: its config
optimizer   options: of each group its learning rate and the like; steps: how many each parameter has taken
about       what the caller gave
files       name -> bytes, sha256
tensors     name -> dtype, shape, boxes: of each box its offsets, sizes, file, first byte and bytes
"""

from functools import partial
from typing import Literal

from course_lib.comm.records import DTYPES
from course_lib.config import config_from_dict
from course_lib.layout import Layout
from course_lib.validate import Index, checked, instance, whole

OPTIONS = ("lr", "betas", "eps", "weight_decay")


def wrong_field(manifest: dict) -> str | None:
    """Return the name of the first field that is not as a save writes it; None if all are."""
    fields = [(name, name, manifest.get(name)) for name in _CHECKS]
    for kind in ("files", "tensors"):
        entries = manifest.get(kind) if isinstance(manifest.get(kind), dict) else {}
        fields += [(f"{name} of {kind}", kind[:-1], entry) for name, entry in entries.items()]
    for told, kind, entry in fields:
        try:
            (_CHECKS | _ENTRIES)[kind](entry)
        except (ValueError, TypeError):
            return told
    return None


@checked
def _check_optimizer(options: list[dict], steps: dict[str, Index]) -> None:
    for one in options:
        _check_options(**one)
    if not options:
        raise ValueError("options has no group")


@checked
def _check_options(
    lr: float = 0.0, betas: tuple[float, float] = (0.0, 0.0), eps: float = 0.0, weight_decay: float = 0.0
):
    """Names as in OPTIONS."""


@checked
def _check_file(bytes: Index, sha256: str) -> None:
    """What `files.file_entry` says."""


@checked
def _check_tensor(
    dtype: Literal[tuple(DTYPES)], shape: list[Index], boxes: list[tuple[list[Index], list[Index], str, Index, Index]]
) -> None:
    for offsets, sizes, *_ in boxes:
        if not all(low + size <= whole for low, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError("a box is not inside of its tensor")


def _fields_of(check):
    """A check of an object's fields, from one that takes them by name."""
    return lambda entry: check(**entry)


_is_object = partial(instance, "it", kind=dict)
_CHECKS = {
    "step": partial(whole, "step", least=0),
    "layout": lambda entry: _is_object(entry) or Layout.from_dict(entry),
    "model": lambda entry: _is_object(entry) or config_from_dict(entry),
    "optimizer": _fields_of(_check_optimizer),
    "about": _is_object,
    "files": _is_object,
    "tensors": _is_object,
}
_ENTRIES = {"file": _fields_of(_check_file), "tensor": _fields_of(_check_tensor)}
