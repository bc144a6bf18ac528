"""The precision explorer: what each number format makes of a weight, and of an update that is added to it."""

import math
from dataclasses import dataclass

import ipywidgets as widgets
import torch

from course_lib.plots.formats import FORMATS, draw_ranges
from course_lib.validate import checked
from course_lib.widgets import parts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PrecisionRow:
    """One format: the weight and the update as stored, their sum as stored, and what happened."""

    name: str
    weight: float
    update: float
    after: float
    verdict: str


@checked
def explore_precision(weight: float, update: float) -> list[PrecisionRow]:
    """Store a weight and an update in each format, add them there, and say what is lost."""
    rows = []
    for name, dtype in DTYPES.items():
        stored, change = torch.tensor(weight).to(dtype), torch.tensor(update).to(dtype)
        after = (stored + change).item()
        rows.append(
            PrecisionRow(name, stored.item(), change.item(), after, _verdict(stored.item(), change.item(), after))
        )
    return rows


def _verdict(weight: float, update: float, after: float) -> str:
    if math.isinf(weight) or math.isinf(update) or math.isinf(after):
        return "overflows"
    if update == 0:
        return "the update underflows to zero"
    if weight == 0:
        return "the weight underflows to zero"
    if after == weight:
        return "the update is swallowed"
    kept = (after - weight) / update
    return "kept" if abs(kept - 1) < 0.05 else f"{100 * kept:.0f} % of the update arrive"


@checked
def precision_table(rows: list[PrecisionRow]) -> str:
    """The rows as an HTML table."""
    cells = "".join(
        f"<tr><td><b>{r.name}</b></td><td>{r.weight:.6g}</td><td>{r.update:.4g}</td><td>{r.after:.9g}</td><td>{r.verdict}</td></tr>"
        for r in rows
    )
    head = "<tr><th>format</th><th>weight as stored</th><th>update as stored</th><th>weight + update</th><th></th></tr>"
    return f"<table cellpadding='6'>{head}{cells}</table>"


def precision_explorer() -> widgets.VBox:
    """Two sliders, a weight and an update: which format keeps the sum."""
    weight = parts.slider("weight", _magnitudes(-8, 5), 1.0)
    update = parts.slider("update", _magnitudes(-12, 5), 1e-3)

    def predict() -> tuple[bytes, str]:
        rows = explore_precision(weight.value, update.value)
        marks = {"weight": weight.value, "update": update.value}
        shown = [FORMATS[row.name] for row in rows]
        return parts.figure_png(lambda axes: draw_ranges(axes, shown, marks), 2.5), precision_table(rows)

    return parts.picture_panel([weight, update], predict)


def _magnitudes(lowest: int, highest: int) -> list[tuple[str, float]]:
    values = [digit * 10.0**exponent for exponent in range(lowest, highest) for digit in (1, 3)] + [10.0**highest]
    return [(f"{value:.0e}" if value < 1e-3 or value >= 1e4 else f"{value:g}", value) for value in values]
