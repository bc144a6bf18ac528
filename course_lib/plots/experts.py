"""Experts in pictures: their load, what balancing does over time, rows and speed, how few are active, bytes sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt

from course_lib.hardware import GPU
from course_lib.palette import COMPUTE_COLOR, LIMIT_COLOR, NEUTRAL_COLOR, OKABE_ITO, mix
from course_lib.panels.svg import bars, columns
from course_lib.plots.concepts import show_charts
from course_lib.plots.style import keys_below, panel_title, picture_axes, picture_panels
from course_lib.plots.tiles import Tile, draw_tiles
from course_lib.timing.rates import peak_flops, roofline_s
from course_lib.units import UNITS, three_digits, unit_for
from course_lib.validate import Index, Positive, Size, checked


@checked
def show_load(load: Sequence[int], capacity: Size | None = None, title: str = "") -> None:
    """Show assignments by expert, with the mean, hatched what a capacity drops; raises ValueError without load."""
    if sum(load) == 0:
        raise ValueError(f"the load of {len(load)} experts is empty; give how many assignments fell on each expert")
    mean, computed = sum(load) / len(load), [min(tokens, capacity or tokens) for tokens in load]
    most = three_digits(max(computed) / mean)
    said = title or f"The most loaded of {len(load)} experts computes {most} times the mean load"
    rows = {
        str(expert): {"computed": kept, "dropped": tokens - kept}
        for expert, (tokens, kept) in enumerate(zip(load, computed, strict=True))
    }
    marks = {f"mean {three_digits(mean)}": mean} | ({f"capacity {capacity:,}": capacity} if capacity else {})
    notes = {str(expert): str(tokens) for expert, tokens in enumerate(load)}
    show_charts(said, columns("Assignments by expert", rows, "count", marks=marks, notes=notes))


@dataclass(frozen=True)
class BalancePicture:
    """The load of each expert over the mean, step by step; the most loaded of a step, meaned over the last quarter."""

    relative: list[list[float]]  # [expert][step]
    largest_at_end: float
    last_steps: int


@checked
def balance_picture(loads: Sequence[Sequence[float]]) -> BalancePicture:
    """From loads[step][expert] to multiples of a step's mean; raises ValueError without a step, or one without load."""
    if not loads or any(sum(step) <= 0 for step in loads):
        raise ValueError(f"got {len(loads)} steps; give loads[step][expert], with some load in each")
    relative = [[float(n) * len(step) / float(sum(step)) for n in step] for step in loads]
    last = relative[-max(1, len(relative) // 4) :]
    by_expert = [list(expert) for expert in zip(*relative, strict=True)]
    return BalancePicture(by_expert, sum(map(max, last)) / len(last), len(last))


@checked
def show_balance(loads: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Show `{label: loads[step][expert]}`: each expert thin, the largest and the smallest thick, on one scale."""
    pictures = {label: balance_picture(steps) for label, steps in loads.items()}
    if not pictures:
        raise ValueError("loads is empty; give the loads of one run or more")
    top = 1.08 * max(max(map(max, picture.relative)) for picture in pictures.values())
    most = {"color": OKABE_ITO["vermillion"], "linewidth": 1.8, "label": "most loaded expert"}
    least = {"color": OKABE_ITO["blue"], "linewidth": 1.8, "linestyle": "--", "label": "emptiest expert"}
    with picture_panels(1, len(pictures), 3.1, squeeze=False, sharey=True) as (figure, panels):
        for axes, (label, picture) in zip(panels[0], pictures.items(), strict=True):
            by_step = list(zip(*picture.relative, strict=True))
            steps = range(1, len(by_step) + 1)
            axes.plot(steps, by_step, color=NEUTRAL_COLOR, linewidth=0.8)
            axes.plot(steps, list(map(max, by_step)), **most)
            axes.plot(steps, list(map(min, by_step)), **least)
            axes.axhline(1, color=LIMIT_COLOR, linewidth=1, linestyle=":")
            axes.set(xlim=(1, max(len(steps), 2)), ylim=(0, top), xlabel="training step")
            said = f"max load, last {picture.last_steps} steps: {three_digits(picture.largest_at_end)} x mean"
            panel_title(axes, f"{label}\n{said}")
        panels[0, 0].set_ylabel("load / mean load")
        line = {"color": NEUTRAL_COLOR, "linewidth": 0.8, "label": "each expert"}
        even = {"color": "black", "linewidth": 1, "linestyle": ":", "label": "even load"}
        keys_below(figure, [plt.Line2D([], [], **look) for look in (most, least, line, even)])


@checked
def show_parameters(parameters: Mapping[str, tuple[float, float]]) -> None:
    """Show `{model: (total, active)}` as bars: what is stored, and within it what computes for one token."""
    rows = {
        name: {"computing": active / 1e9, "experts not chosen": (total - active) / 1e9}
        for name, (total, active) in parameters.items()
    }
    notes = {name: f" billion, {three_digits(active / 1e9)} active" for name, (_, active) in parameters.items()}
    shares = [
        f"{100 * active / total:.3g} % of {name}" for name, (total, active) in parameters.items() if active < total
    ]
    title = "A token passes through " + (" and ".join(shares) or "every parameter")
    show_charts(title, bars("Billions of parameters", rows, "count", notes=notes))


@checked
def grouped_share_of_peak(rows: Positive, d_model: Size, d_expert: Size, gpu: GPU) -> float:
    """Return the share of peak FLOP/s that one matrix of an expert can reach with so many rows, in bf16 (modelled).

    The FLOPs at peak, or the bytes of rows in, matrix and rows out at memory bandwidth: whichever takes longer.
    """
    flops = 2 * rows * d_model * d_expert
    moved_bytes = 2 * (rows * d_model + d_model * d_expert + rows * d_expert)
    return flops / peak_flops(gpu, "bf16") / roofline_s(flops, moved_bytes, gpu)


@checked
def show_rows_per_expert(points: Mapping[str, float], d_model: Size, d_expert: Size, gpu: GPU) -> None:
    """Show the modelled share of peak over rows per expert; raises ValueError without a point, or below a row."""
    if not points or min(points.values()) < 1:
        raise ValueError(f"got {len(points)} points; give at least one, with at least 1 row each")
    rows = [2 ** (half / 2) for half in range(0, 27)]
    with picture_axes(2.9) as axes:
        axes.plot(rows, [100 * grouped_share_of_peak(r, d_model, d_expert, gpu) for r in rows], color=COMPUTE_COLOR)
        for name, count in points.items():
            share = 100 * grouped_share_of_peak(count, d_model, d_expert, gpu)
            axes.plot([count], [share], "o", color=OKABE_ITO["vermillion"])
            side = (
                {"xytext": (-7, 3), "ha": "right", "va": "bottom"} if share > 60 else {"xytext": (7, -3), "va": "top"}
            )
            text = f"{name}:\n{count:,.0f} rows, {three_digits(share)} %"
            axes.annotate(text, (count, share), textcoords="offset points", fontsize=9, **side)
        axes.set_xscale("log", base=2)
        axes.set(xlabel=f"rows per expert (matrix {d_model:,} x {d_expert:,}, bf16)", ylabel="% of peak FLOP/s")
        axes.set(ylim=(0, 118), yticks=[0, 25, 50, 75, 100])
        axes.set_title(f"With few rows an expert's matrix is read for little work ({gpu.name}, modelled)")


def bytes_sent(rows: Sequence[Sequence[int]], row_bytes: int) -> list[list[int]]:
    """Return bytes from rank to rank, 0 to itself, from rows[src][dst]; raises ValueError unless square, of 1 to 16."""
    count = len(rows)
    if any(len(row) != count for row in rows) or not 1 <= count <= 16:
        raise ValueError(f"got {count} rows; give a square table of 1 to 16 ranks: rows[src][dst]")
    return [[0 if src == dst else n * row_bytes for dst, n in enumerate(row)] for src, row in enumerate(rows)]


@checked
def show_traffic(rows: Sequence[Sequence[int]], row_bytes: Index, title: str) -> None:
    """Show who sends how many bytes to whom, from rows[src][dst] of row_bytes, fuller for more; and the sums."""
    sent = bytes_sent(rows, row_bytes)
    most, count = max(max(row) for row in sent) or 1, len(rows)
    unit = unit_for(most)
    cells = [[_cell(n / UNITS[unit], n / most) for n in row] for row in sent]
    for rank, row in enumerate(cells):
        row[rank] = Tile("", "#F2F2F2")
    with picture_panels(1, 2, 1.7 + 0.33 * count, title, width_ratios=(1.35, 1)) as (_, (left, right)):
        draw_tiles(left, cells, [str(rank) for rank in range(count)], fontsize=9)
        left.set_xticks([rank + 0.5 for rank in range(count)], range(count))
        left.set(xlabel="to rank", ylabel="from rank")
        panel_title(left, f"each cell in {unit}")
        sums = [sum(row) / UNITS[unit] for row in sent]
        right.barh([rank + 0.5 for rank in range(count)], sums, 0.7, color=COMPUTE_COLOR, edgecolor="white")
        right.set(yticks=[], xlim=(0, (max(sums) or 1.0) * 1.05), ylim=(count + 0.05, -0.05))
        right.set_xlabel(f"sent by each rank ({unit})")


def _cell(size: float, share: float) -> Tile:
    return Tile(f"{size:,.{int(size < 9.95)}f}", mix(COMPUTE_COLOR, "#FFFFFF", 0.85 * (1 - share)))
