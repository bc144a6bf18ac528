"""A run as its logs tell it: loss, speed and memory of each rank, and where the seconds of a step go."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt

from course_lib.palette import COMPUTE_COLOR, EXPOSED_COLOR, NEUTRAL_COLOR, OKABE_ITO, RANK_COLORS
from course_lib.plots.style import FULL_WIDTH_IN, finish, style
from course_lib.train.watch import RunNow, look, read_run, steps_of
from course_lib.units import UNITS, unit_for
from course_lib.validate import checked

PARTS = {  # of a step, in the order of the bars: the field of the log, its colour
    "forward": ("forward_s", COMPUTE_COLOR),
    "backward": ("backward_s", OKABE_ITO["blue"]),
    "optimizer": ("optimizer_s", OKABE_ITO["green"]),
    "data": ("data_s", OKABE_ITO["yellow"]),
    "waits for others": ("communication_s", EXPOSED_COLOR),
    "rest": (None, NEUTRAL_COLOR),
}
HEIGHT_IN = 5.2
_WINDOW = 20  # over how many of the last steps seconds are averaged
_IN_LEGEND = 6  # ranks; of more the lines have no names


def run_rows(of_ranks: Mapping[int, Sequence[dict]]) -> tuple[dict[int, list[dict]], dict[str, list[float]]]:
    """Return the lines of each rank's steps, and mean seconds by part of its last; raises ValueError without a step."""
    steps = {rank: found for rank, lines in of_ranks.items() if (found := steps_of(lines))}
    if not steps:
        raise ValueError("the logs tell of no step yet; look again when the run has done one")
    last = [lines[-_WINDOW:] for lines in steps.values()]
    seconds = {
        part: [mean(line[field] or 0.0 for line in lines) for lines in last]
        for part, (field, _) in PARTS.items()
        if field
    }
    whole = [mean(line["seconds"] for line in lines) for lines in last]
    seconds["rest"] = [max(0.0, all_ - sum(parts)) for all_, *parts in zip(whole, *seconds.values(), strict=True)]
    return steps, seconds


def draw_run(figure, steps: Mapping[int, list[dict]], by_part: Mapping[str, list[float]], finding: str) -> None:
    """Draw the four pictures into a figure."""
    (loss, speed), (memory, seconds) = figure.subplots(2, 2)
    longest, names = max(steps.values(), key=len), list(steps)
    loss.plot([line["step"] for line in longest], [line["loss"] for line in longest], color=OKABE_ITO["black"])
    loss.set(title="Loss", xlabel="step", ylabel="loss")
    for index, (rank, lines) in enumerate(steps.items()):
        curve = [line["step"] for line in lines], [line["tokens_per_s_per_rank"] for line in lines]
        speed.plot(*curve, label=f"rank {rank}", linewidth=1.2, color=RANK_COLORS[index % len(RANK_COLORS)])
    speed.set(title="Speed of each rank", xlabel="step", ylabel="tokens/s per rank", ylim=(0, None))
    if len(names) <= _IN_LEGEND:
        speed.legend(loc="lower right", ncols=2)
    peaks = [lines[-1]["peak_memory_bytes"] for lines in steps.values()]
    unit, places = unit_for(max(peaks)), range(len(names))
    now = [lines[-1]["memory_bytes"] / UNITS[unit] for lines in steps.values()]
    memory.bar(places, now, color=COMPUTE_COLOR, label="now")
    most = {"color": OKABE_ITO["black"], "markersize": 14, "label": "the most so far"}
    memory.plot(places, [peak / UNITS[unit] for peak in peaks], "_", **most)
    memory.set_xticks(places, names)
    memory.set(title="Memory", xlabel="rank", ylabel=unit, ylim=(0, 1.35 * max(peaks) / UNITS[unit]))
    memory.legend(loc="upper right", ncols=2)
    left = [0.0] * len(names)
    for part, values in by_part.items():
        seconds.barh(places, values, left=left, color=PARTS[part][1], label=part)
        left = [before + value for before, value in zip(left, values, strict=True)]
    seconds.set_yticks(places, names)
    seconds.invert_yaxis()
    seconds.set(title="Where a step's time goes", xlabel="seconds", ylabel="rank")
    seconds.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, fontsize=8)
    figure.suptitle(finding, fontsize=10)


@checked
def show_run(folder: str | Path) -> RunNow:
    """Draw a run from the logs in its folder; return what `look` says; raises ValueError without a step in them."""
    now, rows = look(folder, _WINDOW), run_rows(read_run(folder))
    with style():
        figure = plt.figure(figsize=(FULL_WIDTH_IN, HEIGHT_IN))
        draw_run(figure, *rows, now.finding)
        finish(figure)
    return now
