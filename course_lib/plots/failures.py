"""How often to save when GPUs fail: where the job's time goes, by the interval between checkpoints."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import PercentFormatter

from course_lib.plots.palette import OKABE_ITO
from course_lib.plots.style import picture_axes, show_seconds
from course_lib.timing.failures import Failures, best_interval_s, shares
from course_lib.validate import Positive, checked

COLORS = {"training": "green", "saving": "blue", "lost work": "vermillion", "restarting": "orange"}
POINTS = 61


def default_intervals(failures: Failures) -> list[float]:
    """Intervals around the best one, from a thirtieth of it to 30 times, or as far as the formula is sensible."""
    best_s = best_interval_s(failures)
    longest_s = min(30 * best_s, 20 * failures.mtbf_s)
    return np.geomspace(best_s / 30, longest_s, POINTS).tolist()


def share_rows(failures: Failures, intervals_s: Sequence[Positive]) -> dict[str, list[float]]:
    """Return of each share of `timing.failures.shares` its values at these intervals."""
    found = [shares(failures, interval_s) for interval_s in intervals_s]
    return {name: [one[name] for one in found] for name in COLORS}


@checked
def show_checkpoint_interval(failures: Failures, title: str = "") -> None:
    """Show as stacked areas what becomes of the job's time, and the interval of the highest goodput."""
    intervals_s = default_intervals(failures)
    rows, best_s = share_rows(failures, intervals_s), best_interval_s(failures)
    with picture_axes(3.4) as axes:
        colors = [OKABE_ITO[color] for color in COLORS.values()]
        axes.stackplot(intervals_s, list(rows.values()), labels=list(rows), colors=colors, alpha=0.85)
        axes.axvline(best_s, color="black", linestyle="--", linewidth=1.2)
        goodput = shares(failures, best_s)["training"]
        note = f"best: {show_seconds(best_s)}\ngoodput {goodput:.1%}"
        look = {"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
        axes.annotate(
            note, (best_s, 0.25), xytext=(8, 0), textcoords="offset points", fontsize=9, va="center", bbox=look
        )
        axes.set(xscale="log", ylim=(0, 1), xlim=(intervals_s[0], intervals_s[-1]))
        axes.set(xlabel="seconds of training between checkpoints", ylabel="share of the job's time")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title(title or f"Time between failures {show_seconds(failures.mtbf_s)} (modelled)")
