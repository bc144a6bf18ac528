"""Data parallelism in pictures: copies that average, buckets, and what ranks hold from moment to moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.patches import Rectangle

from course_lib.palette import KIND_COLORS, NEUTRAL_COLOR, OKABE_ITO, RANK_COLORS, mix
from course_lib.plots.style import draw_arrows, labelled_box, picture_axes, write
from course_lib.plots.tiles import Tile, draw_tiles, ranks
from course_lib.validate import Size, checked

_OWN_COLORS = tuple(OKABE_ITO[name] for name in ("sky", "green", "yellow", "purple"))  # of what only one rank has
_REPLICA_ROWS = ("its sequences", "the model", "own gradient", "", "mean gradient", "new model")


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
    count, gap, rows = len(sequences), 0.14, [[] for _ in _REPLICA_ROWS]
    for rank, (values, gradient) in enumerate(zip(sequences, own, strict=True)):
        tint = mix(_OWN_COLORS[rank % len(_OWN_COLORS)], "#FFFFFF", 0.35)
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
        draw_tiles(axes, rows, _REPLICA_ROWS, height=0.66, fontsize=9.5)
        middles = [rank + 0.43 for rank in range(count)]
        draw_arrows(axes, [((x, row - 0.34), (x, row)) for row in range(1, len(rows)) for x in middles])
        axes.set_xticks(middles, ranks(count))
        axes.xaxis.tick_top()
        axes.set_title("Equal models, different sequences, one mean, equal models again")


def falls(sizes: Mapping[str, int], buckets: Sequence[Sequence[str]]) -> list[tuple[str, int, int, int]]:
    """Return (name, start, elements, bucket) in model order; raises ValueError unless buckets hold each name once."""
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
    """Return the four moments of a step of stage 1, shards in their places; arguments: what each rank has of each."""

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
