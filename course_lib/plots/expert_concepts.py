"""Experts as concepts: a layer beside a dense MLP, sorted rows, kinds of experts; rows that travel between ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course_lib.hardware import GPU
from course_lib.layout.experts import ExpertLayout
from course_lib.palette import (
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    EXPOSED_COLOR,
    NEUTRAL_COLOR,
    OKABE_ITO,
    RANK_COLORS,
    mix,
)
from course_lib.plots.diagrams import diagram, draw_arrows, draw_diagram
from course_lib.plots.style import bare, labelled_box, picture_axes, write
from course_lib.plots.tiles import Tile, draw_tiles, rank_tile, ranks
from course_lib.timing.rates import peak_flops, roofline_s
from course_lib.units import three_digits
from course_lib.validate import Positive, Size, checked

USED_COLOR, SHARED_COLOR = COMPUTE_COLOR, OKABE_ITO["green"]
IDLE_COLOR = mix(NEUTRAL_COLOR, "#FFFFFF", 0.55)
MOST_BOXES, MOST_ROWS = 64, 12


def _check_room(num_experts: int, num_ranks: int) -> ExpertLayout:
    layout = ExpertLayout(num_experts, num_ranks)
    if num_experts > 16 or num_ranks > len(RANK_COLORS):
        raise ValueError(
            f"got {num_experts} experts on {num_ranks} ranks; the picture has room for 16 experts, 8 ranks"
        )
    return layout


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

    @property
    def colors(self) -> list[str]:
        """Of each expert, shared ones first; those that a token uses are spread over the row."""
        step = self.num_experts / max(self.top_k, 1)
        chosen = {int((slot + 0.35) * step) for slot in range(self.top_k)}
        routed = [USED_COLOR if index in chosen else IDLE_COLOR for index in range(self.num_experts)]
        return [SHARED_COLOR] * self.num_shared + routed


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


@checked
def show_dense_and_experts(num_experts: Size = 8, top_k: Size = 2) -> None:
    """Show a dense MLP of the width that a token uses, and experts of which a token passes some: widths are true.

    Raises   ValueError if a token uses more experts than there are, or they are too many to draw
    """
    if top_k > num_experts or num_experts > MOST_BOXES:
        raise ValueError(f"top_k is {top_k} of {num_experts} experts; choose at most all, and at most {MOST_BOXES}")
    left, dense = 0.55 * num_experts, top_k / 2
    centre, colors = left + num_experts / 2, ExpertKind(num_experts, top_k, 0, 1.0).colors
    boxes = [
        (0, 1.0, top_k, 0.9, USED_COLOR, "dense MLP"),
        (centre - 0.9, 2.5, 1.8, 0.6, OKABE_ITO["yellow"], "router"),
    ]
    boxes += [(left + index, 1.0, 1, 0.9, color, f"{index}") for index, color in enumerate(colors)]
    used = [left + index + 0.5 for index, color in enumerate(colors) if color == USED_COLOR]
    arrows = [((dense, 2.6), (dense, 1.92)), ((dense, 0.98), (dense, 0.4)), ((centre, 3.38), (centre, 3.12))]
    arrows += [ends for x in used for ends in (((centre, 2.48), (x, 1.92)), ((x, 0.98), (centre, 0.4)))]
    notes = [(dense, 2.75, "token"), (centre, 3.5, "token"), (centre, 0.2, "weighted sum"), (dense, 0.2, "output")]
    said = f"{num_experts} experts: {num_experts / top_k:g} times the weights, and the FLOPs of {top_k} experts"
    diagram(2.6, said, ((-0.3, left + num_experts + 0.2), (0, 3.7)), boxes, arrows, notes)


@checked
def show_expert_kinds(kinds: Mapping[str, ExpertKind]) -> None:
    """Show rows of experts under each other, with true widths: what is stored, used, and shared.

    Raises   ValueError if there is no kind, or one has too many experts to draw
    """
    if not kinds or max(kind.num_experts + kind.num_shared for kind in kinds.values()) > MOST_BOXES:
        raise ValueError(f"got {len(kinds)} kinds; give at least one, each of at most {MOST_BOXES} experts")
    widest, rows = max(kind.stored for kind in kinds.values()), []
    for kind in kinds.values():
        numbers = [""] * kind.num_shared + [
            f"{index}" if kind.width >= 0.7 else "" for index in range(kind.num_experts)
        ]
        rows.append([Tile(text, color, kind.width) for text, color in zip(numbers, kind.colors, strict=True)])
    with picture_axes(0.7 + 0.75 * len(kinds)) as axes:
        draw_tiles(axes, rows, list(kinds), height=0.55)
        places = (("routed, used", USED_COLOR), ("shared, always used", SHARED_COLOR), ("not used", IDLE_COLOR))
        for index, (text, color) in enumerate(places):
            x = 0.3 * widest * index
            labelled_box(axes, (x, len(kinds) - 0.05), (0.025 * widest, 0.25), color)
            write(axes, x + 0.035 * widest, len(kinds) + 0.08, text, "left")
        axes.set(xlim=(-0.02 * widest, 1.02 * widest), ylim=(len(kinds) + 0.4, -0.1))
        axes.set_title("One token: the same width is stored and used, cut in another way")


# ---------------------------------------------------------------- rows, sorted


def sorted_rows(expert_Tk: Sequence, num_experts: int) -> list[tuple[int, int]]:
    """Return the (expert, token) of every assignment, sorted by expert.

    Raises   ValueError if there is no assignment, or one is to an expert that there is not
    """
    listed = [(int(expert), token) for token, row in enumerate(expert_Tk) for expert in row]
    if not listed or not all(0 <= expert < num_experts for expert, _ in listed):
        raise ValueError(f"got {len(listed)} assignments; give at least one, each to an expert 0 to {num_experts - 1}")
    return sorted(listed, key=lambda one: one[0])


@checked
def show_sorted_rows(expert_Tk: Sequence, num_experts: Size) -> None:
    """Show dispatch and combine: tokens, their rows sorted by expert, one box per expert, and the way back.

    Raises   ValueError as sorted_rows, and where there is no room
    """
    rows, tokens = sorted_rows(expert_Tk, num_experts), len(expert_Tk)
    count, chosen = len(rows), [expert for expert, _ in rows]
    if count > 32 or tokens > len(RANK_COLORS):
        raise ValueError(f"got {tokens} tokens and {count} rows; the picture has room for {len(RANK_COLORS)} and 32")
    token_x = [(token + 0.5) * count / tokens for token in range(tokens)]
    boxes = [(x - 0.4, y, 0.8, 0.45, RANK_COLORS[token], f"t{token}") for y in (4.0, 0.0)
             for token, x in enumerate(token_x)]  # fmt: skip
    boxes += [(row + 0.06, 2.9, 0.88, 0.45, RANK_COLORS[token], f"t{token}") for row, (_, token) in enumerate(rows)]
    grey = mix(NEUTRAL_COLOR, "#FFFFFF", 0.4)
    boxes += [(chosen.index(expert) + 0.06, 1.7, chosen.count(expert) - 0.12, 0.45, grey, f"expert {expert}")
              for expert in sorted(set(chosen))]  # fmt: skip
    notes = [(-0.25, y + 0.22, text, "right") for y, text in ((4.0, "tokens"), (2.9, "rows, sorted"), (1.7, "experts"))]
    notes += [(-0.25, 0.22, "tokens", "right"), (count + 0.15, 3.68, "dispatch", "left")]
    notes.append((count + 0.15, 1.1, "combine", "left"))
    down = [((row + 0.5, 2.88), (row + 0.5, 2.17)) for row in range(count)]
    with picture_axes(3.5) as axes:
        draw_diagram(axes, ((-1.1, count + 0.9), (-0.1, 4.6)), boxes, down, notes)
        for row, (_, token) in enumerate(rows):
            ends = ((token_x[token], 3.98), (row + 0.5, 3.37)), ((row + 0.5, 1.68), (token_x[token], 0.47))
            draw_arrows(axes, ends, mix(RANK_COLORS[token], "#000000", 0.25))
        axes.set_title(f"{tokens} tokens, {count} rows, {len(set(chosen))} calls of an expert: one for each")


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
            side = (
                {"xytext": (-7, 3), "ha": "right", "va": "bottom"} if share > 60 else {"xytext": (7, -3), "va": "top"}
            )
            text = f"{name}:\n{count:,.0f} rows, {three_digits(share)} %"
            axes.annotate(text, (count, share), textcoords="offset points", fontsize=9, **side)
        axes.set_xscale("log", base=2)
        axes.set(xlabel=f"rows per expert (matrix {d_model:,} x {d_expert:,}, bf16)", ylabel="% of peak FLOP/s")
        axes.set(ylim=(0, 118), yticks=[0, 25, 50, 75, 100])
        axes.set_title(f"With few rows an expert's matrix is read for little work ({gpu.name}, modelled)")


# ---------------------------------------------------------------- rows there and back

STAGES = ("tokens", "rows,\nby expert", "arrived,\nby source", "sorted\nby expert", "returned", "summed")


@dataclass(frozen=True)
class TravellingRow:
    """One assignment: its token, the token's rank, its expert and the expert's rank."""

    token: str
    home: int
    expert: int
    away: int


@checked
def travelling_rows(expert_Tk: Sequence, layout: ExpertLayout) -> list[TravellingRow]:
    """List every assignment of a routing, one expert_Tk per rank; tokens are named by letters over all ranks.

    Raises   ValueError if the routing has another number of ranks than the layout, or too many tokens for letters
    """
    if len(expert_Tk) != layout.ep_size or not 1 <= sum(map(len, expert_Tk)) <= 26:
        raise ValueError(
            f"got {len(expert_Tk)} ranks with {sum(map(len, expert_Tk))} tokens; give one expert_Tk for each of "
            f"{layout.ep_size} ranks, 1 to 26 tokens together"
        )
    rows, letters = [], iter("abcdefghijklmnopqrstuvwxyz")
    for home, tokens in enumerate(expert_Tk):
        for chosen in tokens:
            letter = next(letters)
            rows += [TravellingRow(letter, home, int(e), layout.rank_of_expert(int(e))) for e in chosen]
    return rows


def stages_of_rows(expert_Tk: Sequence, layout: ExpertLayout) -> list[list[list[tuple[str, int]]]]:
    """Return [stage][rank] -> (text, home rank) of each box: from tokens to rows, to experts' ranks, and back."""
    rows, all_ranks = travelling_rows(expert_Tk, layout), range(layout.ep_size)
    tokens = [list(dict.fromkeys((row.token, row.home) for row in rows if row.home == rank)) for rank in all_ranks]
    at_home = [sorted((row for row in rows if row.home == rank), key=lambda row: row.expert) for rank in all_ranks]
    arrived = [[row for source in at_home for row in source if row.away == rank] for rank in all_ranks]
    there = [sorted(here, key=lambda row: row.expert) for here in arrived]
    boxes = [[[(f"{row.token}{row.expert}", row.home) for row in here] for here in stage]
             for stage in (at_home, arrived, there)]  # fmt: skip
    return [tokens, *boxes, boxes[0], tokens]


@checked
def show_travelling_rows(expert_Tk: Sequence, layout: ExpertLayout) -> None:
    """Show tokens and rows at each stage of a layer, rank by rank; colours are the ranks where tokens are at home.

    Raises   ValueError where there is no room
    """
    stages = stages_of_rows(expert_Tk, layout)
    tallest, each = max(len(here) for stage in stages for here in stage), layout.experts_per_rank
    if tallest > MOST_ROWS or layout.ep_size > len(RANK_COLORS):
        raise ValueError(f"a rank has {tallest} rows; the picture has room for {MOST_ROWS} rows and 8 ranks")
    height = tallest + 0.9

    def tops(stage: list) -> list[tuple[str, int, int, float]]:
        """(text, home rank, rank, top) of each box."""
        return [(text, home, rank, rank * height + (tallest - len(here)) / 2 + place)
                for rank, here in enumerate(stage) for place, (text, home) in enumerate(here)]  # fmt: skip

    with picture_axes(0.9 + 0.24 * height * layout.ep_size) as axes:
        for x, (name, stage) in enumerate(zip(STAGES, stages, strict=True)):
            write(axes, 1.6 * x + 0.5, -0.75, name, fontsize=8.5)
            for text, home, _, top in tops(stage):
                labelled_box(axes, (1.6 * x, top + 0.04), (1, 0.92), RANK_COLORS[home], text)
        for x, text in ((1, "all-to-all"), (3, "experts,\nall-to-all")):
            write(axes, 1.6 * x + 1.3, -0.75, text, fontsize=7.5, color="#444444")
            after = {text: (rank, top) for text, _, rank, top in tops(stages[x + 1])}
            for text, home, rank, top in tops(stages[x]):
                other, to = after[text]
                look = {"linewidth": 1.3, "linestyle": "-"} if other != rank else {"linewidth": 0.7, "linestyle": ":"}
                look["color"] = mix(RANK_COLORS[home], "#000000", 0.2)
                axes.plot((1.6 * x + 1, 1.6 * x + 1.6), (top + 0.5, to + 0.5), **look)
        for rank in range(layout.ep_size):
            text = f"rank {rank}\nexperts {rank * each}" + (f"-{(rank + 1) * each - 1}" if each > 1 else "")
            write(axes, -0.2, rank * height + tallest / 2, text, "right")
            axes.axhline(rank * height - 0.45, color=NEUTRAL_COLOR, linewidth=0.8 if rank else 0)
        bare(axes, (-1.5, 9.1), (layout.ep_size * height - 0.5, -1.5))
        moved = sum(row.home != row.away for row in travelling_rows(expert_Tk, layout))
        axes.set_title(f"{moved} of {sum(map(len, stages[1]))} rows leave their rank, and come back")


# ---------------------------------------------------------------- the gradient's way

PATH = ("x", "all-to-all", "expert", "all-to-all", "weighted\nsum", "loss")


@checked
def show_gradient_path(knows_gradient: bool) -> None:
    """Show a row's way to an expert and back: forward, and where backward ends if the all-to-all has no gradient."""
    boxes, router = [(6.4, 0, 1.1, 0.5, COMPUTE_COLOR, "router")], 6.4
    for place, name in enumerate(PATH):
        color = COMMUNICATION_COLOR if name == "all-to-all" else COMPUTE_COLOR
        cut = not knows_gradient and place < 4
        boxes.append((1.6 * place, 0.9, 1.1, 0.8, mix(color, "#FFFFFF", 0.65) if cut else color, name))
    gaps = [(1.6 * place + 1.12, 1.6 * place + 1.58) for place in range(len(PATH) - 1)]
    # along the top from tokens to the loss; below through the router, which gives each row its weight
    forward = [((left, 1.5), (right, 1.5)) for left, right in gaps]
    forward += [((0.75, 0.38), (router - 0.02, 0.38)), ((router + 0.35, 0.52), (router + 0.35, 0.88))]
    back = [((right, 1.1), (left, 1.1)) for left, right in (gaps if knows_gradient else gaps[4:])]
    back += [((0.35, 0.12), (0.35, 0.88)), ((router + 0.75, 0.88), (router + 0.75, 0.52))]
    with picture_axes(1.75) as axes:
        draw_diagram(axes, ((-0.1, 9.2), (-0.1, 1.85)), boxes, forward)
        draw_arrows(axes, back, EXPOSED_COLOR)
        axes.plot((0.75, 0.75), (0.88, 0.38), color="#444444", linewidth=1.2)
        axes.plot((router - 0.02, 0.35), (0.12, 0.12), color=EXPOSED_COLOR, linewidth=1.2)
        if not knows_gradient:
            write(axes, sum(gaps[3]) / 2, 1.1, "x", fontsize=13, color=EXPOSED_COLOR, fontweight="bold")
        write(axes, 1.2, 0.63, "black: forward     red: gradients", "left", 8.5)
        said = "gradients pass both all-to-alls" if knows_gradient else "gradients end at the second all-to-all"
        axes.set_title(f"{'With' if knows_gradient else 'Without'} a backward: {said}")


# ---------------------------------------------------------------- who has what

SHARED_PARTS = ("norms", "attention", "router", "shared\nexpert")


@checked
def show_owners(num_experts: Size = 8, ep_size: Size = 4) -> None:
    """Show which rank has which part of a block, and which gradients are summed over ranks.

    Raises   ValueError if experts do not divide by the ranks, or where there is no room
    """
    layout, none = _check_room(num_experts, ep_size), Tile("", mix(NEUTRAL_COLOR, "#FFFFFF", 0.8), 0.9)
    rows = []
    for rank in range(ep_size):
        has = [True] * len(SHARED_PARTS) + [layout.rank_of_expert(e) == rank for e in range(num_experts)]
        rows.append([0.05] + [part for own in has for part in (rank_tile("", rank, 0.9) if own else none, 0.1)])
    parts = [*SHARED_PARTS, *(f"expert\n{e}" for e in range(num_experts))]
    braces = (
        (0, 4, "each rank: its own tokens;\nall-reduce of gradients"),
        (4, len(parts), "tokens of all ranks came to the expert;\nno all-reduce"),
    )
    with picture_axes(1.35 + 0.33 * ep_size) as axes:
        draw_tiles(axes, rows, ranks(ep_size), height=0.84)
        for x, name in enumerate(parts):
            write(axes, x + 0.5, -0.5, name, fontsize=8.5)
        for left, right, text in braces:
            axes.plot((left + 0.05, right - 0.05), (ep_size + 0.15,) * 2, color="black", linewidth=1)
            write(axes, (left + right) / 2, ep_size + 0.75, text, fontsize=8.5)
        axes.set(ylim=(ep_size + 1.35, -1.0))
        axes.set_title("Gradients are summed where several ranks have the same parameter")


@checked
def show_two_cuts(num_experts: Size = 8, num_ranks: Size = 4) -> None:
    """Show all experts cut over ranks in two ways: some experts on each rank, or a slice of each expert.

    Raises   ValueError if experts do not divide by the ranks, or where there is no room
    """
    layout, right, boxes = _check_room(num_experts, num_ranks), 1.15 * num_experts, []
    for e in range(num_experts):
        rank = layout.rank_of_expert(e)
        boxes.append((e + 0.05, 0, 0.9, num_ranks, RANK_COLORS[rank], f"rank\n{rank}"))
        boxes += [(right + e + 0.05, r, 0.9, 1, RANK_COLORS[r], str(r)) for r in range(num_ranks)]
    numbers = [(left + e + 0.5, -0.25, str(e)) for left in (0, right) for e in range(num_experts)]
    captions = [(num_experts / 2, -0.75, "expert parallelism: rows travel")]
    captions.append((right + num_experts / 2, -0.75, "slices: tokens travel"))
    with picture_axes(2.3) as axes:
        limits = (-0.1, 2.15 * num_experts + 0.1), (num_ranks + 0.1, -1.1)
        draw_diagram(axes, limits, boxes, (), [*numbers, *captions])
        write(axes, right - 0.4, num_ranks / 2, "width $F_e$ of an expert", fontsize=8.5, rotation=90)
        axes.set_title(f"{num_experts} experts on {num_ranks} ranks: whole experts, or a slice of each")
