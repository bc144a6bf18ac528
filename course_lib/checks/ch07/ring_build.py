"""Grader of chapter 07, exercise 7: ring attention from an empty cell, in four steps, on real ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks import Cost, Exercise, fresh_seed, numbers, several
from course_lib.checks.ch07.context_parallel import merged
from course_lib.comm import all_reduce
from course_lib.layout.sequence_sharding import Tile, tile
from course_lib.minimal import ring_attention
from course_lib.parallel.positions import positions
from course_lib.parallel.tiles import standard_backward, standard_forward

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TARGET = 0.95  # share of the ideal work: contiguous tokens reach 2/3 on 2 ranks and 4/7 on 4


@dataclass
class Ring:
    """What a rank gets: who it is, how tokens are cut, messages to its neighbour, and the kernel of one tile."""

    rank: int
    size: int
    zigzag: bool
    group: dist.ProcessGroup
    sent_bytes: int = 0
    hidden_bytes: int = 0  # of messages during which a tile was computed
    tiles: list[int] = field(default_factory=list)  # pairs of each

    def pass_on(self, outgoing: Tensor) -> Callable[[], Tensor]:
        """Start to send to the right and to receive from the left; what it returns waits and gives what came."""
        tiles_at_start, sent_bytes = len(self.tiles), outgoing.nbytes
        self.sent_bytes += sent_bytes
        arrived = ring_attention.pass_on(outgoing.contiguous(), self.group)

        def arrived_and_noted() -> Tensor:
            self.hidden_bytes += sent_bytes * (len(self.tiles) > tiles_at_start)
            return arrived()

        return arrived_and_noted

    def tile(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, with shape (B, N, queries), of these queries with these keys."""
        self._count(q, k, causal)
        return standard_forward(q, k, v, causal)

    def tile_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shares of dq, dk and dv; out and lse are those over all keys."""
        self._count(q, k, causal)
        return standard_backward(grad, q, k, v, out, lse, causal)

    def _count(self, q: Tensor, k: Tensor, causal: bool) -> None:
        rows, columns = q.shape[2], k.shape[2]
        if causal and rows != columns:
            raise ValueError(f"a causal tile has {rows} queries and {columns} keys; give equally many of both")
        self.tiles.append(rows * (rows + 1) // 2 if causal else rows * columns)


class ForwardAlone:
    """The forward pass of the reference."""

    knows_zigzag, rests = True, 1  # a block rests in the last ring step
    merge = staticmethod(merged)

    def part(self, ring: Ring, key_rank: int, s: int) -> Tile | None:
        return tile("zigzag" if ring.zigzag and self.knows_zigzag else "contiguous", s, ring.rank, key_rank)

    def blocks(self, kv, ring):
        for step in range(ring.size):
            arrived = ring.pass_on(kv) if step < ring.size - self.rests else None
            yield (ring.rank - step) % ring.size, kv
            kv = arrived() if arrived else None

    def tiles(self, q, kv, ring):
        """Of each block that is seen: rows, output and log-sum-exp."""
        for key_rank, block in self.blocks(kv, ring):
            if of := self.part(ring, key_rank, q.shape[2]):
                yield of.queries, *ring.tile(q[:, :, of.queries], *block[..., of.keys, :], of.causal)

    def forward(self, q, k, v, ring):
        out = lse = None
        for rows, *new in self.tiles(q, torch.stack([k, v]), ring):
            if out is None:
                out, lse = new
            else:
                out[:, :, rows], lse[:, :, rows] = self.merge([(out[:, :, rows], lse[:, :, rows]), new])
        return out, lse


class MyRing(ForwardAlone):
    """The reference; each wrong answer changes one method."""

    keeps_its_own = True  # share of its block's gradient: the others' come home after size - 1 ring steps

    def final(self, rows, q, keys, out, lse):
        return out[:, :, rows], lse[:, :, rows]

    def backward(self, grad, q, k, v, out, lse, ring):
        dq, own, arrived = torch.zeros_like(q), torch.zeros_like(torch.stack([k, v])), None
        for key_rank, kv in self.blocks(torch.stack([k, v]), ring):
            dkv, of = torch.zeros_like(kv), self.part(ring, key_rank, q.shape[2])
            if of:
                rows, keys = of.queries, kv[..., of.keys, :]
                final = self.final(rows, q, keys, out, lse)
                new_dq, *new_dkv = ring.tile_backward(grad[:, :, rows], q[:, :, rows], *keys, *final, of.causal)
                dq[:, :, rows] += new_dq
                dkv[..., of.keys, :] = torch.stack(new_dkv)
            if key_rank == ring.rank and self.keeps_its_own:
                own = dkv
            else:
                arrived = ring.pass_on(dkv if arrived is None else dkv + arrived())
        return dq, *self.home(own, arrived)

    def home(self, own, arrived):
        return own + arrived()


class MergesAtTheEnd(MyRing):
    """All parts are kept, and merged once; gradients go all the way round."""

    keeps_its_own = False

    def forward(self, q, k, v, ring):
        found = []
        for rows, new, new_lse in self.tiles(q, torch.stack([k, v]), ring):
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -1e30)
            out[:, :, rows], lse[:, :, rows] = new, new_lse
            found.append((out, lse))
        return merged(found)


class SendsAfterwards(MyRing):
    def blocks(self, kv, ring):
        for step in range(ring.size):
            yield (ring.rank - step) % ring.size, kv
            if step < ring.size - 1:
                kv = ring.pass_on(kv)()


WAYS = {"forward": "step 1 (forward)", "backward": "step 2 (backward)"}
_ZIGZAG = "steps 1 to 3 are right; step 4 (zig-zag)"
OVERLAP = "step 3 (overlap): blocks of the {} pass that travelled while no tile was computed{}"


def inputs(rng):
    [size], seed = rng.choices([2, 4]), fresh_seed(rng)
    S = 2 * size * rng.randrange(2, 5)
    return [(size, S, False, seed), (size, S, True, seed)]


def watch(answer, S, zigzag, seed):
    """Watch forward, then backward, then overlap; zig-zag last, and how near its work is to an equal share."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    mine_s = positions("zigzag" if zigzag else "contiguous", S, size, rank)
    *shards, weight = (numbers(generator, 2, n, S, HEAD_DIM)[:, :, mine_s] for n in heads)
    rings, made, seen = [Ring(rank, size, zigzag, group) for _ in WAYS], answer(), {}
    blocks = shards[1].nbytes + shards[2].nbytes
    results = several("forward returns out and lse", "out", "lse")(made.forward, *(x.clone() for x in shards), rings[0])
    if "error" in results:
        return results
    _tell(seen, "forward", zigzag, results, rings[0].sent_bytes / blocks)
    has_backward = seen[f"{WAYS['forward']} is right; {WAYS['backward']}"] = hasattr(made, "backward")
    if not has_backward:
        return seen
    given = weight.clone(), *(x.clone() for x in shards), results["out"], results["lse"]
    grads = several("backward returns dq, dk and dv", "dq", "dk", "dv")(made.backward, *given, rings[1])
    if "error" in grads:
        return seen | grads
    _tell(seen, "backward", zigzag, grads, rings[1].sent_bytes / blocks)
    for way, ring, most in zip(WAYS, rings, (0, 1), strict=True):
        exposed = (ring.sent_bytes - ring.hidden_bytes) / blocks
        if zigzag or rank == size - 1:  # in order, the last rank alone computes at every step
            seen[OVERLAP.format(way, ", zig-zag" if zigzag else "")] = Cost(exposed, most - exposed)
        if zigzag:
            pairs, most = sum(ring.tiles), S * (S + 1) / 2 / size / TARGET
            seen[f"{_ZIGZAG}: pairs of the {way} pass"] = Cost(pairs, most - pairs)
    return seen


def _tell(seen: dict, way: str, zigzag: bool, results: dict[str, Tensor], sent: float) -> None:
    """The results of one pass, and how many blocks it sent: a rank's own keys and values are one."""
    group = dist.group.WORLD
    dist.barrier(group)  # a rank that passes on too seldom is told of forward, not of the backward that it began
    step, most = _ZIGZAG if zigzag else WAYS[way], group.size() - 1 if way == "forward" else 2 * group.size()
    seen[f"{step}: blocks are passed on"] = all_reduce(torch.tensor(sent), group, op="max").item() > 0
    for name, result in results.items():
        seen[f"{step}: {name}"] = result
    seen[f"{step}: blocks sent {way}"] = Cost(sent, most - sent)


_SEES = "which queries may see which keys of each block?"
_FINAL = "does tile_backward get the out and lse over all keys, and is every block's share added?"
HOME = "does the gradient of a block get a share from each rank that sees it, and come back to its owner?"
ENOUGH = "a block is its own keys and values, which need no more than size - 1 ring steps"
EARLY = "call pass_on before the tile, and the function that it returns after it"
_HALVES = (
    f"{TARGET:.0%} of the ideal work is the target; give the kernel half of the keys of an earlier rank, and half of "
    "your queries for a later one"
)
SAYS = {"out": _SEES, "lse": _SEES, "dq": _FINAL, "dk": HOME, "dv": HOME}
SAYS |= {"blocks sent forward": ENOUGH, "blocks sent backward": ENOUGH}
WRONG = {
    "there is no method backward yet": ForwardAlone,
    "no rank passed a block on, so each saw its own keys alone; call ring.pass_on": {
        "blocks": lambda self, kv, ring: [(ring.rank, kv)],
        "home": lambda self, own, arrived: own,
    },
    "rank 0 needs no other block: is each block merged, and does the old output shrink too?": {
        "merge": partial(merged, weigh=lambda lses: torch.stack([torch.ones_like(lses[0]), lses.softmax(0)[1]]))
    },
    _FINAL: {"final": lambda self, rows, q, keys, out, lse: standard_forward(q[:, :, rows], *keys, False)},
    HOME: {"home": lambda self, own, arrived: (arrived(), own)[1]},
    ENOUGH: {"rests": 0},
    EARLY: SendsAfterwards,
    _SEES: {"knows_zigzag": False},
    _HALVES: {  # the kernel computes a tile that is thrown away
        "forward": lambda self, q, k, v, ring: (ring.tile(q, k, v, False), MyRing.forward(self, q, k, v, ring))[1]
    },
}
SAYS = (
    {f"{step}: {what}": why for step in (*WAYS.values(), _ZIGZAG) for what, why in SAYS.items()}
    | {OVERLAP.format(way, of): EARLY for way in WAYS for of in ("", ", zig-zag")}
    | {f"{_ZIGZAG}: pairs of the {way} pass": _HALVES for way in WAYS}
)
HANG = "Does every rank pass on as many blocks as its neighbour waits for?"
check_ring = Exercise(MyRing, inputs, WRONG, watch, SAYS, right=MergesAtTheEnd, ranks=HANG)
