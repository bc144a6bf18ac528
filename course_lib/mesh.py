"""The mesh pp x dp x cp x tp: which rank sits where, and who talks to whom along each axis.

Where a rank sits is pure arithmetic. Groups of processes are made in one place, `make_groups`.
The tensor axis is innermost: tp talks most, so its ranks are neighbours, on one node's NVLink. The pipeline axis is
outermost: it talks least. (Narayanan et al. 2021, arXiv:2104.04473, section 3; Ultra-Scale Playbook, "5D parallelism")
"""

from dataclasses import dataclass

import torch.distributed as dist

AXES = ("pp", "dp", "cp", "tp")  # outermost to innermost


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes; rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank.

    Raises   ValueError if a size is not a whole number of 1 or more
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self):
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis} ({size!r}) must be a whole number of 1 or more; leave {axis} out to have 1")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has: the product of its axes."""
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` sits: its index along each axis."""
        self._check_rank(rank)
        index_by_axis = {}
        for axis in reversed(AXES):
            rank, index_by_axis[axis] = divmod(rank, getattr(self, axis))
        return {axis: index_by_axis[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank that sits at these coordinates; an axis of size 1 may be left out.

        Raises   ValueError if an axis is unknown, missing, or an index is outside it
        """
        for axis in coordinates:
            _check_axis(axis)
        rank = 0
        for axis, size in self.sizes.items():
            if axis not in coordinates and size > 1:
                raise ValueError(
                    f"the index along {axis} is missing, and {axis} has {size} ranks; give {axis}=0..{size - 1}"
                )
            index = coordinates.get(axis, 0)
            if not 0 <= index < size:
                raise ValueError(
                    f"{axis}={index} is outside the mesh, whose {axis} axis has {size}; give 0..{size - 1}"
                )
            rank = rank * size + index
        return rank

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from `rank` along `axis` only, itself included, in order."""
        _check_axis(axis)
        here = self.coordinates(rank)
        return [self.rank(**{**here, axis: index}) for index in range(getattr(self, axis))]

    def all_ranks_along(self, axis: str) -> list[list[int]]:
        """Every group of `axis`, in order of their first ranks: together they hold each rank once."""
        first_ranks = [rank for rank in range(self.world_size) if self.coordinates(rank)[axis] == 0]
        return [self.ranks_along(axis, rank) for rank in first_ranks]

    def describe(self) -> str:
        """A table with one line a rank: its coordinates and, for each axis longer than 1, whom it talks to."""
        long_axes = [axis for axis in AXES if getattr(self, axis) > 1]
        lines = [" x ".join(f"{axis} {size}" for axis, size in self.sizes.items()) + f" = {self.world_size} ranks"]
        for rank in range(self.world_size):
            here = self.coordinates(rank)
            talks = "   ".join(f"{axis} {here[axis]} with {self.ranks_along(axis, rank)}" for axis in long_axes)
            lines.append(f"rank {rank}: {talks}".rstrip(": "))
        return "\n".join(lines)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank ({rank}) must be one of 0..{self.world_size - 1}: the mesh has {self.world_size} ranks"
            )


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        raise ValueError(f"axis {axis!r} is not one of {', '.join(AXES)}")


def make_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """My process group along each axis. Every rank of the world must call it, as `new_group` requires.

    Each rank makes all groups of all axes in the same order, its own or not: otherwise ranks would wait for each other.
    Raises   ValueError if the world has another size than the mesh
    """
    if dist.get_world_size() != mesh.world_size:
        raise ValueError(
            f"the world has {dist.get_world_size()} ranks, the mesh {mesh.describe().splitlines()[0]}; launch that many"
        )
    my_rank, my_groups = dist.get_rank(), {}
    for axis in AXES:
        for ranks in mesh.all_ranks_along(axis):
            group = dist.new_group(ranks)
            if my_rank in ranks:
                my_groups[axis] = group
    return my_groups
