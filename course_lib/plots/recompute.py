"""Recomputation as a graph: which tensors of a block wait for backward, and which are made a second time."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch, Rectangle

from course_lib.config import ModelConfig, Recompute
from course_lib.memory.activations import block_terms
from course_lib.plots.palette import KIND_COLORS, NEUTRAL_COLOR
from course_lib.plots.style import bare, panel_title, picture_panels, show_bytes
from course_lib.validate import Bytes, Size, checked

STEP = 1.25  # from one tensor to the next, in widths of a block's input


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a block saves for backward, and the operation that makes it."""

    name: str
    made_by: str
    nbytes: Bytes


@dataclass(frozen=True)
class GraphBox:
    """A tensor as drawn: where it stands, how wide it is, and whether it is kept from forward to backward."""

    name: str
    left: float
    width: float
    kept: bool


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
        ("attention\nweights", "scores,\nsoftmax", scores),
        ("core output", "times v", terms["input of o"]),
        ("residual", "linear, add", terms["residual"] + terms["second norm's statistics"]),
        ("normed", "norm", terms["input of the MLP"]),
        ("gate, up", "linear", gate_and_up),
        ("silu, product", "silu,\ntimes up", terms["MLP"] - gate_and_up),
    ]
    return [SavedTensor(name, made_by, int(size) * num_tokens) for name, made_by, size in sizes]


def kept_names(mode: Recompute, tensors: Sequence[SavedTensor]) -> list[bool]:
    """Say of each tensor whether it stays from forward to backward."""
    dropped = {"none": (), "selective": ("attention\nweights",), "full": tuple(t.name for t in tensors[1:])}
    return [tensor.name not in dropped[mode] for tensor in tensors]


def graph_boxes(mode: Recompute, tensors: Sequence[SavedTensor]) -> list[GraphBox]:
    """Lay the tensors side by side, as wide as their bytes; the block's input is one wide."""
    unit, left, boxes = tensors[0].nbytes, 0.0, []
    for tensor, kept in zip(tensors, kept_names(mode, tensors), strict=True):
        boxes.append(GraphBox(tensor.name, left, tensor.nbytes / unit, kept))
        left += tensor.nbytes / unit + STEP
    return boxes


def draw_graph(axes, mode: Recompute, tensors: Sequence[SavedTensor]) -> None:
    """Draw one row: kept tensors filled, tensors that are made again as outlines, operations as arrows."""
    boxes = graph_boxes(mode, tensors)
    for box in boxes:
        filled = {"facecolor": KIND_COLORS["activations"], "edgecolor": KIND_COLORS["activations"]}
        again = {"facecolor": "white", "edgecolor": KIND_COLORS["temporary"], "linestyle": "--", "linewidth": 1.3}
        axes.add_patch(Rectangle((box.left, 0), box.width, 1, **(filled if box.kept else again)))
        if box.left:
            arrow = {"arrowstyle": "->", "color": "black" if box.kept else KIND_COLORS["temporary"], "linewidth": 1.2}
            axes.annotate("", (box.left, 0.5), (box.left - STEP, 0.5), arrowprops=arrow)
    right = boxes[-1].left + boxes[-1].width
    bare(axes, (-0.3, right + 0.3), (-0.15, 1.15))


@checked
def show_graph(config: ModelConfig, num_tokens: Size, seq_len: Size) -> None:
    """Show one block without recomputation, with selective and with full recomputation; widths are true to bytes."""
    tensors = saved_tensors(config, num_tokens, seq_len)
    said = "One block and what it keeps for backward; widths are bytes"
    with picture_panels(4, 1, 4.1, said, height_ratios=[0.95, 1, 1, 1]) as (figure, panels):
        for axes, mode in zip(panels[1:], ("none", "selective", "full"), strict=True):
            draw_graph(axes, mode, tensors)
            kept = sum(t.nbytes for t, kept in zip(tensors, kept_names(mode, tensors), strict=True) if kept)
            panel_title(axes, f"{mode}: keeps {show_bytes(kept)}")
        _name_operations(panels[0], graph_boxes("none", tensors), tensors)
        handles = [
            Patch(color=KIND_COLORS["activations"], label="kept from forward to backward"),
            Patch(fc="white", ec=KIND_COLORS["temporary"], linestyle="--", label="made again in backward"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncol=2)


def _name_operations(axes, boxes: Sequence[GraphBox], tensors: Sequence[SavedTensor]) -> None:
    """Above the rows: the name of each tensor, and between them the operations."""
    for box, tensor in zip(boxes, tensors, strict=True):
        axes.text(box.left + box.width / 2, 0, box.name, ha="center", va="bottom", fontsize=8, fontweight="bold",
                  rotation=0 if box.width > 3 else 90)  # fmt: skip
        if tensor.made_by:
            axes.text(box.left - STEP / 2, 0, tensor.made_by, ha="center", va="bottom", fontsize=7.5, rotation=90,
                      color="#444444")  # fmt: skip
    bare(axes, (-0.3, boxes[-1].left + boxes[-1].width + 0.3), (0, 1))
    axes.axhline(0, color=NEUTRAL_COLOR, linewidth=0)
