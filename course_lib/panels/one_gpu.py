"""One GPU: what it holds (lesson 1), number formats (2a), blocks computed again (2b), optimizers (2c), scales (13b)."""

import math
from collections.abc import Mapping

from course_lib.config import preset
from course_lib.float_formats import FORMATS
from course_lib.flops import step_flops
from course_lib.hardware import GPUS, gpu
from course_lib.memory.activations import layer_terms, part_of
from course_lib.memory.budget import budgets, fits
from course_lib.palette import KINDS
from course_lib.panels.controls import controls, named, of_table, powers, run_of
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Box, Chart, bars, columns
from course_lib.run import OPTIMIZERS
from course_lib.tensors import count_parameters
from course_lib.units import show_bytes

COMPARED = ("t4", "a100-40", "h100", "h200", "b200")


def kinds_of(budget) -> dict[str, int]:
    """Bytes by kind, in the fixed order and without zeros, of a mapping or of a `Budget`'s largest moment."""
    if isinstance(budget, Mapping):
        given = dict(budget)
    else:
        given = dict(budget.at_peak)
        given["overhead"] = sum(getattr(budget, "overheads", {}).values())
    if unknown := set(given) - set(KINDS):
        raise ValueError(f"kinds {sorted(unknown)} have no colour; use {', '.join(KINDS)}")
    return {kind: int(given[kind]) for kind in KINDS if kind != "free" and given.get(kind, 0)}


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def _draw_memory(**values) -> Shown:
    """What is there between two steps and at the largest moment of one, and which GPUs have room for it."""
    run = run_of(values)
    needed, gpus = budgets(run)[0], [gpu(key) for key in dict.fromkeys((*COMPARED, values["gpu"]))]
    total, states = needed.total_bytes, needed.states_bytes
    between = {"parameters": needed.parameters, "optimizer": needed.optimizer}
    rows = {
        "between steps": between | {"overhead": sum(needed.overheads.values())},
        "largest moment": kinds_of(needed),
    }
    said = (
        f"{_gigabytes(total)} = {total / 2**30:,.1f} GiB at the largest moment of a step ({needed.moment}); "
        f"{_gigabytes(states)} ({states / 2**30:,.1f} GiB) for {count_parameters(run.config):,} parameters, their "
        "gradients and the optimizer."
    )
    for words, which in (("Fits", True), ("Out of memory", False)):
        names = [one.name for one in gpus if fits(needed, one) == which]
        said += f" {words}: {', '.join(names)}." * bool(names)
    title = f"{values['model']}: {_gigabytes(total)} at the largest moment"
    return [bars(title, rows, marks={one.name: one.usable_bytes for one in gpus})], said


def _draw_optimizers(**values) -> Shown:
    needed, device = {name: budgets(run_of(values, optimizer=name))[0] for name in OPTIMIZERS}, gpu(values["gpu"])
    fit = ", ".join(name for name, one in needed.items() if fits(one, device)) or "none"
    said = f"{device.name} gives programs {show_bytes(device.usable_bytes)}. Fits: {fit}."
    said += "".join(f" {name} needs {_gigabytes(one.total_bytes)}." for name, one in needed.items())
    title = f"{values['model']}, all weights trained: the largest moment of a step"
    rows = {name: kinds_of(one) for name, one in needed.items()}
    return [bars(title, rows, marks={device.name: device.usable_bytes})], said


_SIZES = controls(model="llama-3.1-8b", seq_len=4096, micro_batch=1)
_GPU = controls(gpu=("h100", of_table(GPUS)))
MEMORY = Panel(
    "Memory of one GPU",
    _SIZES | controls(recipe="bf16-master", optimizer="adamw", attention="fused", recompute="none") | _GPU,
    _draw_memory,
)
OPTIMIZER = Panel(
    "Optimizers and memory",
    _SIZES | controls(micro_batches=(1, powers(1, 16)), recipe="bf16-master", recompute="none") | _GPU,
    _draw_optimizers,
)

MODEL = preset("llama-3.2-1b")
BLOCKS = MODEL.num_layers


def _draw_recompute(blocks: str, recompute: str, **values) -> Shown:
    """What each block keeps, and what is there when backward comes to it: its own activations are whole again."""
    parts = [part_of(run_of({**values, "recompute": how}, MODEL)) for how in ("none", recompute)]
    whole, less = (sum(sum(half.values()) for half in layer_terms(part, has_experts=False)) for part in parts)
    kept = [less if again == "1" else whole for again in blocks]
    held = [sum(kept[: layer + 1]) for layer in range(BLOCKS)]
    each, moments = (
        {str(n): {"kept": size, "computed again": whole - kept[n]} for n, size in enumerate(sizes)}
        for sizes in (kept, held)
    )
    tokens, count = values["micro_batch"] * values["seq_len"], blocks.count("1")
    once, again = (step_flops(MODEL, tokens, values["seq_len"], name) for name in ("none", recompute))
    totals = [sum(parts.values()) for parts in moments.values()]
    said = (
        f"{count} of {BLOCKS} blocks are computed again: {show_bytes(sum(kept))} are kept in place of "
        f"{show_bytes(BLOCKS * whole)}. The largest moment of backward is at block {totals.index(max(totals))}: "
        f"{show_bytes(max(totals))}. A step computes {(again - once) / once * count / BLOCKS:.1%} more."
    )
    return [
        columns(f"{MODEL.name}: activations of each block", each),
        columns("Activations when backward comes to a block", moments, marks={"none again": BLOCKS * whole}),
    ], said


RECOMPUTE = Panel(
    "Recomputation, block by block",
    {"blocks": Control("again", named(map(str, range(BLOCKS))), "0" * BLOCKS, "strip")}
    | controls(recompute=("full", named(("selective", "full"))), seq_len=(4096, powers(256, 65_536)))
    | controls(micro_batch=1, attention="fused"),
    _draw_recompute,
    {
        "every block": ({"blocks": "1" * BLOCKS}, ""),
        "every second block": ({"blocks": "01" * (BLOCKS // 2)}, ""),
        "the first half": ({"blocks": "1" * (BLOCKS // 2) + "0" * (BLOCKS - BLOCKS // 2)}, ""),
    },
)

SHOWN = ("fp32", "bf16", "fp16")


def outcome(weight: float, update: float, after: float) -> str:
    """Say what became of an update that was added to a weight, all three as stored."""
    if math.inf in (weight, update, after):
        return "overflows"
    if update == 0:
        return "the update underflows to zero"
    if weight == 0:
        return "the weight underflows to zero"
    if after == weight:
        return "the update is swallowed"
    arrived = (after - weight) / update
    return "kept" if abs(arrived - 1) < 0.05 else f"{100 * arrived:.0f} % of the update arrive"


def add(name: str, weight: float, update: float) -> tuple[float, float, float]:
    """Return weight, update and their sum as the format stores them; sums are taken in FP32 and then rounded."""
    stored, change = (FORMATS[name].stored(value) for value in (weight, update))
    return stored, change, FORMATS[name].stored(FORMATS["fp32"].stored(stored + change))


def _range_chart(title: str, ends: tuple[int, int], of: Mapping, notes: Mapping, numbers: Mapping) -> Chart:
    """The range (smallest, largest) of each format by the power of ten, with named numbers as lines."""
    rows = {name: [Box(*map(math.log10, each), "range")] for name, each in of.items()}
    marks = {f"{name} {number:g}": math.log10(number) for name, number in numbers.items()}
    return Chart(title, rows, ends[1], ends[0], "exponent", marks, notes, ground=True)


def _draw_precision(weight: float, update: float) -> Shown:
    """The range of each format with the weight and the update in it, and what becomes of their sum."""
    became = {name: add(name, weight, update) for name in SHOWN}
    notes = {name: outcome(*each) for name, each in became.items()}
    said = (f"{name}: {a:.6g} + {b:.4g} gives {c:.9g}, {notes[name]}." for name, (a, b, c) in became.items())
    ranges = {name: (FORMATS[name].smallest, FORMATS[name].largest) for name in SHOWN}
    title, numbers = "Numbers of each format, by their power of ten", {"weight": weight, "update": update}
    return [_range_chart(title, (-46, 39), ranges, notes, numbers)], " ".join(said)


def _magnitudes(**ranges: tuple[int, int, float]) -> dict[str, Control]:
    """Sliders from one power of ten to another, with what each starts at."""
    found = {}
    for name, (lowest, highest, start) in ranges.items():
        values = [digit * 10.0**power for power in range(lowest, highest) for digit in (1, 3)] + [10.0**highest]
        found[name] = Control(name, tuple((f"{value:g}", value) for value in values), start, "slider")
    return found


PRECISION = Panel(
    "A weight and an update in three formats", _magnitudes(weight=(-8, 5, 1.0), update=(-12, 5, 1e-3)), _draw_precision
)

SCALED = ("int8", "fp8 e4m3", "fp8 e5m2", "fp4 e2m1")


def beside(name: str, number: float, outlier: float) -> float:
    """Return what a number becomes in a block whose largest is the outlier, by one scale for both."""
    scale = max(number, outlier) / FORMATS[name].largest
    return FORMATS[name].stored(number / scale) * scale


def _draw_scaled(number: float, outlier: float) -> Shown:
    """The numbers that each format can store of a block with an outlier, and what becomes of an ordinary one."""
    largest, became = max(number, outlier), {name: beside(name, number, outlier) for name in SCALED}
    notes = {name: f"off by {abs(got / number - 1):.1%}" if got else "becomes 0" for name, got in became.items()}
    ranges = {
        name: [size / FORMATS[name].largest * largest for size in (FORMATS[name].smallest, FORMATS[name].largest)]
        for name in SCALED
    }
    said = f"{number:g} beside {outlier:g}: {', '.join(f'{name} {note}' for name, note in notes.items())}."
    title, numbers = "What one scale can store, by the power of ten", {"number": number, "outlier": outlier}
    return [_range_chart(title, (-12, 7), ranges, notes, numbers)], said


SCALES = Panel(
    "One scale for an ordinary number and an outlier",
    _magnitudes(number=(-6, 1, 1.0), outlier=(0, 6, 1000.0)),
    _draw_scaled,
)
