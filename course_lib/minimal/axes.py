"""Several axes at once without options: where a rank sits, who is in its groups, over whom a gradient is summed.

    sizes = {"pp": 2, "dp": 2, "cp": 1, "tp": 2}        # outermost first
    coordinates(5, sizes)                               # {"tp": 1, "cp": 0, "dp": 0, "pp": 1}
    group_along(["dp", "cp"], 5, sizes)                 # [5, 7]

The engine has the same in layout/mesh.py and parallel/sums.py, with two kinds more: key/value heads that several ranks
of tp share, and an embedding that is tied to the head on another stage.
"""

from math import prod


def coordinates(rank, sizes):
    """Return the place of a rank along each axis; sizes has the outermost axis first."""
    place = {}
    for axis in reversed(sizes):  # the innermost axis is the last digit
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


def group_along(axes, rank, sizes):
    """Return the ranks that differ from this one along these axes only."""
    own, group = coordinates(rank, sizes), []
    for other in range(prod(sizes.values())):
        place = coordinates(other, sizes)
        if all(place[axis] == own[axis] for axis in sizes if axis not in axes):
            group.append(other)
    return group


def axes_of(kind, layout):
    """Return the groups over which a gradient of this kind is summed, one after the other."""
    axes = ["expert_dp" if kind == "experts" else "data"]
    if kind == "norms" and layout.sequence_parallel:
        axes.append("tp")  # each rank of tp saw its own tokens only
    return axes
