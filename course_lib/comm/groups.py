"""The process groups of a mesh, one for each axis: made in one place, here."""

from dataclasses import dataclass, fields

import torch.distributed as dist

from course_lib.layout.mesh import ALL_AXES, AXES, REPLICA_AXES, Mesh
from course_lib.validate import Size


def make_groups(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """My process group along each axis. Every rank of the world must call it, as `new_group` requires.

    Each rank makes all groups of all axes in the same order, its own or not: otherwise ranks would wait for each other.
    Raises   ValueError if the world has another size than the mesh
    """
    _check_world(mesh)
    my_rank, my_groups = dist.get_rank(), {}
    for axis in AXES:
        for ranks in mesh.all_ranks_along(axis):
            group = dist.new_group(ranks)
            if my_rank in ranks:
                my_groups[axis] = group
    return my_groups


@dataclass(frozen=True)
class Groups:
    """One rank's process groups, real ones also where it is alone; `make_all_groups` makes them."""

    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    cp: dist.ProcessGroup
    tp: dist.ProcessGroup
    data: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_dp: dist.ProcessGroup
    world: dist.ProcessGroup
    mesh: Mesh
    ep_size: int
    shard: dist.ProcessGroup | None = None  # these four with replicas alone
    replicate: dist.ProcessGroup | None = None
    expert_shard: dist.ProcessGroup | None = None
    expert_replicate: dist.ProcessGroup | None = None

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this rank sits: its index along each of the four axes."""
        return self.mesh.coordinates(self.world.rank())

    @property
    def by_axis(self) -> dict[str, dist.ProcessGroup]:
        """Each group by its axis, for `ByteMeter(axes=...)`: no two are one, even where their ranks are the same."""
        groups = {field.name: getattr(self, field.name) for field in fields(self)}
        return {axis: group for axis, group in groups.items() if isinstance(group, dist.ProcessGroup)}


def make_all_groups(
    mesh: Mesh, ep_size: Size = 1, local_only: bool = False, replicas: Size = 1, folded: bool = False
) -> Groups:
    """My process groups along each axis, data, ep and expert_dp. Every rank of the world must call it.

    With replicas also those of ZeRO's shards and of their replicas; folded: experts are spread over tp's ranks too.

    Each rank makes all groups in the same order, its own or not. With local_only it makes only its own, and waits only
    for their members: the cost does not grow with the number of ranks, and a fake world needs no other rank.
    Raises   ValueError if the world has another size than the mesh, or ep_size or replicas do not divide dp x cp (x tp)
    """
    _check_world(mesh)
    mine = mesh.members(dist.get_rank(), ep_size, replicas, folded)
    made = {}
    for axis in (*ALL_AXES, *(REPLICA_AXES if replicas > 1 else ())):
        if local_only:
            made[axis] = dist.new_group(mine[axis], use_local_synchronization=True)
            continue
        members = (mesh.members(rank, ep_size, replicas, folded)[axis] for rank in range(mesh.world_size))
        for ranks in (ranks for rank, ranks in enumerate(members) if ranks[0] == rank):
            group = dist.new_group(ranks)
            if ranks == mine[axis]:
                made[axis] = group
    return Groups(**made, world=dist.group.WORLD, mesh=mesh, ep_size=ep_size)


def _check_world(mesh: Mesh) -> None:
    if dist.get_world_size() != mesh.world_size:
        sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes.items())
        raise ValueError(
            f"the world has {dist.get_world_size()} ranks, the mesh {sizes} = {mesh.world_size} ranks; launch that many"
        )
