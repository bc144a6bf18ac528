"""FlashAttention's tiles: the score matrix that standard attention keeps, and the blocks that replace it."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch, Rectangle

from course_lib.plots.palette import KIND_COLORS, NEUTRAL_COLOR, mix
from course_lib.plots.style import CENTRED, panel_title, picture_panels
from course_lib.validate import Index, Size, checked

DONE, NOW, TO_COME, SKIPPED = "used and dropped", "in fast memory now", "still to come", "never computed"
TILE_COLORS = {
    DONE: mix(KIND_COLORS["temporary"], "#FFFFFF", 0.65),
    NOW: KIND_COLORS["temporary"],
    TO_COME: "#FFFFFF",
    SKIPPED: "#E6E6E6",
}
KEPT_COLOR = KIND_COLORS["activations"]


@dataclass(frozen=True)
class Tile:
    """One block of queries against one block of keys: when its turn is (from 1; 0: never), and its state."""

    query_block: int
    key_block: int
    turn: int
    state: str


def flash_tiles(num_blocks: Size, now: Index) -> list[Tile]:
    """Return the tiles of a causal score matrix in the order of rows; tile number `now` is being computed.

    Raises   ValueError if there is no tile of that number
    """
    last = num_blocks * (num_blocks + 1) // 2
    if not 1 <= now <= last:
        raise ValueError(f"now is {now}; {num_blocks} blocks have tiles 1 to {last}")
    tiles, turn = [], 0
    for query_block in range(num_blocks):
        for key_block in range(num_blocks):
            if key_block > query_block:
                tiles.append(Tile(query_block, key_block, 0, SKIPPED))
                continue
            turn += 1
            state = DONE if turn < now else NOW if turn == now else TO_COME
            tiles.append(Tile(query_block, key_block, turn, state))
    return tiles


def draw_tiles(axes, tiles: Sequence[Tile]) -> None:
    """Draw the blocks with their turns; beside the row of the current tile, its three running values."""
    size = 1 + max(tile.query_block for tile in tiles)
    for tile in tiles:
        look = {"facecolor": TILE_COLORS[tile.state], "edgecolor": NEUTRAL_COLOR, "linewidth": 0.8}
        axes.add_patch(Rectangle((tile.key_block, tile.query_block), 1, 1, **look))
        if tile.turn:
            axes.text(tile.key_block + 0.5, tile.query_block + 0.5, tile.turn, **CENTRED, fontsize=9)
        if tile.state == NOW:
            text = "running\n$m$, $\\ell$, $o$"
            axes.text(size + 0.15, tile.query_block + 0.5, text, ha="left", va="center", fontsize=9)
    _label_blocks(axes, size, size + 1.2)


def draw_score_matrix(axes, seq_len: Size) -> None:
    """Draw every score of a causal matrix: the lower half filled, because it is kept, the upper half masked."""
    for query in range(seq_len):
        for key in range(seq_len):
            color = KEPT_COLOR if key <= query else mix(KEPT_COLOR, "#FFFFFF", 0.7)
            axes.add_patch(Rectangle((key, query), 1, 1, facecolor=color, edgecolor="white", linewidth=0.4))
    axes.set(xlim=(-0.1, seq_len + 0.1), ylim=(seq_len + 0.1, -0.1), aspect="equal", xticks=[], yticks=[])
    axes.set(xlabel="keys", ylabel="queries")
    axes.spines[:].set_visible(False)


def _label_blocks(axes, size: int, right: float) -> None:
    axes.set(xlim=(-0.1, right), ylim=(size + 0.1, -0.1), aspect="equal", ylabel="blocks of queries")
    axes.set_xticks([block + 0.5 for block in range(size)], [f"K{block}, V{block}" for block in range(size)])
    axes.set_yticks([block + 0.5 for block in range(size)], [f"Q{block}" for block in range(size)])
    axes.tick_params(length=0, labelsize=8.5)
    axes.spines[:].set_visible(False)


@checked
def show_tiles(num_blocks: Size = 4, block_size: Size = 4, now: Index = 8) -> None:
    """Show the score matrix of standard attention beside FlashAttention's blocks, at the moment of tile `now`.

    Raises   ValueError if the picture has no room for so many blocks, or there is no tile of that number
    """
    if num_blocks * block_size > 32:
        raise ValueError(f"{num_blocks} blocks of {block_size} are too many cells; give at most 32 tokens")
    tiles = flash_tiles(num_blocks, now)
    said = "The same scores: one matrix in memory, or one tile after the other"
    with picture_panels(1, 2, 3.6, said, width_ratios=[1, 1.3]) as (figure, (left, right)):
        draw_score_matrix(left, num_blocks * block_size)
        panel_title(left, "standard: all scores kept")
        draw_tiles(right, tiles)
        panel_title(right, "blocks: one tile at a time")
        handles = [Patch(facecolor=KEPT_COLOR, label="kept for backward (light: masked)")]
        handles += [Patch(facecolor=c, edgecolor=NEUTRAL_COLOR, label=name) for name, c in TILE_COLORS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncol=3)
