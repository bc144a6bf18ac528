"""Context parallelism from scratch: every rank has the whole model and a part of each sequence.

Tokens meet in attention (ring.py, ulysses.py); everything else treats each by itself and stays as it is. Three things
must follow the cut: positions (RoPE's angles are those of a token's place in the whole sequence), labels (token t + 1
is token t's label wherever it went, so labels are made before the cut), and the loss (my tokens' sum over all tokens).
Each rank's gradient is then of its own tokens' losses; their sum, not their average, is the gradient.

On the wire, per micro-batch and layer, what the method says. Once a step an all-reduce of all gradients in
one message, and one of the loss, a number in float32 at least. To clip nothing more: every rank has the whole gradient.

Source   Liu et al. 2023 (arXiv:2310.01889); Llama Team 2024 (arXiv:2407.21783), section 3.3.2
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.comm.conjugate import Group, check_group
from course_lib.layout.check import FAMILIES
from course_lib.layout.partition import CP_METHODS
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, check_context
from course_lib.model.attention import CORES
from course_lib.parallel import engine as engines
from course_lib.parallel.engine import MicroBatches, ModelEngine, Trace, cross_entropy
from course_lib.parallel.positions import positions
from course_lib.parallel.ring import Gathered, Ring
from course_lib.parallel.tensor import share_seed, sum_gradients
from course_lib.parallel.tiles import Exchange, Tiling, block_attention
from course_lib.parallel.ulysses import check_ulysses, inner_positions, ulysses_core
from course_lib.validate import one_of


@dataclass(frozen=True)
class Context:
    """How an engine's sequences are cut. With both methods: Ulysses over inner_group, a ring over outer_group."""

    group: Group
    method: str
    sequence_sharding: str
    inner_group: Group | None = None
    outer_group: Group | None = None
    trace: Trace | None = None

    def positions(self, seq_len: int) -> Tensor:
        if self.outer_group is None:
            return positions(self.sequence_sharding, seq_len, self.group.size(), self.group.rank())
        inner, outer = ((group.size(), group.rank()) for group in (self.inner_group, self.outer_group))
        return inner_positions(self.sequence_sharding, seq_len, inner, outer)


class ContextParallel(ModelEngine):
    """The whole model on every rank; all ranks bring the same whole sequences, and take their tokens of each."""

    def __init__(self, module: nn.Module, context: Context) -> None:
        super().__init__(module, context.trace)
        self.context, self.loss_group = context, context.group

    def count_tokens(self, micro_batches: MicroBatches) -> int:
        check_micro_batches(self, micro_batches)
        return super().count_tokens(micro_batches)

    def token_losses(self, x_BS: Tensor, y_BS: Tensor) -> Tensor:
        """The losses of my tokens alone: those of all ranks are of all tokens."""
        positions_s = self.context.positions(x_BS.shape[1]).to(x_BS.device)
        logits_BsV = self(x_BS[:, positions_s], positions_s)
        return cross_entropy(logits_BsV, y_BS[:, positions_s])

    def finish(self) -> None:
        """Sums each rank's gradients of its tokens' losses.
        Bytes    beside those of attention: 2 (cp - 1) / cp * (all gradients)
        """
        sum_gradients(self.parameters(), self.context.group)


def build(
    model: nn.Module,
    group: Group,
    method: str = "ring",
    sequence_sharding: str = "zigzag",
    outer: int = 1,
    trace: Trace | None = None,
) -> ContextParallel:
    """Sets each block's attention core, in place; returns the engine. Every rank must bring the same weights.

    It takes x_Bs, my tokens, and their positions_s, and gives logits_BsV.
    method   "ring" | "all_gather" | "ulysses"
    outer    for "ulysses": ranks of a ring around it, each of which is group.size() / outer ranks of Ulysses
    Bytes    with dropout a seed, from which each rank draws for its own tokens; otherwise none
    Raises   ValueError if model or group cannot do it, before anything is sent or changed
    """
    _check_cuttable(model, group, method, sequence_sharding, outer)
    inner_group, outer_group = _inner_and_outer(group, outer) if outer > 1 else (None, None)
    context = Context(group, method, sequence_sharding, inner_group, outer_group, trace)
    for block in model.blocks:
        block.attention.core = core_of(block.attention.core, context)
    if model.config.dropout > 0:
        share_seed(group, apart=True)
    return ContextParallel(model, context)


def core_of(core: Callable, context: Context) -> Callable:
    """What takes the place of a block's own core, with its kernel (fused, standard): over whatever heads it gets."""
    kernel = next(name for name, function in CORES.items() if function is core)
    tiling = Tiling(context.sequence_sharding, kernel=kernel, trace=context.trace)
    if context.outer_group is not None:
        around = _core_over(Ring(context.outer_group, context.trace), tiling)
        return ulysses_core(context.inner_group, "contiguous", around)
    if context.method == "ulysses":
        return ulysses_core(context.group, context.sequence_sharding, core)
    exchange = Ring(context.group, context.trace) if context.method == "ring" else Gathered(context.group)
    return _core_over(exchange, tiling)


def _core_over(exchange: Exchange, tiling: Tiling) -> Callable:
    """Return an attention core over the blocks of all ranks. With dropout it draws a seed each time it is called."""

    def over_all_ranks(
        q_BNsH: Tensor, k_BKsH: Tensor, v_BKsW: Tensor, causal: bool = True, dropout: float = 0.0
    ) -> Tensor:
        seed = torch.randint(2**62, ()).item() if dropout else 0  # of the generator that a checkpoint restores
        this_time = replace(tiling, causal=causal, dropout=dropout, seed=seed)
        return block_attention(q_BNsH, k_BKsH, v_BKsW, exchange, this_time)

    return over_all_ranks


def _inner_and_outer(group: Group, outer: int) -> tuple[Group, Group]:
    """My rows of the mesh: neighbours, for Ulysses; and those at my place among other neighbours, for the ring."""
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    size = len(ranks) // outer
    first = rank // size * size
    members = ranks[first : first + size], ranks[rank % size :: size]
    return tuple(dist.new_group(each, use_local_synchronization=True) for each in members)


def _check_cuttable(model: nn.Module, group: Group, method: str, sequence_sharding: str, outer: int) -> None:
    """Raises ValueError for what this engine does not know, or heads that Ulysses cannot divide."""
    config, cp_size = model.config, check_group(group, "build").size()
    one_of("family", config.family, FAMILIES)
    if config.moe is not None:
        raise ValueError("the model has experts, whose balance would be that of a part of the tokens; use a dense one")
    one_of("method", method, CP_METHODS)
    one_of("sequence_sharding", sequence_sharding, SEQUENCE_SHARDINGS)
    if outer < 1 or cp_size % outer:
        raise ValueError(f"outer ({outer}) must be a divisor of cp ({cp_size})")
    if outer > 1 and method != "ulysses":
        raise ValueError(f'outer is {outer}, a ring around Ulysses, but method is {method!r}; choose method="ulysses"')
    for block in model.blocks:
        attention = block.attention
        if attention.core not in CORES.values():
            raise ValueError("an attention core has been replaced already; build from a model with its own cores")
        if method == "ulysses":
            layers = (attention.q_up,) * 2 if config.mla else (attention.q, attention.k)
            heads = (layer.weight.shape[0] // config.head_dim for layer in layers)
            check_ulysses(*heads, cp_size // outer)


def check_micro_batches(engine: ContextParallel, micro_batches: MicroBatches) -> None:
    """Raises ValueError for lengths that do not divide over the ranks, or that the model has no positions for."""
    engines.check_micro_batches(engine, micro_batches)
    for x_BS, _ in micro_batches:
        if engine.context.outer_group is None:
            check_context(x_BS.shape[1], engine.context.group.size(), engine.context.sequence_sharding)
        else:
            engine.context.positions(x_BS.shape[1])
