"""The planner to play with: ranked layouts, what they hold, speed against memory, and the best one as a file."""

from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Literal

import ipywidgets as widgets

from course_lib.hardware import GPUS, LINKS, Cluster, gpu, link
from course_lib.plan import Job, Plan, explain, search, table
from course_lib.plan.measured import MODELS
from course_lib.plots.choosing import draw_front, draw_options
from course_lib.validate import Size, check_fields, checked
from course_lib.widgets import parts

NETWORKS = tuple(name for name, known in LINKS.items() if known.kind == "network")
LARGE_GPUS = tuple(name for name, known in GPUS.items() if known.bf16_flops and known.memory_bytes >= 40e9)
SHOWN = 6


@dataclass(frozen=True)
class PlanChoice:
    """What the controls say; `between` is a key of LINKS."""

    model: Literal[tuple(MODELS)] = "8B"
    gpu_key: Literal[LARGE_GPUS] = "h100"
    num_gpus: Size = 64
    between: Literal[NETWORKS] = "efa"
    seq_len: Size = 4096
    sequences: Size = 256

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def job(self) -> Job:
        cluster = Cluster(gpu(self.gpu_key), link(gpu(self.gpu_key).link), link(self.between))
        tokens = self.seq_len * self.sequences
        return Job(MODELS[self.model], cluster, self.num_gpus, self.seq_len, tokens, engine="nanotron")


@checked
@lru_cache(maxsize=16)
def explore_plan(chosen: PlanChoice) -> Plan:
    """Return the plan of a choice, by the rates that are fitted to runs of nanotron.

    Raises   ValueError if no layout divides, or none fits
    """
    return search(chosen.job)


@checked
def plan_png(found: Plan) -> bytes:
    """The memory of the best layouts, and all that fit as speed against memory."""
    shown = found.ranked[:SHOWN]
    return parts.stacked_png(
        [
            (lambda axes: draw_options(axes, shown), 1.5 + 0.3 * len(shown)),
            (lambda axes: draw_front(axes, found.ranked, found.front), 3.0),
        ]
    )


@checked
def plan_text(found: Plan) -> str:
    """The ranked layouts and the explanation of the first, as HTML."""
    lines = [*table(found.ranked[:SHOWN]), "", *explain(found), "", "All figures are modelled."]
    return f'<pre style="overflow-x: auto">{escape(chr(10).join(lines))}</pre>'


@checked
def save_layout(found: Plan, path: str = "layout.txt") -> str:
    """Write the best layout as the words that `course train --layout` takes; return what was done."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{found.best.layout}\n")
    return f"{path}: {found.best.layout}"


@checked
def plan_explorer(start: PlanChoice | None = None) -> widgets.VBox:
    """Controls for a job, a picture of its layouts, and a button that writes the best one to layout.txt."""
    start = start or PlanChoice()
    controls = {
        "model": parts.choice("model", list(MODELS), start.model),
        "gpu_key": parts.choice("GPU", [(GPUS[key].name, key) for key in LARGE_GPUS], start.gpu_key),
        "num_gpus": parts.slider("GPUs", parts.powers_of_two(8, 512), start.num_gpus),
        "between": parts.choice("between nodes", [(LINKS[key].name, key) for key in NETWORKS], start.between),
        "seq_len": parts.slider("sequence", parts.powers_of_two(1024, 16_384), start.seq_len),
        "sequences": parts.slider("sequences a step", parts.powers_of_two(64, 4096), start.sequences),
    }

    def current() -> Plan:
        return explore_plan(PlanChoice(**parts.values_of(controls)))

    panel = parts.picture_panel(list(controls.values()), lambda: (plan_png(current()), plan_text(current())))
    button, said = widgets.Button(description="Export", tooltip="write layout.txt", button_style="info"), widgets.HTML()

    def pressed(button: widgets.Button) -> None:
        parts.attempt(said, lambda: parts.note(said, escape(save_layout(current()))))

    button.on_click(pressed)
    panel.children = (*panel.children, button, said)
    return panel
