"""A run as its logs tell it: loss, speed and memory of each rank, and where the seconds of a step go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from course_lib.plots.palette import COMPUTE_COLOR, EXPOSED_COLOR, NEUTRAL_COLOR, OKABE_ITO, RANK_COLORS
from course_lib.plots.style import FULL_WIDTH_IN, UNITS, finish, style, unit_for
from course_lib.train.watch import RunNow, look, read_run, steps_of
from course_lib.validate import Size, checked

PARTS = {  # of a step, in the order of the bars: the field of the log, its colour
    "forward": ("forward_s", COMPUTE_COLOR),
    "backward": ("backward_s", OKABE_ITO["blue"]),
    "optimizer": ("optimizer_s", OKABE_ITO["green"]),
    "data": ("data_s", OKABE_ITO["yellow"]),
    "waits for others": ("communication_s", EXPOSED_COLOR),
    "rest": (None, NEUTRAL_COLOR),
}
HEIGHT_IN = 5.2
IN_LEGEND = 6  # ranks; of more the lines have no names


@dataclass(frozen=True)
class RunRows:
    """What is drawn, rank by rank in the order of `ranks`.

    curves       "loss" of the run, "tokens/s" of each rank: steps and values
    memory       bytes now and the most so far
    seconds      of the mean step of the last ones, by the part in which they went
    """

    ranks: list[int]
    loss: tuple[list[int], list[float]]
    tokens_per_s: list[tuple[list[int], list[float]]]
    memory: list[tuple[int, int]]
    seconds: dict[str, list[float]]


def run_rows(of_ranks: Mapping[int, Sequence[dict]], window: Size = 20) -> RunRows:
    """Return what the lines of all ranks' logs say; `window` is over how many steps seconds are averaged.

    Raises   ValueError if no rank has finished a step
    """
    steps = {rank: found for rank, lines in of_ranks.items() if (found := steps_of(lines))}
    if not steps:
        raise ValueError("the logs tell of no step yet; look again when the run has done one")
    first = max(steps.values(), key=len)
    return RunRows(
        list(steps),
        ([line["step"] for line in first], [line["loss"] for line in first]),
        [([x["step"] for x in lines], [x["tokens_per_s_per_rank"] for x in lines]) for lines in steps.values()],
        [(lines[-1]["memory_bytes"], lines[-1]["peak_memory_bytes"]) for lines in steps.values()],
        seconds_by_part([lines[-window:] for lines in steps.values()]),
    )


def seconds_by_part(of_ranks: Sequence[Sequence[dict]]) -> dict[str, list[float]]:
    """Return of each part the mean seconds of a step, rank by rank; what the log does not split is in the rest."""
    seconds = {
        part: [mean(line[field] or 0.0 for line in lines) for lines in of_ranks]
        for part, (field, _) in PARTS.items()
        if field
    }
    whole = [mean(line["seconds"] for line in lines) for lines in of_ranks]
    seconds["rest"] = [max(0.0, all_ - sum(parts)) for all_, *parts in zip(whole, *seconds.values(), strict=True)]
    return seconds


def draw_run(figure, rows: RunRows, verdict: str) -> None:
    """Draw the four pictures into a figure."""
    (loss, speed), (memory, seconds) = figure.subplots(2, 2)
    loss.plot(*rows.loss, color=OKABE_ITO["black"])
    loss.set(title="Loss", xlabel="step", ylabel="loss")
    for index, (rank, curve) in enumerate(zip(rows.ranks, rows.tokens_per_s, strict=True)):
        look = {"linewidth": 1.2, "color": RANK_COLORS[index % len(RANK_COLORS)]}
        speed.plot(*curve, label=f"rank {rank}", **look)
    speed.set(title="Speed of each rank", xlabel="step", ylabel="tokens/s per rank", ylim=(0, None))
    if len(rows.ranks) <= IN_LEGEND:
        speed.legend(loc="lower right", ncols=2)
    draw_memory(memory, rows)
    draw_seconds(seconds, rows)
    figure.suptitle(verdict, fontsize=10)


def draw_memory(axes: Axes, rows: RunRows) -> None:
    """A bar for what a rank holds, a mark for the most that it held."""
    unit = unit_for(max(peak for _, peak in rows.memory))
    held, peaks = ([value / UNITS[unit] for value in values] for values in zip(*rows.memory, strict=True))
    places = range(len(rows.ranks))
    axes.bar(places, held, color=COMPUTE_COLOR, label="now")
    axes.plot(places, peaks, "_", color=OKABE_ITO["black"], markersize=14, label="the most so far")
    axes.set_xticks(places, rows.ranks)
    axes.set(title="Memory", xlabel="rank", ylabel=unit)
    axes.set_ylim(0, 1.35 * max(peaks))
    axes.legend(loc="upper right", ncols=2)


def draw_seconds(axes: Axes, rows: RunRows) -> None:
    """A lying bar for each rank, cut into the parts of its mean step."""
    left = [0.0] * len(rows.ranks)
    for part, values in rows.seconds.items():
        axes.barh(range(len(rows.ranks)), values, left=left, color=PARTS[part][1], label=part)
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.set_yticks(range(len(rows.ranks)), rows.ranks)
    axes.invert_yaxis()
    axes.set(title="Where a step's time goes", xlabel="seconds", ylabel="rank")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, fontsize=8)


@checked
def show_run(folder: str | Path) -> RunNow:
    """Draw a run from the logs in its folder, now or after it; return what `look` says of it.

    Raises   ValueError if the folder has no logs, or no step in them
    """
    now, rows = look(folder, 20), run_rows(read_run(folder))
    with style():
        figure = plt.figure(figsize=(FULL_WIDTH_IN, HEIGHT_IN))
        draw_run(figure, rows, now.verdict)
        finish(figure)
    return now
