"""Tensor parallelism from scratch: a Llama or GPT cut from outside over a group's ranks, all with the same tokens.

On the wire, per micro-batch and L layers, each an all-reduce:

    forward    2 L of B S D (o, down), 1 of B S D (embedding), 3 of B S (loss)
    backward   2 L of B S D (q k v together, gate up together), 1 of B S D (head)
    once       gradients of weights that ranks share and use for different heads; one number, to clip
    again      with recompute="full", what a block's forward sends up to the last tensor that backward needs

Source   Shoeybi et al. 2019 (arXiv:1909.08053)
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.conjugate import Group, check_group
from course_lib.config import ModelConfig
from course_lib.devices import rank_device
from course_lib.layout.check import FAMILIES
from course_lib.layout.partition import check_heads, kv_replication, piece_sizes
from course_lib.model.gpt import Dropout
from course_lib.model.llama import RMSNorm
from course_lib.parallel.engine import ModelEngine, Trace, trainable
from course_lib.parallel.linear import ColumnLinear, Cut, ReplicatedResidual, RowLinear, column_linears
from course_lib.parallel.vocabulary import VocabEmbedding, vocab_cross_entropy
from course_lib.parallel.whole import put_together
from course_lib.training.precision import gradient_of
from course_lib.validate import one_of

MATRICES = {"q", "k", "v", "q_up", "kv_up", "o", "gate", "up", "down", "head"}  # names of the layers that are cut


class TensorParallel(ModelEngine):
    """A model whose matrices are cut over the ranks of one group; `replica_group` has the same key/value head."""

    def __init__(self, module: nn.Module, residual: ReplicatedResidual) -> None:
        super().__init__(module, residual.trace)
        self.residual, self.replica_group = residual, replica_group_of(module.config, residual.group)
        self.norm_groups = (residual.group,)

    def token_losses(self, x_BS: Tensor, y_BS: Tensor) -> Tensor:
        return vocab_cross_entropy(self(x_BS), y_BS, self.module.embed.first, self.residual.group)

    def finish(self) -> None:
        sum_replicas(self)

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        cuts, tp_size = cuts_of(self.module), self.residual.group.size()
        return ((param, cuts[name].copies if name in cuts else tp_size) for name, param in trainable(self.module))

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        cuts, group = cuts_of(self.module), self.residual.group
        return put_together(self.config, super().whole(tensor_of), cuts, group, group.rank())


def build(model: nn.Module, group: Group, overlap: bool = True, trace: Trace | None = None) -> TensorParallel:
    """Cuts the model in place; returns the engine. Every rank brings the same weights: `model.build` with one seed.

    It takes tokens_BS and gives logits_BSv, this rank's part of the vocabulary.
    Bytes    with dropout, a seed that the group then shares; otherwise none
    Raises   ValueError if model or group cannot be cut so, before anything is sent or changed
    """
    check_shardable(model, group)
    if model.config.dropout > 0:
        share_seed(group)
    residual = ReplicatedResidual(group, overlap, trace)
    shard_model(model, residual)
    return TensorParallel(model, residual)


def shard_model(model: nn.Module, residual: ReplicatedResidual) -> None:
    """Replaces each matrix by this rank's part of it. Norms, positions and biases of rows stay whole."""
    model.embed = VocabEmbedding(model.embed, residual)
    for block in model.blocks:
        shard_block(block, residual, model.config)
    model.head = ColumnLinear(model.head, residual)
    model.tie()


def shard_block(block: nn.Module, residual: ReplicatedResidual, config: ModelConfig) -> None:
    """The matrices of one block without experts."""
    cut_attention(block.attention, residual, config)
    shard_mlp(block.mlp, residual)


def shard_attention(attention: nn.Module, residual: ReplicatedResidual, config: ModelConfig) -> None:
    """By heads: N / tp query heads a rank; key/value heads likewise, or one for tp / K ranks together."""
    copies = kv_replication(config, residual.group.size())
    attention.q = ColumnLinear(attention.q, residual)
    attention.k, attention.v = ColumnLinear(attention.k, residual, copies), ColumnLinear(attention.v, residual, copies)
    attention.o = RowLinear(attention.o, residual)
    if config.qk_norm:
        attention.q_norm = HeadNorm(attention.q_norm, residual.group)
        attention.k_norm = HeadNorm(attention.k_norm, residual.group)
    attention.project = partial(column_linears, residual=residual)
    if config.dropout > 0:
        attention.core = with_rank_rng(attention.core, residual.group)


def cut_attention(attention: nn.Module, residual: ReplicatedResidual, config: ModelConfig) -> None:
    """Cut attention of either kind by heads. Of latent attention what makes latent vectors is small, and stays whole.

    A latent vector enters its columns as x enters those of q, k and v: where the residual stream is cut along the
    sequence, each rank makes its own tokens' vectors, and these are gathered, not x.
    """
    if config.mla is None:
        shard_attention(attention, residual, config)
        return
    attention.o = RowLinear(attention.o, residual)
    attention.q_up, attention.kv_up = ColumnLinear(attention.q_up, residual), ColumnLinear(attention.kv_up, residual)
    attention.share_key = residual.enter


class HeadNorm(RMSNorm):
    """QK-norm on a rank with some of the heads: the weight is whole, and its gradient here is one term of a sum."""

    def __init__(self, norm: RMSNorm, group: Group) -> None:
        super().__init__(len(norm.weight), norm.eps)
        self.weight = norm.weight
        self.cuts = {"weight": Cut(0, len(norm.weight), group.size(), copies=group.size())}


def shard_mlp(mlp: nn.Module, residual: ReplicatedResidual) -> None:
    """By features: gate and up (or up alone) are columns, down is the row."""
    for name, linear in list(mlp.named_children()):
        if name != "down":
            setattr(mlp, name, ColumnLinear(linear, residual))
    mlp.down = RowLinear(mlp.down, residual)
    mlp.project = partial(column_linears, residual=residual)


def replica_group_of(config: ModelConfig, group: Group) -> Group | None:
    """The ranks that have this rank's key/value head; None if no other has it."""
    copies = kv_replication(config, group.size())
    if copies == 1:
        return None
    start = group.rank() // copies * copies
    return dist.new_group(dist.get_process_group_ranks(group)[start : start + copies], use_local_synchronization=True)


def check_shardable(model: nn.Module, group: Group) -> None:
    """Raises ValueError for what cannot be cut: family, heads, too few features or tokens, layers already replaced."""
    config, tp_size = model.config, check_group(group, "build").size()
    one_of("family", config.family, FAMILIES)
    check_heads(config.num_heads, config.num_kv_heads, tp_size)
    for field in ("d_ff", "vocab_size"):
        if min(piece_sizes(getattr(config, field), tp_size)) == 0:
            raise ValueError(f"{field} ({getattr(config, field)}) leaves a rank of tp ({tp_size}) with none; use fewer")
    for path, layer in model.named_modules():
        if path.rpartition(".")[2] in MATRICES and type(layer) is not nn.Linear:
            raise ValueError(f"{path} is a {type(layer).__name__}; only a model of plain nn.Linear can be cut")


def share_seed(group: Group, apart: bool = False) -> None:
    """Gives all ranks the random numbers of the group's first: of a whole residual stream all must drop the same.
    apart    each rank its own instead, which follow from the first's: where ranks have different tokens
    Bytes    sent per rank: 8
    """
    seed = torch.randint(2**62, (1,), device="cpu").to(rank_device())
    torch.manual_seed(comm.broadcast(seed, src=0, group=group).item() + apart * group.rank())


@contextmanager
def rank_rng(group: Group) -> Iterator[None]:
    """Inside, each rank draws its own random numbers: what is cut over ranks must not drop the same places on each.

    The seed is drawn from the common generator, so a checkpoint, which restores that, draws the same numbers again.
    """
    seed = torch.randint(2**62, ()).item() + group.rank()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed)
        yield


def with_rank_rng(core: Callable, group: Group) -> Callable:
    """An attention core whose dropout differs between ranks, as their heads do."""

    def core_of_my_heads(*inputs) -> Tensor:
        with rank_rng(group):
            return core(*inputs)

    return core_of_my_heads


class RankDropout(Dropout):
    """Dropout of what is cut over a group's ranks: each drops other places."""

    def __init__(self, probability: float, group: Group) -> None:
        super().__init__(probability)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        with rank_rng(self.group):
            return super().forward(x)


def sum_replicas(engine: ModelEngine) -> None:
    """Sum the gradients of weights that several ranks have, each for its own heads: shared key/value heads, QK-norm.

    Each rank's gradient is a different term of the sum. A norm of all features is not among them: `enter` has summed
    the gradient that reaches it, so each rank has the same one.
    """
    cuts, tp_group = cuts_of(engine.module), engine.residual.group
    shared: dict[int, list[nn.Parameter]] = {}
    for name, param in engine.named_parameters():
        if name in cuts and cuts[name].copies > 1:
            shared.setdefault(cuts[name].copies, []).append(param)
    for copies, params in shared.items():
        sum_gradients(params, tp_group if copies == tp_group.size() else engine.replica_group)


def sum_gradients(parameters: Iterable[nn.Parameter], group: Group) -> None:
    """Sums over the group gradients of which each rank has a part, all in one message.
    Bytes    sent per rank: 2 (G - 1) / G * (all of them)
    """
    grads = [grad for param in parameters if (grad := gradient_of(param)) is not None]
    if not grads:
        return
    flat_P = torch.cat([grad.flatten() for grad in grads])
    comm.all_reduce_(flat_P, group)
    for grad, summed in zip(grads, flat_P.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """How each parameter is cut, by the model's names; those that are missing are whole, for all heads and features."""
    model = model.module if isinstance(model, ModelEngine) else model
    return {
        f"{path}.{name}": layer.cuts[name]
        for path, layer in model.named_modules()
        if hasattr(layer, "cuts")
        for name, _ in layer.named_parameters(recurse=False)
        if name in layer.cuts
    }
