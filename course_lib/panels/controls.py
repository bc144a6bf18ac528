"""The controls that several panels have, by the names that Layout, Run and Cluster give their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from course_lib.config import PRESETS
from course_lib.hardware import GPUS, LINKS, Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.layout.partition import CP_METHODS
from course_lib.layout.record import DEFAULTS
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS
from course_lib.memory.budget import Budget
from course_lib.memory.states import OPTIMIZERS, RECIPES
from course_lib.palette import KINDS
from course_lib.panels.record import Control, Value
from course_lib.panels.svg import Bars

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


_NODE_LINKS = of_table(LINKS, lambda known: known.kind in ("nvlink", "pci"))
_NETWORKS = of_table(LINKS, lambda known: known.kind == "network")
_BF16_GPUS = of_table(GPUS, lambda known: known.bf16_flops)
_CONTROLS: dict[str, tuple[str, str, Options]] = {  # what it is called, how it is chosen, from what
    "model": ("model", "list", named(name for name, config in PRESETS.items() if config.family == "llama")),
    "seq_len": ("sequence", "slider", powers(64, 2**20)),
    "micro_batch": ("micro-batch", "slider", powers(1, 64)),
    "micro_batches": ("micro-batches", "slider", powers(1, 512, 120)),
    "recipe": ("precision", "list", named(RECIPES)),
    "optimizer": ("optimizer", "list", named(OPTIMIZERS)),
    "attention": ("attention", "list", (("fused (FlashAttention)", "fused"), ("standard (all scores)", "standard"))),
    "recompute": ("recomputation", "list", named(("none", "selective", "full"))),
    "gpu": ("GPU", "list", _BF16_GPUS),
    "inside": ("inside a node", "list", _NODE_LINKS),
    "between": ("between nodes", "list", _NETWORKS),
    "gpus_per_node": ("GPUs a node", "slider", powers(1, 64)),
    "dp": ("dp", "slider", powers(1, 2048)),
    "cp": ("cp", "slider", powers(1, 64)),
    "tp": ("tp", "slider", powers(1, 64)),
    "pp": ("pp", "slider", powers(1, 64)),
    "ep": ("ep", "slider", powers(1, 256)),
    "zero_stage": ("ZeRO stage", "slider", named(range(4))),
    "sequence_parallel": ("SP", "list", (("no", False), ("yes", True))),
    "regather": ("inputs kept", "list", (("all tokens", False), ("own tokens (SP), gathered again", True))),
    "schedule": ("schedule", "list", ()),
    "v": ("stages a rank", "slider", named(range(1, 9))),
    "cp_method": ("method", "list", named(CP_METHODS)),
    "cp_sharding": ("sequence sharding", "list", named(SEQUENCE_SHARDINGS)),
}


def controls(**starts: Value | tuple[Value, Options]) -> dict[str, Control]:
    """Return the controls of these names with what they start at, or (start, options) for others than the table's."""
    found = {}
    for name, start in starts.items():
        label, kind, usual = _CONTROLS[name]
        first, options = start if isinstance(start, tuple) else (start, usual)
        found[name] = Control(label, options, first, kind)
    return found


# ------------------------------------------------------------------------------------ from values to records
def layout_of(values: Mapping[str, Value]) -> Layout:
    """Return the layout that these values describe; what a layout has not is left out.

    Raises   ValueError as `Layout`
    """
    return Layout(**{name: value for name, value in values.items() if name in DEFAULTS})


def cluster_of(values: Mapping) -> Cluster:
    """Return the cluster that these values describe: 8 GPUs a node unless they say how many, the GPU's own links."""
    inside = values.get("inside", gpu(values["gpu"]).link)
    return Cluster(gpu(values["gpu"]), link(inside), link(values["between"]), values.get("gpus_per_node", 8))


def kinds_of(budget: Budget) -> dict[str, float]:
    """Return the bytes of a budget's largest moment by kind, as a bar has them."""
    found = budget.at_peak | {"overhead": sum(budget.overheads.values())}
    return {kind: found[kind] for kind in KINDS if found.get(kind)}


def budget_bars(title: str, budgets: Mapping[str, Budget], gpus: Iterable[str], **look) -> Bars:
    """Return a bar for each budget, and lines at what programs see of these GPUs; keys of `hardware.GPUS`."""
    limits = {gpu(key).name: gpu(key).usable_bytes for key in gpus}
    return Bars(title, {label: kinds_of(budget) for label, budget in budgets.items()}, limits=limits, **look)
