"""Curves: what a model predicts as a line, what somebody measured and published as points."""

from collections.abc import Mapping, Sequence

from course_lib.hardware import Link
from course_lib.palette import NEUTRAL_COLOR, OKABE_ITO
from course_lib.plots.style import FULL_WIDTH_IN, ground, picture_axes, write
from course_lib.timing import collective_costs, collective_s, fastest
from course_lib.units import show_bytes, show_seconds, three_digits
from course_lib.validate import Size, checked

LINE_COLORS = [OKABE_ITO[name] for name in ("blue", "vermillion", "green", "purple", "orange", "sky")]
LINE_STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P"]

_Curve = Mapping[float, float]


def value_labels_of(curve: _Curve, lines: Sequence[_Curve] = ()) -> list[tuple[float, float, bool]]:
    """Return (x, y, above) of each point's number: above the point, or below where a line would strike it through."""
    reach, found = 0.12 * max(curve.values(), default=0), []  # from a point to the far edge of its number
    for x, y in curve.items():
        gaps = [line[x] - y for line in lines if x in line]
        struck = any(0 < gap < reach for gap in gaps) and not any(-reach < gap <= 0 for gap in gaps)
        found.append((x, y, not struck))
    return found


@checked
def show_curves(
    lines: Mapping[str, _Curve],
    points: Mapping[str, _Curve],
    title: str,
    xlabel: str,
    ylabel: str,
    log_x: bool = True,
    log_y: bool = False,
    value_labels: bool = True,
) -> None:
    """Show `{name: {x: y}}` of models as lines, of published measurements as points, the first with their numbers."""
    with picture_axes(3.8, FULL_WIDTH_IN * 0.85) as axes:
        for index, (name, curve) in enumerate(lines.items()):
            look = {"color": LINE_COLORS[index % 6], "linestyle": LINE_STYLES[index % 6]}
            axes.plot(list(curve), list(curve.values()), label=name, **look)
        for index, (name, curve) in enumerate(points.items()):
            look = {"color": LINE_COLORS[(index + len(lines)) % 6], "marker": MARKERS[index % 6], "markersize": 8}
            axes.plot(list(curve), list(curve.values()), label=name, linestyle="none", markeredgecolor="white", **look)
        numbered = next(iter(points.values()), {}) if value_labels else {}
        for x, y, above in value_labels_of(numbered, list(lines.values())):
            look = {"va": "bottom" if above else "top", "ha": "center", "bbox": ground("white", 0.3, 0.75)}
            place = {"xytext": (0, 7 if above else -8), "textcoords": "offset points"}
            axes.annotate(three_digits(y), (x, y), fontsize=8.5, **place, **look)
        axes.legend(loc="best")
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
def show_bandwidth(published: Mapping[str, _Curve], models: Mapping[str, _Curve], title: str) -> None:
    """Show bytes per second over nodes: published as points, models as lines; all `{nodes: bytes/s}`."""
    show_curves(
        {name: {x: y / 1e9 for x, y in curve.items()} for name, curve in models.items()},
        {name: {x: y / 1e9 for x, y in curve.items()} for name, curve in published.items()},
        title,
        "nodes of 8 GPUs",
        "bus bandwidth (GB/s)",
    )


_SIZES_BYTES = [10 ** (3 + step / 8) for step in range(57)]  # from 1 KB to 10 GB, eight to a decade


def crossover_bytes(collective: str, world_size: int, link: Link) -> float:
    """The message size at which the latency of the smallest message is as long as moving bytes at the best rate."""
    if world_size < 2:
        raise ValueError(f"world_size is {world_size}; a collective that costs something needs at least 2 ranks")
    costs = collective_costs(collective, world_size, link)
    return min(cost.latency_s for cost in costs) * max(cost.payload_bytes_per_s for cost in costs)


def ways(collective: str, world_size: int, link: Link) -> list[tuple[float, str, float]]:
    """Of each size the name of the fastest way, and its seconds."""
    found = []
    for size in _SIZES_BYTES:
        best = fastest(collective, size, world_size, link)
        name = best.algorithm if best.protocol == "plain" else f"{best.algorithm}, {best.protocol}"
        found.append((size, name, best.seconds(size)))
    return found


@checked
def show_alpha_beta(world_size: Size, link: Link, title: str) -> None:
    """Show the modelled time of an all-reduce over its size, with each way's name where it begins to be fastest."""
    crossover = crossover_bytes("all_reduce", world_size, link)
    latency_ms = 1e3 * collective_s("all_reduce", 0, world_size, link)
    found = ways("all_reduce", world_size, link)
    times_ms = [1e3 * seconds for _, _, seconds in found]
    low, high, blue = _SIZES_BYTES[0], _SIZES_BYTES[-1], OKABE_ITO["blue"]
    with picture_axes(3.6, FULL_WIDTH_IN * 0.85) as axes:
        axes.loglog(_SIZES_BYTES, times_ms, color=blue, label="time", zorder=3)
        axes.axhline(latency_ms, color=OKABE_ITO["orange"], linestyle="--", linewidth=1.5)
        write(axes, low, latency_ms, f" latency alone: {show_seconds(latency_ms / 1e3)}", "left", va="bottom")
        slope = [latency_ms * size / crossover for size in _SIZES_BYTES]
        axes.loglog(_SIZES_BYTES, slope, color=OKABE_ITO["green"], linestyle=":", zorder=2)
        axes.axvline(crossover, color=NEUTRAL_COLOR, linewidth=1.5)
        here = {"xycoords": ("data", "axes fraction"), "va": "top", "fontsize": 9}
        axes.annotate("latency rules  ", (crossover, 0.97), ha="right", **here)
        axes.annotate(f"  bandwidth rules, from {show_bytes(crossover)} on", (crossover, 0.97), ha="left", **here)
        before = ""
        for size, name, seconds in found:
            if name != before:
                axes.plot(size, 1e3 * seconds, "|", color=blue, markersize=9, zorder=4)
                look = {"bbox": ground("white", 0.2, 0.8)} if before else {}
                place = {"xytext": (3, -6), "textcoords": "offset points", "ha": "left", "va": "top"}
                axes.annotate(name, (size, 1e3 * seconds), fontsize=8.5, **place, **look)
            before = name
        axes.set(xlim=(low, high), ylim=(latency_ms / 4, max(times_ms) * 2))
        axes.set(xlabel="message (bytes)", ylabel="time (ms)")
        axes.set_title(title)
