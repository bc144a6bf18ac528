"""The choice of a layout in pictures: steps, cuts, memory against speed, predicted against measured; failures."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.ticker import PercentFormatter

from course_lib.estimate import Estimate
from course_lib.hardware import GB
from course_lib.palette import AXIS_COLORS, COMPUTE_COLOR, KIND_COLORS, LIMIT_COLOR, NEUTRAL_COLOR, OKABE_ITO, mix
from course_lib.plan.measured import MeasuredRun
from course_lib.plots.diagrams import BORDERED, diagram, draw_arrows, draw_diagram
from course_lib.plots.style import bare, key, keys_below, labelled_box, picture_axes, picture_panels, plain_rows, write
from course_lib.plots.tiles import Tile, draw_tiles
from course_lib.simulate.two_hosts import HostRow
from course_lib.timing.failures import Failures, best_interval_s, shares
from course_lib.units import show_seconds
from course_lib.validate import Amount, Positive, Size, checked, one_of

# ---------------------------------------------------------------- the steps of a choice


@checked
def show_steps(
    steps: Mapping[str, str],
    back: str = "calibrate",
    title: str = "How a layout is chosen: most candidates fall out before anything runs",
) -> None:
    """Show steps as boxes from left to right, each with a text; the last leads back to the last but two.

    back     what the arrow back is called
    Raises   ValueError if there are fewer than two steps
    """
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps cannot be a chart; give at least 2")
    last, color, red = len(steps) - 1, mix(OKABE_ITO["sky"], "#FFFFFF", 0.5), OKABE_ITO["vermillion"]
    boxes = [(place, 0, 0.78, 1, color, f"{name}\n\n{text}") for place, (name, text) in enumerate(steps.items())]
    with picture_axes(2.1) as axes:
        ahead = [((place + 0.78, 0.5), (place + 1, 0.5)) for place in range(last)]
        draw_diagram(axes, ((-0.05, last + 0.83), (-0.65, 1.05)), boxes, ahead, edgecolor="black")
        bend = f"bar,fraction={-0.3 / max(1, last - 2):.2f}"
        draw_arrows(axes, [((last + 0.39, 0), (max(0, last - 2) + 0.39, 0))], red, connectionstyle=bend)
        write(axes, last - 0.61, -0.22, back, color=red)
        axes.set_title(title)


# ---------------------------------------------------------------- all cuts of a number of GPUs

MOST_CUTS = 256


@checked
def show_cuts(triples: Sequence[tuple[int, int, int]], gpus_per_node: Size = 8) -> None:
    """Show every (dp, tp, pp): a column for each tp, a row for each pp, dp in the cell; grey where tp leaves a node.

    Raises   ValueError if there is none, or more than the picture has room for
    """
    if not 0 < len(triples) <= MOST_CUTS:
        raise ValueError(f"there are {len(triples)} cuts; give 1 to {MOST_CUTS} triples (dp, tp, pp)")
    columns, rows = (sorted({triple[place] for triple in triples}) for place in (1, 2))
    dp_of = {(tp, pp): dp for dp, tp, pp in triples}
    inside = mix(AXIS_COLORS["dp"], "#FFFFFF", 0.35)
    tiles = [
        [Tile(f"dp {dp_of[tp, pp]}", "#D9D9D9" if tp > gpus_per_node else inside) if (tp, pp) in dp_of else 1.0
         for tp in columns]
        for pp in rows
    ]  # fmt: skip
    with picture_axes(0.9 + 0.34 * len(rows), 6.375) as axes:
        draw_tiles(axes, tiles, [str(pp) for pp in rows])
        axes.set_xticks([place + 0.5 for place in range(len(columns))], [str(tp) for tp in columns])
        axes.set(xlabel="tp", ylabel="pp")
        axes.set_title(f"{len(triples)} cuts; grey: tp leaves a node of {gpus_per_node}")


def show_paths() -> None:
    """Show one micro-batch on one GPU: tp sums inside every layer, a pipeline sends once behind its layers."""
    layers, computing, boxes = 4, mix(OKABE_ITO["sky"], "#FFFFFF", 0.6), []
    for part in range(2 * layers):
        boxes.append((0.8 * part, 1.2, 0.5, 0.7, computing, ("attention", "MLP")[part % 2]))
        boxes.append((0.8 * part + 0.5, 1.2, 0.3, 0.7, AXIS_COLORS["tp"], "sum"))
    boxes += [(layer, 0, 1.0, 0.7, computing, f"layer {layer}") for layer in range(layers)]
    boxes.append((layers, 0, 0.3, 0.7, AXIS_COLORS["pp"], "send"))
    notes = [(1.6 * layer + 0.8, 2.05, f"layer {layer}") for layer in range(layers)]
    notes += [(-0.1, 1.55, "tp over nodes", "right"), (-0.1, 0.35, "pp over nodes", "right")]
    said = "Forward, not to scale: “sum” and “send” use the network; the GPU waits for each sum"
    diagram(2.0, said, ((-1.03, 1.62 * layers), (-0.1, 2.25)), boxes, (), notes, fontsize=7.5)


# ---------------------------------------------------------------- what options need

# Kinds of memory as the predictors tell them -> the six that a picture has room for.
SHOWN_KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary", "overhead")
SHOWN_AS = {"gathered": "activations", "messages": "temporary", "logits": "temporary", "update": "temporary"}
SHOWN_AS |= {"whole sequences": "temporary", "queued": "temporary", "backward": "gradients"}
SHOWN_AS |= {kind: kind for kind in SHOWN_KINDS}
MOST_BARS = 12


def shown_kinds(option: Estimate) -> dict[str, float]:
    """Return an option's GB in the kinds that the picture shows; what is none of them is overhead."""
    found = dict.fromkeys(SHOWN_KINDS, 0.0)
    for kind, size in option.bytes_by_kind.items():
        found[SHOWN_AS.get(kind, "overhead")] += size / GB
    return found


@checked
def cut_name(layout) -> str:
    """Return a layout in a few words: its axes, its ZeRO stage, its micro-batch."""
    axes = " ".join(f"{axis}{getattr(layout, axis)}" for axis in ("dp", "cp", "tp", "pp", "ep"))
    kept = " ".join(word for word in axes.split() if word[2:] != "1")
    return f"{kept or 'one GPU'} z{layout.zero_stage} mb{layout.micro_batch}"


def draw_options(axes, options: Sequence[Estimate]) -> None:
    """Draw a bar of memory for each option, and what a GPU has as a line.

    Raises   ValueError if there is no option, or more than the picture has room for
    """
    if not 0 < len(options) <= MOST_BARS:
        raise ValueError(f"there are {len(options)} options; give 1 to {MOST_BARS}")
    left = [0.0] * len(options)
    for kind in SHOWN_KINDS:
        sizes = [shown_kinds(option)[kind] for option in options]
        axes.barh(range(len(options)), sizes, left=left, color=KIND_COLORS[kind], label=kind, edgecolor="white")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(options[0].usable_bytes / GB, color="black", linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(options)), [cut_name(option.layout) for option in options])
    axes.invert_yaxis()
    axes.set_xlabel("GB on the fullest GPU (modelled); dashed: what a GPU has")
    below = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.16 - 0.6 / len(options))}
    axes.legend(ncols=len(SHOWN_KINDS), fontsize=8, **below)


@checked
def show_options(options: Sequence[Estimate]) -> None:
    """Show what each option's fullest GPU holds, and the limit."""
    with picture_axes(1.6 + 0.3 * len(options)) as axes:
        draw_options(axes, options)
        axes.set_title("Memory of some layouts", fontsize=10)


def draw_front(axes, ranked: Sequence[Estimate], best: Sequence[Estimate]) -> None:
    """Draw MFU against memory: a point for each option, a line through the front.

    Raises   ValueError if one of both is empty
    """
    if not ranked or not best:
        raise ValueError("there is no option to draw; give those that fit, and their front")
    share = [[(one.memory_bytes / GB, one.mfu) for one in options] for options in (ranked, best)]
    axes.plot(*zip(*share[0], strict=True), "o", color="#999999", markersize=4, label="fits")
    axes.plot(*zip(*share[1], strict=True), "o-", color=OKABE_ITO["blue"], label="front: no other beats it in both")
    axes.axvline(ranked[0].usable_bytes / GB, color="black", linestyle="--", linewidth=1.2)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set(xlim=(0, None), ylim=(0, 1.2 * max(one.mfu for one in ranked)))
    axes.set(xlabel="GB on the fullest GPU (modelled)", ylabel="MFU (modelled)")
    axes.legend(loc="upper left", ncols=2)


@checked
def show_front(ranked: Sequence[Estimate], best: Sequence[Estimate]) -> None:
    """Show speed against memory."""
    with picture_axes(3.2) as axes:
        draw_front(axes, ranked, best)
        axes.set_title("Each point is a layout that fits", fontsize=10)


def _refuse_none(options: Mapping) -> None:
    if not options:
        raise ValueError("options is empty; give one layout or more")


@checked
def show_by_memory(options: Mapping[str, Estimate], title: str) -> None:
    """Show each layout by its memory and its MFU, under the first word of its name; the line is what the GPU has."""
    _refuse_none(options)
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


PARTS = {  # of a step: colour, name; what is drawn with them
    "compute": (COMPUTE_COLOR, "computing"),
    "tp": (AXIS_COLORS["tp"], "tp"),
    "cp": (OKABE_ITO["yellow"], "cp"),
    "ep": (AXIS_COLORS["ep"], "ep"),
    "bubble": (NEUTRAL_COLOR, "pipeline"),
    "data": (AXIS_COLORS["dp"], "ZeRO, gradients"),
}
DRAWN_WITH = {"launches": "compute", "update": "compute", "transfer": "bubble", "waiting": "bubble"}


@checked
def show_waiting(options: Mapping[str, Estimate], title: str) -> None:
    """Show of each named layout how long a step computes and for what it waits, in modelled seconds."""
    _refuse_none(options)
    longest_s = max(option.step_s for option in options.values())
    with picture_axes(0.9 + 0.42 * len(options)) as axes:
        for row, option in enumerate(options.values()):
            parts, left = dict.fromkeys(PARTS, 0.0), 0.0
            for part, seconds in option.seconds_by_part.items():
                parts[DRAWN_WITH.get(part, part)] += seconds
            for part, seconds in parts.items():
                axes.barh(row, seconds, left=left, height=0.66, color=PARTS[part][0])
                left += seconds
        plain_rows(axes, list(options), -0.5, -0.5)
        axes.set(xlim=(0, 1.02 * longest_s), xlabel="modelled seconds of a step")
        axes.set_title(title)
        seen = [one for one in PARTS if any(option.seconds_by_part.get(one, 0.0) > 0.005 * longest_s
                                            for option in options.values())]  # fmt: skip
        keys_below(axes.figure, [key(*PARTS[part]) for part in seen])


# ---------------------------------------------------------------- the flow chart of a choice

RUNGS = {
    "dp": "1. One GPU for a copy?\nZeRO-1, then ZeRO-3\n(micro-batch 1, 2, 4, 8; HSDP above 128 GPUs)",
    "node": "2. 2, 4 or 8 GPUs of a node for a copy?\nevery tp x cp, ZeRO-1, then ZeRO-3\n"
    "(micro-batches and HSDP as in 1)",
    "nodes": "3. Several nodes for a copy?\npp with tp and cp, ZeRO-1, interleaved or 1F1B;\ncp over nodes, ZeRO-3",
    "recompute": "4. Every block recomputed?\nsteps 1 to 3 again",
}
STOP = "Stop at the first layout\nthat fits in memory\nand waits for at most\n5 % of its step:\nnothing is much faster"
HOLDS_FOR = (
    "Tested on 20 jobs whose step has at least one sequence per two GPUs.\n"
    "With a smaller global batch, or where the choice waits for more than 5 %, use the search."
)


@checked
def show_flow_chart(marked: str) -> None:
    """Show the flow chart of `minimal.choose.choose`; the marked box is where a choice stopped.

    Raises   ValueError if no box has that name
    """
    one_of("marked", marked, tuple(RUNGS))
    plain, boxes, arrows, notes = mix(OKABE_ITO["sky"], "#FFFFFF", 0.7), [], [], []
    for row, (name, text) in enumerate(RUNGS.items()):
        y = -1.6 * row
        boxes.append((0, y, 4.9, 0.95, OKABE_ITO["yellow"] if name == marked else plain, text))
        if row < len(RUNGS) - 1:
            question = "no" if row < 2 else "nothing fits, or the fastest\nso far waits for 25 % or more"
            arrows += [((2.45, y - 0.03), (2.45, y - 0.6)), ((4.95, y + 0.47), (6.15, y + 0.47))]
            notes += [(2.55, y - 0.32, question, "left"), (5.55, y + 0.6, "yes")]
    boxes.append((6.2, -3.2, 2.7, 4.15, "#E8F4EC", STOP))
    boxes.append((6.2, -4.8, 2.7, 0.95, "#E8F4EC", "End: of all that fit,\ntake the fastest"))
    arrows += [((4.95, -4.33), (6.15, -4.33)), ((4.95, -3.05), (6.15, -4.0))]
    notes += [
        (5.55, -4.2, "all were tried"),
        (5.65, -3.52, "      the fastest waits\n        for less than 25 %", "left"),
    ]
    notes.append((0, -5.25, HOLDS_FOR, "left"))
    said = "Small copies of the model first, recomputation last"
    diagram(5.7, said, ((-0.1, 9), (-5.55, 1.1)), boxes, arrows, notes, fontsize=9, **BORDERED)


# ---------------------------------------------------------------- losses, speeds


@checked
def show_losses(losses: Mapping[str, Sequence[float]], title: str) -> None:
    """Show the loss of each step under each named rule.

    Raises   ValueError without any
    """
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
    """Show measured tokens/s of each run over its predicted ones, on the line where both are equal.

    Raises   ValueError if there is no run, or not an option for each
    """
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
    """Show MFU by the number of GPUs, a line for each name; `peak` is the upper end of the axis.

    Raises   ValueError if a line has not one value for each number of GPUs
    """
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


# ---------------------------------------------------------------- two hosts and a thin link

WIDEST_POINTS, INSIDE_POINTS = 22.0, 3.0  # of the line that stands for the most bytes; inside a host none are counted
RANKS_AT = ((0.0, 1.0), (0.0, 0.0), (2.6, 1.0), (2.6, 0.0))  # two on each host


@checked
def show_two_hosts(rows: Sequence[HostRow]) -> None:
    """Show for each row which axis lies inside the hosts and which across, its bytes on the link, and its seconds.

    Raises   ValueError if there is no row
    """
    if not rows:
        raise ValueError("rows is empty; give what measure_two_hosts returned")
    most = max(row.link_bytes for row in rows)
    with picture_panels(1, len(rows), 2.1, squeeze=False) as (_, panels):
        for axes, row in zip(panels[0], rows, strict=True):
            bare(axes, (-0.75, 3.35), (-1.45, 1.75))
            for left, name in ((-0.55, "host 0"), (2.05, "host 1")):
                labelled_box(axes, (left, -0.5), (1.1, 2.0), "#F4F4F4", edgecolor=NEUTRAL_COLOR, zorder=0)
                write(axes, left + 0.55, 1.55, name, fontsize=8.5, va="bottom")
            across = WIDEST_POINTS * row.link_bytes / most
            for pair, axis in (((0, 2), row.across), ((1, 3), row.across), ((0, 1), row.inside), ((2, 3), row.inside)):
                look = {"color": AXIS_COLORS[axis], "linewidth": across if axis == row.across else INSIDE_POINTS}
                ends = zip(*(RANKS_AT[rank] for rank in pair), strict=True)
                axes.plot(*ends, solid_capstyle="butt", zorder=1, **look)
            for rank, (x, y) in enumerate(RANKS_AT):
                axes.scatter(x, y, s=190, color="white", edgecolor="black", zorder=2)
                write(axes, x, y - 0.02, str(rank), zorder=3)
            axes.set_title(f"{row.inside} inside, {row.across} across", fontsize=9.5)
            told = f"{row.link_bytes / 1e6:.1f} MB on the link\n{row.step_s:.1f} s for a step"
            write(axes, 1.3, -0.75, told, va="top")


# ---------------------------------------------------------------- how often to save when GPUs fail

SHARE_COLORS = {"training": "green", "saving": "blue", "lost work": "vermillion", "restarting": "orange"}


def share_rows(failures: Failures) -> tuple[list[float], dict[str, list[float]]]:
    """Return intervals around the best one, and of each share of `timing.failures.shares` its values there.

    From a thirtieth of it to 30 times, or as far as the formula is sensible.
    """
    best_s = best_interval_s(failures)
    intervals_s = np.geomspace(best_s / 30, min(30 * best_s, 20 * failures.mtbf_s), 61).tolist()
    found = [shares(failures, interval_s) for interval_s in intervals_s]
    return intervals_s, {name: [one[name] for one in found] for name in SHARE_COLORS}


@checked
def show_checkpoint_interval(failures: Failures, title: str) -> None:
    """Show as stacked areas what becomes of the job's time, and the interval of the highest goodput."""
    (intervals_s, rows), best_s = share_rows(failures), best_interval_s(failures)
    with picture_axes(3.4) as axes:
        colors = [OKABE_ITO[color] for color in SHARE_COLORS.values()]
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
