"""Experts on ranks as concepts: rows that travel and return, gradients that are lost, whose gradients are summed."""

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.layout.experts import ExpertLayout
from course_lib.plots.palette import COMMUNICATION_COLOR, COMPUTE_COLOR, EXPOSED_COLOR, NEUTRAL_COLOR, RANK_COLORS, mix
from course_lib.plots.style import CENTRED, arrow, bare, labelled_box, picture_axes
from course_lib.validate import Size, checked

STAGES = ("tokens", "rows,\nby expert", "arrived,\nby source", "sorted\nby expert", "returned", "summed")
MOST_ROWS = 12  # of one rank at one stage


# ---------------------------------------------------------------- rows there and back


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
    rows, ranks = travelling_rows(expert_Tk, layout), range(layout.ep_size)
    tokens = [list(dict.fromkeys((row.token, row.home) for row in rows if row.home == rank)) for rank in ranks]
    named = [(f"{row.token}{row.expert}", row) for row in rows]
    at_home = [sorted((p for p in named if p[1].home == rank), key=lambda p: p[1].expert) for rank in ranks]
    arrived = [[p for source in at_home for p in source if p[1].away == rank] for rank in ranks]
    sorted_there = [sorted(here, key=lambda p: p[1].expert) for here in arrived]
    boxes = [[[(text, row.home) for text, row in here] for here in stage] for stage in (at_home, arrived, sorted_there)]
    return [tokens, *boxes, boxes[0], tokens]


@checked
def show_travelling_rows(expert_Tk: Sequence, layout: ExpertLayout) -> None:
    """Show tokens and rows at each stage of a layer, rank by rank; colours are the ranks where tokens are at home.

    Raises   ValueError where there is no room
    """
    stages = stages_of_rows(expert_Tk, layout)
    tallest = max(len(here) for stage in stages for here in stage)
    if tallest > MOST_ROWS or layout.ep_size > len(RANK_COLORS):
        raise ValueError(f"a rank has {tallest} rows; the picture has room for {MOST_ROWS} rows and 8 ranks")
    height = tallest + 0.9
    with picture_axes(0.9 + 0.24 * height * layout.ep_size) as axes:
        for x, (name, stage) in enumerate(zip(STAGES, stages, strict=True)):
            axes.text(1.6 * x + 0.5, -0.75, name, fontsize=8.5, **CENTRED)
            for rank, here in enumerate(stage):
                top = rank * height + (tallest - len(here)) / 2
                for place, (text, home) in enumerate(here):
                    labelled_box(axes, (1.6 * x, top + place + 0.04), (1, 0.92), RANK_COLORS[home], text)
        for x, text in ((1, "all-to-all"), (3, "experts,\nall-to-all")):
            axes.text(1.6 * x + 1.3, -0.75, text, fontsize=7.5, color="#444444", **CENTRED)
        for src, dst in ((1, 2), (3, 4)):
            _draw_moves(axes, stages[src], stages[dst], (1.6 * src + 1, 1.6 * dst), (tallest, height))
        each = layout.experts_per_rank
        for rank in range(layout.ep_size):
            text = f"rank {rank}\nexperts {rank * each}" + (f"-{(rank + 1) * each - 1}" if each > 1 else "")
            axes.text(-0.2, rank * height + tallest / 2, text, ha="right", va="center", fontsize=9)
            if rank:
                axes.axhline(rank * height - 0.45, color=NEUTRAL_COLOR, linewidth=0.8)
        bare(axes, (-1.5, 9.1), (layout.ep_size * height - 0.5, -1.5))
        moved = sum(row.home != row.away for row in travelling_rows(expert_Tk, layout))
        said = f"{moved} of {sum(map(len, stages[1]))} rows leave their rank, and come back"
        axes.set_title(said)


def _draw_moves(axes, before: list, after: list, xs: tuple, sizes: tuple) -> None:
    tallest, height = sizes
    where = {}
    for rank, here in enumerate(after):
        for place, (text, _) in enumerate(here):
            where[text] = rank, rank * height + (tallest - len(here)) / 2 + place + 0.5
    for rank, here in enumerate(before):
        for place, (text, home) in enumerate(here):
            other, y = where[text]
            start = rank * height + (tallest - len(here)) / 2 + place + 0.5
            look = {"color": mix(RANK_COLORS[home], "#000000", 0.2), "linewidth": 1.3 if other != rank else 0.7}
            axes.plot(xs, (start, y), linestyle="-" if other != rank else ":", **look)


# ---------------------------------------------------------------- the gradient's way

PATH = ("x", "all-to-all", "expert", "all-to-all", "weighted\nsum", "loss")


@checked
def show_gradient_path(knows_gradient: bool) -> None:
    """Show a row's way to an expert and back: forward, and where backward ends if the all-to-all has no gradient."""
    with picture_axes(1.75) as axes:
        for place, name in enumerate(PATH):
            color = COMMUNICATION_COLOR if name == "all-to-all" else COMPUTE_COLOR
            cut = not knows_gradient and place < 4
            labelled_box(axes, (1.6 * place, 0.9), (1.1, 0.8), mix(color, "#FFFFFF", 0.65) if cut else color, name)
        for place in range(len(PATH) - 1):
            left, right = 1.6 * place + 1.12, 1.6 * (place + 1) - 0.02
            arrow(axes, (left, 1.5), (right, 1.5))
            if knows_gradient or place >= 4:
                arrow(axes, (right, 1.1), (left, 1.1), color=EXPOSED_COLOR)
            elif place == 3:
                axes.text((left + right) / 2, 1.1, "x", color=EXPOSED_COLOR, fontsize=13, fontweight="bold", **CENTRED)
        # the other way, through the router: tokens in, a weight for each row out; gradients come back on it
        router = 1.6 * 4
        labelled_box(axes, (router, 0), (1.1, 0.5), COMPUTE_COLOR, "router")
        forward, back = ((0.75, 0.88), (0.75, 0.38)), ((router - 0.02, 0.12), (0.35, 0.12))
        for (start, corner), color in ((forward, "#444444"), (back, EXPOSED_COLOR)):
            axes.plot(*zip(start, corner, strict=True), color=color, linewidth=1.2)
        arrow(axes, (0.75, 0.38), (router - 0.02, 0.38))
        arrow(axes, (0.35, 0.12), (0.35, 0.88), color=EXPOSED_COLOR)
        arrow(axes, (router + 0.35, 0.52), (router + 0.35, 0.88))
        arrow(axes, (router + 0.75, 0.88), (router + 0.75, 0.52), color=EXPOSED_COLOR)
        axes.text(1.2, 0.63, "black: forward     red: gradients", fontsize=8.5, va="center")
        bare(axes, (-0.1, 1.6 * 5 + 1.2), (-0.1, 1.85))
        said = "gradients pass both all-to-alls" if knows_gradient else "gradients end at the second all-to-all"
        axes.set_title(f"{'With' if knows_gradient else 'Without'} a backward: {said}")


# ---------------------------------------------------------------- who has what


def owners(num_experts: Size, ep_size: Size) -> list[tuple[str, list[int]]]:
    """Return each part of a block with the ranks that have it: experts on one rank each, the rest on all.

    Raises   ValueError if experts do not divide by the ranks
    """
    layout, everybody = ExpertLayout(num_experts, ep_size), list(range(ep_size))
    shared = [("norms", everybody), ("attention", everybody), ("router", everybody), ("shared\nexpert", everybody)]
    return shared + [(f"expert\n{e}", [layout.rank_of_expert(e)]) for e in range(num_experts)]


@checked
def show_owners(num_experts: Size = 8, ep_size: Size = 4) -> None:
    """Show which rank has which part of a block, and which gradients are summed over ranks.

    Raises   ValueError if experts do not divide by the ranks, or where there is no room
    """
    parts = owners(num_experts, ep_size)
    if len(parts) > 20 or ep_size > len(RANK_COLORS):
        raise ValueError(f"got {num_experts} experts on {ep_size} ranks; the picture has room for 16 experts, 8 ranks")
    with picture_axes(1.35 + 0.33 * ep_size) as axes:
        for x, (name, ranks) in enumerate(parts):
            axes.text(x + 0.5, -0.5, name, fontsize=8.5, **CENTRED)
            for rank in range(ep_size):
                color = RANK_COLORS[rank] if rank in ranks else mix(NEUTRAL_COLOR, "#FFFFFF", 0.8)
                labelled_box(axes, (x + 0.05, rank + 0.08), (0.9, 0.84), color)
        for rank in range(ep_size):
            axes.text(-0.1, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
        _brace(axes, 0, 4, ep_size + 0.15, "each rank: its own tokens;\nall-reduce of gradients")
        _brace(axes, 4, len(parts), ep_size + 0.15, "tokens of all ranks came to the expert;\nno all-reduce")
        bare(axes, (-1.1, len(parts) + 0.1), (ep_size + 1.35, -1.0))
        axes.set_title("Gradients are summed where several ranks have the same parameter")


def _brace(axes, left: float, right: float, y: float, text: str) -> None:
    axes.plot((left + 0.05, right - 0.05), (y, y), color="black", linewidth=1)
    axes.text((left + right) / 2, y + 0.6, text, fontsize=8.5, **CENTRED)


# ---------------------------------------------------------------- two ways to cut


@checked
def show_two_cuts(num_experts: Size = 8, num_ranks: Size = 4) -> None:
    """Show all experts cut over ranks in two ways: some experts on each rank, or a slice of each expert.

    Raises   ValueError if experts do not divide by the ranks, or where there is no room
    """
    layout = ExpertLayout(num_experts, num_ranks)
    if num_experts > 16 or num_ranks > len(RANK_COLORS):
        raise ValueError(f"got {num_experts} experts on {num_ranks} ranks; the picture has room for 16 and 8")
    with picture_axes(2.3) as axes:
        for left, caption in ((0.0, "expert parallelism: rows travel"), (1.15 * num_experts, "slices: tokens travel")):
            axes.text(left + num_experts / 2, -0.75, caption, fontsize=9, **CENTRED)
            for e in range(num_experts):
                axes.text(left + e + 0.5, -0.25, str(e), fontsize=8.5, **CENTRED)
                if left == 0:
                    rank = layout.rank_of_expert(e)
                    labelled_box(axes, (e + 0.05, 0), (0.9, num_ranks), RANK_COLORS[rank], f"rank\n{rank}")
                    continue
                for rank in range(num_ranks):
                    labelled_box(axes, (left + e + 0.05, rank), (0.9, 1), RANK_COLORS[rank], str(rank))
        width_at = (1.15 * num_experts - 0.4, num_ranks / 2)
        axes.text(*width_at, "width $F_e$ of an expert", fontsize=8.5, rotation=90, **CENTRED)
        bare(axes, (-0.1, 2.15 * num_experts + 0.1), (num_ranks + 0.1, -1.1))
        axes.set_title(f"{num_experts} experts on {num_ranks} ranks: whole experts, or a slice of each")
