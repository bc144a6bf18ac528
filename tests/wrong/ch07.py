"""Wrong answers of chapter 07, each with a part of the message that it must get."""

import torch
from torch.nn import functional as F

from course_lib.checks.ch07 import (
    check_bytes,
    check_heads_for_tokens,
    check_loss,
    check_merge,
    check_positions,
    check_ring,
    check_tile,
)
from course_lib.comm import all_gather, all_reduce, all_to_all
from course_lib.layout import tile
from course_lib.parallel.positions import positions


# ------------------------------------------------------------------------------------ 1. positions
def _right(sequence_sharding, S, ranks, rank):
    return positions(sequence_sharding, S, ranks, rank).tolist()


def second_chunk_not_from_the_end(sequence_sharding, S, ranks, rank):
    chunks = torch.arange(S).chunk(2 * ranks)
    zigzag = torch.cat([chunks[rank], chunks[ranks + rank]]).tolist()
    return zigzag if sequence_sharding == "zigzag" else _right(sequence_sharding, S, ranks, rank)


def zigzag_of_neighbours(sequence_sharding, S, ranks, rank):
    return _right("contiguous" if sequence_sharding == "zigzag" else sequence_sharding, S, ranks, rank)


def late_chunk_first(sequence_sharding, S, ranks, rank):
    right = _right(sequence_sharding, S, ranks, rank)
    return [*right[len(right) // 2 :], *right[: len(right) // 2]] if sequence_sharding == "zigzag" else right


def stripes_in_one_piece(sequence_sharding, S, ranks, rank):
    return _right("contiguous" if sequence_sharding == "striped" else sequence_sharding, S, ranks, rank)


def contiguous_dealt_out(sequence_sharding, S, ranks, rank):
    return _right("striped" if sequence_sharding == "contiguous" else sequence_sharding, S, ranks, rank)


# ------------------------------------------------------------------------------------ 2. merge
def _lse(parts):
    return torch.stack([lse for _, lse in parts]).logsumexp(0)


def _weighted(parts):
    lse = _lse(parts)
    return sum(out * (part_lse - lse).exp().unsqueeze(-1) for out, part_lse in parts)


def averages_outputs(parts):
    return sum(out for out, _ in parts) / len(parts), _lse(parts)


def adds_outputs(parts):
    return sum(out for out, _ in parts), _lse(parts)


def weighs_by_lse(parts):
    total = sum(lse for _, lse in parts)
    return sum(out * (lse / total).unsqueeze(-1) for out, lse in parts), _lse(parts)


def overflows(parts):
    total = sum(lse.exp() for _, lse in parts)
    return sum(out * (lse.exp() / total).unsqueeze(-1) for out, lse in parts), _lse(parts)


def old_part_not_shrunk(parts):
    out, lse = parts[0]
    for part, part_lse in parts[1:]:
        lse = torch.logaddexp(lse, part_lse)
        out = out + part * (part_lse - lse).exp().unsqueeze(-1)
    return out, lse


def adds_lse(parts):
    return _weighted(parts), sum(lse for _, lse in parts)


def largest_lse(parts):
    return _weighted(parts), torch.stack([lse for _, lse in parts]).max(0).values


def last_lse(parts):
    return _weighted(parts), parts[-1][1]


def no_logarithm(parts):
    return _weighted(parts), _lse(parts).exp()


# ------------------------------------------------------------------------------------ 3. a step's tile
def _tile(s, query_rank, key_rank, sequence_sharding="zigzag"):
    part = tile(sequence_sharding, s, query_rank, key_rank)
    return (part.queries, part.keys, part.causal) if part else (slice(0, 0), slice(0, 0), False)


def as_if_contiguous(s, query_rank, key_rank):
    return _tile(s, query_rank, key_rank, "contiguous" if key_rank > query_rank else "zigzag")


def no_diagonal(s, query_rank, key_rank):
    return (slice(0, s), slice(0, s), False) if query_rank == key_rank else _tile(s, query_rank, key_rank)


def sees_all(s, query_rank, key_rank):
    return (slice(0, s), slice(0, s), False) if query_rank != key_rank else _tile(s, query_rank, key_rank)


def triangles_everywhere(s, query_rank, key_rank):
    return slice(0, s), slice(0, s), True


def half_of_the_keys_of_later_ranks(s, query_rank, key_rank):
    later = key_rank > query_rank
    return (slice(0, s), slice(s // 2, s), False) if later else _tile(s, query_rank, key_rank)


def late_keys_of_earlier_ranks(s, query_rank, key_rank):
    earlier = key_rank < query_rank
    return (slice(0, s), slice(s // 2, s), False) if earlier else _tile(s, query_rank, key_rank)


def one_query_short(s, query_rank, key_rank):
    later = key_rank > query_rank
    return (slice(s // 2 + 1, s), slice(0, s), False) if later else _tile(s, query_rank, key_rank)


def triangle_of_an_earlier_rank(s, query_rank, key_rank):
    """Slices are right; `causal` of an earlier rank is not."""
    queries, keys, causal = _tile(s, query_rank, key_rank)
    return queries, keys, causal or key_rank < query_rank


# ------------------------------------------------------------------------------------ 4. bytes
def _ring(c, B, s, heads, H, bytes_a_number, hops=None):
    return (c - 1 if hops is None else hops) * 2 * B * s * heads * H * bytes_a_number


def _ulysses(c, B, s, heads, H, itemsize, ways=2):
    return ways * heads * B * s * H * itemsize * (c - 1) // c


def all_heads_travel(method, c, B, s, N, K, H, itemsize):
    return _ring(c, B, s, N, H, 2 * itemsize + 4) if method == "ring" else _ulysses(c, B, s, 2 * N + 2 * K, H, itemsize)


def c_hops(method, c, B, s, N, K, H, itemsize):
    return _ring(c, B, s, K, H, 2 * itemsize + 4, hops=c)


def gradient_goes_all_the_way(method, c, B, s, N, K, H, itemsize):
    return _ring(c, B, s, K, H, 2 * itemsize) + _ring(c, B, s, K, H, 4, hops=c)


def c_hops_backward(method, c, B, s, N, K, H, itemsize):
    return _ring(c, B, s, K, H, itemsize) + _ring(c, B, s, K, H, itemsize + 4, hops=c)


def keys_kept(method, c, B, s, N, K, H, itemsize):
    return _ring(c, B, s, K, H, itemsize + 4)


def gradients_in_16_bits(method, c, B, s, N, K, H, itemsize):
    return _ring(c, B, s, K, H, 3 * itemsize)


def keys_alone(method, c, B, s, N, K, H, itemsize):
    return _ring(c, B, s, K, H, 2 * itemsize + 4) // 2


def ulysses_sends_all(method, c, B, s, N, K, H, itemsize):
    right = _ring(c, B, s, K, H, 2 * itemsize + 4)
    return right if method == "ring" else 2 * (2 * N + 2 * K) * B * s * H * itemsize


def ulysses_without_the_output(method, c, B, s, N, K, H, itemsize):
    right = _ring(c, B, s, K, H, 2 * itemsize + 4)
    return right if method == "ring" else _ulysses(c, B, s, N + 2 * K, H, itemsize)


def ulysses_of_n_heads(method, c, B, s, N, K, H, itemsize):
    right = _ring(c, B, s, K, H, 2 * itemsize + 4)
    return right if method == "ring" else _ulysses(c, B, s, 4 * N, H, itemsize)


def ulysses_of_keys_alone(method, c, B, s, N, K, H, itemsize):
    right = _ring(c, B, s, K, H, 2 * itemsize + 4)
    return right if method == "ring" else _ulysses(c, B, s, 2 * K, H, itemsize)


def forward_only(method, c, B, s, N, K, H, itemsize):
    right = _ring(c, B, s, K, H, 2 * itemsize + 4)
    return right if method == "ring" else _ulysses(c, B, s, 2 * N + 2 * K, H, itemsize, ways=1)


# ------------------------------------------------------------------------------------ 5. the loss of a shard
def _loss(engine, tokens_BS1, at_s, labels_Bs, positions_s, divisor=None):
    logits_BsV = engine(tokens_BS1[:, :-1][:, at_s], positions_s)
    total = F.cross_entropy(logits_BsV.flatten(0, 1), labels_Bs.flatten(), reduction="sum")
    return total / (divisor or tokens_BS1[:, 1:].numel())


def mean_of_mine(engine, tokens_BS1, positions_s):
    y_Bs = tokens_BS1[:, 1:][:, positions_s]
    return _loss(engine, tokens_BS1, positions_s, y_Bs, positions_s, y_Bs.numel()).float()  # named in any dtype


def a_sum(engine, tokens_BS1, positions_s):
    return _loss(engine, tokens_BS1, positions_s, tokens_BS1[:, 1:][:, positions_s], positions_s, 1)


def by_one_row(engine, tokens_BS1, positions_s):
    S = tokens_BS1.shape[1] - 1
    return _loss(engine, tokens_BS1, positions_s, tokens_BS1[:, 1:][:, positions_s], positions_s, S)


def labels_after_the_cut(engine, tokens_BS1, positions_s):
    x_Bs, y_Bs = tokens_BS1[:, :-1][:, positions_s], tokens_BS1[:, 1:][:, positions_s]
    return _loss(engine, tokens_BS1, positions_s, torch.cat([x_Bs[:, 1:], y_Bs[:, -1:]], 1), positions_s)


def labels_rolled_after_the_cut(engine, tokens_BS1, positions_s):
    x_Bs = tokens_BS1[:, :-1][:, positions_s]
    return _loss(engine, tokens_BS1, positions_s, x_Bs.roll(-1, 1), positions_s).float()


def no_label_for_my_last(engine, tokens_BS1, positions_s):
    x_Bs = tokens_BS1[:, :-1][:, positions_s]
    labels_Bs = F.pad(x_Bs[:, 1:], (0, 1), value=-100)
    return _loss(engine, tokens_BS1, positions_s, labels_Bs, positions_s)


def labels_filled_with_zeros(engine, tokens_BS1, positions_s):
    labels_Bs = F.pad(tokens_BS1[:, :-1][:, positions_s][:, 1:], (0, 1))
    return _loss(engine, tokens_BS1, positions_s, labels_Bs, positions_s)


def cut_then_shifted(engine, tokens_BS1, positions_s):
    mine_Bs = tokens_BS1[:, positions_s]
    logits_BsV = engine(mine_Bs[:, :-1], positions_s[:-1])
    losses = F.cross_entropy(logits_BsV.flatten(0, 1), mine_Bs[:, 1:].flatten(), reduction="sum")
    return losses / tokens_BS1[:, 1:].numel()


def labels_are_inputs(engine, tokens_BS1, positions_s):
    return _loss(engine, tokens_BS1, positions_s, tokens_BS1[:, :-1][:, positions_s], positions_s)


def positions_from_zero(engine, tokens_BS1, positions_s):
    from_zero_s = torch.arange(len(positions_s))
    return _loss(engine, tokens_BS1, positions_s, tokens_BS1[:, 1:][:, positions_s], from_zero_s)


def detached(engine, tokens_BS1, positions_s):
    return _loss(engine, tokens_BS1, positions_s, tokens_BS1[:, 1:][:, positions_s], positions_s).detach()


# ------------------------------------------------------------------------------------ 6. tokens for heads
def _in(x_BNsH, group):
    pieces = x_BNsH.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
    return all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)


def _back(grad_BnSH, group):
    pieces = grad_BnSH.unflatten(2, (group.size(), -1)).movedim(2, 0).contiguous()
    return all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


class Right(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        return _in(x_BNsH, group)

    @staticmethod
    def backward(ctx, grad_BnSH):
        return _back(grad_BnSH, ctx.group), None


class DealsTokensOut(Right):
    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        pieces = x_BNsH.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
        return all_to_all(pieces, group).movedim(0, 3).flatten(2, 3)


class DealsHeadsOut(Right):
    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        pieces = x_BNsH.unflatten(1, (-1, group.size())).movedim(2, 0).contiguous()
        return all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)


class HeadsAndRowsMixed(Right):
    """Reshaped where a dimension must move: heads of other rows."""

    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group, (B, N, s, H) = group, x_BNsH.shape
        pieces = x_BNsH.reshape(group.size(), B, N // group.size(), s, H)
        return all_to_all(pieces.contiguous(), group).movedim(0, 2).flatten(2, 3)


class ReshapedAfterwards(Right):
    """The right pieces, put together without moving the dimension of ranks."""

    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        out = _in(x_BNsH, group)
        pieces = out.unflatten(2, (group.size(), -1)).movedim(2, 0)
        return pieces.reshape(out.shape)


class NothingExchanged(Right):
    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        return x_BNsH.clone()


class AlongHeads(Right):
    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        pieces = x_BNsH.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
        return all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


class Averages(Right):
    @staticmethod
    def backward(ctx, grad_BnSH):
        return _back(grad_BnSH, ctx.group) / ctx.group.size(), None


class NoGradient(Right):
    @staticmethod
    def backward(ctx, grad_BnSH):
        return None, None


class GathersEverything(Right):
    @staticmethod
    def forward(ctx, x_BNsH, group):
        ctx.group = group
        whole = all_gather(x_BNsH.unsqueeze(0).contiguous(), group).movedim(0, 2).flatten(2, 3)
        return whole.chunk(group.size(), dim=1)[group.rank()].contiguous()


class SumsAgain(Right):
    @staticmethod
    def backward(ctx, grad_BnSH):
        return all_reduce(_back(grad_BnSH, ctx.group).contiguous(), ctx.group), None


# ------------------------------------------------------------------------------------ 7. ring attention
def seen_part(ring, key_rank, s):
    sharding = "zigzag" if ring.zigzag else "contiguous"
    part = tile(sharding, s, ring.rank, key_rank)
    return part and (part.queries, part.keys, part.causal)


class Ring:
    """Right; each wrong answer changes one method."""

    part = staticmethod(seen_part)

    def blocks(self, kv, ring):
        for step in range(ring.size):
            arrived = ring.pass_on(kv) if step < ring.size - 1 else None
            yield (ring.rank - step) % ring.size, kv
            kv = arrived() if arrived else None

    def shares(self, lse, new_lse):
        both = torch.logaddexp(lse, new_lse)
        return (lse - both).exp().unsqueeze(-1), (new_lse - both).exp().unsqueeze(-1), both

    def forward(self, q, k, v, ring):
        out = lse = None
        for key_rank, kv in self.blocks(torch.stack([k, v]), ring):
            part = self.part(ring, key_rank, q.shape[2])
            if part is None:
                continue
            rows, columns, causal = part
            new, new_lse = ring.tile(q[:, :, rows], *kv[..., columns, :], causal)
            if out is None:
                out, lse = new, new_lse
                continue
            old, added, both = self.shares(lse[:, :, rows], new_lse)
            out[:, :, rows] = old * out[:, :, rows] + added * new
            lse[:, :, rows] = both
        return out, lse

    def final(self, ring, rows, columns, q, keys, out, lse):
        return out[:, :, rows], lse[:, :, rows]

    def backward(self, grad, q, k, v, out, lse, ring):
        dq, own, arrived = torch.zeros_like(q), None, None
        for key_rank, kv in self.blocks(torch.stack([k, v]), ring):
            dkv, part = torch.zeros_like(kv), self.part(ring, key_rank, q.shape[2])
            if part is not None:
                rows, columns, causal = part
                keys = kv[..., columns, :]
                final = self.final(ring, rows, columns, q, keys, out, lse)
                new_dq, *new_dkv = ring.tile_backward(grad[:, :, rows], q[:, :, rows], *keys, *final, causal)
                dq[:, :, rows] += new_dq
                dkv[..., columns, :] = torch.stack(new_dkv)
            if own is None:
                own = dkv
                continue
            arrived = ring.pass_on(dkv if arrived is None else dkv + arrived())
        return dq, *self.home(own, arrived)

    def home(self, own, arrived):
        return own if arrived is None else own + arrived()


class OwnBlockAlone(Ring):
    def forward(self, q, k, v, ring):
        return ring.tile(q, k, v, True)


class ForwardAlone:
    forward, blocks, part, shares = Ring.forward, Ring.blocks, staticmethod(seen_part), Ring.shares


class AddsUnshrunk(Ring):
    def shares(self, lse, new_lse):
        old, added, both = super().shares(lse, new_lse)
        return torch.ones_like(old), added, both


class SharesStayAway(Ring):
    """The gradient of a block never comes back to its owner."""

    def home(self, own, arrived):
        arrived()
        return own


class EachTilesOwnSum(Ring):
    def final(self, ring, rows, columns, q, keys, out, lse):
        from course_lib.parallel.tiles import standard_forward

        own_out, own_lse = standard_forward(q[:, :, rows], *keys, False)
        return own_out, own_lse


class SendsAfterwards(Ring):
    def blocks(self, kv, ring):
        for step in range(ring.size):
            yield (ring.rank - step) % ring.size, kv
            if step < ring.size - 1:
                kv = ring.pass_on(kv)()


class GoesAroundTwice(Ring):
    """Right, but the blocks go around once more before the ring that computes."""

    def forward(self, q, k, v, ring):
        kv = torch.stack([k, v])
        for _ in range(ring.size):
            kv = ring.pass_on(kv)()
        return super().forward(q, *kv, ring)


class AlwaysContiguous(Ring):
    @staticmethod
    def part(ring, key_rank, s):
        part = tile("contiguous", s, ring.rank, key_rank)
        return part and (part.queries, part.keys, part.causal)


class WholeTiles(Ring):
    """Right with zig-zag too, but the kernel computes what the merge then throws away."""

    def forward(self, q, k, v, ring):
        ring.tile(q, k, v, False)
        return super().forward(q, k, v, ring)


WRONG = {
    "MyRing": {
        "check": check_ring,
        "answers": [
            (ForwardAlone, "there is no method backward yet"),
            (OwnBlockAlone, "each saw its own keys alone"),
            (AddsUnshrunk, "does the old output shrink too"),
            (EachTilesOwnSum, "does tile_backward get the out and lse over all keys"),
            (SharesStayAway, "come back to its owner"),
            (GoesAroundTwice, "need no more than size - 1 ring steps"),
            (SendsAfterwards, "step 3 (overlap)"),
            (AlwaysContiguous, "step 4 (zig-zag): out is wrong"),
            (WholeTiles, "of the ideal work"),
        ],
    },
    "my_positions": {
        "check": check_positions,
        "answers": [
            (second_chunk_not_from_the_end, "counted from the end"),
            (zigzag_of_neighbours, "two neighbouring chunks"),
            (late_chunk_first, "positions ascend"),
            (stripes_in_one_piece, "deals tokens out one by one"),
            (contiguous_dealt_out, "contiguous tokens are neighbours"),
        ],
    },
    "my_merge": {
        "check": check_merge,
        "answers": [
            (averages_outputs, "the outputs were averaged"),
            (adds_outputs, "the outputs were added"),
            (weighs_by_lse, "weighted by lse itself"),
            (overflows, "exp of a large score overflows"),
            (old_part_not_shrunk, "must shrink as well"),
            (adds_lse, "log-sum-exps were added"),
            (largest_lse, "the largest log-sum-exp"),
            (last_lse, "the last part's log-sum-exp"),
            (no_logarithm, "its logarithm is asked for"),
        ],
    },
    "my_tile": {
        "check": check_tile,
        "answers": [
            (as_if_contiguous, "as if tokens were contiguous"),
            (no_diagonal, "my own keys were seen whole"),
            (sees_all, "all was seen"),
            (triangles_everywhere, "the lower triangle is of my own keys alone"),
            (half_of_the_keys_of_later_ranks, "are mixed up"),
            (late_keys_of_earlier_ranks, "the earlier rank's late chunk"),
            (one_query_short, "pairs are seen that the mask forbids"),
            (triangle_of_an_earlier_rank, "causal must be False"),
        ],
    },
    "my_bytes": {
        "check": check_bytes,
        "answers": [
            (all_heads_travel, "copies are made where they arrive"),
            (c_hops, "a block makes c - 1 ring steps"),
            (gradient_goes_all_the_way, "a gradient is home after c - 1 ring steps"),
            (c_hops_backward, "backward has c - 1 ring steps"),
            (keys_kept, "go around in backward once more"),
            (gradients_in_16_bits, "gradients travel in FP32"),
            (keys_alone, "that is 2 tensors"),
            (ulysses_sends_all, "keeps one piece of c itself"),
            (ulysses_without_the_output, "the output goes back as well"),
            (ulysses_of_n_heads, "keys and values have K heads"),
            (ulysses_of_keys_alone, "queries and the output travel too"),
            (forward_only, "backward is asked for as well"),
        ],
    },
    "my_loss": {
        "check": check_loss,
        "answers": [
            (mean_of_mine, "divided by its own number of tokens"),
            (a_sum, "divided by no number of tokens"),
            (by_one_row, "there are B rows"),
            (labels_after_the_cut, "labels were shifted after the cut"),
            (labels_rolled_after_the_cut, "labels were rolled after the cut"),
            (no_label_for_my_last, "my last token has no label"),
            (labels_filled_with_zeros, "labels were shifted, and filled with 0, after the cut"),
            (cut_then_shifted, "cut first, shifted then"),
            (labels_are_inputs, "the labels are the inputs themselves"),
            (positions_from_zero, "positions were counted from 0"),
            (detached, "no gradient arrived at the model"),
        ],
    },
    "MyTokensForHeads": {
        "check": check_heads_for_tokens,
        "answers": [
            (DealsTokensOut, "tokens of the ranks are dealt out"),
            (DealsHeadsOut, "heads were dealt out one by one"),
            (NothingExchanged, "nothing was exchanged"),
            (AlongHeads, "side by side along heads"),
            (HeadsAndRowsMixed, "which dimension is cut into pieces"),
            (ReshapedAfterwards, "the right elements in wrong places"),
            (Averages, "averaged over ranks"),
            (NoGradient, "no gradient arrived at x_BNsH"),
            (GathersEverything, "bytes forward, and"),
            (SumsAgain, "gradient of x_BNsH is wrong"),
        ],
    },
}
