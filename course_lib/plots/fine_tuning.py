"""Fine-tuning in pictures: the matrices of LoRA, the values of codes, blocks with scales, and what to try first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.ticker import MaxNLocator

from course_lib.plots.palette import KIND_COLORS, LIMIT_COLOR, NEUTRAL_COLOR, OKABE_ITO, mix, text_on
from course_lib.plots.style import CENTRED, panel_title, picture_axes, picture_panels
from course_lib.validate import Size, checked

# ---------------------------------------------------------------- the matrices of LoRA

FROZEN_COLOR = "#D9D9D9"


@dataclass(frozen=True)
class MatrixBox:
    """A matrix: its rows and columns, which are its height and width, and whether it is trained."""

    label: str
    rows: int
    columns: int
    x: float
    y: float
    trained: bool


def lora_boxes(d_out: Size, d_in: Size, rank: Size) -> list[MatrixBox]:
    """Return W, B and A with areas true to their elements."""
    gap = max(d_in, d_out) / 2
    return [
        MatrixBox("W", d_out, d_in, 0, 0, False),
        MatrixBox("B", d_out, rank, d_in + gap, 0, True),
        MatrixBox("A", rank, d_in, d_in + gap + rank + gap / 4, (d_out - rank) / 2, True),
    ]


@checked
def show_lora(d_out: Size = 64, d_in: Size = 64, rank: Size = 8) -> None:
    """Show the frozen matrix beside the two thin ones that are trained."""
    boxes = lora_boxes(d_out, d_in, rank)
    with picture_axes(2.7) as axes:
        for box in boxes:
            color = KIND_COLORS["parameters"] if box.trained else FROZEN_COLOR
            axes.add_patch(
                Rectangle((box.x, box.y), box.columns, box.rows, facecolor=color, edgecolor=LIMIT_COLOR, linewidth=0.8)
            )
            state = "trained" if box.trained else "frozen"
            text = f"{box.label}: {box.rows} x {box.columns}\n{box.rows * box.columns:,} elements, {state}"
            below = box.y + box.rows + 0.06 * d_out
            axes.text(box.x + box.columns / 2, below, text, ha="center", va="top", fontsize=9)
        middle = boxes[1].x / 2 + d_in / 2
        axes.text(middle, d_out / 2, r"$+\ \frac{\alpha}{r}$", **CENTRED, fontsize=16)
        axes.set(xlim=(-d_in * 0.3, boxes[2].x + d_in * 1.3), ylim=(d_out * 1.25, -d_out * 0.05), aspect="equal")
        axes.set_axis_off()
        axes.set_title("A frozen matrix, and two thin ones beside it (areas: elements)")


# ---------------------------------------------------------------- codes and blocks


@checked
def show_codes(codes: Mapping[str, Sequence[float]]) -> None:
    """Show the values of each code as ticks on a line from -1 to 1."""
    with picture_axes(0.8 + 0.55 * len(codes)) as axes:
        for row, values in enumerate(codes.values()):
            axes.hlines(row, -1, 1, color=NEUTRAL_COLOR, linewidth=1)
            axes.vlines(list(values), row - 0.3, row + 0.3, color="black", linewidth=0.8)
        axes.set_yticks(range(len(codes)), [f"{name}, {len(values)} values" for name, values in codes.items()])
        axes.set(xlim=(-1.03, 1.03), ylim=(len(codes) - 0.5, -0.5), xlabel="value, as a share of the block's scale")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_title("Which values a code can store")


@checked
def show_blocks(numbers: Sequence[float], stored: Mapping[str, Sequence[float]], block_size: Size) -> None:
    """Show numbers beside what is stored of them, in one panel for each way to choose the scales."""
    said = "One large number spoils the scale of its block only"
    with picture_panels(1, len(stored), 2.7, said, sharey=True, squeeze=False) as (figure, all_axes):
        xs = range(len(numbers))
        for axes, (name, values) in zip(all_axes[0], stored.items(), strict=True):
            axes.bar(xs, numbers, width=0.9, color=FROZEN_COLOR, edgecolor=NEUTRAL_COLOR, label="number")
            axes.plot(
                xs, values, "_", color=OKABE_ITO["vermillion"], markersize=14, markeredgewidth=2.5, label="stored"
            )
            for edge in range(block_size, len(numbers), block_size):
                axes.axvline(edge - 0.5, color=LIMIT_COLOR, linestyle=":", linewidth=1)
            panel_title(axes, name, "center")
            axes.set_xticks([])
            axes.yaxis.set_major_locator(MaxNLocator(4, prune="both"))
        handles, labels = all_axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncol=2)


# ---------------------------------------------------------------- what to try first


@dataclass(frozen=True)
class Choice:
    """A box of the chart: a question (its answers lead on) or a technique."""

    text: str
    x: float
    y: float
    question: bool = False


CHOICES = {
    "large": Choice("out of memory:\nwhat is large?", 0, 0, True),
    "activations": Choice("activations", 1, -0.5, True),
    "states": Choice("model states", 1, 0.5, True),
    "cheap": Choice("bf16, fused attention,\nmicro-batch 1", 2.2, -0.9),
    "recompute": Choice("recomputation,\nthen offload", 2.2, -0.3),
    "adapt": Choice("fine-tuning:\nLoRA, QLoRA", 2.2, 0.3),
    "train": Choice("all weights:\n8-bit Adam, Adafactor", 2.2, 0.9),
    "gpus": Choice("more GPUs:\nfrom chapter 3 on", 3.4, 0.3),
}
STEPS = (
    ("large", "activations"), ("large", "states"), ("activations", "cheap"), ("activations", "recompute"),
    ("states", "adapt"), ("states", "train"), ("recompute", "gpus"), ("adapt", "gpus"), ("train", "gpus"),
)  # fmt: skip


@checked
def show_choices() -> None:
    """Show which technique helps against what, from the cheap ones down to the expensive ones."""
    with picture_axes(3.2) as axes:
        for start, end in STEPS:
            one, other = CHOICES[start], CHOICES[end]
            axes.add_patch(
                FancyArrowPatch(
                    (one.x + 0.42, one.y), (other.x - 0.46, other.y), arrowstyle="-|>", mutation_scale=12,
                    color="#666666",
                )
            )  # fmt: skip
        for choice in CHOICES.values():
            color = "#FFFFFF" if choice.question else mix(OKABE_ITO["sky"], "#FFFFFF", 0.55)
            axes.add_patch(
                FancyBboxPatch(
                    (choice.x - 0.44, choice.y - 0.2), 0.88, 0.4, boxstyle="round,pad=0.02", facecolor=color,
                    edgecolor=LIMIT_COLOR, linewidth=0.9,
                )
            )  # fmt: skip
            axes.text(choice.x, choice.y, choice.text, **CENTRED, fontsize=8.5, color=text_on(color))
        axes.set(xlim=(-0.55, 3.95), ylim=(1.2, -1.2))
        axes.set_axis_off()
        axes.set_title("First ask what is large")
