"""All five parallelisms at once: one trainer that applies a layout by calling the other files of this folder.

    1. pp        the layers are cut into stages; one executor runs them, also where there is one stage
    2. ep        of each layer's experts a rank keeps its own
    3. tp, sp    matrices of what is left are cut, and with sp the residual stream between them; folded: experts are not
    4. cp        attention becomes a ring, or all-to-alls; tokens, positions and labels are cut
    5. data      gradients are summed over data = dp x cp in buckets while backward runs; ZeRO shards what a rank has

Each dp rank brings its own micro-batches of whole sequences; ranks that differ in pp, cp or tp alone bring the same.
Each rank's loss is its tokens' share of the mean over all tokens of the step, so every sum of gradients is a sum and
nothing is divided. Who sums what with whom is in parallel/sums.py. On the wire of one rank:

    pp           B S D d / cp (with sp also / tp) for each boundary, micro-batch and direction
    tp           what tensor.py and sequence.py say, of this rank's layers and of S / cp tokens
    cp           what the method says, of this rank's layers
    ep           rows of tokens to their experts and back; folded: of S / (cp tp) tokens
    data         gradients, and with ZeRO parameters; experts' over expert_dp
    world        the lengths of micro-batches, to see that all bring the same; the loss; a number to clip

Source   Narayanan et al. 2021 (arXiv:2104.04473); Llama Team 2024 (arXiv:2407.21783), section 3.3.2
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.conjugate import Group
from course_lib.comm.groups import Groups, make_all_groups
from course_lib.config import ModelConfig
from course_lib.devices import rank_device
from course_lib.layout import Layout
from course_lib.layout.experts import ExpertLayout
from course_lib.layout.partition import piece_sizes
from course_lib.model import build as build_whole
from course_lib.model import initial_weights
from course_lib.model.moe import moe_layers
from course_lib.parallel import pipeline, tensor, zero
from course_lib.parallel.context import Context, core_of
from course_lib.parallel.data import BucketedDP, Sharing
from course_lib.parallel.engine import Engine, MicroBatches, Trace
from course_lib.parallel.executor import StageRunner
from course_lib.parallel.expert import keep_my_experts, runner, sum_over
from course_lib.parallel.expert_tensor import cut_block
from course_lib.parallel.linear import ColumnLinear, ReplicatedResidual
from course_lib.parallel.sequence import MyPositions, ShardedResidual
from course_lib.parallel.stages import check_stages, skeleton
from course_lib.parallel.sums import copies_of, owned, sharing_of, sum_gradients
from course_lib.parallel.vocabulary import VocabEmbedding, vocab_cross_entropy, vocab_to_gradient_
from course_lib.parallel.whole import put_together
from course_lib.training.chunked_loss import ChunkedLoss
from course_lib.training.precision import accumulate_in_fp32


class FiveD(nn.Module, Engine):
    """One rank's part of a model: its stages, cut further, and what shards them. `build` makes one.
    data_engines   of each stage what sums its gradients over data: ZeRO, or with zero_stage 0 buckets; none where the
                   layout gives a stage to one rank alone
    loss_chunks    head and loss go over this rank's tokens in so many parts
    """

    loss_chunks = 1

    def __init__(self, config: ModelConfig, layout: Layout, groups: Groups, stages: pipeline.Pipeline):
        super().__init__()
        self.config, self.layout, self.groups, self.pipeline = config, layout, groups, stages
        self.norm_groups, self.is_sharded = (groups.world,), layout.zero_stage > 0
        self.loss_group, self.loss_copies = groups.world, layout.tp
        sharded = partial(ShardedResidual, regather=layout.regather)
        self.residual = (sharded if layout.sequence_parallel else ReplicatedResidual)(groups.tp)
        self.context = Context(groups.cp, layout.cp_method, layout.cp_sharding)
        self.replica_group = tensor.replica_group_of(config, groups.tp) if layout.tp > 1 else None
        self.data_engines = nn.ModuleDict()

    @property
    def stages(self) -> nn.ModuleDict:
        return self.pipeline.stages

    @property
    def trace(self) -> Trace | None:
        """Where the pipeline, and what sums over data, record spans."""
        return self.pipeline.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        for part in (self.pipeline, *self.data_engines.values()):
            part.trace = trace

    def positions(self, seq_len: int) -> Tensor:
        return self.context.positions(seq_len) if self.layout.cp > 1 else torch.arange(seq_len)

    def run(self, micro_batches: MicroBatches) -> Tensor:
        return run_layout(self, micro_batches)

    def finish(self) -> None:
        reduce_gradients(self)

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        return ((param, copies_of(self, kind)) for kind, param in owned(self))

    def share_update(self) -> None:
        for data_engine in self.data_engines.values():
            data_engine.share_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for data_engine in self.data_engines.values():
            data_engine.zero_grad()

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        tensors = {name: tensor_of(param) for name, param in named_parameters(self).items()}
        if self.layout.zero_stage:  # below stage 3 what is frozen is in no flat
            in_flats = {name for each in self.data_engines.values() for flat in each.flats for name in flat.names}
            tensors = {name: x for name, x in tensors.items() if name not in in_flats}
            for data_engine in self.data_engines.values():
                tensors |= zero.whole_tensors(data_engine.flats, tensor_of)
        if self.config.tied and "head.weight" in tensors:
            tensors["embed.weight"] = tensors.pop("head.weight")
        return put_together(self.config, tensors, cuts_of(self), self.groups.world, self.groups.tp.rank())

    @property
    def axes(self) -> dict[str, list[Group]]:
        """All groups over which this rank sends, by axis: for `ByteMeter(axes=engine.axes)`."""
        axes = {axis: [group] for axis, group in self.groups.by_axis.items()}
        axes["pp"] += self.pipeline.channels.values()
        if self.replica_group is not None:
            axes["tp"].append(self.replica_group)
        return axes


def build(
    config: ModelConfig,
    layout: Layout,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    attention: str = "fused",
    grad_dtype: torch.dtype | None = None,
    fill: Callable[["FiveD", int], None] | None = None,
) -> FiveD:
    """This rank's part of the model, with the weights that `model.build(config, seed)` gives, whatever the layout.

    No rank ever holds more than its stages, cut; ZeRO-3 then frees all but a shard of that.
    device       by default `rank_device()`
    grad_dtype   in which gradients are summed, such as torch.float32 beside bfloat16 parameters
    fill         (engine, seed): brings other numbers than `fill_from_seed`, or none
    Bytes        a byte a pipeline channel; nothing else
    Raises       ValueError if the model cannot lie so, before anything is sent
    """
    layout.check_model(config)
    is_alone = dist.get_backend() == "fake"  # then no other rank can help to make its groups
    groups = make_all_groups(layout.mesh, layout.ep, is_alone, layout.dp_replicate, layout.folded)
    device = torch.device(device or rank_device())
    if layout.pp > 1:
        comm.check_point_to_point(device, groups.pp, "a pipeline")

    schedule = pipeline.checked_schedule(layout.schedule, layout.pp, layout.micro_batches, layout.v)
    layers_of_stage = check_stages(config, schedule.num_stages, layout.layers_of_stage)
    mine = schedule.stages_of_rank(groups.pp.rank())
    model = skeleton(config, mine, layers_of_stage, attention, layout.recompute).to(dtype)
    stages = pipeline.build(model, groups.pp, layout.schedule, layout.v, layers_of_stage, layout.micro_batches)
    engine = FiveD(config, layout, groups, stages)
    for stage in engine.stages.values():
        keep_experts(engine, stage)
        cut_over_cp(engine, stage)
        cut_over_tp(engine, stage)
    engine.to_empty(device=device)
    engine.pipeline.tie()
    (fill or fill_from_seed)(engine, seed)
    shard_over_data(engine, grad_dtype)
    if config.dropout > 0:
        seed_dropout(engine, seed)
    return engine


def keep_experts(engine: FiveD, stage: nn.Module) -> None:
    """Expert parallel: of each layer this rank's experts; their load is that of all ranks with other tokens."""
    layout, groups = engine.layout, engine.groups
    for moe in moe_layers(stage):
        moe.sum_load = partial(sum_over, groups=(groups.data, groups.tp) if layout.folded else (groups.data,))
        if layout.ep > 1:
            keep_my_experts(moe, ExpertLayout(moe.config.num_experts, layout.ep), groups.ep.rank())
            moe.run_experts = runner(layout.expert_method, groups)


def cut_over_tp(engine: FiveD, stage: nn.Module) -> None:
    """Tensor parallel, and sequence parallel: both ends of the model, and each block."""
    residual, config = engine.residual, engine.config
    if engine.layout.tp == 1:
        return
    if stage.is_first:
        stage.embed = VocabEmbedding(stage.embed, residual)
    for block in stage.blocks.values():
        cut_block(block, residual, config, engine.layout.folded)
    if stage.is_last:
        stage.head = ColumnLinear(stage.head, residual)
    if not engine.layout.sequence_parallel:
        return
    if stage.is_first and config.family == "gpt":
        stage.positions = MyPositions(stage.positions, residual.group)
    if config.dropout > 0:
        for owner in [*([stage] if stage.is_first else []), *stage.blocks.values()]:
            owner.dropout = tensor.RankDropout(config.dropout, residual.group)


def cut_over_cp(engine: FiveD, stage: nn.Module) -> None:
    """Context parallel: attention over all ranks' tokens, with whatever heads tp has left."""
    if engine.layout.cp > 1:
        for block in stage.blocks.values():
            block.attention.core = core_of(block.attention.core, engine.context)


def shard_over_data(engine: FiveD, grad_dtype: torch.dtype | None) -> None:
    """Sums gradients over data, experts' over expert_dp: one engine a stage, for each has a backward of its own.

    With zero_stage 0 these are chapter 3's buckets; from 1 on ZeRO shards as well, with replicas over one replica's
    ranks.
    """
    layout, sharing = engine.layout, sharing_of(engine)
    group = sharing.groups["matrices"]
    summed: set[nn.Parameter] = set()  # a weight that two stages here share: by the first one's buckets
    for name, stage in engine.stages.items():
        if layout.zero_stage:
            sharded = zero.ZeroUnits if layout.zero_stage == 3 else partial(zero.ZeroBuckets, stage=layout.zero_stage)
            engine.data_engines[name] = sharded(stage, group, grad_dtype=grad_dtype, sharing=sharing)
        elif max(layout.data_size, layout.expert_dp) > 1:
            mine = {p for p in stage.parameters() if p not in summed and sharing.groups[sharing.kind_of(p)].size() > 1}
            of_stage = Sharing(lambda p, mine=mine: sharing.kind_of(p) if p in mine else None, sharing.groups)
            engine.data_engines[name] = BucketedDP(stage, group, sharing=of_stage, grad_dtype=grad_dtype)
            engine.data_engines[name].syncing = False  # `before_backward` says when
            summed |= mine
    if layout.zero_stage == 0 and grad_dtype not in (None, engine.pipeline.dtype):
        accumulate_in_fp32([param for param in engine.pipeline.parameters() if param not in summed])


@torch.no_grad()
def fill_from_seed(engine: FiveD, seed: int) -> None:
    """Draws every tensor of the model, one at a time, and keeps this rank's part of those that it has."""
    for count in engine.buffers():
        count.zero_()
    mine, cuts, tp_rank = named_parameters(engine), cuts_of(engine), engine.groups.tp.rank()
    whole = build_whole(engine.config, device="meta")
    for (name, _), numbers in zip(whole.named_parameters(), initial_weights(whole, seed), strict=True):
        if name in mine:
            mine[name].copy_(cuts[name].part(numbers, tp_rank) if name in cuts else numbers)


named_parameters = pipeline.named_parameters  # of a layout: each a part, if tp has cut it; under ZeRO-3 mostly empty


def cuts_of(engine: FiveD) -> dict[str, tensor.Cut]:
    """How tp has cut them, by the same names."""
    cuts = {name: cut for stage in engine.stages.values() for name, cut in tensor.cuts_of(stage).items()}
    if engine.config.tied and "head.weight" in cuts:
        cuts["embed.weight"] = cuts.pop("head.weight")
    return cuts


def seed_dropout(engine: FiveD, seed: int) -> None:
    """Ranks of a tp group draw alike (what is cut draws for itself), all others draw other numbers."""
    place = engine.groups.coordinates
    index = (place["pp"] * engine.layout.dp + place["dp"]) * engine.layout.cp + place["cp"]
    torch.manual_seed(seed * 1_000_003 + index)


class CutStageRunner(StageRunner):
    """What the executor does with a stage whose tokens are cut over cp, and whose residual stream is cut over tp."""

    def shape_between(self, x_BS: Tensor) -> tuple[int, ...]:
        layout, (batch_size, seq_len) = self.engine.layout, x_BS.shape
        tokens = seq_len // layout.cp
        if layout.sequence_parallel:
            tokens = piece_sizes(tokens, layout.tp)[self.engine.groups.tp.rank()]
        return batch_size, tokens, self.engine.config.d_model

    def mine(self, x_BS: Tensor) -> Tensor:
        return x_BS if self.engine.layout.cp == 1 else x_BS[:, self.engine.positions(x_BS.shape[1]).to(x_BS.device)]

    def forward(self, stage: int, x: Tensor, x_BS: Tensor, y_BS: Tensor) -> Tensor:
        positions_s = self.engine.positions(x_BS.shape[1]).to(x_BS.device)
        if self.engine.layout.sequence_parallel:
            self.engine.residual.seq_len = len(positions_s)
        name = str(stage)
        run = self.engine.data_engines[name] if name in self.engine.data_engines else self.engine.stages[name]
        loss_of = partial(self.chunked_losses, self.mine(y_BS)) if self.engine.loss_chunks > 1 else None
        return run(self.mine(x) if stage == 0 else x, positions_s, loss_of)

    def chunked_losses(self, y_Bs: Tensor, x_BsD: Tensor, w_VD: Tensor) -> Tensor:
        """The mean loss of my tokens, once for each of them."""
        chunk, in_pieces = -(-y_Bs.numel() // self.engine.loss_chunks), []
        if self.engine.layout.tp > 1:
            x_BsD = self.engine.residual.enter(x_BsD)
            in_pieces = [partial(vocab_to_gradient_, **self.my_vocabulary())]
        losses = ChunkedLoss.apply(x_BsD.flatten(0, 1), w_VD, y_Bs.flatten(), chunk, *in_pieces)
        return losses.expand(y_Bs.shape)

    def my_vocabulary(self) -> dict:
        """The first token whose logit this rank computes, and who has the others."""
        group, last = self.engine.groups.tp, str(self.engine.pipeline.num_stages - 1)
        first, _ = self.engine.stages[last].head.cuts["weight"].start_and_length(group.rank())
        return {"first": first, "group": group}

    def token_losses(self, logits: Tensor, y_BS: Tensor) -> Tensor:
        if self.engine.loss_chunks > 1:
            return logits  # losses already
        y_Bs = self.mine(y_BS)
        if self.engine.layout.tp == 1:
            return super().token_losses(logits, y_Bs)
        return vocab_cross_entropy(logits, y_Bs, **self.my_vocabulary())

    def share_of_balancing(self, stage: int, y_BS: Tensor) -> Tensor | None:
        return super().share_of_balancing(stage, self.mine(y_BS))

    def before_backward(self, stage: int, is_last: bool) -> None:
        """What is summed once a step goes out during a stage's last backward.

        A tied weight of two stages on this rank is the first stage's, whose last backward comes after the other's.
        """
        if str(stage) in self.engine.data_engines and self.engine.layout.zero_stage < 2:
            self.engine.data_engines[str(stage)].syncing = is_last

    def after_backward(self, stage: int, is_last: bool) -> None:
        if self.engine.layout.zero_stage > 1:
            self.engine.data_engines[str(stage)].finish()
        elif str(stage) in self.engine.data_engines:
            self.engine.data_engines[str(stage)].syncing = False


def run_layout(engine: FiveD, micro_batches: MicroBatches) -> Tensor:
    """Executes the layout's schedule; returns this rank's share of the mean loss.
    micro_batches   `layout.micro_batches` pairs (x_BS, y_BS) of `layout.micro_batch` whole sequences, of this dp rank;
                    those of all ranks are as long
    Raises          ValueError if they are not so many, not so large, or their length does not divide
    """
    check_micro_batches(engine, micro_batches)
    num_tokens = engine.layout.dp * sum(y_BS.numel() for _, y_BS in micro_batches)
    return pipeline.execute(engine.pipeline, micro_batches, CutStageRunner(engine, num_tokens))


def reduce_gradients(engine: FiveD) -> None:
    """Waits for what is summed over data once a step, then sums what the table of sums.py says beyond it."""
    if engine.layout.zero_stage < 2:
        for data_engine in engine.data_engines.values():
            data_engine.finish()
    sum_gradients(engine)


def check_micro_batches(engine: FiveD, micro_batches: MicroBatches) -> None:
    """Raises ValueError for what the layout does not expect, or if ranks bring different lengths."""
    layout = engine.layout
    if len(micro_batches) != layout.micro_batches:
        raise ValueError(
            f"there are {len(micro_batches)} micro-batches, the layout has micro_batches={layout.micro_batches}"
        )
    pipeline.check_micro_batches(engine.pipeline, micro_batches)
    for index, (x_BS, _) in enumerate(micro_batches):
        if len(x_BS) != layout.micro_batch:
            raise ValueError(
                f"micro-batch {index} has {len(x_BS)} sequences, the layout has micro_batch={layout.micro_batch}"
            )
        if layout.sequence_parallel and x_BS.shape != micro_batches[0][0].shape:
            raise ValueError(
                f"micro-batch {index} has sequences of {x_BS.shape[1]} tokens, the first of "
                f"{micro_batches[0][0].shape[1]}; with sequence parallelism all must be of one length"
            )
        layout.check_model(engine.config, x_BS.shape[1])
    _check_lengths(engine, [x_BS.shape[1] for x_BS, _ in micro_batches])


def _check_lengths(engine: FiveD, lengths: list[int]) -> None:
    """Raises ValueError on every rank unless all bring micro-batches of the same lengths: the mean would be wrong.
    Bytes    an all-reduce of 16 a micro-batch over all ranks
    """
    world = engine.groups.world
    device = next(engine.parameters()).device
    both_ends = torch.tensor([lengths, [-length for length in lengths]], device=device)
    longest, shortest = comm.all_reduce(both_ends, world, op="max").tolist()
    if longest == [-length for length in shortest]:
        return
    of_ranks = comm.all_gather(torch.tensor([lengths], device=device), world).tolist()
    odd = next(rank for rank, others in enumerate(of_ranks) if others != of_ranks[0])
    raise ValueError(
        f"rank {odd} brings micro-batches of {of_ranks[odd]} tokens a sequence, rank 0 of {of_ranks[0]}; "
        "all ranks must bring the same lengths, in the same order"
    )
