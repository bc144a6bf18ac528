"""ZeRO from scratch: data parallelism without the copies. Each rank keeps 1 / dp of what all ranks held dp times.

    stage   sharded over the ranks                        sent per rank and step, m micro-batches, times (dp - 1) / dp
      1     optimizer states                              P  + P        reduce-scatter once, all-gather after the step
      2     and gradients                                 m P + P       each micro-batch's gradients are scattered
      3     and parameters                                2 m P + m P   gathered for forward, gathered for backward

P counts padding; gradients are sent in `grad_dtype`. Stage 0 is plain data parallelism (parallel/data.py), whose
all-reduce sends 2 P, being a reduce-scatter and an all-gather. Stage 1 puts the optimizer's step between the two and
gathers what the step made: no byte more. Where the all-reduce stays and parameters are shared on top, it costs 3 P.

Activations are not sharded by any stage: they belong to this rank's part of the batch, and no other rank holds them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.parallel.data import BUCKET_BYTES, DataParallel, Sharing, arrived_twice, assign_buckets, hook_gradients
from course_lib.parallel.engine import Trace, trainable
from course_lib.parallel.shards import (
    FlatShard,
    Load,
    first_and_last_use,
    hollow_out,
    unit_parameters,
    units_of,
    views_into,
)
from course_lib.span import Span
from course_lib.training.precision import set_gradient


class Sharded(DataParallel):
    """Data parallelism whose optimizer updates shards: what all stages of ZeRO share."""

    is_sharded = True
    flats: list[FlatShard]  # this model's parameters, in flat buffers

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        return ((flat.shard_p, 1) for flat in self.flats if flat.trains)

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        in_flats = {param for flat in self.flats for param in flat.params}
        frozen = {name: tensor_of(param) for name, param in self.module.named_parameters() if param not in in_flats}
        found = {name: x.clone() for name, x in frozen.items() if x is not None}
        return found | whole_tensors(self.flats, tensor_of)


# --- stages 1 and 2: parameters stay whole


class ZeroBuckets(Sharded):
    """Data parallelism whose optimizer (stage 1), and gradients (stage 2), are sharded by buckets.

    A hook on each parameter collects its gradient; a full bucket's reduce-scatter starts at once, in one fixed order on
    every rank. Stage 1 does so in the last micro-batch and keeps a whole buffer of gradients; stage 2 in every one, and
    frees each buffer: at most two are alive, one filling and one on the network. Frozen parameters stay as they are.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        stage: int,
        bucket_bytes: int = BUCKET_BYTES,
        allow_unused: bool = False,
        grad_dtype: torch.dtype | None = None,
        trace: Trace | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(module, group, trace, begin_equal=sharing is None)
        self.stage, self.allow_unused, self.syncing, self.norm_groups = stage, allow_unused, True, (group,)
        sharing = sharing or Sharing.over(group)
        plan = assign_buckets(trainable(module), bucket_bytes, bucket_bytes, sharing.kind_of)
        self.flats = [FlatShard(m, sharing, f"bucket {i}", True, grad_dtype, trace) for i, m in enumerate(plan)]
        self.flat_of = {param: flat for flat in self.flats for param in flat.params}
        self.shards = nn.ParameterList(flat.shard_p for flat in self.flats)
        self.used: set[nn.Parameter] = set()
        self.num_started = 0
        self.handles = hook_gradients((param for _, param in trainable(module)), self._ready)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For every micro-batch but the last. Stage 1 only adds up on this rank; stage 2 reduces, on leaving."""
        before, self.syncing = self.syncing, self.stage == 2
        try:
            yield
        finally:
            self.syncing = before
        if self.stage == 2:
            self.finish()

    def _ready(self, param: nn.Parameter) -> None:
        flat = self.flat_of[param]
        check_first_arrival(flat, param)
        flat.collect(param)
        self.used.add(param)
        if self.syncing:
            flat.arrived.add(param)
            self._start_full_buckets()

    def _start_full_buckets(self) -> None:
        while self.num_started < len(self.flats) and self.flats[self.num_started].is_full():
            if self.stage == 2 and self.num_started > 0:
                self.flats[self.num_started - 1].finish_reduce_scatter()  # frees its buffer
            self.flats[self.num_started].start_reduce_scatter(in_place=self.stage == 1)
            self.num_started += 1

    def finish(self) -> None:
        """Sends the buckets that never filled, waits for all; shards then have their gradients.
        Raises   RuntimeError if a parameter got no gradient since the last finish(), unless `allow_unused`
        """
        for flat in self.flats[self.num_started :]:
            flat.arrived.update(flat.params)
        self._start_full_buckets()
        for flat in self.flats:
            flat.finish_reduce_scatter()
        self.num_started = 0
        check_all_used(self)

    def share_update(self) -> None:
        """All-gathers what each rank's optimizer made of its shard: one message a bucket, all under way at once.
        Bytes    sent per rank: (dp - 1) / dp * P * itemsize
        """
        for flat in self.flats:
            flat.share_update()
        for flat in self.flats:
            flat.wait_for_gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        forget_gradients(self)
        self.num_started = 0


# --- stage 3: parameters come and go


class ZeroUnits(Sharded):
    """Sharded parameters, gradients and optimizer: a unit's parameters are gathered when it computes, then freed.

    Units are the parts of the model that run one after the other: what precedes the blocks, each block, what follows
    them. While one computes the next is gathered, so that two are whole at a time, in forward and in backward. Backward
    gathers again, in reverse order, and scatters the gradients of a unit once it is left. Recomputation ("full" or
    "selective") runs a unit again inside its backward, when its parameters are there. The last unit could stay whole
    between forward and backward, and the embedding's backward reads no weights: gathered all the same, it is 3 P.

    A tied parameter belongs to the first unit that uses it. That unit stays whole until its last use: 3 P as well, but
    it is there beside the other two. Frozen parameters are sharded by themselves; what is frozen below every trained
    one is not gathered for backward.

    The first module of a unit must take what the unit before gave as its first argument.
    Bytes    gathered at most: the two neighbouring units that are largest together, padded; and the tied one, if any
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        prefetch: bool = True,
        allow_unused: bool = False,
        grad_dtype: torch.dtype | None = None,
        trace: Trace | None = None,
        load: Load | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        if load is not None:
            hollow_out(module)
        super().__init__(module, group, begin_equal=load is None and sharing is None)
        self.unit_trace = trace  # each unit has spans of its own, in place of one for all of forward or backward
        self.stage, self.prefetch, self.allow_unused, self.norm_groups = 3, prefetch, allow_unused, (group,)
        sharing = sharing or Sharing.over(group)
        self.units = units_of(module)
        self.flats = [
            FlatShard(members, sharing, label, False, grad_dtype, trace, load)
            for label, members in unit_parameters(module, sharing.kind_of)
        ]
        self.flat_of = {param: flat for flat in self.flats for param in flat.params}
        self.shards = nn.ParameterList(flat.shard_p for flat in self.flats)
        self.first_use, self.last_use = first_and_last_use(self.units, self.flat_of)
        self.used: set[nn.Parameter] = set()
        self.in_backward = False
        self.lowest = 0  # the first unit that backward will reach
        self.computing: tuple[str, float] | None = None  # what the trace's open span is called, when it began
        self.handles = hook_gradients((param for _, param in trainable(module)), self._ready)
        for index, (_, modules) in enumerate(self.units):
            self.handles.append(modules[0].register_forward_pre_hook(partial(self._before_forward, index)))

    def forward(self, *inputs: Tensor) -> Tensor:
        self.in_backward, self.lowest = False, len(self.units) - 1
        output = self.module(*inputs)
        if output.requires_grad:
            output.register_hook(lambda grad: self._before_backward(len(self.units) - 1))
        self._hold([])
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For every micro-batch but the last: whole gradients are not kept, so it is reduced on leaving."""
        yield
        self.finish()

    def _needed(self, index: int) -> list[FlatShard]:
        """What must be whole while that unit computes: its own, and a tied parameter between its two uses."""
        return [flat for flat in self.flats if self.first_use[flat] <= index <= self.last_use[flat]]

    def _hold(self, now: list[FlatShard], following: Sequence[FlatShard] = (), name: str | None = None) -> None:
        """Frees all others, gathers `now` unless that was done ahead, starts to gather `following`."""
        self._note(None)
        for flat in self.flats:
            if flat.is_whole and flat not in now and flat not in following:
                flat.free()
        for flat in [*now, *following]:
            flat.start_gather()
        for flat in now:
            flat.wait_for_gather()
        self._note(name)

    def _before_forward(self, index: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if self.in_backward:  # recomputation: _before_backward has gathered this unit
            return
        if x.requires_grad and not x.is_leaf:  # the unit before gave it: its gradient begins that one's backward
            x.register_hook(lambda grad: self._before_backward(index - 1))
            self.lowest = min(self.lowest, index - 1)
        following = self._needed(index + 1) if self.prefetch else []
        self._hold(self._needed(index), following, f"forward {self.units[index][0]}")

    def _before_backward(self, index: int) -> None:
        self.in_backward = True
        self._reduce([flat for flat in self.flats if self.first_use[flat] == index + 1])
        following = self._needed(index - 1) if self.prefetch and index > self.lowest else []
        self._hold(self._needed(index), following, f"backward {self.units[index][0]}")

    def _ready(self, param: nn.Parameter) -> None:
        flat = self.flat_of[param]
        check_first_arrival(flat, param)
        flat.collect(param)
        flat.arrived.add(param)
        self.used.add(param)

    def _reduce(self, left: list[FlatShard]) -> None:
        """Scatters the gradients of what backward has left; waits for those before, whose buffers are then freed."""
        self._note(None)
        for flat in self.flats:
            flat.finish_reduce_scatter()
        for flat in left:
            if flat.trains:
                flat.start_reduce_scatter(in_place=False)

    def finish(self) -> None:
        """Scatters what is left, waits, frees all parameters: after each backward pass.
        Raises   RuntimeError if a parameter got no gradient since the last finish(), unless `allow_unused`
        """
        self._reduce([flat for flat in self.flats if self.first_use[flat] <= self.lowest])
        self._reduce([])
        self._hold([])
        self.in_backward = False
        check_all_used(self)

    def _note(self, name: str | None) -> None:
        """For the trace alone: ends the span of what was computing, begins the next."""
        if self.unit_trace is not None:
            if self.computing is not None:
                self.unit_trace.append(Span(dist.get_rank(), "compute", *self.computing, time.perf_counter()))
            self.computing = None if name is None else (name, time.perf_counter())

    def zero_grad(self, set_to_none: bool = True) -> None:
        forget_gradients(self)
        self._hold([])


def check_first_arrival(flat: FlatShard, param: nn.Parameter) -> None:
    if flat.reduction is not None or param in flat.arrived:
        raise RuntimeError(arrived_twice(flat.names[flat.params.index(param)]))


def check_all_used(engine: nn.Module) -> None:
    """Raises if a parameter got no gradient on this rank, unless it may count as zeros.

    Weight decay and momentum then move it all the same: a shard has one gradient, which cannot be None in parts.
    """
    missing = [name for name, param in trainable(engine.module) if param not in engine.used]
    engine.used.clear()
    if missing and not engine.allow_unused:
        raise RuntimeError(f"no gradient for {missing} in this step; freeze them, or build with allow_unused=True")


def forget_gradients(engine: nn.Module) -> None:
    """Ready for a new pass: all gradients dropped, those too that a failed pass left in a buffer or on the network."""
    for flat in engine.flats:
        flat.finish_reduce_scatter()
        flat.grad_P = None
        flat.arrived.clear()
        set_gradient(flat.shard_p, None)
    engine.used.clear()


def build(
    model: nn.Module,
    group: dist.ProcessGroup,
    stage: int = 3,
    bucket_bytes: int = BUCKET_BYTES,
    allow_unused: bool = False,
    grad_dtype: torch.dtype | None = None,
    trace: Trace | None = None,
    load: Load | None = None,
) -> ZeroBuckets | ZeroUnits:
    """Shards what `stage` shards of the model, in place, over the group; broadcasts the first rank's parameters.
    bucket_bytes   stages 1 and 2: parameters of one reduce-scatter and one all-gather
    allow_unused   parameters without a gradient count as zeros; by default they are an error
    grad_dtype     in which gradients are summed and sent, such as torch.float32 beside bfloat16 parameters. They are
                   then in `.main_grad`: MasterAdamW reads it, torch's own optimizers would find nothing to do
    load           stage 3, with a model on the meta device: brings this rank's numbers, and nobody ever holds the whole
                   (`partial(read_flat, Weights(folder))` of weights/loading.py)
    Raises   ValueError for another stage, a missing group, a model without numbers, that an engine has already or
             without trainable parameters, or `load` in another stage
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage is {stage!r}; choose 1, 2 or 3 (stage 0, which shards nothing, is parallel/data.py)")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group is {group!r}; it must be a process group with this rank in it: dist.group.WORLD")
    if load is not None and stage != 3:
        raise ValueError(f"load is for stage 3, whose parameters are never whole; stage {stage} needs a loaded model")
    if load is None and any(param.is_meta for param in model.parameters()):
        raise ValueError(
            "the model is on the meta device and has no numbers to shard; build it on a device, or give load="
        )
    if any(param.untyped_storage().nbytes() < param.nbytes for param in model.parameters()):
        raise ValueError("stage 3 has sharded this model already: its parameters are freed; build it anew")
    if not trainable(model):
        raise ValueError("no parameter of the model requires a gradient; unfreeze some")
    hooks = {name: (param._post_accumulate_grad_hooks or {}).values() for name, param in trainable(model)}
    owners = {name: [getattr(hook, "__self__", None) for hook in of_param] for name, of_param in hooks.items()}
    if taken := [name for name, of_param in owners.items() if any(isinstance(one, nn.Module) for one in of_param)]:
        raise ValueError(f"an engine has this model already: its hook takes the gradient of {taken[0]}; build it anew")
    if stage == 3:
        return ZeroUnits(model, group, allow_unused=allow_unused, grad_dtype=grad_dtype, trace=trace, load=load)
    return ZeroBuckets(model, group, stage, bucket_bytes, allow_unused, grad_dtype, trace)


def whole_tensors(flats: Sequence[FlatShard], tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """What `tensor_of` gives of each shard, gathered, by the names of the parameters in it.
    Bytes    sent per rank: (dp - 1) / dp * P * itemsize
    """
    found = {}
    for flat in flats:
        if (piece_p := tensor_of(flat.shard_p)) is not None:
            whole_P = comm.all_gather(piece_p.contiguous(), flat.group)
            found |= zip(flat.names, views_into(whole_P, flat.params), strict=True)
    return found
