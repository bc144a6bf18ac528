"""Curves: what a model predicts as a line, what somebody measured and published as points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from course_lib.hardware import Link
from course_lib.plots.palette import NEUTRAL_COLOR, OKABE_ITO
from course_lib.plots.style import (
    FULL_WIDTH_IN,
    TIME_UNITS,
    ground,
    picture_axes,
    show_bytes,
    show_seconds,
    three_digits,
)
from course_lib.timing import collective_costs, collective_s, fastest
from course_lib.validate import Size, checked

LINE_COLORS = [OKABE_ITO[name] for name in ("blue", "vermillion", "green", "purple", "orange", "sky")]
LINE_STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P"]

Curve = Mapping[float, float]


def draw_curves(axes, lines: Mapping[str, Curve], points: Mapping[str, Curve], value_labels: bool = True) -> None:
    """Lines for models, markers for measurements; measurements carry their numbers."""
    for index, (name, curve) in enumerate(lines.items()):
        look = {"color": LINE_COLORS[index % 6], "linestyle": LINE_STYLES[index % 6]}
        axes.plot(list(curve), list(curve.values()), label=name, **look)
    for index, (name, curve) in enumerate(points.items()):
        look = {"color": LINE_COLORS[(index + len(lines)) % 6], "marker": MARKERS[index % 6], "markersize": 8}
        axes.plot(list(curve), list(curve.values()), label=name, linestyle="none", markeredgecolor="white", **look)
    for x, y, above in value_labels_of(list(points.values()), lines=list(lines.values())) if value_labels else ():
        look = {"va": "bottom" if above else "top", "ha": "center", "bbox": ground("white", 0.3, 0.75)}
        place = {"xytext": (0, 7 if above else -8), "textcoords": "offset points"}
        axes.annotate(three_digits(y), (x, y), fontsize=8.5, **place, **look)
    axes.legend(loc="best")


def value_labels_of(curves: Sequence[Curve], lines: Sequence[Curve] = ()) -> list[tuple[float, float, bool]]:
    """Which points carry their number, as (x, y, above).

    All of the first curve's do: above, or below where a line would strike it through or another point lies there.
    Of other curves those that have room: below, or else above.
    """
    top = max((y for curve in curves for y in curve.values()), default=0)
    height, reach = 0.09 * top, 0.12 * top  # of a number; from a point to the far edge of its number

    def struck(x: float, y: float) -> bool:
        at_x = [line[x] - y for line in lines if x in line]
        return any(0 < gap < reach for gap in at_x) and not any(-reach < gap <= 0 for gap in at_x)

    first, others = (curves[0], curves[1:]) if curves else ({}, ())
    labels = [
        (x, y, not struck(x, y) and not any(0 < curve.get(x, y) - y < reach for curve in others))
        for x, y in first.items()
    ]
    for curve in others:
        for x, y in curve.items():
            taken = [
                place for at, other, above in labels if at == x for place in (other, other + _side(above) * height)
            ]
            free = [
                above
                for above in (False, True)
                if min([abs(place - y - _side(above) * height) for place in taken], default=height) >= height
                and (not struck(x, y) if above else y > height)
            ]
            if free and min([abs(other - y) for at, other, _ in labels if at == x], default=height) > height / 2:
                labels.append((x, y, free[0]))
    return labels


def _side(above: bool) -> int:
    return 1 if above else -1


@checked
def show_curves(
    lines: Mapping[str, Curve],
    points: Mapping[str, Curve],
    title: str,
    xlabel: str,
    ylabel: str,
    log_x: bool = True,
    log_y: bool = False,
    value_labels: bool = True,
) -> None:
    """Show `{name: {x: y}}` of models as lines beside `{name: {x: y}}` of published measurements as points."""
    with picture_axes(3.8, FULL_WIDTH_IN * 0.85) as axes:
        draw_curves(axes, lines, points, value_labels)
        _scale(axes, sorted({x for curve in [*lines.values(), *points.values()] for x in curve}), log_x, log_y)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_title(title)


def _scale(axes, xs: Sequence[float], log_x: bool, log_y: bool) -> None:
    if log_x:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        if len(xs) <= 10:
            axes.set_xticks(xs, [f"{x:g}" for x in xs])
    if log_y:
        axes.set_yscale("log")
        axes.margins(y=0.12)
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:,.10g}")
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)


@checked
def show_bandwidth(published: Mapping[str, Curve], models: Mapping[str, Curve], title: str) -> None:
    """Show bytes per second over nodes: published as points, models as lines; all `{nodes: bytes/s}`."""
    show_curves(
        {name: {x: y / 1e9 for x, y in curve.items()} for name, curve in models.items()},
        {name: {x: y / 1e9 for x, y in curve.items()} for name, curve in published.items()},
        title,
        "nodes of 8 GPUs",
        "bus bandwidth (GB/s)",
    )


@checked
def show_throughput(published: Curve, model: Curve, title: str) -> None:
    """Show throughput over GPUs: `{gpus: tokens per second and GPU}`, published as points, modelled as a line."""
    show_curves({"alpha-beta model": model}, {"published": published}, title, "GPUs", "tokens per second and GPU")


# ---------------------------------------------------------------- alpha-beta


@dataclass(frozen=True)
class AlphaBetaPicture:
    """Times of the fastest way over message sizes, and its two limits: a latency alone, and bytes at the best rate."""

    sizes_bytes: list[float]
    total_s: list[float]
    latency_s: float
    bandwidth_s: list[float]
    crossover_bytes: float
    ways: list[tuple[float, str]]  # the size from which on a way is the fastest, and what it is


def crossover_bytes(collective: str, world_size: Size, link: Link) -> float:
    """The message size at which the latency of the smallest message is as long as moving bytes at the best rate."""
    if world_size < 2:
        raise ValueError(f"world_size is {world_size}; a collective that costs something needs at least 2 ranks")
    costs = collective_costs(collective, world_size, link)
    return min(cost.latency_s for cost in costs) * max(cost.payload_bytes_per_s for cost in costs)


def alpha_beta_picture(collective: str, world_size: Size, link: Link) -> AlphaBetaPicture:
    """Times of messages from 1 KB to 10 GB, eight to a decade, each by the fastest way."""
    ratio = 10 ** (1 / 8)
    sizes = [1e3]
    while sizes[-1] < 1e10:
        sizes.append(min(sizes[-1] * ratio, 1e10))
    best = [fastest(collective, size, world_size, link) for size in sizes]
    crossover = crossover_bytes(collective, world_size, link)
    latency_s = collective_s(collective, 0, world_size, link)
    names = [cost.algorithm if cost.protocol == "plain" else f"{cost.algorithm}, {cost.protocol}" for cost in best]
    ways = list(zip(sizes, names, strict=True))
    first = [way for index, way in enumerate(ways) if index == 0 or ways[index - 1][1] != way[1]]
    total = [cost.seconds(size) for size, cost in zip(sizes, best, strict=True)]
    return AlphaBetaPicture(sizes, total, latency_s, [latency_s * size / crossover for size in sizes], crossover, first)


def interpolated(picture: AlphaBetaPicture, at_bytes: float) -> float:
    """Return the time of a message between two sizes of the picture, on the line that is drawn."""
    return float(np.interp(at_bytes, picture.sizes_bytes, picture.total_s))


def draw_alpha_beta(axes, picture: AlphaBetaPicture, at_bytes: float | None = None) -> None:
    """Log-log: flat where latency rules, a slope where bandwidth rules, and where the fastest way changes.

    at_bytes   one message to mark
    """
    scale = TIME_UNITS["ms"]
    axes.loglog(
        picture.sizes_bytes, [t / scale for t in picture.total_s], color=OKABE_ITO["blue"], label="time", zorder=3
    )
    axes.axhline(picture.latency_s / scale, color=OKABE_ITO["orange"], linestyle="--", linewidth=1.5)
    said = f" latency alone: {show_seconds(picture.latency_s)}\n"
    axes.text(picture.sizes_bytes[0], picture.latency_s / scale, said, va="center", fontsize=9)
    axes.loglog(
        picture.sizes_bytes, [t / scale for t in picture.bandwidth_s], color=OKABE_ITO["green"], linestyle=":", zorder=2
    )
    low, high = picture.sizes_bytes[0], picture.sizes_bytes[-1]
    axes.set(xlim=(low, high), ylim=(picture.latency_s / scale / 4, max(picture.total_s) / scale * 2))
    if low < picture.crossover_bytes < high:
        axes.axvline(picture.crossover_bytes, color=NEUTRAL_COLOR, linewidth=1.5)
        for side, text in (
            ("right", "latency rules  "),
            ("left", f"  bandwidth rules, from {show_bytes(picture.crossover_bytes)} on"),
        ):
            axes.annotate(
                text, (picture.crossover_bytes, 0.97), xycoords=("data", "axes fraction"), ha=side, va="top", fontsize=9
            )
    for index, (size, way) in enumerate(picture.ways):  # all to the right of where they begin, where they are fastest
        at = size, picture.total_s[picture.sizes_bytes.index(size)] / scale
        axes.plot(*at, "|", color=OKABE_ITO["blue"], markersize=9, zorder=4)
        look = {"xytext": (3, -6), "ha": "left", "va": "top"}  # below the curve
        look |= {"bbox": ground("white", 0.2, 0.8)} if index else {}
        axes.annotate(way, at, textcoords="offset points", fontsize=8.5, **look)
    if at_bytes:
        total = interpolated(picture, at_bytes)
        axes.plot(at_bytes, total / scale, "o", color=OKABE_ITO["vermillion"], markersize=10, zorder=4)
        box = ground("white", 1, 0.85)
        label, here = f"{show_bytes(at_bytes)}: {show_seconds(total)}", (at_bytes, total / scale)
        side = "left" if at_bytes < low * 1e3 else "right"
        axes.annotate(label, here, xytext=(0, 24), textcoords="offset points", fontweight="bold", ha=side, bbox=box)
    axes.set(xlabel="message (bytes)", ylabel="time (ms)")


@checked
def show_alpha_beta(world_size: Size, link: Link, collective: str = "all_reduce", title: str = "") -> None:
    """Show a collective's modelled time over message size, with its latency and its bandwidth regime."""
    picture = alpha_beta_picture(collective, world_size, link)
    crossover = picture.crossover_bytes
    with picture_axes(3.6, FULL_WIDTH_IN * 0.85) as axes:
        draw_alpha_beta(axes, picture)
        default = (
            f"{collective} of {world_size} ranks over {link.name}: bandwidth matters from {show_bytes(crossover)} on"
        )
        axes.set_title(title or default)
