"""Data parallelism from scratch: each rank holds the whole model, trains on its share of the batch, averages gradients.

One all-reduce a bucket of about 25 MiB, started by a hook: hidden behind backward, few messages, gradients are not
copied. Lesson 03 in depth comes to it from an engine that averages after backward, and one with a message a parameter.

Inside a step: `engine.no_sync()` around every micro-batch but the last, `engine.finish()` before gradients are read.
Every rank must bring equally many tokens, as `data.batch` sees to: the mean over ranks is of their means.

The volume does not depend on the engine: averaging P numbers costs each rank 2 (dp - 1) / dp * P * itemsize bytes,
however many micro-batches. The mean loss is one number more.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course_lib import comm
from course_lib.model.moe import moe_layers
from course_lib.parallel.engine import Engine, NamedParameter, Trace, trainable
from course_lib.span import Span
from course_lib.training.precision import gradient_of, set_gradient

BUCKET_BYTES = 25 * 2**20  # DDP's default, bucket_cap_mb=25
FIRST_BUCKET_BYTES = 2**20  # DDP's as well: a small first bucket starts the network early

Pending = dist.Work | torch.futures.Future  # something to wait() for


def broadcast_parameters(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives each rank the parameters and buffers of the group's first; averaged gradients keep the models equal.
    Bytes    sent per rank: all of them, frozen ones too; 0 by the last rank of the chain
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().copy_(comm.broadcast(tensor.detach().contiguous(), src=0, group=group))


def hook_gradients(parameters: Iterable[nn.Parameter], when_ready: Callable[[nn.Parameter], None]) -> list:
    """Calls `when_ready(param)` during backward as soon as `param.grad` is complete; returns the hooks' handles.

    A tied parameter's hook runs once, after both contributions are summed.
    """
    return [param.register_post_accumulate_grad_hook(when_ready) for param in parameters]


def start_all_reduce(x: torch.Tensor, group: dist.ProcessGroup, name: str, trace: Trace | None) -> Pending:
    """Starts summing x over the group, returns at once; x must not be touched before `wait()` on what is returned.
    Raises   ValueError if x is strided, as the gradient of a strided parameter is; a bucket copies such a gradient
    """
    start_s = time.perf_counter()
    work = comm.all_reduce_(x, group, async_op=True)
    return work if trace is None else record_when_done(work.get_future(), trace, name, start_s)


def record_when_done(future: torch.futures.Future, trace: Trace, name: str, start_s: float) -> torch.futures.Future:
    """Appends a Span on the lane 'communication' when the future completes. The processor's clock: right for gloo."""

    def done(future: torch.futures.Future) -> torch.Tensor:
        trace.append(Span(dist.get_rank(), "communication", name, start_s, time.perf_counter()))
        return future.value()[0]

    return future.then(done)


class DataParallel(nn.Module, Engine):
    """The whole model on each rank. begin_equal: they get the first's parameters, and balance experts by all's load."""

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, trace: Trace | None = None, begin_equal: bool = True
    ) -> None:
        super().__init__()
        self.module, self.group, self.trace = module, group, trace
        self.loss_group, self.loss_op = group, "mean"
        if begin_equal:
            broadcast_parameters(module, group)
            for moe in moe_layers(module):
                moe.sum_load = partial(comm.all_reduce, group=group)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)


def arrived_twice(name: str) -> str:
    return (
        f"gradient of {name} arrived a second time before finish(): it may be on the network; "
        "put every micro-batch but the last in no_sync(), or call finish() after each backward pass"
    )


def assign_buckets(
    parameters: Sequence[NamedParameter],
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    kind_of: Callable[[nn.Parameter], str] = lambda param: "",
) -> list[list[NamedParameter]]:
    """Groups parameters, last layer first, into buckets of one dtype and device; each closes once it has its size.
    kind_of   whatever has another name from it gets a bucket of its own
    Source   Li et al. 2020 (arXiv:2006.15704), section 3.2.3: backward reaches the last layer first
    """
    if bucket_bytes < 1 or first_bucket_bytes < 1:
        raise ValueError(f"bucket sizes are {bucket_bytes} and {first_bucket_bytes}; choose at least 1 byte")
    closed: list[list[NamedParameter]] = []
    filling: dict[tuple, list[NamedParameter]] = {}
    for name, param in reversed(parameters):
        kind = (param.dtype, param.device, kind_of(param))
        filling.setdefault(kind, []).append((name, param))
        limit_bytes = bucket_bytes if closed else min(first_bucket_bytes, bucket_bytes)
        if sum(member.nbytes for _, member in filling[kind]) >= limit_bytes:
            closed.append(filling.pop(kind))
    return closed + list(filling.values())


@dataclass(frozen=True)
class Sharing:
    """Who has the same parameters, where not all are alike: experts, say, have fewer ranks than the rest.
    kind_of   a name for each parameter: what has the same lies in one bucket; None: not this engine's
    groups    of each kind, the ranks over which its gradients are summed
    divisor   of the sum of the ranks' gradients; 1 if each rank's loss is its share of the mean already
    """

    kind_of: Callable[[nn.Parameter], str | None]
    groups: Mapping[str, dist.ProcessGroup]
    divisor: int = 1

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> "Sharing":
        """All parameters alike; gradients become the mean of the ranks'."""
        return cls(lambda param: "all", {"all": group}, group.size())


class Bucket:
    """Gradients side by side in one flat buffer; each parameter's gradient is a view into it.

    The buffer is there from the first gradient on, until `free`.
    Shapes   views[param] has the parameter's shape; flat_P holds them all, P numbers
    """

    def __init__(self, members: list[NamedParameter], sharing: Sharing, label: str, grad_dtype: torch.dtype | None):
        self.label = label
        self.params = [param for _, param in members]
        self.group, self.divisor = sharing.groups[sharing.kind_of(self.params[0])], sharing.divisor
        self.dtype = grad_dtype or self.params[0].dtype
        self.flat_P: torch.Tensor | None = None
        self.views: dict[nn.Parameter, torch.Tensor] = {}
        self.waiting_for = set(self.params)
        self.sent_P: torch.Tensor | None = None  # what is on the network: flat_P, or a compressed copy
        self.work: Pending | None = None

    def view_of(self, param: nn.Parameter) -> torch.Tensor:
        """The parameter's place in the buffer, which is made when first it is asked for."""
        if self.flat_P is None:
            sizes = [member.numel() for member in self.params]
            self.flat_P = torch.empty(sum(sizes), dtype=self.dtype, device=param.device)
            pieces = zip(self.params, self.flat_P.split(sizes), strict=True)
            self.views = {member: piece.view(member.shape) for member, piece in pieces}
        return self.views[param]

    def collect(self, param: nn.Parameter, is_last: bool) -> None:
        """Moves the gradient into the buffer; the last time divides it, before the sum: 16 bits could overflow.

        Autograd adds later gradients in place, unless the buffer is of another dtype.
        """
        view, gradient = self.view_of(param), param.grad
        divisor = self.divisor if is_last else 1
        if self.dtype != param.dtype:
            self._collect_converted(param, view)
            if divisor != 1:
                view.div_(divisor)
        elif gradient is not view or divisor != 1:
            torch.div(gradient, divisor, out=view)  # one pass
            param.grad = view

    def _collect_converted(self, param: nn.Parameter, view: torch.Tensor) -> None:
        if param.grad is None:  # it is in the buffer already
            return
        if gradient_of(param) is view:
            view.add_(param.grad)
        else:
            view.copy_(param.grad)
        param.grad, param.main_grad = None, view

    def start(self, wire_dtype: torch.dtype | None, trace: Trace | None) -> None:
        self.sent_P = self.flat_P if wire_dtype is None else self.flat_P.to(wire_dtype)
        self.work = start_all_reduce(self.sent_P, self.group, self.label, trace)

    def wait(self) -> None:
        self.work.wait()
        if self.sent_P is not self.flat_P:
            self.flat_P.copy_(self.sent_P)
        self.waiting_for, self.sent_P, self.work = set(self.params), None, None

    def free(self) -> None:
        if self.work is not None:
            self.work.wait()
        for param in self.params:
            set_gradient(param, None)
        self.flat_P, self.views = None, {}
        self.waiting_for, self.sent_P, self.work = set(self.params), None, None


class BucketedDP(DataParallel):
    """Starts a full bucket's all-reduce while backward goes on; gradients live inside the buckets.

    Buckets start in one fixed order on every rank, however the gradients arrive: ranks always agree what they sum.
    sharing      where parameters differ in who has them: then nothing is broadcast, ranks bring the same numbers, and
                 all buckets are of one size
    grad_dtype   in which gradients are summed, such as torch.float32 beside bfloat16 parameters; then in `.main_grad`
    Bytes    sent per rank and step: 2 (dp - 1) / dp * P * itemsize (that of `wire_dtype` if given), one call a bucket
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        allow_unused: bool = False,
        wire_dtype: torch.dtype | None = None,
        trace: Trace | None = None,
        sharing: Sharing | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(module, group, trace, begin_equal=sharing is None)
        self.allow_unused, self.wire_dtype = allow_unused, wire_dtype
        first_bucket_bytes = FIRST_BUCKET_BYTES if sharing is None else bucket_bytes
        sharing = sharing or Sharing.over(group)
        members = [(name, param) for name, param in trainable(module) if sharing.kind_of(param) is not None]
        self.names = {param: name for name, param in members}
        plan = assign_buckets(members, bucket_bytes, first_bucket_bytes, sharing.kind_of)
        self.buckets = [Bucket(m, sharing, f"bucket {index}", grad_dtype) for index, m in enumerate(plan)]
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self.used: set[nn.Parameter] = set()  # in any micro-batch of this step
        self.num_started = 0
        self.syncing = True
        self.handles = hook_gradients(self.names, self._ready)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only add up on this rank: for every micro-batch but the last."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def _ready(self, param: nn.Parameter) -> None:
        bucket = self.bucket_of[param]
        if bucket.work is not None or (self.syncing and param not in bucket.waiting_for):
            raise RuntimeError(arrived_twice(self.names[param]))
        self.used.add(param)
        bucket.collect(param, is_last=self.syncing)
        if self.syncing:
            bucket.waiting_for.remove(param)
            self._start_full_buckets()

    def _start_full_buckets(self) -> None:
        while self.num_started < len(self.buckets) and not self.buckets[self.num_started].waiting_for:
            self.buckets[self.num_started].start(self.wire_dtype, self.trace)
            self.num_started += 1

    def finish(self) -> None:
        """Starts the buckets that never filled, then waits for all: the one place that waits.
        Raises   RuntimeError if a parameter got no gradient in the whole step, unless `allow_unused`
        """
        unused = [param for param in self.names if param not in self.used]
        if unused and not self.allow_unused:
            names = [self.names[param] for param in unused]
            raise RuntimeError(f"no gradient for {names} in this step; freeze them, or build with allow_unused=True")
        self._start_the_rest()
        for bucket in self.buckets:
            bucket.wait()
        if self.allow_unused:
            self._drop_what_no_rank_used()
        self.used.clear()
        self.num_started = 0

    def _start_the_rest(self) -> None:
        for bucket in self.buckets[self.num_started :]:
            for param in bucket.waiting_for:
                if param not in self.used:  # zeros here; other ranks may have used it
                    set_gradient(param, bucket.view_of(param).zero_())
                bucket.collect(param, is_last=True)
            bucket.waiting_for.clear()
        self._start_full_buckets()

    def _drop_what_no_rank_used(self) -> None:
        """A gradient of None, as in one process: weight decay and momentum then leave the parameter alone."""
        device = self.buckets[0].flat_P.device
        used_by = torch.tensor([param in self.used for param in self.names], dtype=torch.int32, device=device)
        comm.all_reduce_(used_by, self.group)
        for param, count in zip(self.names, used_by.tolist(), strict=True):
            if count == 0:
                set_gradient(param, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for bucket in self.buckets:
            bucket.free()
        self.used.clear()
        self.num_started = 0


build = BucketedDP  # build(model, group, ...): the engine that the course uses from here on
