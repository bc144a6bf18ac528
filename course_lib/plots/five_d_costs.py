"""What a layout costs, in pictures: memory along the pipeline, bytes by axis, seconds by part."""

from collections.abc import Iterable, Mapping, Sequence

from course_lib.hardware import GPU
from course_lib.layout.mesh import REPLICA_AXES
from course_lib.palette import (
    AXIS_COLORS,
    COMPUTE_COLOR,
    KIND_COLORS,
    KIND_HATCHES,
    KINDS,
    LIMIT_COLOR,
    NEUTRAL_COLOR,
)
from course_lib.plots.memory import gpu_limits, kind_patch, kinds_of, merge_limits
from course_lib.plots.style import ground, keys_below, panel_title, picture_axes, picture_panels, plain_rows, write
from course_lib.units import TIME_UNITS, UNITS, show_bytes, show_seconds, three_digits, time_unit_for, unit_for
from course_lib.validate import checked

# ---------------------------------------------------------------- memory along the pipeline


def kinds_of_ranks(of_ranks) -> list[dict[str, int]]:
    """Bytes by kind of each rank of a pipeline, in order.

    of_ranks   budgets of `memory.budget.budgets`; or a simulation, whose ranks have `peak_by_kind`; or
               {kind: bytes} of each rank
    """
    return [kinds_of(getattr(rank, "peak_by_kind", rank)) for rank in getattr(of_ranks, "ranks", of_ranks)]


def visible_kinds(bars: Sequence[Mapping[str, int]]) -> list[str]:
    """Kinds that are seen somewhere: more than one per cent of the tallest column."""
    tallest = max(sum(bar.values()) for bar in bars)
    return [kind for kind in KINDS if any(bar.get(kind, 0) > 0.01 * tallest for bar in bars)]


@checked
def show_pipeline_memory(
    of_ranks: Iterable, gpus: Mapping[str, float] | Iterable[GPU], title: str, unit: str | None = None
) -> None:
    """Show the memory of each rank of a pipeline by kind, against GPUs (of `hardware.GPUS`, or `{name: bytes}`).

    of_ranks   as kinds_of_ranks
    """
    bars, limits = kinds_of_ranks(of_ranks), gpu_limits(gpus)
    totals = [sum(bar.values()) for bar in bars]
    unit = unit or unit_for(max([*totals, *limits.values()]))
    size, top, few = UNITS[unit], 1.14 * max([*totals, *limits.values()]) / UNITS[unit], len(bars) <= 8
    with picture_axes(3.6) as axes:
        floor = [0.0] * len(bars)
        for kind in KINDS:
            heights = [bar.get(kind, 0) / size for bar in bars]
            look = {"color": KIND_COLORS[kind], "hatch": KIND_HATCHES[kind], "edgecolor": "white", "linewidth": 0.6}
            if any(heights):
                axes.bar(range(len(bars)), heights, 0.74, bottom=floor, **look)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        for place, total in enumerate(floor if len(bars) <= 16 else []):
            text = {"va": "bottom", "bbox": ground("white", 0.6)}
            write(axes, place, total + 0.01 * top, three_digits(total), fontsize=8.5, **text)
        for name, limit in merge_limits(limits):
            axes.axhline(limit / size, color=LIMIT_COLOR, linestyle="--", linewidth=1.3, zorder=1.5)
            said = f" {name}\n {three_digits(limit / size)} {unit}"
            axes.annotate(said, (1, limit / size), xycoords=("axes fraction", "data"), va="center", fontsize=8.5)
        axes.set_xticks(range(len(bars)), [f"{'pp ' * few}{place}" for place in range(len(bars))])
        axes.tick_params(axis="x", length=0)
        axes.set(xlim=(-0.6, len(bars) - 0.4), ylim=(0, top), ylabel=f"memory ({unit})")
        axes.set_xlabel("" if few else "place along pp")
        look = {"columnspacing": 1.0, "handletextpad": 0.5}
        keys_below(axes, [kind_patch(kind) for kind in visible_kinds(bars)], 2.2 if few else 3.6, **look)
        axes.set_title(title)


# ---------------------------------------------------------------- bytes by axis, seconds by part

_SENT_ORDER = ("tp", "cp", "ep", "pp", "data", "expert_dp", *REPLICA_AXES, "world")
COLORS = AXIS_COLORS | {"data": AXIS_COLORS["dp"], "expert_dp": "#666666", "world": NEUTRAL_COLOR}
COLORS |= {axis: COLORS["expert_dp" if axis.startswith("expert") else "data"] for axis in REPLICA_AXES}
COLORS |= dict.fromkeys(("compute", "launches", "update"), COMPUTE_COLOR) | {"transfer": AXIS_COLORS["pp"]}
COLORS |= dict.fromkeys(("bubble", "waiting"), NEUTRAL_COLOR)
HATCHES = {"bubble": "////", "transfer": "..", "launches": "..", "update": "xx", "waiting": "xx"}


def sent_rows(sent_bytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by axis in a fixed order, those of which nothing is sent left out."""
    if unknown := set(sent_bytes) - set(_SENT_ORDER):
        raise ValueError(f"axes {sorted(unknown)} are unknown; use {', '.join(_SENT_ORDER)}")
    return {axis: sent_bytes[axis] for axis in _SENT_ORDER if sent_bytes.get(axis, 0)}


def _draw_bars(axes, widths: Mapping[str, float], labels: Sequence[str], xlabel: str, title: str) -> None:
    for row, ((name, width), label) in enumerate(zip(widths.items(), labels, strict=True)):
        look = {"hatch": HATCHES.get(name, ""), "edgecolor": "white", "linewidth": 0.6}
        axes.barh(row, width, height=0.66, color=COLORS[name], **look)
        write(axes, width, row, f" {label}", "left")
    plain_rows(axes, list(widths))
    axes.set(xlim=(0, max(widths.values(), default=1.0) * 1.32), xlabel=xlabel)
    panel_title(axes, title)


@checked
def show_costs(sent_bytes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
    """Show bytes by axis, of `traffic.sent` or a meter, beside seconds by part, of `StepTime.parts`; no zeros."""
    sent, parts = sent_rows(sent_bytes), {part: value for part, value in seconds.items() if value > 0}
    if not sent or not parts:
        raise ValueError("nothing is sent, or no part of a step takes time; give what a layout costs")
    most, total = max(sent, key=sent.get), sum(sent.values())
    unit, time_unit = unit_for(sent[most]), time_unit_for(max(parts.values()))
    said = f"{show_bytes(total)} sent in a step, {100 * sent[most] / total:.0f} % over {most}"
    whole_s = sum(parts.values())
    share = f"{show_seconds(whole_s)} modelled, {100 * parts.get('compute', 0.0) / whole_s:.0f} % computing"
    with picture_panels(1, 2, 1.25 + 0.27 * max(len(sent), len(parts))) as (_, (left, right)):
        widths = {axis: value / UNITS[unit] for axis, value in sent.items()}
        _draw_bars(left, widths, list(map(show_bytes, sent.values())), f"sent by one rank in a step ({unit})", said)
        widths = {part: value / TIME_UNITS[time_unit] for part, value in parts.items()}
        labels = list(map(show_seconds, parts.values()))
        _draw_bars(right, widths, labels, f"modelled time of a step ({time_unit})", share)
