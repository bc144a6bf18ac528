"""Experts as concepts: a layer beside a dense MLP, sorted rows, kinds of experts, rows per expert and speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course_lib.hardware import GPU
from course_lib.plots.palette import COMPUTE_COLOR, NEUTRAL_COLOR, OKABE_ITO, RANK_COLORS, mix
from course_lib.plots.style import CENTRED, arrow, bare, labelled_box, picture_axes, three_digits
from course_lib.timing.rates import peak_flops, roofline_s
from course_lib.validate import Positive, Size, checked

USED_COLOR, SHARED_COLOR = COMPUTE_COLOR, OKABE_ITO["green"]
IDLE_COLOR = mix(NEUTRAL_COLOR, "#FFFFFF", 0.55)
MOST_BOXES = 64


# ---------------------------------------------------------------- a dense MLP and experts


@dataclass(frozen=True)
class ExpertKind:
    """How a layer is cut into experts: all routed experts, how many a token uses, shared ones; `width` of each."""

    num_experts: int
    top_k: int
    num_shared: int
    width: float

    @property
    def stored(self) -> float:
        """Width of all experts together."""
        return (self.num_experts + self.num_shared) * self.width

    @property
    def used(self) -> float:
        """Width that one token passes."""
        return (self.top_k + self.num_shared) * self.width


@checked
def finer(kind: ExpertKind, parts: Size, num_shared: int = 0) -> ExpertKind:
    """Cut each expert into `parts`, of which a token uses as many times more; some of the used become shared.

    What is stored and what a token uses stay as they are.
    Raises   ValueError if more would be shared than a token uses
    """
    used = kind.top_k * parts
    if not 0 <= num_shared <= used:
        raise ValueError(f"num_shared is {num_shared}; choose 0 to {used}, the experts that a token uses")
    return ExpertKind(kind.num_experts * parts - num_shared, used - num_shared, num_shared, kind.width / parts)


def _chosen(kind: ExpertKind) -> set[int]:
    """Which experts a picture colours: spread over the row."""
    step = kind.num_experts / kind.top_k
    return {int((slot + 0.35) * step) for slot in range(kind.top_k)}


def _draw_experts(axes, kind: ExpertKind, left: float, y: float, height: float) -> list[float]:
    """A row of experts with true widths, shared ones first; returns the middles of those that a token uses."""
    middles, chosen, x = [], _chosen(kind), left
    for index in range(-kind.num_shared, kind.num_experts):
        used = index < 0 or index in chosen
        color = SHARED_COLOR if index < 0 else USED_COLOR if index in chosen else IDLE_COLOR
        labelled_box(axes, (x, y), (kind.width, height), color, f"{index}" if kind.width >= 0.7 and index >= 0 else "")
        if used:
            middles.append(x + kind.width / 2)
        x += kind.width
    return middles


@checked
def show_dense_and_experts(num_experts: Size = 8, top_k: Size = 2) -> None:
    """Show a dense MLP of the width that a token uses, and experts of which a token passes some: widths are true.

    Raises   ValueError if a token uses more experts than there are, or they are too many to draw
    """
    if top_k > num_experts or num_experts > MOST_BOXES:
        raise ValueError(f"top_k is {top_k} of {num_experts} experts; choose at most all, and at most {MOST_BOXES}")
    kind, left = ExpertKind(num_experts, top_k, 0, 1.0), 0.55 * num_experts
    with picture_axes(2.6) as axes:
        middle = top_k / 2
        labelled_box(axes, (0, 1.0), (top_k, 0.9), USED_COLOR, "dense MLP")
        axes.text(middle, 2.75, "token", fontsize=9, **CENTRED)
        arrow(axes, (middle, 2.6), (middle, 1.92))
        arrow(axes, (middle, 0.98), (middle, 0.4))
        centre = left + num_experts / 2
        axes.text(centre, 3.5, "token", fontsize=9, **CENTRED)
        labelled_box(axes, (centre - 0.9, 2.5), (1.8, 0.6), OKABE_ITO["yellow"], "router")
        arrow(axes, (centre, 3.38), (centre, 3.12))
        for x in _draw_experts(axes, kind, left, 1.0, 0.9):
            arrow(axes, (centre, 2.48), (x, 1.92))
            arrow(axes, (x, 0.98), (centre, 0.4))
        axes.text(centre, 0.2, "weighted sum", fontsize=9, **CENTRED)
        axes.text(middle, 0.2, "output", fontsize=9, **CENTRED)
        bare(axes, (-0.3, left + num_experts + 0.2), (0, 3.7))
        axes.set_title(
            f"{num_experts} experts: {num_experts / top_k:g} times the weights, and the FLOPs of {top_k} experts"
        )


@checked
def show_expert_kinds(kinds: Mapping[str, ExpertKind]) -> None:
    """Show rows of experts under each other, with true widths: what is stored, used, and shared.

    Raises   ValueError if there is no kind, or one has too many experts to draw
    """
    if not kinds or max(kind.num_experts + kind.num_shared for kind in kinds.values()) > MOST_BOXES:
        raise ValueError(f"got {len(kinds)} kinds; give at least one, each of at most {MOST_BOXES} experts")
    widest = max(kind.stored for kind in kinds.values())
    with picture_axes(0.7 + 0.75 * len(kinds)) as axes:
        for row, (name, kind) in enumerate(kinds.items()):
            _draw_experts(axes, kind, 0, row, 0.55)
            axes.text(-0.02 * widest, row + 0.28, name, ha="right", va="center", fontsize=9)
        places = (("routed, used", USED_COLOR), ("shared, always used", SHARED_COLOR), ("not used", IDLE_COLOR))
        for index, (text, color) in enumerate(places):
            x = 0.3 * widest * index
            labelled_box(axes, (x, len(kinds) - 0.05), (0.025 * widest, 0.25), color)
            axes.text(x + 0.035 * widest, len(kinds) + 0.08, text, va="center", fontsize=9)
        bare(axes, (-0.3 * widest, 1.02 * widest), (len(kinds) + 0.4, -0.1))
        axes.set_title("One token: the same width is stored and used, cut in another way")


# ---------------------------------------------------------------- rows, sorted


@dataclass(frozen=True)
class SortedRows:
    """The assignments of a few tokens: (token, slot, expert) in the order of tokens, and the order by expert."""

    assignments: list[tuple[int, int, int]]
    order: list[int]
    num_experts: int

    @property
    def rows(self) -> list[int]:
        """How many rows each expert has."""
        chosen = [expert for _, _, expert in self.assignments]
        return [chosen.count(expert) for expert in range(self.num_experts)]


def sorted_rows(expert_Tk: Sequence, num_experts: Size) -> SortedRows:
    """Sort the assignments of tokens by expert.

    Raises   ValueError if there is no assignment, or one is to an expert that there is not
    """
    listed = [(t, slot, int(expert)) for t, row in enumerate(expert_Tk) for slot, expert in enumerate(row)]
    if not listed or not all(0 <= expert < num_experts for _, _, expert in listed):
        raise ValueError(f"got {len(listed)} assignments; give at least one, each to an expert 0 to {num_experts - 1}")
    order = sorted(range(len(listed)), key=lambda index: listed[index][2])
    return SortedRows(listed, order, num_experts)


@checked
def show_sorted_rows(expert_Tk: Sequence, num_experts: Size) -> None:
    """Show dispatch and combine: tokens, their rows sorted by expert, one box per expert, and the way back.

    Raises   ValueError as sorted_rows, and where there is no room
    """
    picture = sorted_rows(expert_Tk, num_experts)
    tokens, count = len(expert_Tk), len(picture.order)
    if count > MOST_BOXES // 2 or tokens > len(RANK_COLORS):
        raise ValueError(f"got {tokens} tokens and {count} rows; the picture has room for {len(RANK_COLORS)} and 32")
    token_x = [(token + 0.5) * count / tokens for token in range(tokens)]
    with picture_axes(3.5) as axes:
        for y, text in ((4.0, "tokens"), (2.9, "rows, sorted"), (1.7, "experts"), (0.0, "tokens")):
            axes.text(-0.25, y + 0.22, text, ha="right", va="center", fontsize=9)
        for token, x in enumerate(token_x):
            for y in (4.0, 0.0):
                labelled_box(axes, (x - 0.4, y), (0.8, 0.45), RANK_COLORS[token], f"t{token}")
        for row, index in enumerate(picture.order):
            token = picture.assignments[index][0]
            labelled_box(axes, (row + 0.06, 2.9), (0.88, 0.45), RANK_COLORS[token], f"t{token}")
            look = {"color": mix(RANK_COLORS[token], "#000000", 0.25), "linewidth": 1.3}
            arrow(axes, (token_x[token], 3.98), (row + 0.5, 3.37), **look)
            arrow(axes, (row + 0.5, 1.68), (token_x[token], 0.47), **look)
            arrow(axes, (row + 0.5, 2.88), (row + 0.5, 2.17))
        first = 0
        for expert, rows in enumerate(picture.rows):
            if rows:
                labelled_box(
                    axes,
                    (first + 0.06, 1.7),
                    (rows - 0.12, 0.45),
                    mix(NEUTRAL_COLOR, "#FFFFFF", 0.4),
                    f"expert {expert}",
                )
            first += rows
        axes.text(count + 0.15, 3.68, "dispatch", va="center", fontsize=9)
        axes.text(count + 0.15, 1.1, "combine", va="center", fontsize=9)
        bare(axes, (-1.1, count + 0.9), (-0.1, 4.6))
        used = sum(rows > 0 for rows in picture.rows)
        axes.set_title(f"{tokens} tokens, {count} rows, {used} calls of an expert: one for each")


# ---------------------------------------------------------------- rows per expert and speed


@checked
def grouped_share_of_peak(rows: Positive, d_model: Size, d_expert: Size, gpu: GPU) -> float:
    """Return the share of peak FLOP/s that one matrix of an expert can reach with so many rows, in bf16 (modelled).

    The FLOPs at peak, or the bytes of rows in, matrix and rows out at memory bandwidth: whichever takes longer.
    """
    flops = 2 * rows * d_model * d_expert
    moved_bytes = 2 * (rows * d_model + d_model * d_expert + rows * d_expert)
    return flops / peak_flops(gpu, "bf16") / roofline_s(flops, moved_bytes, gpu)


@checked
def show_rows_per_expert(points: Mapping[str, float], d_model: Size, d_expert: Size, gpu: GPU) -> None:
    """Show the modelled share of peak over rows per expert, with named points.

    Raises   ValueError if there is no point, or one has less than a row
    """
    if not points or min(points.values()) < 1:
        raise ValueError(f"got {len(points)} points; give at least one, with at least 1 row each")
    rows = [2 ** (half / 2) for half in range(0, 27)]
    with picture_axes(2.9) as axes:
        axes.plot(rows, [100 * grouped_share_of_peak(r, d_model, d_expert, gpu) for r in rows], color=USED_COLOR)
        for name, count in points.items():
            share = 100 * grouped_share_of_peak(count, d_model, d_expert, gpu)
            axes.plot([count], [share], "o", color=OKABE_ITO["vermillion"])
            left = share > 60
            place = {"ha": "right" if left else "left", "va": "bottom" if left else "top"}
            text = f"{name}:\n{count:,.0f} rows, {three_digits(share)} %"
            axes.annotate(text, (count, share), (-7 if left else 7, 3 if left else -3), textcoords="offset points",
                          fontsize=9, **place)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set(xlabel=f"rows per expert (matrix {d_model:,} x {d_expert:,}, bf16)", ylabel="% of peak FLOP/s")
        axes.set(ylim=(0, 118), yticks=[0, 25, 50, 75, 100])
        axes.set_title(f"With few rows an expert's matrix is read for little work ({gpu.name}, modelled)")
