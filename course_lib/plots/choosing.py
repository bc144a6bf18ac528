"""The choice of a layout in pictures: its steps, all cuts, memory, speed against memory, predicted against measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from course_lib.hardware import GB
from course_lib.plan.measured import MeasuredRun
from course_lib.plan.option import Option
from course_lib.plots.palette import AXIS_COLORS, KIND_COLORS, OKABE_ITO, mix
from course_lib.plots.style import CENTRED, FULL_WIDTH_IN, bare, finish, labelled_box, picture_axes, style
from course_lib.validate import Amount, Positive, Size, checked

# Kinds of memory as the predictors tell them -> the six that a picture has room for.
SHOWN_KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary", "overhead")
SHOWN_AS = {"gathered": "activations", "messages": "temporary", "logits": "temporary", "update": "temporary"}
SHOWN_AS |= {"whole sequences": "temporary", "queued": "temporary", "backward": "gradients"}
SHOWN_AS |= {kind: kind for kind in SHOWN_KINDS}
MOST_BARS, MOST_CUTS = 12, 256


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
    last = len(steps) - 1
    with picture_axes(2.1) as axes:
        for place, (name, text) in enumerate(steps.items()):
            color = mix(OKABE_ITO["sky"], "#FFFFFF", 0.5)
            labelled_box(axes, (place, 0), (0.78, 1), color, f"{name}\n\n{text}", fontsize=8.5, edgecolor="black")
            if place < last:
                arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.5}
                axes.annotate("", (place + 1, 0.5), xytext=(place + 0.78, 0.5), arrowprops=arrow)
        look = {"arrowstyle": "-|>", "color": OKABE_ITO["vermillion"], "linewidth": 1.5}
        bend = look | {"connectionstyle": f"bar,fraction={-0.3 / max(1, last - 2):.2f}"}
        axes.annotate("", (max(0, last - 2) + 0.39, 0), xytext=(last + 0.39, 0), arrowprops=bend)
        axes.text(last - 0.61, -0.22, back, **CENTRED, fontsize=9, color=OKABE_ITO["vermillion"])
        bare(axes, (-0.05, last + 0.83), (-0.65, 1.05))
        axes.set_title(title)


# ---------------------------------------------------------------- all cuts of a number of GPUs
@dataclass(frozen=True)
class Cut:
    """One (dp, tp, pp), and whether its tp leaves the node."""

    dp: int
    tp: int
    pp: int
    over_nodes: bool


def cuts_of(triples: Sequence[tuple[int, int, int]], gpus_per_node: Size = 8) -> list[Cut]:
    """Return the cuts of a picture.

    Raises   ValueError if there is none, or more than it has room for
    """
    if not 0 < len(triples) <= MOST_CUTS:
        raise ValueError(f"there are {len(triples)} cuts; give 1 to {MOST_CUTS} triples (dp, tp, pp)")
    return [Cut(dp, tp, pp, tp > gpus_per_node) for dp, tp, pp in triples]


@checked
def show_cuts(triples: Sequence[tuple[int, int, int]], gpus_per_node: Size = 8) -> None:
    """Show every (dp, tp, pp): a column for each tp, a row for each pp, dp in the cell."""
    cuts = cuts_of(triples, gpus_per_node)
    columns, rows = sorted({cut.tp for cut in cuts}), sorted({cut.pp for cut in cuts})
    inside, outside = mix(AXIS_COLORS["dp"], "#FFFFFF", 0.35), "#D9D9D9"
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN * 0.75, 0.9 + 0.34 * len(rows)))
        for cut in cuts:
            color = outside if cut.over_nodes else inside
            labelled_box(axes, (columns.index(cut.tp), rows.index(cut.pp)), (0.94, 0.9), color, f"dp {cut.dp}")
        axes.set_xticks([place + 0.47 for place in range(len(columns))], [str(tp) for tp in columns])
        axes.set_yticks([place + 0.45 for place in range(len(rows))], [str(pp) for pp in rows])
        axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), xlabel="tp", ylabel="pp")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title(f"{len(cuts)} cuts; grey: tp leaves a node of {gpus_per_node}")
        finish(figure)


# ---------------------------------------------------------------- where the messages of two layouts stand
@checked
def show_paths(num_layers: Size = 4) -> None:
    """Show one micro-batch on one GPU: tp sums inside every layer, a pipeline sends once behind its layers.

    Raises   ValueError if the picture has no room for so many layers
    """
    if num_layers > 8:
        raise ValueError(f"num_layers is {num_layers}; the picture has room for 1 to 8")
    tensor, stage = AXIS_COLORS["tp"], AXIS_COLORS["pp"]
    computing = mix(OKABE_ITO["sky"], "#FFFFFF", 0.6)
    with picture_axes(2.0) as axes:
        x = 0.0
        for layer in range(num_layers):
            for part in ("attention", "MLP"):
                labelled_box(axes, (x, 1.2), (0.5, 0.7), computing, part, fontsize=7.5)
                labelled_box(axes, (x + 0.5, 1.2), (0.3, 0.7), tensor, "sum", fontsize=7.5)
                x += 0.8
            axes.text(x - 0.8, 1.98, f"layer {layer}", ha="center", fontsize=8.5)
        for layer in range(num_layers):
            labelled_box(axes, (layer, 0), (1.0, 0.7), computing, f"layer {layer}", fontsize=8)
        labelled_box(axes, (num_layers, 0), (0.3, 0.7), stage, "send", fontsize=7.5)
        axes.text(-0.1, 1.55, "tp over nodes", ha="right", va="center", fontsize=9)
        axes.text(-0.1, 0.35, "pp over nodes", ha="right", va="center", fontsize=9)
        bare(axes, (-0.22 * num_layers - 0.15, 1.62 * num_layers), (-0.1, 2.25))
        axes.set_title("Forward, not to scale: “sum” and “send” use the network; the GPU waits for each sum")


# ---------------------------------------------------------------- what options need
def shown_kinds(option: Option) -> dict[str, float]:
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


def draw_options(axes, options: Sequence[Option]) -> None:
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
    axes.legend(
        ncols=len(SHOWN_KINDS), loc="upper center", bbox_to_anchor=(0.4, -0.16 - 0.6 / len(options)), fontsize=8
    )


@checked
def show_options(options: Sequence[Option]) -> None:
    """Show what each option's fullest GPU holds, and the limit."""
    with picture_axes(1.6 + 0.3 * len(options)) as axes:
        draw_options(axes, options)
        axes.set_title("Memory of some layouts", fontsize=10)


def draw_front(axes, ranked: Sequence[Option], best: Sequence[Option]) -> None:
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
    axes.set_xlabel("GB on the fullest GPU (modelled)")
    axes.set_ylabel("MFU (modelled)")
    axes.legend(loc="upper left", ncols=2)


@checked
def show_front(ranked: Sequence[Option], best: Sequence[Option]) -> None:
    """Show speed against memory."""
    with picture_axes(3.2) as axes:
        draw_front(axes, ranked, best)
        axes.set_title("Each point is a layout that fits", fontsize=10)


# ---------------------------------------------------------------- predicted and measured
@checked
def show_predicted(runs: Sequence[MeasuredRun], options: Sequence[Option]) -> None:
    """Show measured tokens/s of each run over its predicted ones, on the line where both are equal.

    Raises   ValueError if there is no run, or not an option for each
    """
    if not runs or len(runs) != len(options):
        raise ValueError(f"there are {len(runs)} runs and {len(options)} options; give one option for each run")
    with picture_axes(3.6, 6.0) as axes:
        for kind, color in (("no pipeline", OKABE_ITO["blue"]), ("pipeline", OKABE_ITO["vermillion"])):
            both = [
                (option.tokens_per_s / run.num_gpus, run.tokens_per_s_per_gpu)
                for run, option in zip(runs, options, strict=True)
                if (run.layout.pp > 1) == (kind == "pipeline")
            ]
            if both:
                axes.loglog(*zip(*both, strict=True), "o", color=color, label=kind)
        ends = [min(run.tokens_per_s_per_gpu for run in runs), max(run.tokens_per_s_per_gpu for run in runs)]
        axes.plot(ends, ends, color="#777777", linewidth=1, linestyle="--", label="equal")
        axes.set_xlabel("predicted tokens/s per GPU (modelled)")
        axes.set_ylabel("measured tokens/s per GPU")
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
        for place, (name, line) in enumerate(shares.items()):
            axes.plot(num_gpus, line, "o-", color=colors[place % len(colors)], label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(num_gpus, [f"{n:,}" for n in num_gpus])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(ylim=(0, peak), xlabel="GPUs", ylabel="MFU")
        axes.legend(loc="lower left")
        axes.set_title("The same batch on more GPUs, and a batch that grows with them", fontsize=10)
