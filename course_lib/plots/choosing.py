"""The choice of a layout in pictures: memory against speed, predicted against measured; how often to save."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.ticker import PercentFormatter

from course_lib.cluster.failures import Failures, best_interval_s, shares
from course_lib.estimate import Estimate
from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.palette import LIMIT_COLOR, OKABE_ITO
from course_lib.panels.svg import bars
from course_lib.plan.measured import MeasuredRun
from course_lib.plots.concepts import show_charts
from course_lib.plots.style import picture_axes, write
from course_lib.units import show_seconds
from course_lib.validate import Amount, Positive, Size, checked


@checked
def show_options(options: Sequence[Estimate]) -> None:
    """Show what each option's fullest GPU holds, and the limit; raises ValueError if there is no option."""
    rows = {cut_name(option.layout): option.bytes_by_kind for option in options}
    limits = {"what a GPU has": max((option.usable_bytes for option in options), default=0)}
    show_charts("Memory of some layouts", bars("Memory of the fullest GPU (modelled)", rows, marks=limits))


@checked
def cut_name(layout: Layout) -> str:
    """Return a layout in a few words: its axes, its ZeRO stage, its micro-batch."""
    axes = " ".join(f"{axis}{getattr(layout, axis)}" for axis in ("dp", "cp", "tp", "pp", "ep"))
    kept = " ".join(word for word in axes.split() if word[2:] != "1")
    return f"{kept or 'one GPU'} z{layout.zero_stage} mb{layout.micro_batch}"


@checked
def show_front(ranked: Sequence[Estimate], best: Sequence[Estimate]) -> None:
    """Show MFU against memory: a point for each option, a line through the front; raises ValueError without them."""
    if not ranked or not best:
        raise ValueError("there is no option to draw; give those that fit, and their front")
    share = [[(one.memory_bytes / GB, one.mfu) for one in options] for options in (ranked, best)]
    with picture_axes(3.2) as axes:
        axes.plot(*zip(*share[0], strict=True), "o", color="#999999", markersize=4, label="fits")
        axes.plot(*zip(*share[1], strict=True), "o-", color=OKABE_ITO["blue"], label="front: no other beats it in both")
        axes.axvline(ranked[0].usable_bytes / GB, color="black", linestyle="--", linewidth=1.2)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(xlim=(0, None), ylim=(0, 1.2 * max(one.mfu for one in ranked)))
        axes.set(xlabel="GB on the fullest GPU (modelled)", ylabel="MFU (modelled)")
        axes.legend(loc="upper left", ncols=2)
        axes.set_title("Each point is a layout that fits", fontsize=10)


@checked
def show_by_memory(options: Mapping[str, Estimate], title: str) -> None:
    """Show each layout by its memory and its MFU, under the first word of its name; the line is what the GPU has."""
    if not options:
        raise ValueError("options is empty; give one layout or more")
    limit_gb = next(iter(options.values())).usable_bytes / GB
    with picture_axes(3.2) as axes:
        for name, option in options.items():
            x, y = option.memory_bytes / GB, 100 * option.mfu
            mark, color = ("o", "green") if option.fits else ("X", "vermillion")
            axes.plot(x, y, mark, color=OKABE_ITO[color], markersize=8)
            axes.annotate(name.split()[0], (x, y), xytext=(-16, -4), textcoords="offset points", fontsize=9.5)
        axes.axvline(limit_gb, color=LIMIT_COLOR, linestyle="--")
        write(axes, limit_gb, 3, f" one GPU: {limit_gb:.1f} GB", "left", 8.5, va="baseline")
        right = max(option.memory_bytes / GB for option in options.values())
        axes.set(xlim=(0, 1.25 * max(right, limit_gb)), ylim=(0, 60))
        axes.set(xlabel="memory of the most loaded rank (GB)", ylabel="modelled MFU (%)")
        axes.set_title(title)


@checked
def show_waiting(options: Mapping[str, Estimate], title: str) -> None:
    """Show of each named layout how long a step computes and for what it waits, in modelled seconds."""
    rows = {name: option.seconds_by_part for name, option in options.items()}
    show_charts(title, bars(title, rows, "seconds"))


@checked
def show_losses(losses: Mapping[str, Sequence[float]], title: str) -> None:
    """Show the loss of each step under each named rule; raises ValueError without any."""
    if not losses:
        raise ValueError("losses is empty; give the losses of one rule or more")
    with picture_axes(2.4) as axes:
        for (name, row), line in zip(losses.items(), cycle(("-", "--", ":")), strict=False):
            axes.plot(range(1, len(row) + 1), row, line, label=name)
        axes.set(xlabel="step", ylabel="loss")
        axes.set_title(title)
        axes.legend()


@checked
def show_predicted(runs: Sequence[MeasuredRun], options: Sequence[Estimate]) -> None:
    """Show measured tokens/s of runs over predicted ones; raises ValueError without a run, or an option for each."""
    if not runs or len(runs) != len(options):
        raise ValueError(f"there are {len(runs)} runs and {len(options)} options; give one option for each run")
    measured = [run.tokens_per_s_per_gpu for run in runs]
    with picture_axes(3.6, 6.0) as axes:
        for kind, color in (("no pipeline", OKABE_ITO["blue"]), ("pipeline", OKABE_ITO["vermillion"])):
            both = [
                (option.tokens_per_s / run.num_gpus, run.tokens_per_s_per_gpu)
                for run, option in zip(runs, options, strict=True)
                if (run.layout.pp > 1) == (kind == "pipeline")
            ]
            if both:
                axes.loglog(*zip(*both, strict=True), "o", color=color, label=kind)
        ends = [min(measured), max(measured)]
        axes.plot(ends, ends, color="#777777", linewidth=1, linestyle="--", label="equal")
        axes.set(xlabel="predicted tokens/s per GPU (modelled)", ylabel="measured tokens/s per GPU")
        axes.legend(loc="upper left")
        axes.set_title("Predicted and measured speed: equal on the dashed line", fontsize=10)


@checked
def show_scaling(num_gpus: Sequence[Size], shares: Mapping[str, Sequence[Amount]], peak: Positive = 0.6) -> None:
    """Show MFU by GPUs, a line a name, up to `peak`; raises ValueError unless each has a value a number of GPUs."""
    if not num_gpus or any(len(line) != len(num_gpus) for line in shares.values()):
        raise ValueError(f"there are {len(num_gpus)} numbers of GPUs; give each line as many values, at least one")
    colors = [OKABE_ITO[name] for name in ("vermillion", "orange", "blue", "green", "purple", "black")]
    with picture_axes(3.0) as axes:
        for (name, line), color in zip(shares.items(), cycle(colors), strict=False):
            axes.plot(num_gpus, line, "o-", color=color, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(num_gpus, [f"{n:,}" for n in num_gpus])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(ylim=(0, peak), xlabel="GPUs", ylabel="MFU")
        axes.legend(loc="lower left")
        axes.set_title("The same batch on more GPUs, and a batch that grows with them", fontsize=10)


_SHARE_COLORS = {"training": "green", "saving": "blue", "lost work": "vermillion", "restarting": "orange"}


def share_rows(failures: Failures) -> tuple[list[float], dict[str, list[float]]]:
    """Return intervals from a thirtieth of the best to 30 times it, as far as is sensible, and each share there."""
    best_s = best_interval_s(failures)
    intervals_s = np.geomspace(best_s / 30, min(30 * best_s, 20 * failures.mtbf_s), 61).tolist()
    found = [shares(failures, interval_s) for interval_s in intervals_s]
    return intervals_s, {name: [one[name] for one in found] for name in _SHARE_COLORS}


@checked
def show_checkpoint_interval(failures: Failures, title: str) -> None:
    """Show as stacked areas what becomes of the job's time, and the interval of the highest goodput."""
    (intervals_s, rows), best_s = share_rows(failures), best_interval_s(failures)
    with picture_axes(3.4) as axes:
        colors = [OKABE_ITO[color] for color in _SHARE_COLORS.values()]
        axes.stackplot(intervals_s, list(rows.values()), labels=list(rows), colors=colors, alpha=0.85)
        axes.axvline(best_s, color="black", linestyle="--", linewidth=1.2)
        note = f"best: {show_seconds(best_s)}\ngoodput {shares(failures, best_s)['training']:.1%}"
        look = {"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(note, (best_s, 0.25), fontsize=9, bbox=look, **place)
        axes.set(xscale="log", ylim=(0, 1), xlim=(intervals_s[0], intervals_s[-1]))
        axes.set(xlabel="seconds of training between checkpoints", ylabel="share of the job's time")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title(title)
