"""What a mixture of experts puts on the wire: rows and bytes that each rank sends, from where the tokens are routed.

A routing is one array expert_Tk per rank (a tensor or nested lists serve as well): the k experts of each of its T
tokens, -1 where a choice was dropped.
Rows go from rank to rank: rows[src][dst]; those on the diagonal stay where they are and cost nothing.

    method          a token travels                                            with each row
    plain           once for every expert that it chose                        D numbers
    once_per_rank   once to each rank with one of its experts                  D numbers, k ids, k weights
    once_per_node   once to each node, then inside it once to each rank        D numbers, k ids, k weights, on both hops
    padded          capacity rows to every expert, full or not; no counts      D numbers

`padded` is what static shapes cost (GShard, Switch): arithmetic alone; the others run in parallel/dispatch.py.
Combine sends a row back for each that came, of D numbers. `plain` and `padded` apply the weights at home; the other two
at the expert's rank, so that one row returns per rank or node: they must travel (in FP32 at least), and so must their
gradients.
In backward each row's gradient goes the way back: as many rows as forward, in the other direction.

Source   DeepSeek-AI 2024 (arXiv:2412.19437), sections 2.1.2 and 3.2.2; Lepikhin et al. 2020 (arXiv:2006.16668)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from course_lib.layout.experts import METHODS, ExpertLayout
from course_lib.validate import Bytes, Size, checked

ID_BYTES = 4  # an expert's number beside a row, int32
COUNT_BYTES = 8  # how many rows will come, int64

Rows = list[list[int]]  # rows[src][dst]
Routing = Sequence[Any]  # expert_Tk of each rank: an array, a tensor or nested lists


@checked
def plain_rows(experts: Routing, layout: ExpertLayout) -> Rows:
    """One row for every assignment, to the rank that has the expert; dropped ones do not count."""
    return [_rows_to(list, expert_Tk, layout.experts_per_rank, layout.ep_size) for expert_Tk in experts]


def once_per_rank_rows(experts: Routing, layout: ExpertLayout) -> Rows:
    """One row to each rank that has an expert of the token."""
    return [_rows_to(set, expert_Tk, layout.experts_per_rank, layout.ep_size) for expert_Tk in experts]


def once_per_node_rows(experts: Routing, layout: ExpertLayout) -> tuple[Rows, Rows]:
    """(across, inside): first once to each node, at its relay; from there once to each rank with an expert.

    In `across` what stays in the token's own node is on the diagonal: the first relay is the rank itself.
    """
    size, width = layout.ep_size, layout.experts_per_rank
    across, inside = [[0] * size for _ in range(size)], [[0] * size for _ in range(size)]
    for src, expert_Tk in enumerate(experts):
        nodes = _rows_to(set, expert_Tk, width * layout.ranks_per_node, layout.num_nodes)
        ranks = _rows_to(set, expert_Tk, width, size)
        for node, tokens in enumerate(nodes):
            across[src][layout.relay(src, node)] = tokens
        for dst, tokens in enumerate(ranks):
            inside[layout.relay(src, layout.node_of_rank(dst))][dst] += tokens
    return across, inside


def _rows_to(kind: type[list] | type[set], expert_Tk: Any, width: int, places: int) -> list[int]:
    """How many rows go to each place of `width` neighbouring experts: of a token a list of places, or each once."""
    chosen_Tk = expert_Tk.tolist() if hasattr(expert_Tk, "tolist") else expert_Tk
    rows = Counter(place for chosen in chosen_Tk for place in kind(expert // width for expert in chosen))
    return [rows[place] for place in range(places)]


@dataclass(frozen=True)
class Sent:
    """What one rank sends, to ranks of its own node and to those of other nodes."""

    within_bytes: int = 0
    between_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.within_bytes + self.between_bytes

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.within_bytes + other.within_bytes, self.between_bytes + other.between_bytes)


@checked
def sent(rows: Rows, layout: ExpertLayout, row_bytes: Bytes) -> list[Sent]:
    """What each rank sends if rows[src][dst] rows of row_bytes travel; the diagonal stays at home."""
    return [
        Sent(
            sum(n for dst, n in enumerate(row) if dst != src and _same_node(src, dst, layout)) * row_bytes,
            sum(n for dst, n in enumerate(row) if not _same_node(src, dst, layout)) * row_bytes,
        )
        for src, row in enumerate(rows)
    ]


def way_back(rows: Rows) -> Rows:
    """The same rows, returning: what src sent to dst, dst sends to src."""
    return [list(column) for column in zip(*rows, strict=True)]


def _same_node(src: int, dst: int, layout: ExpertLayout) -> bool:
    return layout.node_of_rank(src) == layout.node_of_rank(dst)


@dataclass(frozen=True)
class MoeTraffic:
    """What each rank sends in one MoE layer for one micro-batch; each list has an entry a rank."""

    counts: list[Sent]  # how many rows will come: sent first
    dispatch: list[Sent]
    combine: list[Sent]
    combine_backward: list[Sent]  # gradients of the experts' outputs, to the experts
    dispatch_backward: list[Sent]  # gradients of their inputs, home

    def forward(self, rank: int) -> Sent:
        return self.counts[rank] + self.dispatch[rank] + self.combine[rank]

    def backward(self, rank: int) -> Sent:
        return self.combine_backward[rank] + self.dispatch_backward[rank]

    def sent_bytes(self, rank: int) -> int:
        """Forward and backward, within and between nodes."""
        return (self.forward(rank) + self.backward(rank)).total_bytes


@checked
def moe_traffic(
    experts: Routing,
    layout: ExpertLayout,
    d_model: Size,
    method: Literal[METHODS] = "plain",
    itemsize: Size = 2,
    capacity: Size | None = None,
) -> MoeTraffic:
    """Exact bytes of one MoE layer for one micro-batch. capacity: rows an expert gets from each rank, for "padded"."""
    if len(experts) != layout.ep_size:
        raise ValueError(f"the routing has {len(experts)} ranks, ep is {layout.ep_size}; give one expert_Tk a rank")
    if method == "padded" and capacity is None:
        raise ValueError(
            f'method "padded" needs a capacity, 1 row or more that an expert gets from each rank, got {capacity}; '
            "see capacity_of"
        )
    there = {
        "plain": lambda: [plain_rows(experts, layout)],
        "padded": lambda: [[[capacity * layout.experts_per_rank] * layout.ep_size] * layout.ep_size],
        "once_per_rank": lambda: [once_per_rank_rows(experts, layout)],
        "once_per_node": lambda: once_per_node_rows(experts, layout),
    }[method]()
    back, row, travel = [way_back(rows) for rows in there], d_model * itemsize, method.startswith("once")
    top_k = next((len(chosen) for expert_Tk in experts for chosen in expert_Tk), 0)
    ids, weights = travel * top_k * ID_BYTES, travel * top_k * max(4, itemsize)

    def hop_by_hop(hops: Sequence[Rows], row_bytes: int) -> list[Sent]:
        each = [sent(rows, layout, row_bytes) for rows in hops]
        return [sum((hop[rank] for hop in each), Sent()) for rank in range(layout.ep_size)]

    return MoeTraffic(
        counts=hop_by_hop([] if method == "padded" else _count_rows(layout, method), COUNT_BYTES),
        dispatch=hop_by_hop(there, row + ids + weights),
        combine=hop_by_hop(back, row),
        combine_backward=hop_by_hop(there, row),
        dispatch_backward=hop_by_hop(back, row + weights),
    )


def _count_rows(layout: ExpertLayout, method: str) -> list[Rows]:
    """How many counts go from rank to rank, hop by hop: one an expert (plain), otherwise one a rank."""
    size = layout.ep_size
    if method != "once_per_node":
        return [[[layout.experts_per_rank if method == "plain" else 1] * size for _ in range(size)]]
    pairs = [[(src, dst) for dst in range(size)] for src in range(size)]
    across = [[int((src - dst) % layout.ranks_per_node == 0) for src, dst in row] for row in pairs]
    return [across, [[int(_same_node(src, dst, layout)) for src, dst in row] for row in pairs]]
