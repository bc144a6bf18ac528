"""What a layout costs, in pictures: memory along the pipeline, bytes by axis, seconds by part."""

import math
from collections.abc import Iterable, Mapping, Sequence

from course_lib.hardware import GPU
from course_lib.layout.mesh import REPLICA_AXES
from course_lib.plots.holdings import draw_boxes
from course_lib.plots.memory import BudgetBar, budget_bars, gpu_limits, kind_patch, merge_limits
from course_lib.plots.palette import (
    AXIS_COLORS,
    COMPUTE_COLOR,
    KIND_COLORS,
    KIND_HATCHES,
    KINDS,
    LIMIT_COLOR,
    NEUTRAL_COLOR,
)
from course_lib.plots.style import (
    TIME_UNITS,
    UNITS,
    ground,
    panel_title,
    picture_axes,
    picture_panels,
    show_bytes,
    show_seconds,
    three_digits,
    time_unit_for,
    unit_for,
)
from course_lib.validate import checked

# ---------------------------------------------------------------- memory along the pipeline


def pipeline_bars(of_ranks, limits_bytes: Mapping[str, int] | None = None) -> list[BudgetBar]:
    """Bytes by kind of each rank of a pipeline, in order.

    of_ranks   budgets of `memory.budget.budgets`; or a simulation, whose ranks have `peak_by_kind`; or
               {kind: bytes} of each rank
    """
    ranks = getattr(of_ranks, "ranks", of_ranks)
    labels = [getattr(rank, "coordinates", {}).get("pp", place) for place, rank in enumerate(ranks)]
    by_kind = [getattr(rank, "peak_by_kind", rank) for rank in ranks]
    return budget_bars({f"pp {label}": each for label, each in zip(labels, by_kind, strict=True)}, limits_bytes or {})


def pipeline_title(bars: Sequence[BudgetBar], limits_bytes: Mapping[str, int], unit: str | None = None) -> str:
    """The most loaded rank, and whether the GPU holds it."""
    largest = max(bars, key=lambda bar: bar.total_bytes)
    who = f"{largest.label} is the most loaded with" if len(bars) > 1 else "A rank needs"
    size = largest.total_bytes
    said = f"{who} {show_bytes(size) if unit is None else f'{three_digits(size / UNITS[unit])} {unit}'}"
    if not limits_bytes:
        return said
    name = next(iter(limits_bytes))
    return f"{said}, {'which fits' if name in largest.fits else 'too much for'} one {name}"


def visible_kinds(bars: Sequence[BudgetBar]) -> list[str]:
    """Kinds that are seen somewhere: more than one per cent of the tallest column."""
    tallest = max(bar.total_bytes for bar in bars)
    return [kind for kind in KINDS if any(bar.bytes_by_kind.get(kind, 0) > 0.01 * tallest for bar in bars)]


def draw_pipeline(axes, bars: Sequence[BudgetBar], limits_bytes: Mapping[str, int], unit: str = "GB") -> None:
    """A column for each rank, its kinds stacked; what stands above a GPU's line does not fit."""
    size, places = UNITS[unit], range(len(bars))
    floor = [0.0] * len(bars)
    shown = [kind for kind in KINDS if any(kind in bar.bytes_by_kind for bar in bars)]
    for kind in shown:
        heights = [bar.bytes_by_kind.get(kind, 0) / size for bar in bars]
        look = {"facecolor": KIND_COLORS[kind], "hatch": KIND_HATCHES[kind], "edgecolor": "white", "linewidth": 0.6}
        draw_boxes(
            axes, [(x - 0.37, low, 0.74, height) for x, low, height in zip(places, floor, heights, strict=True)], **look
        )
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    top = 1.14 * max([*floor, *(limit / size for limit in limits_bytes.values())])
    if len(bars) <= 16:
        for place, total in zip(places, floor, strict=True):
            text = {"ha": "center", "va": "bottom", "fontsize": 8.5, "bbox": ground("white", 0.6)}
            axes.text(place, total + 0.01 * top, three_digits(total), **text)
    for name, limit in merge_limits(limits_bytes):
        axes.axhline(limit / size, color=LIMIT_COLOR, linestyle="--", linewidth=1.3, zorder=1.5)
        said = f" {name}\n {three_digits(limit / size)} {unit}"
        axes.annotate(said, (1, limit / size), xycoords=("axes fraction", "data"), va="center", fontsize=8.5)
    step, few = 1 + len(bars) // 33, len(bars) <= 8
    axes.set_xticks([*places][::step], [bar.label if few else bar.label.removeprefix("pp ") for bar in bars][::step])
    axes.set_xlabel("" if few else "place along pp")
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(-0.6, len(bars) - 0.4), ylim=(0, top), ylabel=f"memory ({unit})")
    handles = [kind_patch(kind) for kind in visible_kinds(bars)]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 2.2 if few else 3.6}
    axes.legend(handles=handles, ncol=len(handles), columnspacing=1.0, handlelength=1.4, handletextpad=0.5, **below)


@checked
def show_pipeline_memory(
    of_ranks: Iterable, gpus: Mapping[str, float] | Iterable[GPU] = (), title: str = "", unit: str | None = None
) -> None:
    """Show the memory of each rank of a pipeline by kind, against GPUs (of `hardware.GPUS`, or `{name: bytes}`).

    of_ranks   budgets of a run, a simulation of `fake_cluster.simulate`, or {kind: bytes} of each rank
    """
    limits = gpu_limits(gpus)
    bars = pipeline_bars(of_ranks, limits)
    unit = unit or unit_for(max([bar.total_bytes for bar in bars] + list(limits.values())))
    with picture_axes(3.6) as axes:
        draw_pipeline(axes, bars, limits, unit)
        axes.set_title(title or pipeline_title(bars, limits, unit))


# ---------------------------------------------------------------- bytes by axis, seconds by part

MOST_RATIO = 50  # of the longest bar to the shortest that is still seen
SENT_ORDER = ("tp", "cp", "ep", "pp", "data", "expert_dp", *REPLICA_AXES, "world")
SENT_COLORS = AXIS_COLORS | {"data": AXIS_COLORS["dp"], "expert_dp": "#666666", "world": NEUTRAL_COLOR}
SENT_COLORS |= {axis: SENT_COLORS["expert_dp" if axis.startswith("expert") else "data"] for axis in REPLICA_AXES}
PART_COLORS = AXIS_COLORS | {
    "compute": COMPUTE_COLOR,
    "launches": COMPUTE_COLOR,
    "update": COMPUTE_COLOR,
    "bubble": NEUTRAL_COLOR,
    "waiting": NEUTRAL_COLOR,
    "transfer": AXIS_COLORS["pp"],
    "data": AXIS_COLORS["dp"],
}
PART_HATCHES = {"bubble": "////", "transfer": "..", "launches": "..", "update": "xx", "waiting": "xx"}


def sent_rows(sent_bytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by axis in a fixed order, those of which nothing is sent left out."""
    if unknown := set(sent_bytes) - set(SENT_ORDER):
        raise ValueError(f"axes {sorted(unknown)} are unknown; use {', '.join(SENT_ORDER)}")
    return {axis: sent_bytes[axis] for axis in SENT_ORDER if sent_bytes.get(axis, 0)}


def sent_title(sent_bytes: Mapping[str, int]) -> str:
    """All bytes, and the axis that sends most of them."""
    rows, total = sent_rows(sent_bytes), sum(sent_bytes.values())
    if not total:
        return "Nothing is sent"
    most = max(rows, key=rows.get)
    return f"{show_bytes(total)} sent in a step, {100 * rows[most] / total:.0f} % over {most}"


def time_rows(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part in the order given, those of which there is nothing left out."""
    return {part: value for part, value in seconds.items() if value > 0}


def time_title(seconds: Mapping[str, float]) -> str:
    """The whole step, and how much of it computes."""
    total = sum(seconds.values())
    return f"{show_seconds(total)} modelled, {100 * seconds.get('compute', 0.0) / total:.0f} % computing"


def draw_sent_by_axis(axes, sent_bytes: Mapping[str, int]) -> None:
    """A bar for each axis with its bytes, on a log axis where they differ too much to be seen beside each other."""
    rows = sent_rows(sent_bytes)
    unit = unit_for(max(rows.values(), default=0))
    labels = {axis: show_bytes(value) for axis, value in rows.items()}
    _bars(axes, {axis: value / UNITS[unit] for axis, value in rows.items()}, labels, SENT_COLORS, {})
    axes.set_xlabel(f"sent by one rank in a step ({unit})")
    if sent_on_log_axis(rows):
        _log_bytes(axes, list(rows.values()))


def sent_on_log_axis(rows: Mapping[str, int]) -> bool:
    """Whether the largest is more than `MOST_RATIO` times the smallest."""
    return bool(rows) and max(rows.values()) > MOST_RATIO * min(rows.values())


def _log_bytes(axes, sent_bytes: Sequence[int]) -> None:
    """Powers of ten in a unit each, of which at most six; a fifth of the width is left for the last label."""
    low = math.floor(math.log10(min(sent_bytes))) - 0.5
    high = math.log10(max(sent_bytes))
    unit = UNITS[unit_for(max(sent_bytes))]
    step = 1 + int(high - low) // 4
    ticks = [10**power for power in range(math.ceil(low), math.floor(high) + 1, step)]
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(
        [tick / unit for tick in ticks], [show_bytes(tick).replace(".00", "").replace(".0 ", " ") for tick in ticks]
    )
    axes.set_xlim(10**low / unit, 10 ** (high + 0.34 * (high - low)) / unit)
    axes.set_xlabel("sent by one rank in a step, log axis")


def draw_time_by_part(axes, seconds: Mapping[str, float]) -> None:
    """A bar for each part of a step with its seconds."""
    rows = time_rows(seconds)
    unit = time_unit_for(max(rows.values()))
    labels = {part: show_seconds(value) for part, value in rows.items()}
    _bars(axes, {part: value / TIME_UNITS[unit] for part, value in rows.items()}, labels, PART_COLORS, PART_HATCHES)
    axes.set_xlabel(f"modelled time of a step ({unit})")


def _bars(axes, widths: Mapping[str, float], labels: Mapping[str, str], colors, hatches) -> None:
    longest = max(widths.values(), default=1.0)
    for row, (name, width) in enumerate(widths.items()):
        look = {"color": colors[name], "hatch": hatches.get(name, ""), "edgecolor": "white", "linewidth": 0.6}
        axes.barh(row, width, height=0.66, **look)
        axes.text(width, row, f" {labels[name]}", va="center", fontsize=9)
    axes.set_yticks(range(len(widths)), list(widths))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, longest * 1.32), ylim=(max(len(widths), 1) - 0.4, -0.6))


@checked
def show_costs(sent_bytes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
    """Show bytes by axis, of `traffic.sent` or a meter, beside seconds by part, of `StepTime.parts`."""
    rows = max(len(sent_rows(sent_bytes)), len(time_rows(seconds)))
    with picture_panels(1, 2, 1.25 + 0.27 * rows) as (_, (left, right)):
        draw_sent_by_axis(left, sent_bytes)
        draw_time_by_part(right, seconds)
        panel_title(left, sent_title(sent_bytes))
        panel_title(right, time_title(seconds))
