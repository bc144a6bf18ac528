"""Data parallelism in pictures: copies that average, parameters that fall into buckets, kernels on two streams."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import Rectangle

from course_lib.plots.palette import (
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    KIND_COLORS,
    OKABE_ITO,
    RANK_COLORS,
    mix,
    text_on,
)
from course_lib.plots.style import CENTRED, FULL_WIDTH_IN, labelled_box, picture_axes
from course_lib.span import Span
from course_lib.validate import Positive, Size, checked

# ---------------------------------------------------------------- data parallelism as one picture

ALL_RANKS = -1  # of a box that reaches over all ranks
OWN_COLORS = tuple(OKABE_ITO[name] for name in ("sky", "green", "yellow", "purple"))  # of what only one rank has
REPLICA_ROWS = ("its sequences", "the model", "own gradient", "", "mean gradient", "new model")


@dataclass(frozen=True)
class ReplicaBox:
    """One box: its row from the top, its rank (or ALL_RANKS), where it lies within the rank, and what it says."""

    row: int
    rank: int
    left: float
    width: float
    text: str
    color: str


def replica_boxes(
    sequences: Sequence[Sequence[float]], own: Sequence[float], mean: float, weights: tuple[float, float]
) -> list[ReplicaBox]:
    """Return the boxes of one step: each rank has its own sequences and gradient, and the same mean and new weight.

    weights   before the step, after it
    Raises    ValueError if there is not one gradient for each rank
    """
    if len(own) != len(sequences):
        raise ValueError(f"own has {len(own)} gradients for {len(sequences)} ranks; give one for each rank")
    boxes = []
    for rank, (values, gradient) in enumerate(zip(sequences, own, strict=True)):
        tint = mix(OWN_COLORS[rank % len(OWN_COLORS)], "#FFFFFF", 0.35)
        width = 1 / len(values)
        boxes += [ReplicaBox(0, rank, i * width, width, f"x = {x:g}", tint) for i, x in enumerate(values)]
        boxes.append(ReplicaBox(1, rank, 0, 1, f"w = {weights[0]:g}", KIND_COLORS["parameters"]))
        boxes.append(ReplicaBox(2, rank, 0, 1, f"{gradient:g}", tint))
        boxes.append(ReplicaBox(4, rank, 0, 1, f"{mean:g}", KIND_COLORS["gradients"]))
        boxes.append(ReplicaBox(5, rank, 0, 1, f"w = {weights[1]:g}", KIND_COLORS["parameters"]))
    boxes.append(ReplicaBox(3, ALL_RANKS, 0, 1, "all-reduce: mean over ranks", "#FFFFFF"))
    return boxes


@checked
def show_replicas(
    sequences: Sequence[Sequence[float]], own: Sequence[float], mean: float, weights: tuple[float, float]
) -> None:
    """Show a step of data parallelism: equal models, different sequences, one all-reduce, equal models again."""
    boxes, num_ranks = replica_boxes(sequences, own, mean, weights), len(sequences)
    with picture_axes(3.6) as axes:
        for box in boxes:
            wide = num_ranks - 0.14 if box.rank == ALL_RANKS else 0.86
            left, width = max(box.rank, 0) + box.left * wide, box.width * wide
            edge = "black" if box.rank == ALL_RANKS else "white"
            look = {"fontsize": 9.5, "edgecolor": edge, "linewidth": 1.5}
            labelled_box(axes, (left, box.row), (width, 0.66), box.color, box.text, **look)
        for row in range(len(REPLICA_ROWS) - 1):
            for rank in range(num_ranks):
                axes.annotate(
                    "", (rank + 0.43, row + 1.0), xytext=(rank + 0.43, row + 0.66), arrowprops={"arrowstyle": "->"}
                )
        axes.set_yticks([row + 0.33 for row in range(len(REPLICA_ROWS))], REPLICA_ROWS)
        axes.set_xticks([rank + 0.43 for rank in range(num_ranks)], [f"rank {rank}" for rank in range(num_ranks)])
        axes.xaxis.tick_top()
        axes.set(xlim=(-0.05, num_ranks), ylim=(len(REPLICA_ROWS) - 0.25, -0.1))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title("Equal models, different sequences, one mean, equal models again")


# ---------------------------------------------------------------- parameters falling into buckets


@dataclass(frozen=True)
class Fall:
    """One parameter in model order: where it lies among all elements, and the bucket into which it falls."""

    name: str
    start: int
    size: int
    bucket: int


def falls(sizes: Mapping[str, Size], buckets: Sequence[Sequence[str]]) -> list[Fall]:
    """Return where each parameter lies and into which bucket it falls.

    Raises   ValueError if the buckets do not hold each parameter once
    """
    bucket_of = {name: index for index, names in enumerate(buckets) for name in names}
    if sorted(name for names in buckets for name in names) != sorted(sizes):
        raise ValueError("the buckets must hold each parameter once; give the names of `sizes`, each in one bucket")
    found, start = [], 0
    for name, size in sizes.items():
        found.append(Fall(name, start, size, bucket_of[name]))
        start += size
    return found


@checked
def show_buckets(sizes: Mapping[str, Size], buckets: Sequence[Sequence[str]], title: str) -> None:
    """Show parameters in model order and, below, the buckets that they fill; widths are true to elements."""
    placed, total = falls(sizes, buckets), sum(sizes.values())
    with picture_axes(2.7) as axes:
        for fall in placed:
            color = mix(RANK_COLORS[fall.bucket % len(RANK_COLORS)], "#FFFFFF", 0.35)
            label = fall.name.replace(".weight", "").rpartition(".")[2] if fall.size > 0.04 * total else ""
            for top, height, text in ((0, 0.5, label), (1.35, 0.6, "")):
                look = {"fontsize": 8, "linewidth": 0.8}
                labelled_box(axes, (fall.start, top), (fall.size, height), color, text, **look)
            middle = fall.start + fall.size / 2
            if fall.size > 0.013 * total:
                axes.annotate(
                    "", (middle, 1.33), xytext=(middle, 0.53), arrowprops={"arrowstyle": "->", "color": "0.4"}
                )
        for index, names in enumerate(buckets):
            inside = [fall for fall in placed if fall.name in set(names)]
            left, right = inside[0].start, inside[-1].start + inside[-1].size
            axes.add_patch(Rectangle((left, 1.35), right - left, 0.6, fill=False, edgecolor="black", linewidth=1.6))
            text = f"bucket {index}\n{right - left:,} elements"
            axes.text((left + right) / 2, 2.0, text, ha="center", va="top", fontsize=8.5)
        axes.annotate(
            "", (0.3 * total, -0.25), xytext=(total, -0.25), arrowprops={"arrowstyle": "->", "linewidth": 1.5}
        )
        axes.text(0.29 * total, -0.25, "order of backward", ha="right", va="center", fontsize=9)
        axes.set_yticks([0.25, 1.65], ["gradients", "messages"])
        axes.set(xlim=(-0.005 * total, 1.005 * total), ylim=(2.65, -0.5), xticks=[])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(title)


# ---------------------------------------------------------------- tokens against steps


def times_the_least(share: Positive) -> tuple[float, float]:
    """Return steps and tokens, as multiples of the least, at a batch of `share` critical batch sizes.

    Source   McCandlish et al. 2018 (arXiv:1812.06162), section 2.3
    """
    return 1 + 1 / share, 1 + share


@checked
def show_batch_tradeoff() -> None:
    """Show how steps fall and tokens rise with the batch, on both sides of the critical batch size."""
    shares = [2 ** (step / 4) for step in range(-20, 21)]
    steps, tokens = zip(*map(times_the_least, shares), strict=True)
    with picture_axes(3.2, FULL_WIDTH_IN * 0.85) as axes:
        axes.plot(shares, steps, color=OKABE_ITO["blue"], label="steps / least steps")
        axes.plot(shares, tokens, color=OKABE_ITO["vermillion"], linestyle="--", label="tokens / least tokens")
        axes.axvline(1, ymax=0.7, color="black", linewidth=1, linestyle=":")
        for x, text in ((0.11, "twice the batch:\nhalf the steps"), (9, "twice the batch:\ntwice the tokens")):
            axes.text(x, 2.6, text, ha="center", fontsize=9)
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


@checked
def backward_on_streams(
    num_buckets: Size = 3, launch_s: Positive = 1.0, compute_s: Positive = 5.0, send_s: Positive = 6.0
) -> list[Span]:
    """Return a modelled backward on a GPU: the CPU only launches, a stream does its kernels in order.

    An all-reduce begins when its gradients are computed and the all-reduce before it is done. `work.wait()` makes the
    compute stream wait, not the CPU: the optimizer's kernel is launched at once and runs after the last all-reduce.
    """
    spans, cpu_s, computed_s, sent_s = [], 0.0, 0.0, 0.0

    def on_cpu(name: str) -> None:
        nonlocal cpu_s
        spans.append(Span(0, CPU, name, cpu_s, cpu_s + launch_s))
        cpu_s += launch_s

    for index in range(num_buckets):
        on_cpu(f"B{index}")
        start_s = max(cpu_s, computed_s)
        computed_s = start_s + compute_s
        spans.append(Span(0, COMPUTE, f"backward {index}", start_s, computed_s))
        on_cpu(f"R{index}")
        start_s = max(cpu_s, computed_s, sent_s)
        sent_s = start_s + send_s
        spans.append(Span(0, COMMUNICATION, f"all-reduce {index}", start_s, sent_s))
    on_cpu("wait")
    on_cpu("O")
    start_s = max(cpu_s, computed_s, sent_s)
    spans.append(Span(0, COMPUTE, "optimizer", start_s, start_s + compute_s / 2))
    return spans


@checked
def show_streams(spans: Sequence[Span], title: str) -> None:
    """Show what the CPU thread and each stream do, with the wait of the compute stream as an arrow."""
    rows = (CPU, COMPUTE, COMMUNICATION)
    last = max((span for span in spans if span.lane == COMMUNICATION), key=lambda span: span.stop_s)
    with picture_axes(2.5) as axes:
        for span in spans:
            row, color = rows.index(span.lane), STREAM_COLORS[span.lane]
            look = {"height": 0.66, "facecolor": color, "edgecolor": "white", "linewidth": 1}
            axes.barh(row, span.seconds, left=span.start_s, **look)
            middle = (span.start_s + span.stop_s) / 2
            small = {"fontsize": 7, "rotation": 90} if span.name == "wait" else {"fontsize": 8.5}
            axes.text(middle, row, span.name, **CENTRED, color=text_on(color), **small)
        axes.annotate(
            "wait()", (last.stop_s, 1.33), xytext=(last.stop_s, 1.67), fontsize=8.5, ha="center",
            arrowprops={"arrowstyle": "->"},
        )  # fmt: skip
        axes.set_yticks(range(3), rows)
        axes.set(xlim=(0, 1.01 * max(span.stop_s for span in spans)), ylim=(2.5, -0.5), xticks=[], xlabel="time")
        axes.tick_params(length=0)
        axes.set_title(title)
