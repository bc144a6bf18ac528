"""Ulysses: attention over a whole sequence of which each rank has some tokens, by exchanging tokens for heads.

    before      every head of my tokens         q_BNsH
    all-to-all  my heads of every token         q_BnSH       n = N / cp: heads are independent, so the core is any core
    attention                                   out_BnSH
    all-to-all  every head of my tokens again   out_BNsH

Tokens are put into the sequence's order on arrival, so the causal mask is the usual one whatever the sequence sharding,
and work is equal on all ranks. The limit is the number of heads: each rank needs whole ones, of queries and of keys.

Beyond it, both methods together on a mesh: Ulysses inside, among neighbours, and a ring outside. The inner ranks share
the tokens that one rank of the ring would have; after the first all-to-all each has all of these for its heads, and
the ring runs among the ranks that have the same heads.

On the wire, a layer: 4 all-to-alls forward (q, k, v; out), and backward the 4 of their gradients. Recomputation repeats
those of q, k and v, and that of out where something behind it in the block is recomputed as well.

Source   Jacobs et al. 2023 (arXiv:2309.14509); both together: Fang and Zhao 2024 (arXiv:2405.07719), USP
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.conjugate import Group, InFlight, check_group
from course_lib.layout.partition import check_ulysses
from course_lib.layout.sequence_sharding import check_context
from course_lib.model.attention import fused_attention
from course_lib.parallel.positions import order, positions

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses_attention(
    q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, group: Group, sequence_sharding: str, core: Core = fused_attention
) -> Tensor:
    """Causal attention of my tokens to the whole sequence: tokens for heads, `core`, heads for tokens.

    core: what runs on whole heads, such as fused_attention, or a ring over another group.
    Shapes   q_BNsH, k_BKsH, v_BKsH -> out_BNsH
    Bytes    sent per rank: (cp - 1) / cp * (2 N + 2 K) B s H * itemsize forward, and again backward
    Raises   ValueError if heads do not divide by the group's size, before anything is sent
    """
    size = check_group(group, "ulysses_attention").size()
    check_ulysses(q_BNsH.shape[1], k_BKsH.shape[1], size)
    check_context(q_BNsH.shape[2] * size, size, sequence_sharding)
    order_S = order_on(sequence_sharding, q_BNsH.shape[2] * size, size, q_BNsH.device)
    heads = _TokensForHeads.apply(group, order_S, q_BNsH, k_BKsH, v_BKsH)
    return _HeadsForTokens.apply(group, order_S, core(*heads))


def ulysses_core(group: Group, sequence_sharding: str, core: Core = fused_attention) -> Core:
    """An attention core, for a block's `attention.core`."""

    def exchanged(q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, causal: bool = True, dropout: float = 0.0) -> Tensor:
        on_whole_heads = partial(core, causal=causal, dropout=dropout)
        return ulysses_attention(q_BNsH, k_BKsH, v_BKsH, group, sequence_sharding, on_whole_heads)

    return exchanged


def inner_positions(sequence_sharding: str, seq_len: int, inner: tuple[int, int], outer: tuple[int, int]) -> Tensor:
    """My tokens on a mesh with Ulysses inside and a ring outside; each pair is (size, my rank).

    The ring's sequence sharding counts; what one of its ranks has is cut among the inner ranks in order.
    Shapes   -> positions_s              (s = seq_len / inner size / outer size)
    Raises   ValueError if the sequence does not divide so
    """
    ring_positions = positions(sequence_sharding, seq_len, *outer)
    if len(ring_positions) % inner[0]:
        parts = (2 if sequence_sharding == "zigzag" else 1) * inner[0] * outer[0]
        raise ValueError(
            f"seq_len ({seq_len}) over a ring of {outer[0]} leaves {len(ring_positions)} tokens, which Ulysses over "
            f"{inner[0]} does not divide; choose a multiple of {parts}"
        )
    return ring_positions.chunk(inner[0])[inner[1]]


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, order_S, *tensors_BNsH):
        ctx.group, ctx.order_S = group, order_S
        return finish([start_tokens_for_heads(x_BNsH, group, order_S) for x_BNsH in tensors_BNsH])

    @staticmethod
    def backward(ctx, *grads_BnSH):
        return None, None, *finish([start_heads_for_tokens(grad, ctx.group, ctx.order_S) for grad in grads_BnSH])


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, order_S, x_BnSH):
        ctx.group, ctx.order_S = group, order_S
        return start_heads_for_tokens(x_BnSH, group, order_S).wait()

    @staticmethod
    def backward(ctx, grad_BNsH):
        return None, None, start_tokens_for_heads(grad_BNsH, ctx.group, ctx.order_S).wait()


def start_tokens_for_heads(x_BNsH: Tensor, group: Group, order_S: Tensor | None) -> InFlight:
    """Starts to send each rank its heads of my tokens; gives my heads of all tokens, in the sequence's order."""
    pieces_PBnsH = x_BNsH.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()

    def in_order(received_PBnsH: Tensor) -> Tensor:
        x_BnSH = received_PBnsH.movedim(0, 2).flatten(2, 3)
        return x_BnSH if order_S is None else torch.empty_like(x_BnSH).index_copy_(2, order_S, x_BnSH)

    return start_all_to_all(pieces_PBnsH, group, in_order)


def start_heads_for_tokens(x_BnSH: Tensor, group: Group, order_S: Tensor | None) -> InFlight:
    """Starts to send each rank its tokens of my heads; gives all heads of my tokens."""
    x_BnSH = x_BnSH if order_S is None else x_BnSH.index_select(2, order_S)
    pieces_PBnsH = x_BnSH.unflatten(2, (group.size(), -1)).movedim(2, 0).contiguous()
    return start_all_to_all(pieces_PBnsH, group, lambda received_PBnsH: received_PBnsH.movedim(0, 1).flatten(1, 2))


def start_all_to_all(pieces: Tensor, group: Group, arrange: Callable[[Tensor], Tensor]) -> InFlight:
    """Starts to send piece j to rank j; gives what came, arranged."""
    received = torch.empty_like(pieces)
    work = dist.all_to_all_single(received, pieces, group=group, async_op=True)
    return InFlight(work, lambda: arrange(received))


def finish(in_flight: list[InFlight]) -> tuple[Tensor, ...]:
    """All of them were started before the first is waited for."""
    return tuple(each.wait() for each in in_flight)


@lru_cache(maxsize=8)
def order_on(sequence_sharding: str, seq_len: int, cp_size: int, device: torch.device) -> Tensor | None:
    """Where arriving tokens stand in the sequence; None if they arrive in order."""
    in_order = sequence_sharding == "contiguous" or cp_size == 1
    return None if in_order else order(sequence_sharding, seq_len, cp_size).to(device)
