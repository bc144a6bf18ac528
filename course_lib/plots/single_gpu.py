"""One GPU in pictures: numbers as squares, what a block saves and makes again, who counts which bytes, tiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.patches import Rectangle

from course_lib.config import ModelConfig, Recompute, require_dense
from course_lib.memory.activations import block_terms
from course_lib.palette import KIND_COLORS, NEUTRAL_COLOR, OKABE_ITO, mix
from course_lib.plots.diagrams import draw_arrows
from course_lib.plots.style import (
    FULL_WIDTH_IN,
    bare,
    ground,
    key,
    keys_below,
    labelled_box,
    panel_title,
    picture_axes,
    picture_panels,
    write,
)
from course_lib.plots.tiles import Tile, draw_tiles
from course_lib.units import show_bytes
from course_lib.validate import Size, checked

# ---------------------------------------------------------------- squares


@checked
def show_squares(kinds: Mapping[str, Size], caption: str, title: str) -> None:
    """Show {kind: numbers} as squares in columns of eight, so that areas are true; `caption` says what a square is.

    Raises   ValueError if a kind has no colour
    """
    if not kinds or (unknown := set(kinds) - set(KIND_COLORS)):
        raise ValueError(f"kinds {sorted(unknown if kinds else [])} have no colour; use {', '.join(KIND_COLORS)}")
    rows, height = [[] for _ in range(8)], 8
    for kind, count in kinds.items():
        for row in range(height):
            across = len(range(row, count, height))
            rows[row] += [Tile(color=KIND_COLORS[kind], look={"linewidth": 0.8})] * across
            rows[row].append(-(-count // height) - across + 1.0)
    right = sum(-(-count // height) + 1 for count in kinds.values()) - 1
    with picture_axes(0.95 + min(0.2, (FULL_WIDTH_IN - 1.5) / right) * (height + 1.4)) as axes:
        draw_tiles(axes, rows)
        starts = accumulate((-(-count // height) + 1 for count in kinds.values()), initial=0)
        for left, count in zip(starts, kinds.values(), strict=False):  # the last end starts nothing
            write(axes, left, -0.1, str(count), "left", va="bottom")
        axes.set(xlim=(0, right), ylim=(height + 0.2, -1.1), aspect="equal", anchor="W")
        axes.set_title(title)
        handles = [key(KIND_COLORS[kind], kind) for kind in KIND_COLORS if kind in kinds]
        look = {"loc": "outside lower left", "ncol": len(kinds), "title": caption, "alignment": "left"}
        axes.figure.legend(handles=handles, **look)


# ---------------------------------------------------------------- a Llama block with what it saves

TOP, LOW, BRANCH = 1.0, 0.0, 0.27  # the rows of attention and of the MLP, and how far tensors of a row branch
NODES = (
    *((1.0, TOP, "norm"), (2.2, TOP, "q, k, v"), (3.9, TOP, "attention"), (5.3, TOP, "o"), (6.1, TOP, "+")),
    *((1.0, LOW, "norm"), (2.2, LOW, "gate, up"), (3.55, LOW + BRANCH, "silu"), (4.9, LOW, "\u00d7")),
    *((6.1, LOW, "down"), (7.0, LOW, "+")),
)
CONNECTORS = (  # thin lines: where nothing is saved, or to the start of an edge
    *((5.3, TOP, 6.1, TOP), (6.1, LOW, 7.0, LOW), (4.9, LOW, 5.2, LOW)),
    *((2.2, TOP, 2.57, TOP + step) for step in (BRANCH, 0, -BRANCH)),
    *((3.45, TOP + step, 3.9, TOP) for step in (BRANCH, 0, -BRANCH)),
    *((2.2, LOW, 2.57, LOW + step) for step in (BRANCH, -BRANCH)),
    *((4.7, LOW + step, 4.9, LOW) for step in (BRANCH, -BRANCH)),
    *((x, y, x + 0.4, y) for x, y in ((1.6, TOP), (3.9, TOP), (4.9, TOP), (1.6, LOW))),
)


def block_edges(config: ModelConfig) -> list[tuple[str, int, float, float, float]]:
    """Return the tensors that one block with fused attention saves: (name, elements per token, from x, to x, y)."""
    D, F = config.d_model, config.d_ff
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    return [
        ("input", D, 0.1, 0.78, TOP),
        ("", D, 1.22, 1.83, TOP),
        ("q", N * H, 2.57, 3.45, TOP + BRANCH),
        ("k", K * H, 2.57, 3.45, TOP),
        ("v", K * H, 2.57, 3.45, TOP - BRANCH),
        ("", N * H, 4.35, 5.12, TOP),
        ("sum", D, 0.1, 0.78, LOW),
        ("", D, 1.22, 1.83, LOW),
        ("gate", F, 2.57, 3.33, LOW + BRANCH),
        ("silu", F, 3.77, 4.7, LOW + BRANCH),
        ("up", F, 2.57, 4.7, LOW - BRANCH),
        ("product", F, 5.08, 5.83, LOW),
    ]


@checked
def show_block(config: ModelConfig) -> None:
    """Show one block with the tensors that it saves for backward on the edges, as thick as their bytes."""
    require_dense(config, "show_block")
    edges = block_edges(config)
    most, total = (reduce(edge[1] for edge in edges) for reduce in (max, sum))
    with picture_axes(3.3) as axes:
        for name, elements, start, stop, y in edges:
            points = 20 * elements / most
            look = {"color": KIND_COLORS["activations"], "solid_capstyle": "butt", "zorder": 1}
            axes.plot([start, stop], [y, y], linewidth=points, **look)
            above = {"xytext": (0, points / 2 + 1), "textcoords": "offset points", "ha": "center", "va": "bottom"}
            axes.annotate(f"{name} {elements:,}".strip(), ((start + stop) / 2, y), fontsize=8, **above)
        for x0, y0, x1, y1 in CONNECTORS:
            axes.plot([x0, x1], [y0, y1], color="#666666", linewidth=1, zorder=0)
        write(axes, 6.3, TOP, "sum, to the\nsecond row", "left", 8)
        write(axes, 7.2, LOW, "next\nblock", "left", 8)
        for x, y, name in NODES:
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "black", "linewidth": 0.9}
            write(axes, x, y, name, bbox=box, zorder=3)
        bare(axes, (0, 7.7), (-0.45, 1.5))
        axes.set_yticks([TOP, LOW], ["attention", "MLP"])
        axes.tick_params(length=0)
        axes.set_title(f"One block of {config.name} saves {total:,} elements per token")


# ---------------------------------------------------------------- who counts which bytes

LAYERS = (  # parts of a GPU's memory: share of the picture (not measured), colour
    ("tensors", 0.50, NEUTRAL_COLOR),
    ("rounding\nto 512 B", 0.10, "#F4F4F4"),
    ("free, cached", 0.16, KIND_COLORS["free"]),
    ("CUDA\ncontext", 0.12, KIND_COLORS["overhead"]),
    ("communication\nbuffers", 0.15, OKABE_ITO["yellow"]),
)
COUNTERS = {  # who counts, and how many of the layers
    "a tracker of tensors": 1,
    "torch.cuda.memory_allocated()": 2,
    "torch.cuda.memory_reserved()": 3,
    "nvidia-smi, for this process": 5,
}


def show_counters() -> None:
    """Show what lies in a GPU's memory, and how much of it each counter sees."""
    ends = [0.0, *accumulate(share for _, share, _ in LAYERS)]
    with picture_axes(2.3) as axes:
        for (name, share, color), left in zip(LAYERS, ends, strict=False):  # the last end starts nothing
            look = {"hatch": "////", "edgecolor": "#999999"} if name.startswith("rounding") else {}
            labelled_box(axes, (left / ends[-1], 0), (share / ends[-1], 1), color, name, **look)
        for row, (name, count) in enumerate(COUNTERS.items()):
            y, end = 1.4 + 0.55 * row, ends[count] / ends[-1]
            axes.annotate("", (end, y), (0, y), arrowprops={"arrowstyle": "|-|", "mutation_scale": 3})
            write(axes, 0.02, y, name, "left", 8.5, bbox=ground("white"))
        bare(axes, (-0.01, 1.01), (1.0 + 0.55 * len(COUNTERS), -0.1))
        axes.set_title("Who counts which bytes of a GPU (not to scale)")


# ---------------------------------------------------------------- what is kept, and what is made again

STEP = 1.25  # from one tensor to the next, in widths of a block's input
SCORES = "attention\nweights"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a block saves for backward, the operation that makes it, and where it is drawn.

    left, width   in widths of the block's input
    """

    name: str
    made_by: str
    nbytes: int
    left: float = 0.0
    width: float = 1.0


@checked
def saved_tensors(config: ModelConfig, num_tokens: Size, seq_len: Size) -> list[SavedTensor]:
    """Return what a Llama block with standard attention saves, in the order of forward; statistics with their tensors.

    Shapes   bytes of FP32 tensors for `num_tokens` tokens in sequences of `seq_len`
    """
    terms = block_terms(config, seq_len, "standard", "fp32")
    scores = config.num_heads * seq_len * 4
    gate_and_up = 2 * config.d_ff * 4
    sizes = [
        ("input", "", terms["block input"] + terms["first norm's statistics"]),
        ("normed", "norm", terms["input of q, k, v"]),
        ("q, k, v", "linear", terms["core"] - scores),
        (SCORES, "scores,\nsoftmax", scores),
        ("core output", "times v", terms["input of o"]),
        ("residual", "linear, add", terms["residual"] + terms["second norm's statistics"]),
        ("normed", "norm", terms["input of the MLP"]),
        ("gate, up", "linear", gate_and_up),
        ("silu, product", "silu,\ntimes up", terms["MLP"] - gate_and_up),
    ]
    tensors, left, unit = [], 0.0, int(sizes[0][2])
    for name, made_by, size in sizes:
        tensors.append(SavedTensor(name, made_by, int(size) * num_tokens, left, int(size) / unit))
        left += int(size) / unit + STEP
    return tensors


def kept_names(mode: Recompute, tensors: Sequence[SavedTensor]) -> list[bool]:
    """Say of each tensor whether it stays from forward to backward."""
    dropped = {"none": (), "selective": (SCORES,), "full": tuple(t.name for t in tensors[1:])}
    return [tensor.name not in dropped[mode] for tensor in tensors]


@checked
def show_graph(config: ModelConfig, num_tokens: Size, seq_len: Size) -> None:
    """Show one block without recomputation, with selective and with full recomputation; widths are true to bytes."""
    tensors = saved_tensors(config, num_tokens, seq_len)
    kept_color, again_color = KIND_COLORS["activations"], KIND_COLORS["temporary"]
    filled = {"facecolor": kept_color, "edgecolor": kept_color}
    again = {"facecolor": "white", "edgecolor": again_color, "linestyle": "--", "linewidth": 1.3}
    limits = -0.3, tensors[-1].left + tensors[-1].width + 0.3
    said = "One block and what it keeps for backward; widths are bytes"
    with picture_panels(4, 1, 4.1, said, height_ratios=[0.95, 1, 1, 1]) as (figure, panels):
        for axes, mode in zip(panels[1:], ("none", "selective", "full"), strict=True):
            kept = kept_names(mode, tensors)
            for tensor, stays in zip(tensors, kept, strict=True):
                axes.add_patch(Rectangle((tensor.left, 0), tensor.width, 1, **(filled if stays else again)))
                if tensor.made_by:
                    look = {"arrowstyle": "->", "color": "black" if stays else again_color}
                    draw_arrows(axes, [((tensor.left - STEP, 0.5), (tensor.left, 0.5))], **look)
            bare(axes, limits, (-0.15, 1.15))
            size = sum(t.nbytes for t, stays in zip(tensors, kept, strict=True) if stays)
            panel_title(axes, f"{mode}: keeps {show_bytes(size)}")
        for t in tensors:  # above the rows: the name of each tensor, and between them the operations
            look = {"va": "bottom", "rotation": 0 if t.width > 3 else 90}
            write(panels[0], t.left + t.width / 2, 0, t.name, fontsize=8, fontweight="bold", **look)
            look = {"va": "bottom", "rotation": 90, "color": "#444444"}
            write(panels[0], t.left - STEP / 2, 0, t.made_by, fontsize=7.5, **look)
        bare(panels[0], limits, (0, 1))
        handles = [key(kept_color, "kept from forward to backward")]
        handles += [key("white", "made again in backward", edgecolor=again_color, linestyle="--")]
        keys_below(figure, handles)


# ---------------------------------------------------------------- FlashAttention's tiles

NUM_BLOCKS, BLOCK_SIZE, NOW = 4, 4, 8  # of queries and of keys; tokens of each; the tile that is computed


def turns() -> list[list[int]]:
    """Return when the turn of each tile of a causal score matrix is, [query block][key block], from 1; 0: never."""
    counted = iter(range(1, NUM_BLOCKS**2 + 1))
    return [[next(counted) if k <= q else 0 for k in range(NUM_BLOCKS)] for q in range(NUM_BLOCKS)]


def show_tiles() -> None:
    """Show the score matrix of standard attention beside FlashAttention's blocks, while one tile is computed."""
    kept, fast = KIND_COLORS["activations"], KIND_COLORS["temporary"]
    dropped, masked = mix(fast, "#FFFFFF", 0.65), mix(kept, "#FFFFFF", 0.7)
    said, size = "The same scores: one matrix in memory, or one tile after the other", NUM_BLOCKS * BLOCK_SIZE
    with picture_panels(1, 2, 3.6, said, width_ratios=[1, 1.3]) as (figure, (left, right)):
        scores = [[Tile(color=kept if k <= q else masked, look={"linewidth": 0.4}) for k in range(size)]
                  for q in range(size)]  # fmt: skip
        draw_tiles(left, scores)
        left.set(aspect="equal", xlabel="keys", ylabel="queries")
        panel_title(left, "standard: all scores kept")
        look, rows = {"edgecolor": NEUTRAL_COLOR, "linewidth": 0.8}, []
        for row in turns():
            colors = ["#E6E6E6" if not t else dropped if t < NOW else fast if t == NOW else "#FFFFFF" for t in row]
            rows.append([Tile(f"{t or ''}", color, look=look) for t, color in zip(row, colors, strict=True)])
            if NOW in row:
                write(right, NUM_BLOCKS + 0.15, len(rows) - 0.5, "running\n$m$, $\\ell$, $o$", "left")
        draw_tiles(right, rows, [f"Q{block}" for block in range(NUM_BLOCKS)], fontsize=9)
        right.set_xticks([b + 0.5 for b in range(NUM_BLOCKS)], [f"K{b}, V{b}" for b in range(NUM_BLOCKS)])
        right.set(xlim=(-0.1, NUM_BLOCKS + 1.2), aspect="equal", ylabel="blocks of queries")
        right.tick_params(labelsize=8.5)
        panel_title(right, "blocks: one tile at a time")
        states = {"used and dropped": dropped, "in fast memory now": fast}
        states |= {"still to come": "#FFFFFF", "never computed": "#E6E6E6"}
        handles = [key(kept, "kept for backward (light: masked)")]
        handles += [key(color, name, edgecolor=NEUTRAL_COLOR) for name, color in states.items()]
        keys_below(figure, handles, ncol=3)
