"""The form of what leads to what: boxes, arrows between them and words beside them."""

from collections.abc import Iterable, Sequence

from matplotlib.patches import FancyArrowPatch

from course_lib.plots.style import bare, labelled_box, picture_axes, write

Box = tuple[float, float, float, float, str, str]  # left, bottom, width, height, colour, text
Place = tuple[float, float]
BLACK = "#444444"
BORDERED = {"edgecolor": "black", "linewidth": 0.9}


def draw_arrows(axes, ends: Iterable[tuple[Place, Place]], color: str = BLACK, **look) -> None:
    """Draw arrows from one place to another; look as FancyArrowPatch has it."""
    look = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0} | look
    for start, stop in ends:
        axes.add_patch(FancyArrowPatch(start, stop, color=color, **look))


def draw_notes(axes, notes: Iterable[Sequence], **look) -> None:
    """Write words at (x, y, text), centred, or with what side of them stands there as a fourth value."""
    for x, y, text, *align in notes:
        write(axes, x, y, text, *align, **look)


def diagram(
    height_in: float,
    title: str,
    limits: tuple[Place, Place],
    boxes: Iterable[Box],
    arrows: Iterable[tuple[Place, Place]] = (),
    notes: Iterable[Sequence] = (),
    **look,
) -> None:
    """Show boxes with arrows and notes.

    limits   (left, right), (bottom, top)
    look     of the boxes, as Rectangle has it, and their `fontsize`
    """
    with picture_axes(height_in) as axes:
        draw_diagram(axes, limits, boxes, arrows, notes, **look)
        axes.set_title(title)


def draw_diagram(axes, limits: tuple[Place, Place], boxes=(), arrows=(), notes=(), **look) -> None:
    """Draw all that into axes of which nothing else is left."""
    for left, bottom, width, height, color, text in boxes:
        labelled_box(axes, (left, bottom), (width, height), color, text, **(look if text else {}))
    draw_arrows(axes, arrows)
    draw_notes(axes, notes)
    bare(axes, *limits)
