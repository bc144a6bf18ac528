"""Sequence parallelism in pictures: two ways to cut hidden states, and what a rank holds along half a block."""

from dataclasses import dataclass

from matplotlib.patches import Patch, Rectangle

from course_lib.plots.palette import AXIS_COLORS, NEUTRAL_COLOR, OKABE_ITO, RANK_COLORS, mix
from course_lib.plots.style import labelled_box, picture_panels
from course_lib.validate import Index, Size, checked

# ---------------------------------------------------------------- one tensor, cut in two ways

NUM_TOKENS, NUM_FEATURES = 4, 6


@dataclass(frozen=True)
class Tile:
    """One element of x_BSD: its token, its feature, and the rank that holds it."""

    token: int
    feature: int
    rank: int


def cut_tiles(by_tokens: bool, num_ranks: Size = 2) -> list[Tile]:
    """Return who holds which element if x is cut along the sequence, or along the features.

    Raises   ValueError if the ranks do not divide tokens and features
    """
    if NUM_TOKENS % num_ranks or NUM_FEATURES % num_ranks:
        raise ValueError(f"num_ranks is {num_ranks}; {NUM_TOKENS} tokens and {NUM_FEATURES} features need 1 or 2")
    tokens, features = NUM_TOKENS // num_ranks, NUM_FEATURES // num_ranks
    return [
        Tile(token, feature, token // tokens if by_tokens else feature // features)
        for token in range(NUM_TOKENS)
        for feature in range(NUM_FEATURES)
    ]


_CUTS = {  # title, what a norm of the outlined token needs
    True: ("by tokens: $x_{BsD}$", "one rank has all its features:\nits norm needs no other rank"),
    False: ("by features: $x_{BSd}$", "every rank has a part of its features:\nits norm needs a sum over the ranks"),
}


@checked
def show_cuts() -> None:
    """Show hidden states cut along the sequence and along the features, and what the norm of one token needs."""
    with picture_panels(1, 2, 2.75) as (figure, panels):
        for axes, (by_tokens, (title, text)) in zip(panels, _CUTS.items(), strict=True):
            for tile in cut_tiles(by_tokens):
                color = mix(RANK_COLORS[tile.rank], "#FFFFFF", 0.25)
                labelled_box(axes, (tile.feature, tile.token), (0.94, 0.9), color, str(tile.rank), fontsize=9)
            outline = {"facecolor": "none", "edgecolor": "black", "linewidth": 2}
            axes.add_patch(Rectangle((-0.06, 0.94), NUM_FEATURES + 0.06, 1.0, **outline))
            axes.text(NUM_FEATURES / 2, NUM_TOKENS + 0.25, text, ha="center", va="top", fontsize=9.5)
            axes.set_yticks([token + 0.45 for token in range(NUM_TOKENS)], [f"token {n}" for n in range(NUM_TOKENS)])
            axes.set(xlim=(-0.1, NUM_FEATURES + 0.1), ylim=(NUM_TOKENS + 1.5, -0.1), xticks=[], aspect="equal")
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_title(title, loc="center")
        figure.suptitle("The number in a tile is its rank; one token is outlined", x=0.01, ha="left", fontsize=10)


# ---------------------------------------------------------------- what one rank holds along half a block

FULL, TOKENS, FEATURES, PARTIAL = "full", "tokens", "features", "partial sum"
HOLDING_COLORS = {
    FULL: NEUTRAL_COLOR,
    TOKENS: mix(OKABE_ITO["sky"], "#FFFFFF", 0.1),
    FEATURES: mix(AXIS_COLORS["tp"], "#FFFFFF", 0.25),
    PARTIAL: OKABE_ITO["yellow"],
}
HOLDING_NAMES = {
    FULL: "all of it, equal on all ranks",
    TOKENS: "my tokens",
    FEATURES: "my heads or features",
    PARTIAL: "my partial sum",
}
HOLDING_HATCHES = {FULL: "", TOKENS: "..", FEATURES: "//", PARTIAL: "xx"}
ENTER_AT, LEAVE_AT = 2, 5  # before which of the tensors a border lies


@dataclass(frozen=True)
class Held:
    """One tensor along half a block, and what of it one rank holds."""

    name: str
    holding: str


@dataclass(frozen=True)
class Operator:
    """What is communicated at a border, forward and backward. No symbol: the papers use g for two operators."""

    name: str
    forward: str
    backward: str


def half_block(sequence_parallel: bool) -> list[Held]:
    """Return the tensors of half a block, from the residual stream back to it, as one rank holds them.

    Source   Korthikanti et al. 2022 (arXiv:2205.05198), figures 4 and 5
    """
    outside = TOKENS if sequence_parallel else FULL
    return [
        Held("x", outside),
        Held("norm(x)", outside),
        Held("input of\nq, k, v", FULL),
        Held("q, k, v", FEATURES),
        Held("heads'\noutput", FEATURES),
        Held("output\nof o", PARTIAL),
        Held("summed\noutput", outside),
        Held("x + output", outside),
    ]


def operators(sequence_parallel: bool) -> tuple[Operator, Operator]:
    """Return what lies at the two borders: into the column-parallel layers, and out of the row-parallel layer."""
    if sequence_parallel:
        return (
            Operator("gather_in", "all-gather", "reduce-scatter"),
            Operator("scatter_sum", "reduce-scatter", "all-gather"),
        )
    return Operator("copy_in", "nothing", "all-reduce"), Operator("sum_out", "all-reduce", "nothing")


def part_of(holding: str, rank: Index, num_ranks: Size) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a rank's part in a tensor of size 1 x 1: features across, tokens down.

    Raises   ValueError if the holding is unknown or the rank is not one of them
    """
    if holding not in HOLDING_COLORS or rank >= num_ranks:
        raise ValueError(
            f"holding is {holding!r} and rank is {rank} of {num_ranks}; choose from {', '.join(HOLDING_COLORS)} and a "
            "rank below the number of ranks"
        )
    share = 1 / num_ranks
    if holding == TOKENS:
        return 0.0, rank * share, 1.0, share
    if holding == FEATURES:
        return rank * share, 0.0, share, 1.0
    return 0.0, 0.0, 1.0, 1.0


_SIDE, _STEP, _GAP = 0.9, 1.2, 0.75  # of a tensor; to the next tensor; at a border


def _draw_half_block(axes, sequence_parallel: bool, rank: int, num_ranks: int) -> None:
    x, borders = 0.0, dict(zip((ENTER_AT, LEAVE_AT + 1), operators(sequence_parallel), strict=True))
    for index, held in enumerate(half_block(sequence_parallel)):
        if index in borders:
            operator, middle = borders[index], x + _GAP / 2 - 0.15
            axes.plot([middle, middle], [-0.05, 1.0], color="black", linewidth=1.8)
            axes.text(middle, 1.06, operator.name, ha="center", va="top", fontsize=9, fontweight="bold")
            sent = f"\u2192 {operator.forward}\n\u2190 {operator.backward}"
            axes.text(middle, 1.28, sent, ha="center", va="top", fontsize=8.5)
            x += _GAP
        left, top, width, height = part_of(held.holding, rank, num_ranks)
        axes.add_patch(Rectangle((x, 0), _SIDE, _SIDE, facecolor="white", edgecolor="0.6", linewidth=0.8))
        look = {"facecolor": HOLDING_COLORS[held.holding], "edgecolor": "white", "hatch": HOLDING_HATCHES[held.holding]}
        axes.add_patch(Rectangle((x + left * _SIDE, top * _SIDE), width * _SIDE, height * _SIDE, linewidth=0, **look))
        axes.text(x + _SIDE / 2, -0.08, held.name, ha="center", va="bottom", fontsize=8.5)
        x += _STEP
    axes.set(xlim=(-0.1, x - _STEP + _SIDE + 0.1), ylim=(1.75, -0.55))
    axes.set_axis_off()


@checked
def show_half_block(rank: Index = 1, num_ranks: Size = 4) -> None:
    """Show which part of each tensor of half a block one rank holds, under TP and under TP + SP, and what is sent."""
    said = f"What rank {rank} of {num_ranks} holds along half a block (tokens down, features across)"
    with picture_panels(2, 1, 4.2, said) as (figure, panels):
        for axes, sequence_parallel in zip(panels, (False, True), strict=True):
            _draw_half_block(axes, sequence_parallel, rank, num_ranks)
            axes.set_title("TP + SP" if sequence_parallel else "TP")
        handles = [
            Patch(facecolor=HOLDING_COLORS[held], hatch=HOLDING_HATCHES[held], edgecolor="white", label=name)
            for held, name in HOLDING_NAMES.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncol=4)
