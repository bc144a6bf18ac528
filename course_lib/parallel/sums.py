"""Whose gradients are summed over whom, when all parallelisms meet, and the length of them all together.

    kind         what                                              has the same numbers       summed over
    matrices     cut over tp; everything where tp is 1             data                       data
    norms        not cut over tp: norms, router, biases of rows    data x tp                  data; with sp also tp
    head_norms   QK-norm: one weight for the heads of all ranks    data x tp                  data and tp
    kv           key/value heads that `copies` tp ranks share      data x copies              data, and these tp ranks
    tied         embedding and head as copies on two stages        data, on both stages       data, and the two stages
    experts      this rank's experts; folded: whole, not cut       expert_dp                  expert_dp

Folded (whole experts spread over tp's ranks too) changes one size alone: expert_dp is world / (ep pp).

One question decides for each group of ranks that have the same numbers: is each rank's gradient the same, or a
different term of the sum? Of data each rank has other tokens, of tp under sp as well; without sp the ranks of tp have
the same tokens, and a different term only of what they use for their own heads.

A bucket, or a flat of ZeRO, holds one kind only. With ZeRO what is summed further is a shard: 1 / data of the bytes.
With replicas (HSDP) ZeRO sums over the ranks of one replica, and shards are summed over the replicas once a step.
"""

from collections.abc import Callable, Iterator

from torch import nn

from course_lib.memory.flats import different_terms_over_tp
from course_lib.parallel import pipeline, tensor
from course_lib.parallel.data import Sharing
from course_lib.parallel.expert import my_experts

KINDS = ("matrices", "norms", "head_norms", "kv", "tied", "experts")


def kind_function(engine: nn.Module) -> Callable[[nn.Parameter], str]:
    """Of each of this rank's parameters its kind."""
    kinds: dict[nn.Parameter, str] = {}
    for stage in engine.stages.values():
        cuts = tensor.cuts_of(stage)
        for name, param in stage.named_parameters():
            if engine.layout.tp > 1 and name not in cuts:
                kinds[param] = "norms"
            elif name in cuts and cuts[name].copies > 1:
                kinds[param] = "head_norms" if name.endswith("_norm.weight") else "kv"
            else:
                kinds[param] = "matrices"
        kinds |= dict.fromkeys(my_experts(stage), "experts")
    if (tied := pipeline.tied_weight(engine.pipeline)) is not None:
        kinds[tied] = "tied"
    return kinds.__getitem__


def sharing_of(engine: nn.Module) -> Sharing:
    """Over whom each kind is summed, and sharded by ZeRO. Losses are shares of the mean: sums are not divided."""
    others, experts = (engine.groups.by_axis[axis] for axis in engine.layout.shard_axes)
    groups = dict.fromkeys(KINDS, others) | {"experts": experts}
    return Sharing(kind_function(engine), groups)


def owned(engine: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(kind, what this rank's optimizer updates): parameters, or with ZeRO shards of them."""
    if engine.layout.zero_stage:
        for sharded in engine.data_engines.values():
            yield from ((flat.kind, flat.shard_p) for flat in sharded.flats if flat.trains)
    else:
        kind_of = kind_function(engine)
        yield from ((kind_of(param), param) for param in engine.pipeline.parameters() if param.requires_grad)


def sum_gradients(engine: nn.Module) -> None:
    """What is not summed over data: over tp, between the two stages of a tied weight, and shards over replicas.
    Bytes    sent per rank: an all-reduce of each kind in one message, over each group of the table
    """
    layout, groups = engine.layout, engine.groups
    of_kind: dict[str, list[nn.Parameter]] = {kind: [] for kind in KINDS}
    for kind, param in owned(engine):
        of_kind[kind].append(param)
    if layout.dp_replicate > 1:
        tensor.sum_gradients([p for kind in KINDS if kind != "experts" for p in of_kind[kind]], groups.replicate)
        tensor.sum_gradients(of_kind["experts"], groups.expert_replicate)
    tensor.sum_gradients([p for kind in different_terms_over_tp(layout) for p in of_kind[kind]], groups.tp)
    if engine.replica_group is not None:
        tensor.sum_gradients(of_kind["kv"], engine.replica_group)
    if of_kind["tied"]:
        tensor.sum_gradients(of_kind["tied"], engine.pipeline.channels[engine.pipeline.tied_ranks])


def copies_of(engine: nn.Module, kind: str) -> int:
    """How many of all ranks hold what this rank owns of a kind: in the norm of all gradients it counts once."""
    layout = engine.layout
    copies = {"norms": layout.tp, "head_norms": layout.tp, "tied": 2}.get(kind, 1)
    if kind == "kv":
        copies = engine.replica_group.size()
    copies *= layout.dp_replicate
    if layout.zero_stage == 0:
        copies *= layout.expert_dp if kind == "experts" else layout.data_size
    return copies
