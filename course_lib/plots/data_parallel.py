"""Data parallelism in pictures: copies that average, buckets, streams; what ranks hold at each stage of ZeRO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.patches import Rectangle

from course_lib.palette import (
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    KIND_COLORS,
    KIND_HATCHES,
    NEUTRAL_COLOR,
    OKABE_ITO,
    RANK_COLORS,
    mix,
    text_on,
)
from course_lib.plots.diagrams import draw_arrows
from course_lib.plots.style import (
    FULL_WIDTH_IN,
    key,
    keys_below,
    labelled_box,
    panel_title,
    picture_axes,
    picture_panels,
    plain_rows,
    write,
)
from course_lib.plots.tiles import ABSENT_COLOR, Tile, draw_tiles, ranks
from course_lib.span import Span
from course_lib.validate import Size, checked

# ---------------------------------------------------------------- data parallelism as one picture

OWN_COLORS = tuple(OKABE_ITO[name] for name in ("sky", "green", "yellow", "purple"))  # of what only one rank has
REPLICA_ROWS = ("its sequences", "the model", "own gradient", "", "mean gradient", "new model")


@checked
def show_replicas(
    sequences: Sequence[Sequence[float]], own: Sequence[float], mean: float, weights: tuple[float, float]
) -> None:
    """Show a step of data parallelism: equal models, different sequences, one all-reduce, equal models again.

    weights   before the step, after it
    Raises    ValueError if there is not one gradient for each rank
    """
    if len(own) != len(sequences):
        raise ValueError(f"own has {len(own)} gradients for {len(sequences)} ranks; give one for each rank")
    count, gap, rows = len(sequences), 0.14, [[] for _ in REPLICA_ROWS]
    for rank, (values, gradient) in enumerate(zip(sequences, own, strict=True)):
        tint = mix(OWN_COLORS[rank % len(OWN_COLORS)], "#FFFFFF", 0.35)
        rows[0] += [Tile(f"x = {x:g}", tint, (1 - gap) / len(values)) for x in values] + [gap]
        for row, text, color in (
            (1, f"w = {weights[0]:g}", KIND_COLORS["parameters"]),
            (2, f"{gradient:g}", tint),
            (4, f"{mean:g}", KIND_COLORS["gradients"]),
            (5, f"w = {weights[1]:g}", KIND_COLORS["parameters"]),
        ):
            rows[row] += [Tile(text, color, 1 - gap), gap]
    rows[3] = [Tile("all-reduce: mean over ranks", width=count - gap, look={"edgecolor": "black"})]
    with picture_axes(3.6) as axes:
        draw_tiles(axes, rows, REPLICA_ROWS, height=0.66, fontsize=9.5)
        middles = [rank + 0.43 for rank in range(count)]
        draw_arrows(axes, [((x, row - 0.34), (x, row)) for row in range(1, len(rows)) for x in middles])
        axes.set_xticks(middles, ranks(count))
        axes.xaxis.tick_top()
        axes.set_title("Equal models, different sequences, one mean, equal models again")


# ---------------------------------------------------------------- parameters falling into buckets


def falls(sizes: Mapping[str, int], buckets: Sequence[Sequence[str]]) -> list[tuple[str, int, int, int]]:
    """Return (name, where it lies, elements, bucket) of each parameter in model order.

    Raises   ValueError if the buckets do not hold each parameter once
    """
    bucket_of = {name: index for index, names in enumerate(buckets) for name in names}
    if sorted(name for names in buckets for name in names) != sorted(sizes):
        raise ValueError("the buckets must hold each parameter once; give the names of `sizes`, each in one bucket")
    starts = accumulate(sizes.values(), initial=0)
    return [(name, start, size, bucket_of[name]) for (name, size), start in zip(sizes.items(), starts, strict=False)]


@checked
def show_buckets(sizes: Mapping[str, Size], buckets: Sequence[Sequence[str]], title: str) -> None:
    """Show parameters in model order and, below, the buckets that they fill; widths are true to elements."""
    placed, total = falls(sizes, buckets), sum(sizes.values())
    with picture_axes(2.7) as axes:
        for name, start, size, bucket in placed:
            color = mix(RANK_COLORS[bucket % len(RANK_COLORS)], "#FFFFFF", 0.35)
            label = name.replace(".weight", "").rpartition(".")[2] if size > 0.04 * total else ""
            labelled_box(axes, (start, 0), (size, 0.5), color, label, fontsize=8, linewidth=0.8)
            labelled_box(axes, (start, 1.35), (size, 0.6), color, linewidth=0.8)
            if size > 0.013 * total:
                draw_arrows(axes, [((start + size / 2, 0.53), (start + size / 2, 1.33))], "#666666", arrowstyle="->")
        for index in range(len(buckets)):
            inside = [(start, start + size) for _, start, size, bucket in placed if bucket == index]
            left, right = inside[0][0], inside[-1][1]
            axes.add_patch(Rectangle((left, 1.35), right - left, 0.6, fill=False, edgecolor="black", linewidth=1.6))
            text = f"bucket {index}\n{right - left:,} elements"
            write(axes, (left + right) / 2, 2.0, text, fontsize=8.5, va="top")
        draw_arrows(axes, [((total, -0.25), (0.3 * total, -0.25))], arrowstyle="->")
        write(axes, 0.29 * total, -0.25, "order of backward", "right")
        axes.set_yticks([0.25, 1.65], ["gradients", "messages"])
        axes.set(xlim=(-0.005 * total, 1.005 * total), ylim=(2.65, -0.5), xticks=[])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(title)


# ---------------------------------------------------------------- tokens against steps


def times_the_least(share: float) -> tuple[float, float]:
    """Return steps and tokens, as multiples of the least, at a batch of `share` critical batch sizes.

    Source   McCandlish et al. 2018 (arXiv:1812.06162), section 2.3
    """
    return 1 + 1 / share, 1 + share


def show_batch_tradeoff() -> None:
    """Show how steps fall and tokens rise with the batch, on both sides of the critical batch size."""
    shares = [2 ** (step / 4) for step in range(-20, 21)]
    steps, tokens = zip(*map(times_the_least, shares), strict=True)
    with picture_axes(3.2, FULL_WIDTH_IN * 0.85) as axes:
        axes.plot(shares, steps, color=OKABE_ITO["blue"], label="steps / least steps")
        axes.plot(shares, tokens, color=OKABE_ITO["vermillion"], linestyle="--", label="tokens / least tokens")
        axes.axvline(1, ymax=0.7, color="black", linewidth=1, linestyle=":")
        write(axes, 0.11, 2.6, "twice the batch:\nhalf the steps", va="baseline")
        write(axes, 9, 2.6, "twice the batch:\ntwice the tokens", va="baseline")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks([1 / 16, 1 / 4, 1, 4, 16], ["1/16", "1/4", "1", "4", "16"])
        axes.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        axes.set(xlabel="batch / critical batch size", ylabel="times the least")
        axes.legend(loc="upper center")
        axes.set_title("A larger batch trades tokens for steps (modelled)")


# ---------------------------------------------------------------- kernels on two streams

CPU, COMPUTE, COMMUNICATION = "CPU thread", "compute stream", "communication stream"
STREAM_COLORS = {CPU: "#999999", COMPUTE: COMPUTE_COLOR, COMMUNICATION: COMMUNICATION_COLOR}


def backward_on_streams() -> list[Span]:
    """Return a modelled backward of three buckets on a GPU: the CPU only launches, a stream does its kernels in order.

    An all-reduce begins when its gradients are computed and the all-reduce before it is done. `work.wait()` makes the
    compute stream wait, not the CPU: the optimizer's kernel is launched at once and runs after the last all-reduce.
    """
    launch_s, compute_s, send_s = 1.0, 5.0, 6.0
    spans, ends = [], dict.fromkeys(STREAM_COLORS, 0.0)

    def run(lane: str, name: str, seconds: float, *after: str) -> None:
        start_s = max(ends[one] for one in (lane, *after))
        ends[lane] = start_s + seconds
        spans.append(Span(0, lane, name, start_s, ends[lane]))

    for index in range(3):
        run(CPU, f"B{index}", launch_s)
        run(COMPUTE, f"backward {index}", compute_s, CPU)
        run(CPU, f"R{index}", launch_s)
        run(COMMUNICATION, f"all-reduce {index}", send_s, CPU, COMPUTE)
    run(CPU, "wait", launch_s)
    run(CPU, "O", launch_s)
    run(COMPUTE, "optimizer", compute_s / 2, CPU, COMMUNICATION)
    return spans


def show_streams() -> None:
    """Show what the CPU thread and each stream do in backward, with the wait of the compute stream as an arrow."""
    spans, rows = backward_on_streams(), list(STREAM_COLORS)
    last_s = max(span.stop_s for span in spans if span.lane == COMMUNICATION)
    with picture_axes(2.5) as axes:
        for span in spans:
            color, row = STREAM_COLORS[span.lane], rows.index(span.lane)
            axes.barh(row, span.seconds, left=span.start_s, height=0.66, color=color, edgecolor="white", linewidth=1)
            small = {"fontsize": 7, "rotation": 90} if span.name == "wait" else {"fontsize": 8.5}
            write(axes, (span.start_s + span.stop_s) / 2, row, span.name, color=text_on(color), **small)
        arrow = {"arrowprops": {"arrowstyle": "->"}, "fontsize": 8.5, "ha": "center"}
        axes.annotate("wait()", (last_s, 1.33), xytext=(last_s, 1.67), **arrow)
        plain_rows(axes, rows, -0.5, -0.5)
        axes.set(xlim=(0, 1.01 * max(span.stop_s for span in spans)), xticks=[], xlabel="time")
        axes.set_title("Two streams run at the same time (modelled)")


# ---------------------------------------------------------------- ZeRO: who holds what

SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the stage from which on a kind is cut into pieces
STATE_BYTES = {"parameters": 2, "gradients": 2, "optimizer": 12}  # per parameter, BF16 with FP32 master weights


def held_part(stage: int, kind: str, rank: int, num_ranks: int) -> tuple[float, float]:
    """Return which part of a kind (from, to; the whole is 0 to 1) a rank holds at a ZeRO stage.

    Source   Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1
    """
    return (rank / num_ranks, (rank + 1) / num_ranks) if stage >= SHARDED_FROM[kind] else (0.0, 1.0)


def held_bytes(stage: int, num_ranks: int) -> float:
    """Return the bytes per parameter that a rank holds at a stage."""
    parts = {kind: held_part(stage, kind, 0, num_ranks) for kind in STATE_BYTES}
    return sum((stop - start) * STATE_BYTES[kind] for kind, (start, stop) in parts.items())


def show_zero_stages() -> None:
    """Show who holds what at stages 0 to 3 on four ranks: a frame for every rank and kind, filled where it holds it."""
    count, gap = 4, 0.04 * sum(STATE_BYTES.values())
    said = f"from {held_bytes(0, count):.4g} bytes per parameter down to {held_bytes(3, count):.4g}"
    said = f"Each stage cuts one more kind into {count}: {said}"
    with picture_panels(1, 4, 1.45 + 0.27 * count, said) as (figure, panels):
        for stage, axes in enumerate(panels):
            for rank in range(count):
                left = 0.0
                for kind, size in STATE_BYTES.items():
                    start, stop = (size * edge for edge in held_part(stage, kind, rank, count))
                    frame = {"edgecolor": NEUTRAL_COLOR, "linewidth": 0.8}
                    labelled_box(axes, (left, rank + 0.12), (size, 0.76), "#FFFFFF", **frame)
                    look = {"hatch": KIND_HATCHES[kind], "linewidth": 0.4}
                    box = (left + start, rank + 0.12), (stop - start, 0.76)
                    labelled_box(axes, *box, KIND_COLORS[kind], **look)
                    left += size + gap
            plain_rows(axes, ranks(count) if stage == 0 else [""] * count, -0.05, 0.05)
            axes.set_yticks([rank + 0.5 for rank in range(count)])
            axes.set(xlim=(-0.1, left - gap + 0.1), xticks=[])
            axes.spines[:].set_visible(False)
            panel_title(axes, f"stage {stage}\n{held_bytes(stage, count):.4g} bytes per parameter", "center")
        labels = {
            kind: f"{kind} ({size} B), cut from stage {SHARDED_FROM[kind]} on" for kind, size in STATE_BYTES.items()
        }
        keys_below(figure, [key(KIND_COLORS[kind], label, KIND_HATCHES[kind]) for kind, label in labels.items()])


# ---------------------------------------------------------------- a flat buffer, cut by rank

PADDING = "padding"
FLAT_SIZES, FLAT_RANKS = {"a": 5, "b": 6, "c": 1}, 5


def flat_pieces(sizes: Mapping[str, int], num_ranks: int) -> list[tuple[str, int, int, int]]:
    """Return (name, rank, start, stop) of each piece when tensors are laid end to end, padded, and cut into shards.

    `sizes` are numbers in each tensor. A tensor that crosses a cut becomes several pieces.
    """
    total = sum(sizes.values())
    shard = -(-total // num_ranks)
    pieces, start = [], 0
    for name, size in [*sizes.items(), (PADDING, shard * num_ranks - total)]:
        stop = start + size
        while start < stop:
            end = min(stop, (start // shard + 1) * shard)
            pieces.append((name, start // shard, start, end))
            start = end
    return pieces


def show_flat_shards() -> None:
    """Show tensors laid into one flat buffer and cut into equal shards, one for each rank, with the padding."""
    pieces = flat_pieces(FLAT_SIZES, FLAT_RANKS)
    total, names = pieces[-1][3], list(dict.fromkeys(piece[0] for piece in pieces))
    shard, padding = total // FLAT_RANKS, total - sum(FLAT_SIZES.values())
    whole = {name: (min(p[2] for p in pieces if p[0] == name), max(p[3] for p in pieces if p[0] == name))
             for name in names}  # fmt: skip
    grey = [mix(NEUTRAL_COLOR, "#FFFFFF", 0.15 + 0.5 * (index % 2)) for index in range(len(names))]
    boxes = [(name, *ends, 0.0, color) for (name, ends), color in zip(whole.items(), grey, strict=True)]
    boxes += [(name, start, stop, 1.25 + rank, RANK_COLORS[rank]) for name, rank, start, stop in pieces]
    said = f"{shard:,} elements for each of {FLAT_RANKS} ranks, {padding:,} of them padding"
    with picture_axes(1.5 + 0.32 * FLAT_RANKS) as axes:
        for name, start, stop, y, color in boxes:
            look = {"hatch": "////", "edgecolor": "#666666"} if name == PADDING else {}
            fitting = (
                text for text in (f"{name}: {stop - start:,}", name) if (stop - start) / total > 0.01 * len(text)
            )
            color = "#F2F2F2" if name == PADDING else color
            labelled_box(axes, (start, y), (stop - start, 0.84), color, next(fitting, ""), **look)
        for rank in range(FLAT_RANKS + 1):
            axes.axvline(rank * shard, color="black", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_yticks([0.42] + [1.67 + rank for rank in range(FLAT_RANKS)], ["flat buffer", *ranks(FLAT_RANKS)])
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=(0, total), ylim=(1.25 + FLAT_RANKS, -0.1), xlabel="elements of the flat buffer")
        axes.set_xticks(range(0, total + 1, shard))
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(f"Cuts ignore where tensors end: {said}")


# ---------------------------------------------------------------- gathered for a moment


@dataclass(frozen=True)
class GatherStep:
    """One moment of a stage 3 step: the unit that computes, and all units whose parameters are whole."""

    phase: str
    computing: int
    alive: tuple[int, ...]


def gather_steps(num_units: int, prefetch: bool = True) -> list[GatherStep]:
    """Which units are whole while each one computes: it and, with prefetch, the next one in line.

    Forward goes from the first unit to the last, backward returns. A unit's turn over, it is freed.
    """
    order = [("forward", unit) for unit in range(num_units)]
    order += [("backward", unit) for unit in reversed(range(num_units))]
    steps = []
    for index, (phase, unit) in enumerate(order):
        following = {order[index + 1][1]} if prefetch and index + 1 < len(order) else set()
        steps.append(GatherStep(phase, unit, tuple(sorted({unit} | following))))
    return steps


@checked
def show_gathered(names: Sequence[str], prefetch: bool = True, title: str = "") -> None:
    """Show which units of a model are whole at each moment of a stage 3 step; `names` are the units in order."""
    steps, count, hatch = gather_steps(len(names), prefetch), len(names), KIND_HATCHES["gathered"]
    gathered, waiting = KIND_COLORS["gathered"], mix(KIND_COLORS["gathered"], "#FFFFFF", 0.6)

    def tile(unit: int, step: GatherStep) -> Tile:
        if unit == step.computing:
            return Tile(step.phase[0].upper(), gathered)
        return Tile("", waiting, look={"hatch": hatch}) if unit in step.alive else Tile("", ABSENT_COLOR)

    most = max(len(step.alive) for step in steps)
    said = f"At most {most} of {count} units {'is' if most == 1 else 'are'} full at any moment"
    with picture_axes(1.5 + 0.3 * count) as axes:
        draw_tiles(axes, [[tile(unit, step) for step in steps] for unit in range(count)], names, fontsize=9)
        for x, step in enumerate(steps):
            write(axes, x + 0.5, -0.35, str(len(step.alive)), fontweight="bold")
        axes.set_yticks([-0.35] + [unit + 0.5 for unit in range(count)], ["full units", *names])
        axes.set(xlim=(0, len(steps)), ylim=(count, -0.75), xlabel="moments of one step, in order")
        legend = [key(gathered, "full, computes (F forward, B backward)")]
        legend += [key(waiting, "full, prefetched", hatch)] if most > 1 else []
        keys_below(axes, [*legend, key(ABSENT_COLOR, "shard only")], 2.2)
        axes.set_title(title or said)


# ---------------------------------------------------------------- elements on ranks, from row to row


@dataclass(frozen=True)
class FlowRow:
    """One moment of a step: of each rank its elements (None: not held), their kind, and what happens next."""

    label: str
    kind: str
    of_ranks: Sequence[Sequence[float | None]]
    then: str = ""


def flow_tiles(row: FlowRow) -> list[Tile | float]:
    """Return the elements of all ranks side by side; a tile without text is an element that the rank does not hold."""
    look, tiles = {"edgecolor": NEUTRAL_COLOR, "linewidth": 0.8}, []
    for values in row.of_ranks:
        for value in values:
            held = value is not None
            tiles += [
                Tile(f"{value:g}" if held else "", KIND_COLORS[row.kind] if held else "#FFFFFF", 0.94, look),
                0.06,
            ]
        tiles.append(1.0)
    return tiles[:-1]


@checked
def show_flow(rows: Sequence[FlowRow], title: str) -> None:
    """Show what each rank holds of each element, moment after moment, with the operation between two moments."""
    pitch, across = 1.75, len(rows[0].of_ranks[0])
    right = len(rows[0].of_ranks) * (across + 1) - 1
    with picture_axes(0.7 + 0.68 * len(rows)) as axes:
        draw_tiles(axes, [flow_tiles(row) for row in rows], [row.label for row in rows], pitch=pitch, height=0.9,
                   fontsize=9)  # fmt: skip
        for index, row in enumerate(rows):
            write(axes, right / 2, (index + 0.76) * pitch, f"\u2193 {row.then}" if row.then else "")
        for rank in range(len(rows[0].of_ranks)):
            write(axes, rank * (across + 1) + across / 2, -0.4, f"rank {rank}", fontsize=10, va="baseline")
        axes.set(xlim=(-0.1, right), ylim=((len(rows) - 1) * pitch + 1, -1))
        axes.set_title(title)


@checked
def stage_1_rows(
    gradients: Sequence[Sequence[float]],
    mean_shards: Sequence[Sequence[float]],
    new_shards: Sequence[Sequence[float]],
    new_weights: Sequence[Sequence[float]],
) -> list[FlowRow]:
    """Return the four moments of a step of stage 1, each value of a shard in its place among all elements.

    Arguments   of each rank: its own gradient, its shards of the mean gradient and of the new weights, all new weights
    """

    def in_place(shards: Sequence[Sequence[float]]) -> list[list[float | None]]:
        held = [[None] * sum(map(len, shards)) for _ in shards]
        for rank, shard in enumerate(shards):
            start = sum(map(len, shards[:rank]))
            held[rank][start : start + len(shard)] = shard
        return held

    return [
        FlowRow("own gradient", "gradients", gradients, "reduce-scatter (mean)"),
        FlowRow("mean gradient", "gradients", in_place(mean_shards), "update of the shard"),
        FlowRow("new weights", "parameters", in_place(new_shards), "all-gather"),
        FlowRow("new weights", "parameters", new_weights),
    ]
