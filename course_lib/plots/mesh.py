"""The mesh of ranks: the same eight ranks grouped along each axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D

from course_lib.layout.mesh import Mesh
from course_lib.plots.palette import AXIS_COLORS, text_on
from course_lib.plots.style import CENTRED, ground, picture_axes
from course_lib.validate import checked

DRAWN_AXES = ("tp", "dp", "pp")  # across, into the depth, down


@dataclass(frozen=True)
class MeshPicture:
    """Where each rank stands (x, y), its coordinates, and the groups along each axis."""

    positions: list[tuple[float, float]]
    coordinates: list[dict[str, int]]
    groups: dict[str, list[tuple[int, ...]]]


def mesh_picture(mesh: Mesh) -> MeshPicture:
    """Place the ranks of a dp x tp x pp mesh in a slanted cube, and list who talks to whom along each axis."""
    if mesh.cp != 1 or mesh.world_size > 32:
        raise ValueError(
            f"got cp={mesh.cp} and {mesh.world_size} ranks; the picture shows dp, tp and pp of at most 32 ranks"
        )
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    step = {"tp": (1.7, 0.0), "dp": (0.75, -0.6), "pp": (0.0, 1.3 + 0.6 * (mesh.dp - 1))}
    positions = [tuple(sum(c[axis] * step[axis][i] for axis in DRAWN_AXES) for i in (0, 1)) for c in coordinates]
    groups = {
        axis: sorted({tuple(mesh.ranks_along(axis, rank)) for rank in range(mesh.world_size)})
        for axis in DRAWN_AXES
        if getattr(mesh, axis) > 1
    }
    return MeshPicture(positions, coordinates, groups)


AXIS_MEANING = {
    "dp": "dp: other data, same weights",
    "tp": "tp: same data, a part of each layer",
    "pp": "pp: same data, other layers",
}


def draw_mesh(axes, picture: MeshPicture) -> None:
    """Ranks as discs with their number and coordinates, a line in the axis's colour between neighbours of a group."""
    for axis, groups in picture.groups.items():
        for group in groups:
            axes.plot(*zip(*(picture.positions[rank] for rank in group), strict=True), zorder=1, **_line(axis))
    for rank, ((x, y), at) in enumerate(zip(picture.positions, picture.coordinates, strict=True)):
        color = "#F4F4F4"
        axes.scatter(x, y, s=620, color=color, edgecolor="black", linewidth=1.2, zorder=2)
        where = " ".join(f"{axis}{at[axis]}" for axis in ("dp", "tp", "pp") if axis in picture.groups)
        axes.text(x, y - 0.03, str(rank), **CENTRED, fontsize=11, fontweight="bold", color=text_on(color), zorder=3)
        behind = ground("white", 0.3, 0.8)
        axes.text(x + 0.08, y + 0.17, where, ha="left", va="top", fontsize=8, zorder=3, bbox=behind)
    xs, ys = zip(*picture.positions, strict=True)
    axes.set(xlim=(min(xs) - 0.4, max(xs) + 0.95), ylim=(max(ys) + 0.5, min(ys) - 0.4), aspect="equal")
    axes.set_axis_off()
    handles = [
        Line2D([], [], label=f"{AXIS_MEANING[axis]}\n{_groups_text(groups)}", **_line(axis))
        for axis, groups in picture.groups.items()
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5), labelspacing=1.4, handlelength=3)


def _line(axis: str) -> dict:
    return {"color": AXIS_COLORS[axis], "linewidth": 3.5, "linestyle": {"dp": "-", "tp": "--", "pp": ":"}[axis]}


def _groups_text(groups: Sequence[tuple[int, ...]]) -> str:
    text = " ".join("{" + ",".join(map(str, group)) + "}" for group in groups[:4])
    return "groups " + text + (" ..." if len(groups) > 4 else "")


@checked
def show_mesh(mesh: Mesh, title: str = "") -> None:
    """Show the ranks of a mesh and the groups along dp, tp and pp."""
    picture = mesh_picture(mesh)
    sizes: Mapping[str, int] = {axis: getattr(mesh, axis) for axis in ("dp", "tp", "pp")}
    default = f"{mesh.world_size} ranks as " + " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    height = 1.5 + 0.72 * (max(y for _, y in picture.positions) - min(y for _, y in picture.positions))
    with picture_axes(min(height, 6.5)) as axes:
        draw_mesh(axes, picture)
        axes.set_title(title or default)
