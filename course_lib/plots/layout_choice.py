"""Choosing a layout, in pictures: the ladder as a flow chart, memory against utilisation, what a step waits for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from course_lib.hardware import GB
from course_lib.plan.option import Option
from course_lib.plots.holdings import draw_boxes
from course_lib.plots.palette import AXIS_COLORS, COMPUTE_COLOR, LIMIT_COLOR, NEUTRAL_COLOR, OKABE_ITO, mix
from course_lib.plots.style import CENTRED, bare, picture_axes
from course_lib.validate import Positive, checked

# ---------------------------------------------------------------- the ladder as a flow chart


@dataclass(frozen=True)
class Rung:
    """One box of the chart: what is tried, and what it adds to the box above."""

    name: str
    text: str


RUNGS = (
    Rung("dp", "1. One GPU for a copy?\nZeRO-1, then ZeRO-3\n(micro-batch 1, 2, 4, 8; HSDP above 128 GPUs)"),
    Rung(
        "node",
        "2. 2, 4 or 8 GPUs of a node for a copy?\nevery tp x cp, ZeRO-1, then ZeRO-3\n(micro-batches and HSDP as in 1)",
    ),
    Rung(
        "nodes", "3. Several nodes for a copy?\npp with tp and cp, ZeRO-1, interleaved or 1F1B;\ncp over nodes, ZeRO-3"
    ),
    Rung("recompute", "4. Every block recomputed?\nsteps 1 to 3 again"),
)


_STOP = "Stop at the first layout\nthat fits in memory\nand waits for at most\n5 % of its step:\nnothing is much faster"


_HOLDS_FOR = (
    "Tested on 20 jobs whose step has at least one sequence per two GPUs.\n"
    "With a smaller global batch, or where the choice waits for more than 5 %, use the search."
)


@checked
def show_ladder(marked: str | None = None) -> None:
    """Show the flow chart of `minimal.choose.choose`; a marked box is where a choice stopped.

    Raises   ValueError if no box has that name
    """
    names = [rung.name for rung in RUNGS]
    if marked is not None and marked not in names:
        raise ValueError(f"marked is {marked!r}; choose from {', '.join(names)}, or None")
    with picture_axes(5.7) as axes:
        for row, rung in enumerate(RUNGS):
            y = -1.6 * row
            color = OKABE_ITO["yellow"] if rung.name == marked else mix(OKABE_ITO["sky"], "#FFFFFF", 0.7)
            _box(axes, (0, y, 4.9, 0.95), rung.text, color)
            if row < len(RUNGS) - 1:
                question = "no" if row < 2 else "nothing fits, or the fastest\nso far waits for 25 % or more"
                _arrow(axes, (2.45, y - 0.03), (2.45, y - 0.6), question)
                _arrow(axes, (4.95, y + 0.47), (6.15, y + 0.47), "yes", above=True)
        _box(axes, (6.2, -3.2, 2.7, 4.15), _STOP, "#E8F4EC")
        _box(axes, (6.2, -4.8, 2.7, 0.95), "End: of all that fit,\ntake the fastest", "#E8F4EC")
        _arrow(axes, (4.95, -4.33), (6.15, -4.33), "all were tried", above=True)
        _arrow(axes, (4.95, -3.05), (6.15, -4.0), "      the fastest waits\n        for less than 25 %")
        axes.text(0, -5.05, _HOLDS_FOR, fontsize=9, va="top")
        bare(axes, (-0.1, 9), (-5.55, 1.1))
        axes.set_title("Small copies of the model first, recomputation last")


def _box(axes, box: tuple[float, float, float, float], text: str, color: str) -> None:
    x, y, width, height = box
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", facecolor=color, edgecolor="black")
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, **CENTRED, fontsize=9)


def _arrow(axes, start: tuple[float, float], stop: tuple[float, float], text: str, above: bool = False) -> None:
    look = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.4}
    axes.annotate("", stop, xytext=start, arrowprops=look)
    middle = (start[0] + stop[0]) / 2, (start[1] + stop[1]) / 2
    place = {"ha": "center", "va": "bottom"} if above else {"ha": "left", "va": "center"}
    axes.text(middle[0] + (0 if above else 0.1), middle[1] + (0.04 if above else 0), text, fontsize=8.5, **place)


# ---------------------------------------------------------------- losses under rules


@checked
def show_losses(losses: Mapping[str, Sequence[float]], title: str) -> None:
    """Show the loss of each step under each named rule.

    Raises   ValueError without any
    """
    if not losses:
        raise ValueError("losses is empty; give the losses of one rule or more")
    with picture_axes(2.4) as axes:
        for (name, row), line in zip(losses.items(), cycle(("-", "--", ":")), strict=False):
            axes.plot(range(1, len(row) + 1), row, line, label=name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.set_title(title)
        axes.legend()


# ---------------------------------------------------------------- memory against utilisation


@checked
def show_options(options: Mapping[str, Option], title: str) -> None:
    """Show each layout by its memory and its MFU, under the first word of its name; the line is what the GPU has.

    Raises   ValueError without any
    """
    if not options:
        raise ValueError("options is empty; give one layout or more")
    limit_gb = next(iter(options.values())).usable_bytes / GB
    with picture_axes(3.2) as axes:
        for name, option in options.items():
            x, y = option.memory_bytes / GB, 100 * option.mfu
            color = OKABE_ITO["green"] if option.fits else OKABE_ITO["vermillion"]
            axes.plot(x, y, "o" if option.fits else "X", color=color, markersize=8)
            axes.annotate(name.split()[0], (x, y), xytext=(-16, -4), textcoords="offset points", fontsize=9.5)
        axes.axvline(limit_gb, color=LIMIT_COLOR, linestyle="--")
        axes.text(limit_gb, 3, f" one GPU: {limit_gb:.1f} GB", fontsize=8.5)
        right = max(option.memory_bytes / GB for option in options.values())
        axes.set(xlim=(0, 1.25 * max(right, limit_gb)), ylim=(0, 60))
        axes.set_xlabel("memory of the most loaded rank (GB)")
        axes.set_ylabel("modelled MFU (%)")
        axes.set_title(title)


# ---------------------------------------------------------------- what a step waits for

PART_COLORS = {
    "compute": COMPUTE_COLOR,
    "tp": AXIS_COLORS["tp"],
    "cp": OKABE_ITO["yellow"],
    "ep": AXIS_COLORS["ep"],
    "bubble": NEUTRAL_COLOR,
    "data": AXIS_COLORS["dp"],
}
_DRAWN_WITH = {"launches": "compute", "update": "compute", "transfer": "bubble", "waiting": "bubble"}


@checked
def show_waiting(options: Mapping[str, Option], title: str) -> None:
    """Show of each named layout how long a step computes and for what it waits, in modelled seconds.

    Raises   ValueError without any
    """
    if not options:
        raise ValueError("options is empty; give one layout or more")
    with picture_axes(0.9 + 0.42 * len(options)) as axes:
        for row, option in enumerate(options.values()):
            parts, left = dict.fromkeys(PART_COLORS, 0.0), 0.0
            for part, seconds in option.seconds_by_part.items():
                parts[_DRAWN_WITH.get(part, part)] += seconds
            for part, color in PART_COLORS.items():
                draw_boxes(axes, [(left, row - 0.33, parts[part], 0.66)], facecolor=color)
                left += parts[part]
        names = list(options)
        axes.set_yticks(range(len(names)), names)
        longest = max(option.step_s for option in options.values())
        axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.02 * longest))
        axes.set_xlabel("modelled seconds of a step")
        axes.set_title(title)
        shown = [part for part in PART_COLORS if _is_seen(part, list(options.values()), longest)]
        handles = [plt.Rectangle((0, 0), 1, 1, facecolor=PART_COLORS[part], label=_LABELS[part]) for part in shown]
        axes.figure.legend(handles=handles, loc="outside lower center", ncol=len(shown))


_LABELS = {"compute": "computing", "bubble": "pipeline", "data": "ZeRO, gradients"} | {n: n for n in ("tp", "cp", "ep")}


def _is_seen(part: str, options: Sequence[Option], longest_s: Positive) -> bool:
    return any(option.seconds_by_part.get(part, 0.0) > 0.005 * longest_s for option in options)
