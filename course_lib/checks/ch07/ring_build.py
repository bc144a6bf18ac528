"""Grader of chapter 07, exercise 7: ring attention from an empty cell, in four steps, on real ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.core import fail, fresh_seed, grader, numbers, run_ranks
from course_lib.layout.block_pairs import all_pairs
from course_lib.minimal import ring_attention
from course_lib.model import fused_attention
from course_lib.parallel.positions import positions
from course_lib.parallel.tiles import standard_backward, standard_forward

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TARGET = 0.95  # share of the ideal work: contiguous tokens reach 2/3 on 2 ranks and 4/7 on 4


@dataclass
class Message:
    """A message of pass_on: its bytes, and how many tiles were computed before it was started and awaited."""

    sent_bytes: int
    tiles_at_start: int
    tiles_at_arrival: int | None = None

    @property
    def hidden(self) -> bool:
        """Whether a tile was computed while it was on its way."""
        return self.tiles_at_arrival is not None and self.tiles_at_arrival > self.tiles_at_start


@dataclass
class Ring:
    """What a rank gets: who it is, how tokens are cut, messages to its neighbour, and the kernel of one tile."""

    rank: int
    size: int
    zigzag: bool
    group: dist.ProcessGroup
    messages: list[Message] = field(default_factory=list)
    tiles: list[int] = field(default_factory=list)  # pairs of each

    def pass_on(self, outgoing: Tensor) -> Callable[[], Tensor]:
        """Start to send to the right and to receive from the left; what it returns waits and gives what came."""
        message = Message(outgoing.nbytes, len(self.tiles))
        self.messages.append(message)
        arrived = ring_attention.pass_on(outgoing.contiguous(), self.group)

        def arrived_and_noted() -> Tensor:
            message.tiles_at_arrival = len(self.tiles)
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


@dataclass(frozen=True)
class Built:
    """What one rank's answer did with one cut: differences, bytes in blocks of its own keys and values, pairs."""

    rank: int
    has_backward: bool
    differences: dict[str, float]
    sent: dict[str, float]
    exposed: dict[str, float]
    pairs: dict[str, int]


@grader
def check_ring(answer, rng):
    """Forward, then backward, then overlap, then zig-zag with the target share of ideal work."""
    world_size, seed = rng.choice([2, 4]), fresh_seed(rng)
    S = 2 * world_size * rng.randrange(2, 5)
    for zigzag in (False, True):
        ranks = run_ranks(_build, world_size, answer, seed, S, zigzag)
        _expect_way(ranks, "forward", zigzag)
        if not all(seen.has_backward for seen in ranks):
            fail("step 1 (forward) is right; step 2 (backward): there is no method backward yet")
        _expect_way(ranks, "backward", zigzag)
        _expect_overlap(ranks if zigzag else ranks[-1:])  # in order, the last rank alone computes at every step
        if zigzag:
            _expect_even(ranks, S)


RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


def _expect_way(ranks: list[Built], way: str, zigzag: bool) -> None:
    """The results of one pass, and no more bytes than it takes."""
    first = "step 1 (forward)" if way == "forward" else "step 2 (backward)"
    step = "steps 1 to 3 are right; step 4 (zig-zag)" if zigzag else first
    sent, size = [seen.sent[way] for seen in ranks], len(ranks)
    if max(sent) == 0:
        fail(f"{step}: no rank passed a block on, so each saw its own keys alone; call ring.pass_on")
    for name in RESULTS[way]:
        wrong = {seen.rank: seen.differences[name] for seen in ranks if not seen.differences[name] < 1e-9}
        if wrong:
            right = [seen.rank for seen in ranks if seen.rank not in wrong]
            fail(
                f"{step}: {name} is wrong on ranks {sorted(wrong)}, by up to {max(wrong.values()):.2g}, and right on "
                f"ranks {right}; {_advice(name, sorted(wrong), size, zigzag)}"
            )
    enough = size - 1 if way == "forward" else 2 * size
    if max(sent) > enough + 1e-9:
        fail(
            f"{step}: the {way} pass of a rank of {size} sent {max(sent):g} blocks, and {enough} are enough; a block "
            "is its own keys and values, which need no more than size - 1 ring steps"
        )


def _advice(name: str, wrong: list[int], world_size: int, zigzag: bool) -> str:
    if name in ("out", "lse"):
        if wrong == list(range(1, world_size)) and not zigzag:
            return "rank 0 needs no other block: is each block merged, and does the old output shrink too?"
        return "which queries may see which keys of each block?"
    if name == "dq":
        return "does tile_backward get the out and lse over all keys, and is every block's share added?"
    return "does the gradient of a block get a share from each rank that sees it, and come back to its owner?"


def _expect_overlap(ranks: list[Built]) -> None:
    for way, most in (("forward", 0), ("backward", 1)):
        exposed = max(seen.exposed[way] for seen in ranks)
        if exposed > most + 1e-9:
            allowed = "none is needed" if most == 0 else "only the last gradient's is needed, 1 block"
            fail(
                f"step 3 (overlap): {exposed:g} blocks of the {way} pass travelled while no tile was computed, and "
                f"{allowed}; call pass_on before the tile, and the function that it returns after it"
            )


def _expect_even(ranks: list[Built], S: int) -> None:
    for way in ("forward", "backward"):
        share = all_pairs(S) / len(ranks) / max(seen.pairs[way] for seen in ranks)
        if share < TARGET:
            fail(
                f"steps 1 to 3 are right; step 4 (zig-zag): the {way} pass reaches {share:.0%} of the ideal work, and "
                f"{TARGET:.0%} is the target; give the kernel half of the keys of an earlier rank, and half of your "
                "queries for a later one"
            )


def _build(answer: type, seed: int, S: int, zigzag: bool) -> Built:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    *full, weight = (numbers(generator, 2, n, S, HEAD_DIM) for n in heads)
    mine_s = positions("zigzag" if zigzag else "contiguous", S, size, rank)
    shards = [x[:, :, mine_s].clone() for x in full]
    forward, backward = (Ring(rank, size, zigzag, group) for _ in range(2))
    made = answer()
    out, lse = made.forward(*(x.clone() for x in shards), forward)
    _finish(group)  # a rank that passes on too seldom is then told of forward, not of the backward that it began
    results = {"out": out.clone(), "lse": lse.clone().reshape(out.shape[:3])}
    has_backward = hasattr(made, "backward")
    if has_backward:
        grads = made.backward(weight[:, :, mine_s].clone(), *(x.clone() for x in shards), out, lse, backward)
        results |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    _finish(group)
    expected = {name: x[:, :, mine_s] for name, x in _reference(full, weight).items() if name in results}
    block = shards[1].nbytes + shards[2].nbytes
    rings = {"forward": forward, "backward": backward}
    return Built(
        rank,
        has_backward,
        {name: _difference(results[name], expected[name]) for name in expected},
        {way: sum(m.sent_bytes for m in ring.messages) / block for way, ring in rings.items()},
        {way: sum(m.sent_bytes for m in ring.messages if not m.hidden) / block for way, ring in rings.items()},
        {way: sum(ring.tiles) for way, ring in rings.items()},
    )


def _finish(group: dist.ProcessGroup) -> None:
    """All messages of all ranks are through: a message that an answer never awaited must not meet the next one."""
    dist.barrier(group)


def _reference(full: list[Tensor], weight: Tensor) -> dict[str, Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in full)
    out = fused_attention(q, k, v)
    (out * weight).sum().backward()
    _, lse = standard_forward(*(x.detach() for x in (q, k, v)), True)
    return {"out": out.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}


def _difference(got: object, want: Tensor) -> float:
    if not isinstance(got, Tensor) or got.shape != want.shape:
        what = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        fail(f"a result has shape {what}, and {tuple(want.shape)} is right; forward returns out and lse, backward "
             "dq, dk and dv")  # fmt: skip
    difference = (got - want).abs().max().item()
    return math.inf if math.isnan(difference) else difference
