"""The mesh pp x dp x cp x tp: which rank sits where, and who talks to whom along each axis.

    axis            who is in my group along it
    pp, dp, cp, tp  ranks that differ from me in this index only
    data            ranks that differ from me in dp and cp only: gradients of all but the experts are summed over them
    ep              ep_size neighbours inside data, who have all experts of a layer together
    expert_dp       ranks of data at my place in the other ep groups, who have the same experts as I
                    folded: ep and expert_dp are carved out of data x tp, the innermost axis first
    shard           with replicas (HSDP): neighbours in data who have one replica together, each a shard of it
    replicate       and the ranks at my place in the other replicas, who have the same shard; of experts likewise

By default the tensor axis is innermost: tp talks most, so its ranks are neighbours, on one node's NVLink. The pipeline
axis is outermost: it talks least. (Narayanan et al. 2021, arXiv:2104.04473, section 3; Ultra-Scale Playbook, "5D
parallelism")
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from course_lib.validate import Size, check_fields, checked, one_of

AXES = ("pp", "dp", "cp", "tp")  # outermost to innermost, unless a mesh says otherwise
DATA = ("dp", "cp")  # along which ranks have other tokens
ALL_AXES = (*AXES, "data", "ep", "expert_dp")  # what data is made of, and what it is cut into
REPLICA_AXES = ("shard", "replicate", "expert_shard", "expert_replicate")  # and what ZeRO makes of it with replicas


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes; rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank."""

    pp: Size = 1
    dp: Size = 1
    cp: Size = 1
    tp: Size = 1
    order: tuple[str, ...] = AXES  # outermost first; the formula is that of the default

    def __post_init__(self):
        check_fields(self)
        check_order(self.order)
        object.__setattr__(self, "order", tuple(self.order))

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in self.order}

    @property
    def strides(self) -> dict[str, int]:
        """How far the next rank along each axis is."""
        strides, step = {}, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= getattr(self, axis)
        return strides

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` sits: its index along each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank ({rank}) must be one of 0..{self.world_size - 1}: the mesh has {self.world_size} ranks"
            )
        strides = self.strides
        return {axis: rank // strides[axis] % size for axis, size in self.sizes.items()}

    def rank(self, **coordinates: int) -> int:
        """The rank that sits at these coordinates; an axis of size 1 may be left out."""
        for axis in coordinates:
            one_of("axis", axis, AXES)
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

    def ranks_along(self, axes: str | Sequence[str], rank: int) -> list[int]:
        """The ranks that differ from `rank` along this axis only, or along these, itself included, in order."""
        axes = (axes,) if isinstance(axes, str) else axes
        for axis in axes:
            one_of("axis", axis, AXES)
        here, strides = self.coordinates(rank), self.strides
        first = rank - sum(here[axis] * strides[axis] for axis in axes)
        steps = [range(0, getattr(self, axis) * strides[axis], strides[axis]) for axis in axes]
        return sorted(first + sum(step) for step in product(*steps))

    def members(self, rank: int, ep_size: int = 1, replicas: int = 1, folded: bool = False) -> dict[str, list[int]]:
        """The ranks of each group of `rank`, by axis of ALL_AXES, and of REPLICA_AXES; folded: experts over tp too."""
        check_groups(self.dp, self.cp, ep_size, replicas, self.tp if folded else 1)
        groups = {axis: self.ranks_along(axis, rank) for axis in AXES} | {"data": self.ranks_along(DATA, rank)}
        experts = self.ranks_along(_experts(folded), rank)
        groups["ep"], groups["expert_dp"] = _neighbours_and_peers(experts, rank, len(experts) // ep_size)
        if replicas > 1:
            groups["shard"], groups["replicate"] = _neighbours_and_peers(groups["data"], rank, replicas)
            expert_groups = _neighbours_and_peers(groups["expert_dp"], rank, replicas)
            groups["expert_shard"], groups["expert_replicate"] = expert_groups
        return groups

    def all_ranks_along(self, axis: str) -> list[list[int]]:
        """Every group of `axis`, in order of their first ranks: together they hold each rank once."""
        return [group for rank in range(self.world_size) if (group := self.ranks_along(axis, rank))[0] == rank]


def check_order(order: Sequence[str]) -> None:
    """Raises ValueError unless `order` names each of the four axes once."""
    if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(AXES):
        raise ValueError(f"order is {order!r}; name each of {', '.join(AXES)} once, the outermost first")


def _experts(folded: bool) -> tuple[str, ...]:
    """The axes over whose ranks experts are spread."""
    return (*DATA, "tp") if folded else DATA


def _neighbours_and_peers(ranks: list[int], rank: int, parts: int) -> tuple[list[int], list[int]]:
    """The part of the list, cut into equal runs, that has the rank; and the ranks at its place in every run."""
    size = len(ranks) // parts
    run, place = divmod(ranks.index(rank), size)
    return ranks[run * size : (run + 1) * size], ranks[place::size]


def check_groups(dp: Size, cp: Size, ep_size: Size, replicas: Size = 1, fold: Size = 1) -> None:
    """Raises ValueError unless ep neighbours each make up the ranks of data, or of data and `fold` ranks of tp.

    And unless the ranks that have the same experts make up so many equal groups (replicas), and data does.
    """
    product, sizes, ranks, size = "dp x cp", f"{dp} x {cp}", "data", dp * cp * fold
    if fold > 1:
        product, sizes, ranks = f"{product} x tp", f"{sizes} x {fold}", "data and tp"
    if size % ep_size:
        raise ValueError(
            f"ep ({ep_size}) must divide {product} = {sizes} = {size}: ep is carved out of the ranks of {ranks}"
        )
    if size // ep_size % replicas or dp * cp % replicas:
        raise ValueError(
            f"dp_replicate ({replicas}) must divide {product} / ep = {sizes} / {ep_size} = {size // ep_size}"
            f"{f' and dp x cp = {dp * cp}' if fold > 1 else ''}: "
            "each replica has all shards of every parameter, experts included"
        )


@dataclass(frozen=True)
class AxisLinks:
    """Whether the groups of an axis lie inside nodes. Where they lie differently, the least favourable of them."""

    nodes: int  # over which a group is spread: the most
    kind: str  # "none" (of one rank) | "node" (each inside one node) | "network" (no two share a node) | "both"


@checked
def links_of_axes(mesh: Mesh, ranks_per_node: Size, ep_size: Size = 1, folded: bool = False) -> dict[str, AxisLinks]:
    """What the groups of each axis of ALL_AXES use, if ranks 0 .. ranks_per_node - 1 share a node, and so on.

    Groups that begin at the same place of their nodes lie alike, so one of each is looked at.
    """
    check_groups(mesh.dp, mesh.cp, ep_size, fold=mesh.tp if folded else 1)
    over = {axis: (axis,) for axis in AXES} | {"data": DATA} | dict.fromkeys(("ep", "expert_dp"), _experts(folded))
    links = {}
    for axis, own in over.items():
        ranks, others = mesh.ranks_along(own, 0), [other for other in AXES if other not in own]
        groups = [ranks]
        if axis == "ep":
            groups = [ranks[first : first + ep_size] for first in range(0, len(ranks), ep_size)]
        elif axis == "expert_dp":
            groups = [ranks[place::ep_size] for place in range(ep_size)]
        firsts = {first % ranks_per_node for first in mesh.ranks_along(others, 0)}
        starts = [(group, first) for group in groups for first in firsts]
        counts = [Counter([(first + rank) // ranks_per_node for rank in group]).values() for group, first in starts]
        nodes, inside = max(map(len, counts)), "node" if len(groups[0]) > 1 else "none"
        across = "both" if max(map(max, counts)) > 1 else "network"
        links[axis] = AxisLinks(nodes, across if nodes > 1 else inside)
    return links
