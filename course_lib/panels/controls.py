"""The controls of all panels, and the runs and clusters that their values mean: named as their fields are."""

from collections.abc import Iterable, Mapping

from course_lib.config import PRESETS, ModelConfig, preset
from course_lib.hardware import GPUS, LINKS, Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.layout.partition import CP_METHODS
from course_lib.layout.record import DEFAULTS
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS
from course_lib.panels.record import Control, Value
from course_lib.run import OPTIMIZERS, RECIPES, Run

Options = tuple[tuple[str, Value], ...]


def powers(first: int, last: int, *others: int) -> Options:
    """(label, value) from first to last, doubling, and others between them."""
    values = {first << place for place in range((last // first).bit_length())} | set(others)
    return tuple((f"{value:,}", value) for value in sorted(values))


def named(values: Iterable[Value]) -> Options:
    """(label, value) of values that are their own names."""
    return tuple((str(value), value) for value in values)


def of_table(table: Mapping, keep=lambda record: True) -> Options:
    """(name, key) of the records of a table."""
    return tuple((record.name, key) for key, record in table.items() if keep(record))


LENGTHS = powers(64, 131_072)
_TIMES = named((0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0))
_BF16_GPUS = of_table(GPUS, lambda known: known.bf16_flops)
_LISTS: dict[str, tuple[str, Options]] = {  # what it is called, from what is chosen
    "model": ("model", named(PRESETS)),
    "recipe": ("precision", named(RECIPES)),
    "optimizer": ("optimizer", named(OPTIMIZERS)),
    "attention": ("attention", (("fused (FlashAttention)", "fused"), ("standard (all scores)", "standard"))),
    "recompute": ("recomputation", named(("none", "selective", "full"))),
    "gpu": ("GPU", _BF16_GPUS),
    "inside": ("inside a node", of_table(LINKS, lambda known: known.kind in ("nvlink", "pci"))),
    "between": ("between nodes", of_table(LINKS, lambda known: known.kind == "network")),
    "link": ("slowest link", of_table(LINKS)),
    "sequence_parallel": ("SP", (("no", False), ("yes", True))),
    "regather": ("inputs kept", (("all tokens", False), ("own tokens (SP), gathered again", True))),
    "fewer_at_ends": ("layers", (("evenly", False), ("one less at both ends", True))),
    "overlap": ("overlap with backward", (("yes", True), ("no", False))),
    "cp_method": ("method", named(CP_METHODS)),
    "cp_sharding": ("sequence sharding", named(SEQUENCE_SHARDINGS)),
    "schedule": ("schedule", ()),
    "precision": ("precision", named(("bf16", "fp8"))),
}
_SLIDERS: dict[str, tuple[str, Options]] = {
    "seq_len": ("sequence", LENGTHS),
    "micro_batch": ("micro-batch", powers(1, 64)),
    "micro_batches": ("micro-batches", powers(1, 512, 120)),
    "gpus_per_node": ("GPUs a node", powers(1, 64)),
    "gpus": ("GPUs", powers(8, 512)),
    "sequences": ("sequences a step", powers(64, 4096)),
    "dp": ("dp", powers(1, 2048)),
    **{axis: (axis, powers(1, 64)) for axis in ("cp", "tp", "pp")},
    "ep": ("ep", powers(1, 256)),
    "zero_stage": ("ZeRO stage", named(range(4))),
    "v": ("stages a rank", named(range(1, 9))),
    "buckets": ("buckets", named(range(1, 25))),
    "ranks": ("ranks", powers(2, 1024)),
    **{name: (name.replace("_", " "), _TIMES) for name in ("forward", "input_gradient", "weight_gradient")},
    "transfer": ("transfer", named((0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0))),
    "experts": ("experts", powers(4, 128)),
    "top_k": ("k", named((1, 2, 3, 4, 6, 8))),
    "capacity": ("capacity", (("none: dropless", 0.0), *named((0.5, 1.0, 1.25, 1.5, 2.0, 4.0)))),
    "nodes": ("nodes", powers(1, 16)),
    "max_nodes": ("nodes a token", (("no limit", 0), *named((1, 2, 3, 4)))),
    "skew": ("skew", named((0.0, 0.25, 0.5, 0.75, 1.0, 1.5))),
    "d_model": ("d_model", powers(512, 8192)),
    "rows": ("rows", powers(64, 16_384)),
    **{f"tile_{of}": (f"tile, {of}", powers(16, 256)) for of in "mn"},
}


def controls(**starts: Value | tuple[Value, Options]) -> dict[str, Control]:
    """Return the controls of these names with what they start at, or (start, options) for others than the table's."""
    found = {}
    for name, given in starts.items():
        label, usual = (_LISTS | _SLIDERS)[name]
        start, options = given if isinstance(given, tuple) else (given, usual)
        found[name] = Control(label, options, start, "slider" if name in _SLIDERS else "list")
    return found


def layout_of(values: Mapping[str, Value]) -> Layout:
    """Return the layout that these values describe, without what it has not; raises ValueError as `Layout`."""
    return Layout(**{name: value for name, value in values.items() if name in DEFAULTS})


def run_of(values: Mapping[str, Value], config: ModelConfig | None = None, **fields) -> Run:
    """Return the run that these values describe, of their model or another; raises ValueError as `Layout` and `Run`."""
    how = {name: values[name] for name in ("recipe", "attention", "optimizer") if name in values} | fields
    return Run(config or preset(values["model"]), layout_of(values), values["seq_len"], **how)


def cluster_of(values: Mapping) -> Cluster:
    """Return the cluster that these values describe: 8 GPUs a node unless they say how many, the GPU's own links."""
    inside = values.get("inside", gpu(values["gpu"]).link)
    return Cluster(gpu(values["gpu"]), link(inside), link(values["between"]), values.get("gpus_per_node", 8))
