"""What stands in a manifest, field by field: a file may have the right checksum and still say what no save says.

step        steps done
layout      of the run that saved, as `Layout.to_dict` says it; model: its config
optimizer   options: of each group its learning rate and the like; steps: how many each parameter has taken
about       what the caller gave
files       name -> bytes, sha256
tensors     name -> dtype, shape, boxes: of each box its offsets, sizes, file, first byte and bytes
"""

from course_lib.comm.records import DTYPES
from course_lib.config import MlaConfig, ModelConfig, MoeConfig, RopeScaling
from course_lib.layout import Layout

OPTIONS = ("lr", "betas", "eps", "weight_decay")


def wrong_field(manifest: dict) -> str | None:
    """Return the name of the first field that is not as a save writes it; None if all are."""
    for name, is_right in _FIELDS.items():
        if not is_right(manifest.get(name)):
            return name
    for kind, is_right in (("files", _is_file), ("tensors", _is_tensor)):
        for name, entry in manifest[kind].items():
            if not is_right(entry):
                return f"{name} of {kind}"
    return None


def config_from_dict(values: dict) -> ModelConfig:
    """Return the config that `dataclasses.asdict` was given, after JSON; a wrong field raises as `ModelConfig` does."""
    parts = {"rope_scaling": RopeScaling, "moe": MoeConfig, "mla": MlaConfig}
    return ModelConfig(**{key: parts[key](**x) if key in parts and x is not None else x for key, x in values.items()})


def _is_dict(entry: object) -> bool:
    return isinstance(entry, dict)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63  # as torch has sizes


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_record(build):
    """Whether `build` takes the entry: a record of its own checks its fields."""

    def is_right(entry: object) -> bool:
        try:
            return _is_dict(entry) and build(entry) is not None
        except (ValueError, TypeError):
            return False

    return is_right


def _is_optimizer(entry: object) -> bool:
    options, steps = (entry.get("options"), entry.get("steps")) if _is_dict(entry) else (None, None)
    if not isinstance(options, list) or not options or not _is_dict(steps):
        return False
    return all(map(_is_count, steps.values())) and all(map(_are_options, options))


def _are_options(entry: object) -> bool:
    if not _is_dict(entry) or not set(OPTIONS).issuperset(entry):
        return False
    betas = entry.get("betas", [0.0, 0.0])
    numbers = [value for name, value in entry.items() if name != "betas"]
    is_pair = isinstance(betas, list) and len(betas) == 2
    return is_pair and all(type(value) in (int, float) for value in (*betas, *numbers))


def _is_file(entry: object) -> bool:
    return _is_dict(entry) and _is_count(entry.get("bytes")) and isinstance(entry.get("sha256"), str)


def _is_tensor(entry: object) -> bool:
    if not _is_dict(entry) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
        return False
    shape, boxes = entry.get("shape"), entry.get("boxes")
    return _are_counts(shape) and isinstance(boxes, list) and all(_is_box(box, shape) for box in boxes)


def _is_box(entry: object, shape: list[int]) -> bool:
    """Whether it is [offsets, sizes, file, first byte, bytes], and inside of its tensor."""
    if not isinstance(entry, list) or len(entry) != 5:
        return False
    offsets, sizes, file, *place = entry
    if not (_are_counts(offsets) and _are_counts(sizes) and len(offsets) == len(sizes) == len(shape)):
        return False
    is_inside = all(low + size <= whole for low, size, whole in zip(offsets, sizes, shape, strict=True))
    return is_inside and isinstance(file, str) and _are_counts(place)


_FIELDS = {
    "step": _is_count,
    "layout": _is_record(Layout.from_dict),
    "model": _is_record(config_from_dict),
    "optimizer": _is_optimizer,
    "about": _is_dict,
    "files": _is_dict,
    "tensors": _is_dict,
}
