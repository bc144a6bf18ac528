"""Ring attention: tiles against their written-out twin, merging, overlap, work done."""

import dataclasses
import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.launch import launch
from course_lib.layout import SEQUENCE_SHARDINGS, tile
from course_lib.measure import ByteMeter
from course_lib.minimal.ring_attention import attend
from course_lib.model import standard_attention
from course_lib.parallel import ring, tiles
from course_lib.parallel.positions import positions
from course_lib.parallel.ring import ring_attention
from course_lib.parallel.tiles import KERNELS, Tiling, merge

S, B, N, K, H = 16, 2, 4, 2, 8


def gathered_attention(q, k, v, group, sequence_sharding="zigzag", causal=True, kernel="fused"):
    return tiles.block_attention(q, k, v, ring.Gathered(group), Tiling(sequence_sharding, causal, kernel))


METHODS = {"ring": ring_attention, "all_gather": gathered_attention}


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def whole_inputs():
    """q, k, v and the gradient of the output, of all tokens; the same on every rank."""
    return [random(B, heads, S, H, seed=seed) for seed, heads in enumerate((N, K, K, N))]


# --- one tile


@pytest.mark.parametrize("value_dim", [H - 2, H, H + 2])  # latent attention's values are shorter than its keys
@pytest.mark.parametrize("causal", [True, False])
def test_the_fused_kernel_equals_its_twin_forward_and_backward_on_any_rows_and_columns(causal, value_dim):
    q, k, _, _ = whole_inputs()
    v, grad = random(B, K, S, value_dim, seed=2), random(B, N, S, value_dim, seed=3)
    lse = random(B, N, S, seed=9) + 4.0  # of whole rows, larger than of this tile alone
    for rows, columns in [(slice(0, 16), slice(0, 16)), (slice(8, 16), slice(0, 8)), (slice(1, 16), slice(0, 15))]:
        q_rows, grad_rows, k_columns, v_columns = q[:, :, rows], grad[:, :, rows], k[:, :, columns], v[:, :, columns]
        forward = [kernel.forward(q_rows, k_columns, v_columns, causal) for kernel in KERNELS.values()]
        out_rows = random(B, N, S, value_dim, seed=8)[:, :, rows]
        saved = (grad_rows, q_rows, k_columns, v_columns, out_rows, lse[:, :, rows])
        backward = [kernel.backward(*saved, causal) for kernel in KERNELS.values()]
        for fused, standard in [*zip(*forward, strict=True), *zip(*backward, strict=True)]:
            torch.testing.assert_close(fused, standard, rtol=0, atol=1e-13)


@pytest.mark.parametrize("cuts", [(8,), (3, 4, 15), tuple(range(1, 16))])
def test_parts_over_any_cut_of_the_keys_merge_to_the_softmax_over_all(cuts):
    q, k, v, _ = whole_inputs()
    k = k * 400  # scores of some thousands: exponentials would overflow
    pieces = zip(*(x.tensor_split(cuts, 2) for x in (k, v)), strict=True)
    (out, lse), *parts = [KERNELS["standard"].forward(q, *kv, False) for kv in pieces]
    lse = lse.unsqueeze(-1)
    for part, part_lse in parts:
        out, lse = merge(out, lse, part, part_lse.unsqueeze(-1))
    torch.testing.assert_close(out, standard_attention(q, k, v, causal=False), rtol=0, atol=1e-12)
    out, _ = attend(q, k, v, torch.ones(S, S).tril() == 1)  # the lesson's mask is below any score
    torch.testing.assert_close(out, standard_attention(q, k, v), rtol=0, atol=1e-12)


# --- real ranks


def largest_difference(method, sequence_sharding, causal, kernel):
    """From attention in one process: of my tokens' output and gradients."""
    group, inputs = dist.group.WORLD, whole_inputs()
    *whole, grad = [x.clone().requires_grad_() for x in inputs]
    expected = standard_attention(*whole, causal)
    expected.backward(grad.detach())
    where = positions(sequence_sharding, S, group.size(), group.rank())
    mine = [x[:, :, where].clone().requires_grad_() for x in inputs[:3]]
    out = METHODS[method](*mine, group, sequence_sharding, causal, kernel=kernel)
    out.backward(inputs[3][:, :, where])
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, whole, strict=True))]
    return max((a - b[:, :, where]).abs().max().item() for a, b in pairs), out.detach()


def dropped(exchange, sequence_sharding, kernel):
    """With dropout: distance from one process that is given the masks of all ranks, and the share that is kept."""
    group, inputs = dist.group.WORLD, whole_inputs()
    where = [positions(sequence_sharding, S, group.size(), rank) for rank in range(group.size())]
    tiling, mine = Tiling(sequence_sharding, kernel=kernel, dropout=0.3, seed=1000 * group.rank()), where[group.rank()]
    q, k, v = (x[:, :, mine].clone().requires_grad_() for x in inputs[:3])
    out = tiles.block_attention(q, k, v, exchange(group), tiling)
    out.backward(inputs[3][:, :, mine])
    keep_BNsS = torch.zeros(B, N, len(mine), S, dtype=torch.float64)
    for key_rank, keys in enumerate(where):
        if (part := tiling.tile(q, group.rank(), key_rank)) is not None:
            rows, columns = torch.arange(len(mine))[part.queries], keys[part.keys]
            drawn = tiling.keep(q[:, :, part.queries], k[:, :, part.keys], key_rank)
            keep_BNsS[:, :, rows[:, None], columns] = drawn
    keep_BNSS = torch.empty(B, N, S, S, dtype=torch.float64)
    keep_BNSS[:, :, torch.cat(where)] = comm.all_gather(keep_BNsS.unsqueeze(0), group).movedim(0, 2).flatten(2, 3)
    *whole, grad = [x.clone().requires_grad_() for x in inputs]
    out_BNSH, _ = tiles.standard_forward(*whole, True, keep_BNSS)
    out_BNSH.backward(grad.detach())
    pairs = [(out, out_BNSH), *((a.grad, b.grad) for a, b in zip((q, k, v), whole, strict=True))]
    past = torch.ones(S, S, dtype=torch.bool).tril()
    kept = (keep_BNSS[..., past] > 0).double().mean().item()
    return max((a - b[:, :, mine]).abs().max().item() for a, b in pairs), kept


def all_dropped():
    found = [
        dropped(exchange, sequence_sharding, kernel)
        for exchange in (ring.Ring, ring.Gathered)
        for sequence_sharding in SEQUENCE_SHARDINGS
        for kernel in KERNELS
    ]
    drawn, count = Tiling.keep, itertools.count()

    def draw_anew(tiling, *args):
        return drawn(dataclasses.replace(tiling, seed=tiling.seed + next(count)), *args)

    with patch.object(Tiling, "keep", draw_anew):
        return found, dropped(ring.Ring, "zigzag", "fused")


def tiles_computed(sequence_sharding, causal=True):
    """Pairs of (query, key) that my kernel was given."""
    group, counted = dist.group.WORLD, []
    right = tiles.KERNELS["fused"].forward

    def counting(q, k, v, causal, keep):
        counted.append(q.shape[2] * (q.shape[2] + 1) // 2 if causal else q.shape[2] * k.shape[2])
        return right(q, k, v, causal, keep)

    where = positions(sequence_sharding, S, group.size(), group.rank())
    mine = [x[:, :, where] for x in whole_inputs()[:3]]
    with patch.dict(tiles.KERNELS, fused=dataclasses.replace(tiles.KERNELS["fused"], forward=counting)):
        ring_attention(*mine, group, sequence_sharding, causal)
    return len(counted), sum(counted)


def traced():
    """Spans of one attention, forward and backward."""
    group, trace = dist.group.WORLD, []
    where = positions("zigzag", S, group.size(), group.rank())
    q, k, v, grad = (x[:, :, where].requires_grad_() for x in whole_inputs())
    out = tiles.block_attention(q, k, v, ring.Ring(group, trace), tiles.Tiling("zigzag", trace=trace))
    forward = list(trace)
    out.backward(grad)
    return forward, trace[len(forward) :]


def wire(dtype, merge_dtype=None):
    group = dist.group.WORLD
    q, k, v, grad = (x[:, :, : S // group.size()].to(dtype).requires_grad_() for x in whole_inputs())
    sent = []
    with ByteMeter() as meter:
        out = ring_attention(q, k, v, group, merge_dtype=merge_dtype)
        sent.append(meter.sent_bytes)
        out.backward(grad)
    return sent[0], meter.sent_bytes - sent[0], out.dtype, k.grad.dtype


def in_ranks():
    apart, same = {}, []
    for sequence_sharding in SEQUENCE_SHARDINGS:
        for causal in (True, False):
            for kernel in KERNELS:
                outs = []
                for method in METHODS:
                    case = method, sequence_sharding, causal, kernel
                    apart[case], out = largest_difference(*case)
                    outs.append(out)
                same.append(torch.equal(*outs))
    return {
        "apart": apart,
        "same": same,
        "computed": {sequence_sharding: tiles_computed(sequence_sharding) for sequence_sharding in SEQUENCE_SHARDINGS},
        "computed in both directions": tiles_computed("zigzag", causal=False),
        "spans": traced(),
        "wire": [wire(torch.float32), wire(torch.bfloat16), wire(torch.bfloat16, torch.bfloat16), wire(torch.float64)],
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return launch(in_ranks, request.param)


def test_dropout_equals_one_process_that_is_given_the_masks_of_all_ranks():
    for found, forgets_its_masks in launch(all_dropped, 2):
        assert len(found) == 12 and all(apart < 1e-13 and 0.6 < kept < 0.8 for apart, kept in found)
        assert forgets_its_masks[0] > 1e-3


def test_output_and_gradients_equal_one_process_in_every_placement_by_ring_and_gathered(ranks):
    for rank in ranks:
        assert len(rank["apart"]) == 24 and max(rank["apart"].values()) < 1e-13, rank["apart"]
        assert all(rank["same"])  # both methods merge the same tiles in the same order


def test_only_what_the_mask_leaves_is_computed(ranks):
    cp, s = len(ranks), S // len(ranks)
    for sequence_sharding in SEQUENCE_SHARDINGS:
        of_ranks = [rank["computed"][sequence_sharding] for rank in ranks]
        assert sum(pairs for _, pairs in of_ranks) == S * (S + 1) // 2
        expected = [[tile(sequence_sharding, s, r, j) for j in range(cp)] for r in range(cp)]
        assert [calls for calls, _ in of_ranks] == [sum(part is not None for part in row) for row in expected]
    assert [calls for calls, _ in (rank["computed"]["contiguous"] for rank in ranks)] == list(range(1, cp + 1))
    assert len({pairs for _, pairs in (rank["computed"]["zigzag"] for rank in ranks)}) == 1
    assert all(rank["computed in both directions"] == (cp, S * S // cp) for rank in ranks)


def test_the_next_block_is_on_its_way_while_this_one_is_computed(ranks):
    cp = len(ranks)
    for r, rank in enumerate(ranks):
        for spans, kinds in zip(rank["spans"], (("k v",), ("k v", "dk dv")), strict=True):
            computing = {span.name.split()[-1]: span for span in spans if span.lane == "compute"}
            hops = [span for span in spans if span.lane == "communication"]
            assert len(computing) == cp and len(hops) == (cp - 1) * len(kinds)
            for step in range(cp):
                owner = (r - step) % cp
                during = computing[str(owner)]
                if step < cp - 1:  # the block goes on to my neighbour, and the next comes, while I compute with it
                    ring_step = next(span for span in hops if span.name == f"k v of {owner}")
                    assert ring_step.start_s <= during.start_s and ring_step.stop_s >= during.stop_s
                if "dk dv" in kinds and 1 <= step < cp - 1:  # gradients travel while the next block is computed
                    ring_step = next(span for span in hops if span.name == f"dk dv of {owner}")
                    following = computing[str((owner - 1) % cp)]
                    assert ring_step.start_s <= following.start_s and ring_step.stop_s >= following.stop_s


def test_bytes_are_of_key_value_heads_and_gradients_travel_in_the_dtype_of_the_sums(ranks):
    cp = len(ranks)
    numbers = (cp - 1) * 2 * B * K * (S // cp) * H  # K heads, not N
    assert numbers == {2: 512, 4: 768}[cp]
    in_float32, in_bfloat16, sums_in_bfloat16, in_float64 = ranks[0]["wire"]
    assert in_float32 == (4 * numbers, (4 + 4) * numbers, torch.float32, torch.float32)
    assert in_bfloat16 == (2 * numbers, (2 + 4) * numbers, torch.bfloat16, torch.bfloat16)
    assert sums_in_bfloat16 == (2 * numbers, (2 + 2) * numbers, torch.bfloat16, torch.bfloat16)
    assert in_float64 == (8 * numbers, (8 + 8) * numbers, torch.float64, torch.float64)
