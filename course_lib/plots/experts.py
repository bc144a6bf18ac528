"""Experts in pictures: their load, what is dropped, what balancing does over time, and how few are active."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from course_lib.plots.palette import COMPUTE_COLOR, EXPOSED_COLOR, LIMIT_COLOR, NEUTRAL_COLOR, OKABE_ITO
from course_lib.plots.style import BELOW, panel_title, picture_axes, picture_panels, three_digits
from course_lib.validate import Size, checked

MOST_BARS = 64  # more experts are drawn as one outline
MOST_BORDERS = 32  # between ranks

# ---------------------------------------------------------------- load


@dataclass(frozen=True)
class LoadPicture:
    """Assignments that each expert computes and drops; `largest` is its share of the mean that sets the pace."""

    kept: list[int]
    dropped: list[int]
    mean: float
    capacity: int | None
    largest: float
    drop_rate: float


def load_picture(
    load: Sequence[int], capacity: Size | None = None, dropped: Sequence[int] | None = None
) -> LoadPicture:
    """Split each expert's load in what it computes and what it drops.

    Without `dropped`, what exceeds the capacity is dropped. Give it where ranks have capacities of their own: then
    `capacity` is that of all ranks together, and an expert may drop below it.
    Raises   ValueError if there is no load, or more is dropped than there is
    """
    load = [int(tokens) for tokens in load]
    if not load or sum(load) == 0:
        raise ValueError(f"the load of {len(load)} experts is empty; give how many assignments fell on each expert")
    if dropped is None:
        dropped = [max(0, tokens - capacity) if capacity is not None else 0 for tokens in load]
    dropped = [int(tokens) for tokens in dropped]
    if len(dropped) != len(load) or any(lost > tokens for lost, tokens in zip(dropped, load, strict=True)):
        raise ValueError("dropped must have one number an expert, none above its load")
    kept = [tokens - lost for tokens, lost in zip(load, dropped, strict=True)]
    mean = sum(load) / len(load)
    return LoadPicture(kept, dropped, mean, capacity, max(kept) / mean, sum(dropped) / sum(load))


def load_title(picture: LoadPicture) -> str:
    """What the bars show: how much longer the most loaded expert computes than the mean, and what is lost."""
    said = (
        f"The most loaded of {len(picture.kept)} experts computes {three_digits(picture.largest)} times the mean load"
    )
    return said + (f"; {100 * picture.drop_rate:.1f} % of all assignments are dropped" if picture.capacity else "")


def draw_load(axes, picture: LoadPicture, experts_per_rank: Size | None = None) -> None:
    """A bar for each expert, drops hatched on top, lines for mean and capacity; borders between ranks dotted."""
    experts = range(len(picture.kept))
    whole = [kept + lost for kept, lost in zip(picture.kept, picture.dropped, strict=True)]
    drops = {"facecolor": "white", "edgecolor": EXPOSED_COLOR, "hatch": "////"}
    if len(experts) <= MOST_BARS:
        axes.bar(experts, picture.kept, 0.84, color=COMPUTE_COLOR, edgecolor="white", linewidth=0.8)
        lost = [expert for expert in experts if picture.dropped[expert]]
        heights, floors = [picture.dropped[e] for e in lost], [picture.kept[e] for e in lost]
        axes.bar(lost, heights, 0.84, bottom=floors, linewidth=0.8, **drops)
    else:
        edges = [expert - 0.5 for expert in range(len(experts) + 1)]
        axes.stairs(whole, edges, baseline=picture.kept, fill=True, linewidth=0.4, **drops)
        axes.stairs(picture.kept, edges, fill=True, color=COMPUTE_COLOR)
    top = max([*whole, picture.capacity or 0, picture.mean])
    axes.axhline(picture.mean, color=LIMIT_COLOR, linewidth=1.2, linestyle=":")
    lines = [(picture.mean, f" mean {three_digits(picture.mean)}")]
    if picture.capacity is not None:
        axes.axhline(picture.capacity, color=LIMIT_COLOR, linewidth=1.4, linestyle="--")
        lines.append((picture.capacity, f" capacity {picture.capacity:,}"))
    _label_lines(axes, lines, top)
    borders = len(experts) // experts_per_rank - 1 if experts_per_rank else 0
    if 1 <= borders < MOST_BORDERS:
        for first in range(experts_per_rank, len(experts), experts_per_rank):
            axes.axvline(first - 0.5, color=NEUTRAL_COLOR, linewidth=0.8, zorder=0)
    step = max(1, -(-len(experts) // 16))
    axes.set_xticks(range(0, len(experts), step))
    ranks = ", grey lines between ranks" if 1 <= borders < MOST_BORDERS else ""
    axes.set(xlim=(-0.6, len(experts) - 0.4), ylim=(0, top * 1.1))
    axes.set(xlabel=f"expert{ranks}", ylabel="assignments (token, slot)")
    if any(picture.dropped):
        handles = [
            Patch(facecolor=COMPUTE_COLOR, label="computed"),
            Patch(facecolor="white", edgecolor=EXPOSED_COLOR, hatch="////", label="dropped"),
        ]
        axes.legend(handles=handles, ncol=2, borderaxespad=4.0, **BELOW)


def _label_lines(axes, lines: Sequence[tuple[float, str]], top: float) -> None:
    """Each line's name right of the axes; of two that lie close together the upper one's name moves up."""
    gap = 0.09 * top
    (low, low_text), *rest = sorted(lines)
    places = [(low, low_text)] + [(max(value, low + gap), text) for value, text in rest]
    for value, text in places:
        axes.annotate(
            text, (1, value), xycoords=("axes fraction", "data"), va="center", fontsize=9, annotation_clip=False
        )


@checked
def show_load(
    load: Sequence[int], capacity: Size | None = None, title: str = "", experts_per_rank: Size | None = None
) -> None:
    """Show the load of experts: assignments that fell on each, with the mean, and with what a capacity drops."""
    picture = load_picture(load, capacity)
    with picture_axes(3.2) as axes:
        draw_load(axes, picture, experts_per_rank)
        axes.set_title(title or load_title(picture))


# ---------------------------------------------------------------- load while training


@dataclass(frozen=True)
class BalancePicture:
    """The load of each expert over the mean, step by step; the most loaded of a step, meaned over the last quarter."""

    relative: list[list[float]]  # [expert][step]
    largest_at_end: float
    last_steps: int


@checked
def balance_picture(loads: Sequence[Sequence[float]]) -> BalancePicture:
    """From loads[step][expert], assignments that fell on each expert, to multiples of the step's mean.

    Raises   ValueError if there is no step, or one without load
    """
    if not loads or any(sum(step) <= 0 for step in loads):
        raise ValueError(f"got {len(loads)} steps; give loads[step][expert], with some load in each")
    relative = [[float(n) * len(step) / float(sum(step)) for n in step] for step in loads]
    last = relative[-max(1, len(relative) // 4) :]
    return BalancePicture(
        [list(expert) for expert in zip(*relative, strict=True)], sum(map(max, last)) / len(last), len(last)
    )


def draw_balance(axes, picture: BalancePicture, top: float) -> None:
    """A thin line for each expert, the largest and the smallest of each step thick, and where all would be even."""
    steps = range(1, len(picture.relative[0]) + 1)
    for line in picture.relative:
        axes.plot(steps, line, color=NEUTRAL_COLOR, linewidth=0.8)
    by_step = list(zip(*picture.relative, strict=True))
    axes.plot(steps, list(map(max, by_step)), color=OKABE_ITO["vermillion"], linewidth=1.8, label="most loaded expert")
    axes.plot(
        steps, list(map(min, by_step)), color=OKABE_ITO["blue"], linewidth=1.8, linestyle="--", label="emptiest expert"
    )
    axes.axhline(1, color=LIMIT_COLOR, linewidth=1, linestyle=":")
    axes.set(xlim=(1, max(len(steps), 2)), ylim=(0, top), xlabel="training step")


@checked
def show_balance(loads: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Show the load of experts while training, `{label: loads[step][expert]}`, side by side on one scale."""
    pictures = {label: balance_picture(steps) for label, steps in loads.items()}
    top = 1.08 * max(max(map(max, picture.relative)) for picture in pictures.values())
    with picture_panels(1, len(pictures), 3.1, squeeze=False, sharey=True) as (figure, panels):
        for axes, (label, picture) in zip(panels[0], pictures.items(), strict=True):
            draw_balance(axes, picture, top)
            said = f"{label}\nmax load, last {picture.last_steps} steps: {three_digits(picture.largest_at_end)} x mean"
            panel_title(axes, said)
        panels[0, 0].set_ylabel("load / mean load")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        handles += [
            plt.Line2D([], [], color=NEUTRAL_COLOR, linewidth=0.8),
            plt.Line2D([], [], color="black", linestyle=":", linewidth=1),
        ]
        figure.legend(handles, [*labels, "each expert", "even load"], loc="outside lower center", ncol=4)


# ---------------------------------------------------------------- total and active parameters


def parameters_title(parameters: Mapping[str, tuple[float, float]]) -> str:
    """How large the part is that computes for one token."""
    shares = [
        f"{100 * active / total:.3g} % of {name}" for name, (total, active) in parameters.items() if active < total
    ]
    return "A token passes through " + (" and ".join(shares) or "every parameter")


def draw_parameters(axes, parameters: Mapping[str, tuple[float, float]]) -> None:
    """`{model: (total, active)}` as bars: what is stored, and within it what computes for one token."""
    longest = max(total for total, _ in parameters.values())
    for row, (total, active) in enumerate(parameters.values()):
        axes.barh(row, total / 1e9, height=0.62, color="#E3E3E3", edgecolor="#777777", hatch="////", linewidth=0.8)
        axes.barh(row, active / 1e9, height=0.62, color=OKABE_ITO["blue"])
        part = "all active" if active == total else f"{three_digits(active / 1e9)} B active"
        said = f" {three_digits(total / 1e9)} B, {part}"
        axes.text(total / 1e9, row, said, va="center", fontsize=9)
    axes.set_yticks(range(len(parameters)), list(parameters))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, longest / 1e9 * 1.42), ylim=(len(parameters) - 0.45, -0.55), xlabel="parameters (billions)")
    handles = [
        Patch(facecolor=OKABE_ITO["blue"], label="active: compute for one token"),
        Patch(facecolor="#E3E3E3", edgecolor="#777777", hatch="////", label="experts that this token did not choose"),
    ]
    axes.legend(handles=handles, ncol=2, borderaxespad=4.0, **BELOW)


@checked
def show_parameters(parameters: Mapping[str, tuple[float, float]]) -> None:
    """Show total and active parameters, `{model: (total, active)}`."""
    with picture_axes(1.3 + 0.4 * len(parameters)) as axes:
        draw_parameters(axes, parameters)
        axes.set_title(parameters_title(parameters))
