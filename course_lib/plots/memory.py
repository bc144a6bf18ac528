"""Memory in pictures: over the first steps of training, and as budgets against the sizes of GPUs."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from course_lib.hardware import GPU
from course_lib.memory.budget import Budget
from course_lib.palette import KIND_COLORS, KIND_HATCHES, KINDS, LIMIT_COLOR
from course_lib.panels.one_gpu import kinds_of
from course_lib.panels.svg import bars
from course_lib.plots.concepts import show_charts
from course_lib.plots.style import key, keys_below, panel_title, picture_axes, picture_panels, write
from course_lib.units import UNITS, show_bytes, unit_for
from course_lib.validate import checked

_MOST_POINTS = 1500


@dataclass(frozen=True)
class TimelinePicture:
    """The numbers drawn of a timeline: bytes by kind at each event; phases are (name, from, to)."""

    xs: list[int]
    bytes_by_kind: dict[str, list[int]]
    phases: list[tuple[str, int, int]]
    peak_bytes: int


def timeline_picture(timeline) -> TimelinePicture:
    """Turn a tracker's `Timeline` into what is drawn: kinds in their fixed order, phases between marks, and the peak.

    Allocations and releases are counted: the same picture on every machine. Of a long record only the highest moment
    in each of 1,500 slices is kept: the peak stays exact.
    Raises   ValueError if the timeline is empty
    """
    times, end = list(timeline.times_s), len(timeline.times_s) - 1
    kinds = [kind for kind in KINDS if any(timeline.bytes_by_kind.get(kind, ()))]
    if not times or not kinds:
        raise ValueError("the timeline holds no measurement; run at least one training step inside the tracker")
    totals = [sum(timeline.bytes_by_kind[kind][i] for kind in kinds) for i in range(len(times))]
    slices = min(len(totals), _MOST_POINTS)
    edges = [len(totals) * i // slices for i in range(slices + 1)]
    highest = {max(range(start, stop), key=totals.__getitem__) for start, stop in pairwise(edges)}
    kept = sorted(highest | {0, end})
    marks = [(bisect_left(times, at), name) for at, name in timeline.marks]
    stops = [start for start, _ in marks[1:]] + [end]  # a phase lasts until the next one, the last until the end
    phases = [(name, start, stop) for (start, name), stop in zip(marks, stops, strict=False) if stop > start]
    by_kind = {kind: [timeline.bytes_by_kind[kind][i] for i in kept] for kind in kinds}
    return TimelinePicture(kept, by_kind, phases, max(totals))


def _stack_kinds(axes, picture: TimelinePicture, unit: str) -> None:
    floor = [0.0] * len(picture.xs)
    for kind, values in picture.bytes_by_kind.items():
        top = [low + value / UNITS[unit] for low, value in zip(floor, values, strict=True)]
        look = {"facecolor": KIND_COLORS[kind], "hatch": KIND_HATCHES[kind], "edgecolor": "white", "linewidth": 0}
        axes.fill_between(picture.xs, floor, top, step="post", **look)
        axes.step(picture.xs, top, where="post", color="white", linewidth=0.4)
        floor = top


_PHASE_SHADES = ("#FFFFFF", "#E6E6E6", "#C9C9C9", "#DADADA")


def _draw_phases(axes, picture: TimelinePicture, peak: float) -> None:
    """The strip above: each phase with its name, or with its initial where the name has no room."""
    names = list(dict.fromkeys(name for name, _, _ in picture.phases))
    width = picture.xs[-1] - picture.xs[0]
    shortened = []
    for name, start, stop in picture.phases:
        shade = _PHASE_SHADES[names.index(name) % len(_PHASE_SHADES)]
        axes.fill_between([start, stop], peak * 1.17, peak * 1.28, facecolor=shade, edgecolor="black", linewidth=0.5)
        axes.axvline(start, color="black", linewidth=0.5, alpha=0.5, ymax=1.17 / 1.28)
        share = (stop - start) / width
        label = name if share > 0.015 * len(name) else name[:1].upper() if share > 0.012 else ""
        write(axes, (start + stop) / 2, peak * 1.22, label, fontsize=8)
        if label and label != name and name not in shortened:
            shortened.append(name)
    initials = ", ".join(f"{name[:1].upper()} {name}" for name in shortened)
    above = {"xycoords": "axes fraction", "xytext": (0, 2), "textcoords": "offset points"}
    axes.annotate(initials, (1, 1), ha="right", va="bottom", fontsize=8, **above)


@checked
def show_memory_timeline(timeline, title: str) -> None:
    """Show a measured `Timeline` stacked by kind, with its phases as a strip above and its peak."""
    picture = timeline_picture(timeline)
    unit, end = unit_for(picture.peak_bytes), picture.xs[-1]
    peak = picture.peak_bytes / UNITS[unit]
    with picture_axes(3.8) as axes:
        _stack_kinds(axes, picture, unit)
        axes.axhline(peak, color=LIMIT_COLOR, linewidth=1, linestyle="--")
        axes.set(xlim=(0, end), ylim=(0, peak * 1.28), xlabel="allocations and releases, in order")
        axes.set_ylabel(f"tensors alive ({unit})")
        write(axes, end, peak, f"peak {show_bytes(picture.peak_bytes, unit)} ", "right", va="bottom")
        _draw_phases(axes, picture, peak)
        handles = [key(KIND_COLORS[kind], kind, KIND_HATCHES[kind]) for kind in reversed(picture.bytes_by_kind)]
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title(title, pad=16)


@checked
def show_step_memory(timelines: Mapping, title: str) -> None:
    """Show measured steps side by side on one axis of bytes, stacked by kind; B is backward, O the optimizer."""
    pictures = {name: timeline_picture(timeline) for name, timeline in timelines.items()}
    limit = 1.05 * max(picture.peak_bytes for picture in pictures.values())
    unit = unit_for(limit)
    top = limit / UNITS[unit]
    with picture_panels(1, len(pictures), 3.2, title, sharey=True, squeeze=False) as (figure, panels):
        for axes, (name, picture) in zip(panels[0], pictures.items(), strict=True):
            _stack_kinds(axes, picture, unit)
            axes.set(xlim=(0, picture.xs[-1]), ylim=(0, top), xticks=[])
            panel_title(axes, f"{name}\npeak {show_bytes(picture.peak_bytes)}", "center")
            for phase, start, _ in picture.phases:
                if phase in ("backward", "optimizer"):
                    axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
                    write(axes, start, 0.97 * top, f"{phase[0].upper()} ", "right", va="top")
        panels[0, 0].set_ylabel(f"tensors alive ({unit})")
        drawn = {kind for picture in pictures.values() for kind in picture.bytes_by_kind}
        keys_below(figure, [key(KIND_COLORS[kind], kind, KIND_HATCHES[kind]) for kind in KINDS if kind in drawn])


def gpu_limits(gpus: Mapping[str, float] | Iterable[GPU]) -> dict[str, int]:
    """What fits on each GPU, as `{name: usable bytes}`; from records of `course_lib.hardware`, or a mapping already."""
    return dict(gpus) if isinstance(gpus, Mapping) else {gpu.name: gpu.usable_bytes for gpu in gpus}


def room_text(total: float, limits: Sequence[float]) -> str:
    """Whether one of the limits, or how many of several, hold a total."""
    fits = sum(total <= limit for limit in limits)
    if not limits:
        return ""
    if not fits:
        return ", out of memory" + (" on all" if len(limits) > 1 else "")
    return ", fits" + (f" {fits} of {len(limits)}" if len(limits) > 1 else "")


@checked
def show_budgets(
    budgets: Budget | Mapping,
    gpus: Mapping[str, float] | Iterable[GPU] = (),
    title: str = "What training needs, and what a GPU has",
) -> None:
    """Show a budget, or `{label: budget}`, against GPUs, or `{name: bytes}`: what reaches past one is out of memory."""
    several = isinstance(budgets, Mapping) and not set(budgets) & set(KINDS)
    rows = {label: kinds_of(budget) for label, budget in (budgets if several else {"all": budgets}).items()}
    limits = gpu_limits(gpus)
    notes = {label: room_text(sum(kinds.values()), list(limits.values())) for label, kinds in rows.items()}
    show_charts(title, bars(title, rows, marks=limits, notes=notes))
