"""All panels by name, asked in words and answered in plain data, for a host that is no Python: a web page.

    answer({"do": "show", "panel": "zero", "words": {"dp": "64"}})    {"svg": ..., "said": ...}
    answer({"do": "press", "panel": "plan", "button": "Search", "words": {}})
    answer({"do": "plan", "words": {"gpus": "64"}, "file": "config.json", "text": "{...}"})
    answer({"do": "claim", "id": "C003"})

A word is what an option's value looks like as text; addresses hold the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from course_lib.claims import claims_named
from course_lib.claims.page import as_record
from course_lib.estimate.estimate import SPREAD
from course_lib.language import told, told_svg
from course_lib.panels import runs
from course_lib.panels.collectives import COLLECTIVE, OVERLAP
from course_lib.panels.experts import EXPERTS
from course_lib.panels.kernel import TILES
from course_lib.panels.one_gpu import MEMORY, OPTIMIZER, PRECISION, RECOMPUTE, SCALES
from course_lib.panels.pipeline import PIPELINE, PUZZLE
from course_lib.panels.plans import GAME, PLAN, PLANNER, planned
from course_lib.panels.record import Answer, Control, Panel, Value, answer_of
from course_lib.panels.ring import RING
from course_lib.panels.svg import COLORS
from course_lib.validate import one_of


def _between(what: str, kind: str, stage: str) -> str:
    low, high = getattr(SPREAD[kind, stage], what)
    return f"{low:g} and {high:g} times"


_BYTES = (
    f"Bytes are predicted, not measured: nine in ten published runs needed between "
    f"{_between('memory', 'other', 'one stage')} the prediction, with a pipeline "
    f"{_between('memory', 'other', 'pipeline')}."
)
_SECONDS = (
    f"Seconds are modelled, not measured: nine in ten published runs were between "
    f"{_between('speed', 'other', 'one stage')} as fast, on a measured cloud network "
    f"{_between('speed', 'measured network', 'one stage')}, pipelines there "
    f"{_between('speed', 'measured network', 'pipeline')}."
)
_ALONE = (
    "Seconds are modelled from a link's latency and bandwidth, nothing else uses it; its source stands in "
    "hardware.toml."
)
_UNITS = "Units of time are those that you choose; the order of work is exact, nothing is measured."
_ROOF = "Bytes and FLOPs are counted by formulas; seconds are the least that a GPU's data sheet allows."
_MADE_UP = "Routing is made up, with the skew that you choose; what follows from it is counted exactly."
_EXACT = "Computed exactly; nothing here is measured or modelled."


@dataclass(frozen=True)
class Listed:
    """A panel with the lesson that asks its question, and what its numbers are."""

    panel: Panel
    lesson: str
    basis: str


PANELS = {
    "planner": Listed(PLANNER, "11_finding_a_configuration", f"{_BYTES} {_SECONDS}"),
    "memory": Listed(MEMORY, "01_single_gpu_memory", _BYTES),
    "optimizers": Listed(OPTIMIZER, "02c_fine_tuning", _BYTES),
    "recompute": Listed(RECOMPUTE, "02b_activations", _BYTES),
    "precision": Listed(PRECISION, "02a_precision", _EXACT),
    "collectives": Listed(COLLECTIVE, "00_ranks_and_collectives", _ALONE),
    "ring": Listed(RING, "00_ranks_and_collectives", _EXACT),
    "overlap": Listed(OVERLAP, "03_data_parallel", _SECONDS),
    "zero": Listed(runs.ZERO, "04_zero", f"{_BYTES} {_SECONDS}"),
    "tensor": Listed(runs.TENSOR, "05_tensor_parallel", f"{_BYTES} {_SECONDS}"),
    "sequence": Listed(runs.TENSOR_SEQUENCE, "06_sequence_parallel", f"{_BYTES} {_SECONDS}"),
    "context": Listed(runs.CONTEXT, "07_context_parallel", f"{_BYTES} {_SECONDS}"),
    "pipeline": Listed(PIPELINE, "08_pipeline_parallel", _UNITS),
    "puzzle": Listed(PUZZLE, "08_pipeline_parallel", _UNITS),
    "experts": Listed(EXPERTS, "09b_expert_parallel", _MADE_UP),
    "layout": Listed(runs.LAYOUT, "10_five_d", f"{_BYTES} {_SECONDS}"),
    "tiles": Listed(TILES, "13a_inside_a_gpu", _ROOF),
    "scales": Listed(SCALES, "13b_eight_bits", _EXACT),
    "game": Listed(GAME, "10_five_d", f"{_BYTES} {_SECONDS}"),
    "job": Listed(PLAN, "11_finding_a_configuration", f"{_BYTES} {_SECONDS}"),
}


def described(name: str) -> dict:
    """A panel's controls with words in place of values, its buttons, and what it shows at first."""
    listed = PANELS[name]
    panel = listed.panel
    return {
        "title": told(panel.title),
        "lesson": listed.lesson,
        "basis": told(listed.basis),
        "controls": [_described(key, control) for key, control in panel.controls.items()],
        "presets": {
            key: {name: str(value) for name, value in (panel.start | dict(values)).items()}
            for key, (values, _) in panel.presets.items()
        },
        "buttons": list(panel.slow),
        **_told(panel.answer()),
    }


def _described(name: str, control: Control) -> dict:
    found = {"name": name, "label": told(control.label), "kind": control.kind, "start": str(control.start)}
    found["options"] = [[told(label), str(value)] for label, value in control.options]
    if control.kind == "grid":
        colors = {key: COLORS[label] for label, key in control.options}
        found |= {"cells": control.cells(control.start), "colors": colors}
    return found


def values_of(panel: Panel, words: Mapping[str, str]) -> dict[str, Value]:
    """Return the panel's start with what words, or typed texts, mean; raises ValueError for those of no control."""
    meant = {}
    for name, word in words.items():
        control = panel.controls.get(name)
        known = {str(value): value for _, value in control.options} if control else {}
        typed = control is not None and control.kind in ("strip", "text", "grid")
        meant[name] = word if typed else known.get(word, word)
    return panel.values(meant)


def _told(answer: Answer) -> dict:
    return {"svg": told_svg(answer.svg), "said": told(answer.said)}


def _show(panel: str, words: Mapping[str, str]) -> dict:
    asked = PANELS[panel].panel
    return _told(asked.answer(**values_of(asked, words)))


def _place(panel: str, control: str, value: str, row: int, column: int, option: str) -> dict:
    one_of("control", control, tuple(PANELS[panel].panel.controls))
    grid = PANELS[panel].panel.controls[control]
    placed = grid.press(value, row, column, option)
    return {"value": placed, "cells": grid.cells(placed)}


def _cells(panel: str, control: str, value: str) -> dict:
    one_of("control", control, tuple(PANELS[panel].panel.controls))
    return {"cells": PANELS[panel].panel.controls[control].cells(value)}


def _press(panel: str, button: str, words: Mapping[str, str]) -> dict:
    asked = PANELS[panel].panel
    one_of("button", button, tuple(asked.slow))
    values = values_of(asked, words)
    return _told(answer_of(button, lambda: asked.slow[button](**values)))


def _plan(words: Mapping[str, str], file: str = "", text: str = "") -> dict:
    shown, lines, files, refused = planned(values_of(PLANNER, words), file, text)
    found = {"lines": list(map(told, lines)), "files": files, "refused": refused}
    return _told(answer_of(PLANNER.title, lambda: shown)) | found


def _claim(id: str) -> dict:
    (claim,) = claims_named((id,))
    return {name: as_record(claim)[name] for name in ("answer", "say", "values")}


_DONE = {"show": _show, "press": _press, "place": _place, "cells": _cells, "plan": _plan, "claim": _claim}


def answer(request: Mapping[str, object]) -> dict:
    """Do what is asked; a refusal is {"refused_because": sentence}."""
    fields = dict(request)
    try:
        one_of("do", fields.get("do"), tuple(_DONE))
        if "panel" in fields:
            one_of("panel", fields["panel"], tuple(PANELS))
        return _DONE[fields.pop("do")](**fields)
    except (ValueError, TypeError) as error:
        return {"refused_because": told(str(error))}
