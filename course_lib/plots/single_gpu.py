"""One GPU in pictures: numbers as squares, what a Llama block saves, and who counts which bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from course_lib.config import ModelConfig, require_dense
from course_lib.plots.palette import KIND_COLORS, NEUTRAL_COLOR, OKABE_ITO
from course_lib.plots.style import CENTRED, FULL_WIDTH_IN, bare, finish, ground, labelled_box, picture_axes, style
from course_lib.validate import Size, checked

# ---------------------------------------------------------------- squares


@dataclass(frozen=True)
class Square:
    """One square of a picture: its kind, and its lower left corner."""

    row: str
    kind: str
    x: float
    y: float


SQUARE_GAP = 1.0  # between two kinds, in squares


def squares(rows: Mapping[str, Mapping[str, int]], height: Size = 2) -> list[Square]:
    """Return every square of {row: {kind: squares}}: columns of `height` squares, kind after kind.

    Raises   ValueError if a kind has no colour
    """
    found = []
    for label, counts in rows.items():
        if unknown := set(counts) - set(KIND_COLORS):
            raise ValueError(f"kinds {sorted(unknown)} have no colour; use {', '.join(KIND_COLORS)}")
        left = 0.0
        for kind, count in counts.items():
            found += [Square(label, kind, left + at // height, at % height) for at in range(count)]
            left += -(-count // height) + SQUARE_GAP
    return found


@checked
def show_squares(rows: Mapping[str, Mapping[str, int]], caption: str, title: str, height: Size = 2) -> None:
    """Show {row: {kind: squares}}, so that areas are true to bytes; `caption` says what one square is."""
    drawn, labels, pitch = squares(rows, height), list(rows), height + 1.4
    right = max(one.x for one in drawn) + 1
    size = min(0.2, (FULL_WIDTH_IN - 1.5) / right)  # inches of a square
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, 0.95 + size * pitch * len(rows)))
        for one in drawn:
            look = {"facecolor": KIND_COLORS[one.kind], "edgecolor": "white", "linewidth": 0.8}
            axes.add_patch(Rectangle((one.x, labels.index(one.row) * pitch + one.y), 1, 1, **look))
        for row, label in enumerate(labels):
            for kind, count in rows[label].items():
                left = min([one.x for one in drawn if (one.row, one.kind) == (label, kind)], default=0)
                axes.text(left, row * pitch - 0.1, f"{count}" if count else "", va="bottom", fontsize=9)
        axes.set_yticks([row * pitch + height / 2 for row in range(len(rows))], labels)
        axes.set(xlim=(0, right), ylim=(len(rows) * pitch - 1.2, -1.1), xticks=[], aspect="equal", anchor="W")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(title)
        kinds = [kind for kind in KIND_COLORS if any(kind in counts for counts in rows.values())]
        handles = [Patch(facecolor=KIND_COLORS[kind], label=kind) for kind in kinds]
        figure.legend(handles=handles, loc="outside lower left", ncol=len(kinds), title=caption, alignment="left")
        finish(figure)


# ---------------------------------------------------------------- a Llama block with what it saves


@dataclass(frozen=True)
class Edge:
    """A saved tensor between two operators: its elements per token, and where it is drawn."""

    name: str
    elements: int
    start: tuple[float, float]
    stop: tuple[float, float]


@dataclass(frozen=True)
class Node:
    """An operator of the block, and where it is drawn."""

    name: str
    x: float
    y: float


ATTENTION_Y, MLP_Y, BRANCH = 1.0, 0.0, 0.27
NODES = (
    Node("norm", 1.0, ATTENTION_Y),
    Node("q, k, v", 2.2, ATTENTION_Y),
    Node("attention", 3.9, ATTENTION_Y),
    Node("o", 5.3, ATTENTION_Y),
    Node("+", 6.1, ATTENTION_Y),
    Node("norm", 1.0, MLP_Y),
    Node("gate, up", 2.2, MLP_Y),
    Node("silu", 3.55, MLP_Y + BRANCH),
    Node("\u00d7", 4.9, MLP_Y),
    Node("down", 6.1, MLP_Y),
    Node("+", 7.0, MLP_Y),
)
CONNECTORS = (  # thin lines: where nothing is saved, or to the start of an edge
    (5.3, ATTENTION_Y, 6.1, ATTENTION_Y),
    (6.1, MLP_Y, 7.0, MLP_Y),
    *((2.2, ATTENTION_Y, 2.57, ATTENTION_Y + step) for step in (BRANCH, 0, -BRANCH)),
    *((3.45, ATTENTION_Y + step, 3.9, ATTENTION_Y) for step in (BRANCH, 0, -BRANCH)),
    *((2.2, MLP_Y, 2.57, MLP_Y + step) for step in (BRANCH, -BRANCH)),
    *((4.7, MLP_Y + step, 4.9, MLP_Y) for step in (BRANCH, -BRANCH)),
    *((x, y, x + 0.4, y) for x, y in ((1.6, ATTENTION_Y), (3.9, ATTENTION_Y), (4.9, ATTENTION_Y), (1.6, MLP_Y))),
    (4.9, MLP_Y, 5.2, MLP_Y),
)


def block_edges(config: ModelConfig) -> list[Edge]:
    """Return the tensors that one block with fused attention saves; their elements per token are the model's."""
    require_dense(config, "block_edges")
    D, F = config.d_model, config.d_ff
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    top, low, b = ATTENTION_Y, MLP_Y, BRANCH
    return [
        Edge("input", D, (0.1, top), (0.78, top)),
        Edge("", D, (1.22, top), (1.83, top)),
        Edge("q", N * H, (2.57, top + b), (3.45, top + b)),
        Edge("k", K * H, (2.57, top), (3.45, top)),
        Edge("v", K * H, (2.57, top - b), (3.45, top - b)),
        Edge("", N * H, (4.35, top), (5.12, top)),
        Edge("sum", D, (0.1, low), (0.78, low)),
        Edge("", D, (1.22, low), (1.83, low)),
        Edge("gate", F, (2.57, low + b), (3.33, low + b)),
        Edge("silu", F, (3.77, low + b), (4.7, low + b)),
        Edge("up", F, (2.57, low - b), (4.7, low - b)),
        Edge("product", F, (5.08, low), (5.83, low)),
    ]


def edge_points(edges: Sequence[Edge], widest: float = 20.0) -> list[float]:
    """Return how thick each edge is drawn, in points: in proportion to its bytes."""
    most = max(edge.elements for edge in edges)
    return [widest * edge.elements / most for edge in edges]


@checked
def show_block(config: ModelConfig) -> None:
    """Show one block with the tensors that it saves for backward on the edges, as thick as their bytes."""
    edges = block_edges(config)
    total = sum(edge.elements for edge in edges)
    color = KIND_COLORS["activations"]
    with picture_axes(3.3) as axes:
        for edge, points in zip(edges, edge_points(edges), strict=True):
            (x0, y0), (x1, y1) = edge.start, edge.stop
            axes.plot([x0, x1], [y0, y1], color=color, linewidth=points, solid_capstyle="butt", zorder=1)
            text = f"{edge.name} {edge.elements:,}".strip()
            above = {"xytext": (0, points / 2 + 1), "textcoords": "offset points", "ha": "center", "va": "bottom"}
            axes.annotate(text, ((x0 + x1) / 2, y0), fontsize=8, **above)
        for x0, y0, x1, y1 in CONNECTORS:
            axes.plot([x0, x1], [y0, y1], color="#666666", linewidth=1, zorder=0)
        axes.text(6.3, ATTENTION_Y, "sum, to the\nsecond row", fontsize=8, va="center")
        axes.text(7.2, MLP_Y, "next\nblock", fontsize=8, va="center")
        for node in NODES:
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "black", "linewidth": 0.9}
            axes.text(node.x, node.y, node.name, **CENTRED, fontsize=9, bbox=box, zorder=3)
        axes.set(xlim=(0, 7.7), ylim=(-0.45, 1.5), xticks=[], yticks=[ATTENTION_Y, MLP_Y])
        axes.set_yticklabels(["attention", "MLP"])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"One block of {config.name} saves {total:,} elements per token")


# ---------------------------------------------------------------- who counts which bytes


@dataclass(frozen=True)
class Layer:
    """A part of a GPU's memory (its share of the picture, not measured), and its colour."""

    name: str
    share: float
    color: str
    hatch: str = ""


LAYERS = (
    Layer("tensors", 0.50, NEUTRAL_COLOR),
    Layer("rounding\nto 512 B", 0.10, "#F4F4F4", "////"),
    Layer("free, cached", 0.16, KIND_COLORS["free"]),
    Layer("CUDA\ncontext", 0.12, KIND_COLORS["overhead"]),
    Layer("communication\nbuffers", 0.15, OKABE_ITO["yellow"]),
)
COUNTERS = (  # who counts, and how many of the layers
    ("a tracker of tensors", 1),
    ("torch.cuda.memory_allocated()", 2),
    ("torch.cuda.memory_reserved()", 3),
    ("nvidia-smi, for this process", 5),
)


def counted_shares() -> dict[str, float]:
    """Return how far to the right each counter reaches, of the whole picture."""
    ends = list(accumulate(layer.share for layer in LAYERS))
    return {name: ends[count - 1] / ends[-1] for name, count in COUNTERS}


@checked
def show_counters(title: str = "Who counts which bytes of a GPU (not to scale)") -> None:
    """Show what lies in a GPU's memory, and how much of it each counter sees."""
    with picture_axes(2.3) as axes:
        left, total = 0.0, sum(layer.share for layer in LAYERS)
        for layer in LAYERS:
            width = layer.share / total
            edge = "#999999" if layer.hatch else "white"
            labelled_box(axes, (left, 0), (width, 1), layer.color, layer.name, hatch=layer.hatch, edgecolor=edge)
            left += width
        for row, (name, end) in enumerate(counted_shares().items()):
            y = 1.4 + 0.55 * row
            axes.annotate("", (end, y), (0, y), arrowprops={"arrowstyle": "|-|", "mutation_scale": 3})
            axes.text(0.02, y, name, va="center", fontsize=8.5, bbox=ground("white"))
        bare(axes, (-0.01, 1.01), (1.0 + 0.55 * len(COUNTERS), -0.1))
        axes.set_title(title)
