"""ZeRO in pictures: who holds what, a flat buffer cut by rank, and parameters that are gathered for a moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch, Rectangle

from course_lib.plots.memory import show_budgets
from course_lib.plots.palette import KIND_COLORS, KIND_HATCHES, NEUTRAL_COLOR, RANK_COLORS, mix
from course_lib.plots.style import CENTRED, labelled_box, panel_title, picture_axes, picture_panels
from course_lib.validate import Index, Size, checked

# ---------------------------------------------------------------- who holds what

SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}  # the stage from which on a kind is cut into pieces
STATE_KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one kind: the part from `start` to `stop` of the whole, which reaches from 0 to 1."""

    rank: int
    kind: str
    start: float
    stop: float


def zero_pieces(stage: Index, num_ranks: Size) -> list[Piece]:
    """What each rank holds of parameters, gradients and optimizer states at a ZeRO stage.

    Raises   ValueError if stage is not 0 to 3
    Source   Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage!r}; choose 0 (plain data parallel), 1, 2 or 3")
    return [
        Piece(rank, kind, rank / num_ranks, (rank + 1) / num_ranks)
        if stage >= SHARDED_FROM[kind]
        else Piece(rank, kind, 0.0, 1.0)
        for rank in range(num_ranks)
        for kind in STATE_KINDS
    ]


def held_bytes(pieces: Sequence[Piece], bytes_by_kind: Mapping[str, float], rank: Index = 0) -> float:
    """Bytes of one rank's pieces, from the bytes of each kind as a whole."""
    return sum((p.stop - p.start) * bytes_by_kind[p.kind] for p in pieces if p.rank == rank)


def zero_areas(pieces: Sequence[Piece], bytes_by_kind: Mapping[str, float]) -> list[tuple[Piece, float, float]]:
    """Each piece with its left edge and its width; widths are bytes per parameter, so that areas compare."""
    gap, left, areas = 0.04 * sum(bytes_by_kind.values()), 0.0, []
    for kind in STATE_KINDS:
        width = bytes_by_kind[kind]
        areas += [(p, left + p.start * width, (p.stop - p.start) * width) for p in pieces if p.kind == kind]
        left += width + gap
    return areas


def draw_zero_pieces(
    axes, pieces: Sequence[Piece], bytes_by_kind: Mapping[str, float], title: str, label_ranks: bool = True
) -> None:
    """Draw a frame for every rank and kind, as wide as its bytes; what the rank holds of it is filled."""
    ranks, full = 1 + max(piece.rank for piece in pieces), 0.0
    for piece, left, width in zero_areas(pieces, bytes_by_kind):
        start = left - piece.start * bytes_by_kind[piece.kind]
        frame = {"facecolor": "none", "edgecolor": NEUTRAL_COLOR, "linewidth": 0.8}
        axes.add_patch(Rectangle((start, piece.rank + 0.12), bytes_by_kind[piece.kind], 0.76, **frame))
        look = {"facecolor": KIND_COLORS[piece.kind], "hatch": KIND_HATCHES[piece.kind], "edgecolor": "white"}
        axes.add_patch(Rectangle((left, piece.rank + 0.12), width, 0.76, linewidth=0.4, **look))
        full = max(full, start + bytes_by_kind[piece.kind])
    axes.set(xlim=(-0.1, full + 0.1), ylim=(ranks + 0.05, -0.05), xticks=[])
    axes.set_yticks([r + 0.5 for r in range(ranks)], [f"rank {r}" for r in range(ranks)] if label_ranks else [])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    panel_title(axes, title, "center")


def zero_title(bytes_by_kind: Mapping[str, float], num_ranks: Size) -> str:
    """What the picture shows, in one sentence: bytes of a rank at stage 0 and at stage 3."""
    first, last = (held_bytes(zero_pieces(stage, num_ranks), bytes_by_kind) for stage in (0, 3))
    return f"Each stage cuts one more kind into {num_ranks}: from {first:.4g} bytes per parameter down to {last:.4g}"


@checked
def show_zero_stages(num_ranks: Size = 4) -> None:
    """Show who holds what at stages 0 to 3 of BF16 with FP32 master weights.

    Raises   ValueError if there are more ranks than the picture has room for
    """
    if num_ranks > 16:
        raise ValueError(f"num_ranks is {num_ranks}; the picture has room for 16, the pattern is the same")
    of_each = {"parameters": 2, "gradients": 2, "optimizer": 12}  # bytes per parameter
    with picture_panels(1, 4, 1.45 + 0.27 * num_ranks, zero_title(of_each, num_ranks)) as (figure, panels):
        for stage, axes in enumerate(panels):
            pieces = zero_pieces(stage, num_ranks)
            text = f"stage {stage}\n{held_bytes(pieces, of_each):.4g} bytes per parameter"
            draw_zero_pieces(axes, pieces, of_each, text, label_ranks=stage == 0)
        handles = [
            Patch(
                facecolor=KIND_COLORS[kind],
                hatch=KIND_HATCHES[kind],
                edgecolor="white",
                label=_kind_label(kind, of_each),
            )
            for kind in STATE_KINDS
        ]
        figure.legend(handles=handles, loc="outside lower center", ncol=3)


def _kind_label(kind: str, bytes_by_kind: Mapping[str, float]) -> str:
    return f"{kind} ({bytes_by_kind[kind]:g} B), cut from stage {SHARDED_FROM[kind]} on"


# ---------------------------------------------------------------- bytes of a GPU at each stage


show_stages = show_budgets  # of one GPU, side by side


# ---------------------------------------------------------------- a flat buffer, cut by rank

PADDING = "padding"


@dataclass(frozen=True)
class FlatPiece:
    """Numbers `start` to `stop` of the flat buffer: a part of one tensor (or padding) that one rank holds."""

    name: str
    rank: int
    start: int
    stop: int


def flat_pieces(sizes: Mapping[str, int], num_ranks: Size) -> list[FlatPiece]:
    """Tensors laid end to end, padded to a multiple of `num_ranks`, and cut into equal shards.

    `sizes` are numbers in each tensor. A tensor that crosses a cut becomes several pieces.

    Raises   ValueError if there is no tensor
    """
    if not sizes:
        raise ValueError("sizes is empty; give at least one tensor")
    total = sum(sizes.values())
    shard = -(-total // num_ranks)
    pieces, start = [], 0
    for name, size in [*sizes.items(), (PADDING, shard * num_ranks - total)]:
        stop = start + size
        while start < stop:
            rank = start // shard
            end = min(stop, (rank + 1) * shard)
            pieces.append(FlatPiece(name, rank, start, end))
            start = end
    return pieces


def draw_flat_shards(axes, pieces: Sequence[FlatPiece], num_ranks: Size) -> None:
    """Above the whole flat buffer by tensor, below it each rank's shard where it was cut."""
    total = pieces[-1].stop
    shard = total // num_ranks
    names = list(dict.fromkeys(piece.name for piece in pieces))
    for index, name in enumerate(names):
        parts = [piece for piece in pieces if piece.name == name]
        color = "#F2F2F2" if name == PADDING else mix(NEUTRAL_COLOR, "#FFFFFF", 0.15 + 0.5 * (index % 2))
        _flat_box(axes, parts[0].start, parts[-1].stop, 0, color, total, name, name == PADDING)
    for rank in range(num_ranks):
        for piece in (p for p in pieces if p.rank == rank):
            color = "#F2F2F2" if piece.name == PADDING else RANK_COLORS[rank % len(RANK_COLORS)]
            _flat_box(axes, piece.start, piece.stop, 1.25 + rank, color, total, piece.name, piece.name == PADDING)
        axes.axvline(rank * shard, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.axvline(total, color="black", linewidth=0.8, linestyle=":", zorder=0)
    rows = [0.42] + [1.67 + rank for rank in range(num_ranks)]
    axes.set_yticks(rows, ["flat buffer"] + [f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([rank * shard for rank in range(num_ranks + 1)], [f"{r * shard:,}" for r in range(num_ranks + 1)])
    axes.set(xlim=(0, total), ylim=(1.25 + num_ranks, -0.1), xlabel="elements of the flat buffer")
    axes.spines[["left", "bottom"]].set_visible(False)


def _flat_box(axes, start: int, stop: int, y: float, color: str, total: int, name: str, padding: bool) -> None:
    hatch = "////" if padding else ""
    edge = "#666666" if padding else "white"
    room = (stop - start) / total
    label = next((text for text in (f"{name}: {stop - start:,}", name) if room > 0.0098 * len(text) + 0.008), "")
    labelled_box(axes, (start, y), (stop - start, 0.84), color, label, hatch=hatch, edgecolor=edge)


@checked
def show_flat_shards(sizes: Mapping[str, int], num_ranks: Size = 4) -> None:
    """Show tensors laid into one flat buffer and cut into equal shards, one for each rank, with the padding.

    Raises   ValueError if there are more ranks than the picture has room for
    """
    if num_ranks > 8:
        raise ValueError(f"num_ranks is {num_ranks}; the picture has room for 8, the pattern is the same")
    pieces = flat_pieces(sizes, num_ranks)
    padding = sum(piece.stop - piece.start for piece in pieces if piece.name == PADDING)
    said = f"{pieces[-1].stop // num_ranks:,} elements for each of {num_ranks} ranks, {padding:,} of them padding"
    with picture_axes(1.5 + 0.32 * num_ranks) as axes:
        draw_flat_shards(axes, pieces, num_ranks)
        axes.set_title(f"Cuts ignore where tensors end: {said}")


# ---------------------------------------------------------------- gathered for a moment


@dataclass(frozen=True)
class GatherStep:
    """One moment of a stage 3 step: the unit that computes, and all units whose parameters are whole."""

    phase: str
    computing: int
    alive: tuple[int, ...]


def gather_steps(num_units: Size, prefetch: bool = True) -> list[GatherStep]:
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


def draw_gathered(axes, steps: Sequence[GatherStep], names: Sequence[str]) -> None:
    """Moments to the right, units downwards: whole and computing, whole and waiting, or only its shard."""
    gathered, waiting = KIND_COLORS["gathered"], mix(KIND_COLORS["gathered"], "#FFFFFF", 0.6)
    for x, step in enumerate(steps):
        for unit in range(len(names)):
            color = gathered if unit == step.computing else waiting if unit in step.alive else "#F4F4F4"
            hatch = KIND_HATCHES["gathered"] if unit in step.alive and unit != step.computing else ""
            axes.add_patch(Rectangle((x, unit), 1, 1, facecolor=color, hatch=hatch, edgecolor="white", linewidth=1.5))
            if unit == step.computing:
                axes.text(x + 0.5, unit + 0.5, step.phase[0].upper(), **CENTRED, fontsize=9)
        axes.text(x + 0.5, -0.35, str(len(step.alive)), **CENTRED, fontsize=9, fontweight="bold")
    units = len(names)
    axes.set_yticks([-0.35] + [unit + 0.5 for unit in range(units)], ["full units", *names])
    axes.set(xlim=(0, len(steps)), ylim=(units, -0.75), xticks=[], xlabel="moments of one step, in order")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    legend = [
        Patch(facecolor=gathered, label="full, computes (F forward, B backward)"),
        Patch(facecolor=waiting, hatch=KIND_HATCHES["gathered"], edgecolor="white", label="full, prefetched"),
        Patch(facecolor="#F4F4F4", label="shard only"),
    ]
    if all(set(step.alive) <= {step.computing} for step in steps):
        del legend[1]  # nothing is prefetched
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=2.2, ncol=3)


@checked
def show_gathered(names: Sequence[str], prefetch: bool = True, title: str = "") -> None:
    """Show which units of a model are whole at each moment of a stage 3 step; `names` are the units in order."""
    steps = gather_steps(len(names), prefetch)
    most = max(len(step.alive) for step in steps)
    said = f"At most {most} of {len(names)} units {'is' if most == 1 else 'are'} full at any moment"
    with picture_axes(1.5 + 0.3 * len(names)) as axes:
        draw_gathered(axes, steps, names)
        axes.set_title(title or said)
