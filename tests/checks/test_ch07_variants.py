"""The graders of chapter 07 accept right answers that are arranged otherwise, three of each."""

import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from harness import sampled

from course_lib.checks import ch07
from course_lib.checks.ch07 import ring_build
from course_lib.checks.core import CheckFailed, run_ranks
from course_lib.comm import all_to_all
from course_lib.layout import tile

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ positions
def by_membership(sequence_sharding, S, ranks, rank):
    owner = {
        "contiguous": lambda t: t * ranks // S,
        "striped": lambda t: t % ranks,
        "zigzag": lambda t: min(t * 2 * ranks // S, 2 * ranks - 1 - t * 2 * ranks // S),
    }[sequence_sharding]
    return [t for t in range(S) if owner(t) == rank]


def as_a_tensor(sequence_sharding, S, ranks, rank):
    return torch.tensor(by_membership(sequence_sharding, S, ranks, rank))


def by_reshape(sequence_sharding, S, ranks, rank):
    tokens = torch.arange(S)
    if sequence_sharding == "striped":
        return tokens.view(-1, ranks)[:, rank].tolist()
    if sequence_sharding == "contiguous":
        return tokens.view(ranks, -1)[rank].tolist()
    return tokens.view(2 * ranks, -1)[[rank, -1 - rank]].flatten().tolist()


# ------------------------------------------------------------------------------------ merge
def total_first(parts):
    lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    return sum((part_lse - lse).exp().unsqueeze(-1) * out for out, part_lse in parts), lse


def by_softmax(parts):
    outs, lses = (torch.stack(column) for column in zip(*parts, strict=True))
    return (lses.softmax(0).unsqueeze(-1) * outs).sum(0), lses.logsumexp(0)


def by_recursion(parts):
    if len(parts) == 1:
        return parts[0]
    (out, lse), (part, part_lse) = by_recursion(parts[:-1]), parts[-1]
    share = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    return out + share * (part - out), torch.logaddexp(lse, part_lse)


# ------------------------------------------------------------------------------------ a tile
def by_package(s, query_rank, key_rank):
    part = tile("zigzag", s, query_rank, key_rank)
    return part.queries, part.keys, part.causal


def by_sign(s, query_rank, key_rank):
    first = s // 2 if key_rank > query_rank else 0
    last = s // 2 if key_rank < query_rank else s
    return slice(first, s), slice(0, last), query_rank == key_rank


def with_open_slices(s, query_rank, key_rank):
    if query_rank == key_rank:
        return slice(None), slice(None), 1
    return (slice(None), slice(s // 2), 0) if key_rank < query_rank else (slice(s // 2, None), slice(None), 0)


# ------------------------------------------------------------------------------------ bytes
def bytes_by_parts(method, c, B, s, N, K, H, itemsize):
    if method == "ulysses":
        sent = [heads * B * s * H * itemsize * (c - 1) // c for heads in (N, K, K, N)]
        return 2 * sum(sent)
    block = 2 * B * s * K * H
    forward = (c - 1) * block * itemsize
    return forward + forward + (c - 1) * block * 4


def bytes_as_float(method, c, B, s, N, K, H, itemsize):
    a_head = B * s * H * (c - 1)
    return a_head * (2 * K * (2 * itemsize + 4) if method == "ring" else 4 * (N + K) * itemsize / c)


def bytes_in_a_loop(method, c, B, s, N, K, H, itemsize):
    if method == "ulysses":
        return 4 * (N + K) * B * s * H * itemsize // c * (c - 1)
    return sum(2 * B * s * K * H * size for _ in range(c - 1) for size in (itemsize, itemsize, 4))


# ------------------------------------------------------------------------------------ loss
def loss_by_logsumexp(engine, tokens_BS1, positions_s):
    logits_BsV = engine(tokens_BS1[:, positions_s], positions_s)
    labels_Bs = tokens_BS1[:, positions_s + 1]
    chosen_Bs = logits_BsV.gather(-1, labels_Bs.unsqueeze(-1)).squeeze(-1)
    return (logits_BsV.logsumexp(-1) - chosen_Bs).sum() / (tokens_BS1.shape[0] * (tokens_BS1.shape[1] - 1))


def loss_by_share(engine, tokens_BS1, positions_s):
    logits_BsV = engine(tokens_BS1[:, positions_s], positions_s)
    mean = F.cross_entropy(logits_BsV.flatten(0, 1), tokens_BS1[:, 1:][:, positions_s].flatten())
    return mean * len(positions_s) / (tokens_BS1.shape[1] - 1)


def loss_row_by_row(engine, tokens_BS1, positions_s):
    x_BS, y_BS = tokens_BS1[:, :-1], tokens_BS1[:, 1:]
    logits_BsV = engine(x_BS[:, positions_s], positions_s)
    rows = zip(logits_BsV, y_BS[:, positions_s], strict=True)
    return (
        torch.stack([F.cross_entropy(logits, labels, reduction="sum") for logits, labels in rows]).sum() / y_BS.numel()
    )


# ------------------------------------------------------------------------------------ heads for tokens
class ByChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        pieces = all_to_all(torch.stack(x_BNsH.chunk(group.size(), dim=1)), group)
        return torch.cat(list(pieces), dim=2)

    @staticmethod
    def backward(ctx, grad_BnSH):
        pieces = all_to_all(torch.stack(grad_BnSH.chunk(ctx.group.size(), dim=2)), ctx.group)
        return torch.cat(list(pieces), dim=1), None


class ByReshape(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BNsH, group):
        (B, N, s, H), c, ctx.group = x_BNsH.shape, group.size(), group
        x = x_BNsH.reshape(B, c, N // c, s, H).permute(1, 0, 2, 3, 4).contiguous()
        return all_to_all(x, group).permute(1, 2, 0, 3, 4).reshape(B, N // c, c * s, H)

    @staticmethod
    def backward(ctx, grad):
        (B, n, S, H), c = grad.shape, ctx.group.size()
        x = grad.reshape(B, n, c, S // c, H).permute(2, 0, 1, 3, 4).contiguous()
        return all_to_all(x, ctx.group).permute(1, 0, 2, 3, 4).reshape(B, n * c, S // c, H), None


class ByRowLists(torch.autograd.Function):
    """The same bytes, with the sizes of the pieces said."""

    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        heads = x_BNsH.transpose(0, 1).contiguous()
        each = [len(heads) // group.size()] * group.size()
        got = all_to_all(heads, group, each, each).unflatten(0, (group.size(), -1))
        return torch.cat(list(got), dim=2).transpose(0, 1)

    @staticmethod
    def backward(ctx, grad_BnSH):
        return ByChunks.backward(ctx, grad_BnSH)


# ------------------------------------------------------------------------------------ ring attention
def part_of(ring, key_rank, s):
    part = tile("zigzag" if ring.zigzag else "contiguous", s, ring.rank, key_rank)
    return part and (part.queries, part.keys, part.causal)


class MergesAtTheEnd:
    """All parts are kept, and merged once; keys and values travel in two messages; gradients go all the way round."""

    def forward(self, q, k, v, ring):
        parts = []
        for step in range(ring.size):
            if step < ring.size - 1:
                coming = [ring.pass_on(x) for x in (k, v)]
            part = part_of(ring, (ring.rank - step) % ring.size, q.shape[2])
            if part:
                rows, columns, causal = part
                out = torch.zeros_like(q)
                lse = q.new_full(q.shape[:3], -1e30)
                out[:, :, rows], lse[:, :, rows] = ring.tile(q[:, :, rows], k[:, :, columns], v[:, :, columns], causal)
                parts.append((out, lse))
            if step < ring.size - 1:
                k, v = (arrived() for arrived in coming)
        return by_softmax(parts)

    def backward(self, grad, q, k, v, out, lse, ring):
        dq, sums = torch.zeros_like(q), None
        for step in range(ring.size):
            if step < ring.size - 1:
                coming = [ring.pass_on(x) for x in (k, v)]
            shares = [torch.zeros_like(x) for x in (k, v)]
            part = part_of(ring, (ring.rank - step) % ring.size, q.shape[2])
            if part:
                rows, columns, causal = part
                mine = (grad[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns])
                new = ring.tile_backward(*mine, out[:, :, rows], lse[:, :, rows], causal)
                dq[:, :, rows] += new[0]
                for share, more in zip(shares, new[1:], strict=True):
                    share[:, :, columns] += more
            if sums is not None:
                shares = [share + arrived() for share, arrived in zip(shares, sums, strict=True)]
            sums = [ring.pass_on(share) for share in shares]
            if step < ring.size - 1:
                k, v = (arrived() for arrived in coming)
        return dq, *(arrived() for arrived in sums)


class SmallerTiles:
    """Recursion in place of a loop; more tiles than needed, with the same pairs."""

    def forward(self, q, k, v, ring):
        return self.go_on(q, torch.stack([k, v]), ring, 0, None)

    def go_on(self, q, kv, ring, step, so_far):
        arrived = ring.pass_on(kv) if step + 1 < ring.size else None
        part = part_of(ring, (ring.rank - step) % ring.size, q.shape[2])
        if part:
            rows, columns, causal = part
            for piece in [columns] if causal else self.halves(columns):
                new = ring.tile(q[:, :, rows], *kv[..., piece, :], causal)
                so_far = new if so_far is None else self.merged(so_far, new, rows)
        return so_far if arrived is None else self.go_on(q, arrived(), ring, step + 1, so_far)

    def halves(self, columns):
        middle = (columns.start + columns.stop + 1) // 2
        return [
            piece for piece in (slice(columns.start, middle), slice(middle, columns.stop)) if piece.start < piece.stop
        ]

    def merged(self, so_far, new, rows):
        out, lse = (x.clone() for x in so_far)
        out[:, :, rows], lse[:, :, rows] = by_recursion([(out[:, :, rows], lse[:, :, rows]), new])
        return out, lse

    def backward(self, *args):
        return MergesAtTheEnd().backward(*args)


class AsInTheLesson:
    """The gradients go as in the lesson, the forward pass in smaller tiles."""

    forward = SmallerTiles.forward
    go_on, halves, merged = SmallerTiles.go_on, SmallerTiles.halves, SmallerTiles.merged

    def backward(self, grad, q, k, v, out, lse, ring):
        dq, kv, arrived, own = torch.zeros_like(q), torch.stack([k, v]), None, None
        for step in range(ring.size):
            coming = ring.pass_on(kv) if step < ring.size - 1 else None
            share, part = torch.zeros_like(kv), part_of(ring, (ring.rank - step) % ring.size, q.shape[2])
            if part:
                rows, columns, causal = part
                mine = (grad[:, :, rows], q[:, :, rows], *kv[..., columns, :], out[:, :, rows], lse[:, :, rows])
                more, dk, dv = ring.tile_backward(*mine, causal)
                dq[:, :, rows] = dq[:, :, rows] + more
                share[0][:, :, columns], share[1][:, :, columns] = dk, dv
            if step == 0:
                own = share
            else:
                arrived = ring.pass_on(share + arrived() if arrived else share)
            kv = coming() if coming else kv
        dk, dv = own + arrived() if arrived else own
        return dq, dk, dv


RIGHT = {
    "check_positions": (by_membership, as_a_tensor, by_reshape),
    "check_merge": (total_first, by_softmax, by_recursion),
    "check_tile": (by_package, by_sign, with_open_slices),
    "check_bytes": (bytes_by_parts, bytes_as_float, bytes_in_a_loop),
    "check_loss": (loss_by_logsumexp, loss_by_share, loss_row_by_row),
    "check_heads_for_tokens": (ByChunks, ByReshape, ByRowLists),
    "check_ring": (MergesAtTheEnd, SmallerTiles, AsInTheLesson),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"), sampled([(check, answer) for check, answers in RIGHT.items() for answer in answers], 8)
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    getattr(ch07, check)(answer)
    assert f"{check}: passed" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("answer", RIGHT["check_ring"])
def test_every_right_ring_passes_on_two_and_on_four_ranks(answer, seed):
    ch07.check_ring(answer, seed=seed)


class StopsPassingOn(AsInTheLesson):
    """Rank 0 of contiguous tokens sees no other block, and passes none on."""

    def forward(self, q, k, v, ring):
        if ring.rank == 0:
            return ring.tile(q, k, v, True)
        return AsInTheLesson.forward(self, q, k, v, ring)


@pytest.mark.exhaustive
def test_a_rank_that_stops_passing_on_in_forward_is_told_of_forward():
    with pytest.raises(CheckFailed, match="time limit") as told:
        run_ranks(ring_build._build, 2, StopsPassingOn, 0, 8, False, timeout=8.0)
    assert " in go_on" in str(told.value)
    assert " in backward" not in str(told.value)
