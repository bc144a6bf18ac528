"""Parameters side by side in one flat padded buffer, of which each rank owns one piece: what all stages of ZeRO share.

    whole_P     | embed.weight ........ | norm.weight | 0 0 |      P numbers: a multiple of the number of ranks dp
    shard_p     | rank 0    | rank 1    | rank 2    | ...   |      p = P / dp: what this rank updates
    grad_P      the same layout, for the gradients of this rank's micro-batches

A flat buffer makes one message of many tensors, cuts it into equal pieces whatever the tensors' sizes, and gives the
optimizer one tensor instead of many. AdamW does not mind: it treats each number by itself.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.parallel.data import Pending, Sharing, record_when_done
from course_lib.parallel.engine import NamedParameter, Trace
from course_lib.span import Span
from course_lib.training.precision import gradient_of, set_gradient

Load = Callable[[Sequence[str], int, Tensor], None]  # names laid end to end, first number, what to fill from there on


def flatten_and_pad(tensors: Sequence[Tensor], num_pieces: int) -> Tensor:
    """Lay tensors end to end in one buffer, padded to a multiple of `num_pieces`.
    Shapes   any -> flat_P             (P the sum of their sizes, rounded up)
    """
    size = sum(tensor.numel() for tensor in tensors)
    flat_P = tensors[0].new_zeros(math.ceil(size / num_pieces) * num_pieces)
    torch.cat([tensor.flatten() for tensor in tensors], out=flat_P[:size])
    return flat_P


def room_for(tensors: Sequence[Tensor], num_pieces: int) -> Tensor:
    """As `flatten_and_pad`, without numbers: the host gives memory only where somebody writes."""
    size = sum(tensor.numel() for tensor in tensors)
    return tensors[0].new_empty(math.ceil(size / num_pieces) * num_pieces)


def views_into(flat_P: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in tensors]
    places = flat_P[: sum(sizes)].split(sizes)
    pairs = zip(places, tensors, strict=True)
    return [place.view(tensor.shape) for place, tensor in pairs]


def my_shard(flat_P: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The view of flat_P that this rank owns. Shapes flat_P -> flat_p (p = P / dp)"""
    size = len(flat_P) // group.size()
    return flat_P.narrow(0, group.rank() * size, size)


def hollow_out(model: nn.Module) -> None:
    """Moves parameters from the meta device to the one where new tensors are made: shapes there, still no memory."""
    twins: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if param not in twins:
            twin = torch.empty(param.shape, dtype=param.dtype)
            twin.untyped_storage().resize_(0)
            twins[param] = nn.Parameter(twin, requires_grad=param.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, twins[param])


class FlatShard:
    """Parameters of one dtype that travel together: `whole_P` on every rank, or only for a while; `shard_p` always.
    keep_whole   True: shard_p is a view of whole_P, which stays (stages 1 and 2). False: whole_P is `free` until it is
                 gathered, and shard_p has its own memory (stage 3)
    grad_dtype   in which gradients are summed, over micro-batches and ranks; the parameters' own by default
    load         fills shard_p, of parameters that have no numbers (`hollow_out`) and are not to stay whole
    """

    def __init__(
        self,
        members: list[NamedParameter],
        sharing: Sharing,
        label: str,
        keep_whole: bool,
        grad_dtype: torch.dtype | None = None,
        trace: Trace | None = None,
        load: Load | None = None,
    ) -> None:
        self.names = [name for name, _ in members]
        self.params = [param for _, param in members]
        self.kind, self.divisor = sharing.kind_of(self.params[0]), sharing.divisor
        self.group = group = sharing.groups[self.kind]
        self.label, self.trace = label, trace
        self.trains = self.params[0].requires_grad
        tensors = [param.detach() for param in self.params]
        self.whole_P = flatten_and_pad(tensors, group.size()) if load is None else room_for(tensors, group.size())
        for param, view in zip(self.params, views_into(self.whole_P, self.params), strict=True):
            param.data = view
        mine_p = my_shard(self.whole_P, group)
        if load is not None:
            mine_p = torch.empty_like(mine_p)
            load(self.names, group.rank() * len(mine_p), mine_p)
        elif not keep_whole:
            mine_p = mine_p.clone()
        self.shard_p = nn.Parameter(mine_p, requires_grad=self.trains)
        self.grad_dtype = grad_dtype or self.shard_p.dtype
        self.grad_P: Tensor | None = None  # this rank's gradients, not yet summed over ranks
        self.piece_p: Tensor | None = None  # my piece of their sum, once the network is done
        self.arrived: set[nn.Parameter] = set()  # what has its gradient in grad_P
        self.gather: Pending | None = None
        self.reduction: Pending | None = None
        self.is_whole = True
        if not keep_whole:
            self.free()

    # --- parameters

    @torch.no_grad()
    def start_gather(self) -> None:
        """Starts to fill whole_P with everybody's shard; does nothing if that is done or under way.
        Bytes    sent per rank: (dp - 1) / dp * P * itemsize
        """
        if self.is_whole:
            return
        if self.whole_P.untyped_storage().nbytes() == 0:
            self.whole_P.untyped_storage().resize_(self.whole_P.nbytes)
        start_s = time.perf_counter()
        self.gather = comm.all_gather_into(self.whole_P, self.shard_p.detach(), self.group, async_op=True)
        if self.trace is not None:
            self.gather = record_when_done(self.gather.get_future(), self.trace, f"gather {self.label}", start_s)
        self.is_whole = True

    def wait_for_gather(self) -> None:
        if self.gather is not None:
            self.gather.wait()
            self.gather = None

    def free(self) -> None:
        """Gives the memory of whole_P back. Tensors that look into it, autograd's too, see it refilled later."""
        self.wait_for_gather()
        self.whole_P.untyped_storage().resize_(0)
        self.is_whole = False

    @torch.no_grad()
    def share_update(self) -> None:
        """Starts to put everybody's updated shard into whole_P, where it stays: after the step of stages 1 and 2."""
        self.is_whole = False
        self.start_gather()

    # --- gradients

    def collect(self, param: nn.Parameter) -> None:
        """Adds the gradient, over the divisor of its sum, to its place in grad_P, and drops it."""
        if self.grad_P is None:
            self.grad_P = torch.zeros_like(self.whole_P, dtype=self.grad_dtype)
            self.grad_views = dict(zip(self.params, views_into(self.grad_P, self.params), strict=True))
        self.grad_views[param].add_(param.grad, alpha=1 / self.divisor)  # before the sum: 16 bits could overflow
        param.grad = None

    def is_full(self) -> bool:
        return len(self.arrived) == len(self.params)

    def start_reduce_scatter(self, in_place: bool) -> None:
        """Starts to sum grad_P over the ranks, each its piece: into grad_P itself, or into p numbers of their own.
        Bytes    sent per rank: (dp - 1) / dp * P * itemsize of grad_dtype
        """
        if self.grad_P is None:
            self.grad_P = torch.zeros_like(self.whole_P, dtype=self.grad_dtype)
        mine_p = my_shard(self.grad_P, self.group)
        self.piece_p = mine_p if in_place else torch.empty_like(mine_p)
        self.sent_s = time.perf_counter()
        self.reduction = comm.reduce_scatter_into(self.piece_p, self.grad_P, self.group, async_op=True)

    def finish_reduce_scatter(self) -> None:
        """Waits, adds my piece to the shard's gradient, forgets grad_P: freed, unless the piece is a view of it."""
        if self.reduction is None:
            return
        self.reduction.wait()
        if self.trace is not None:  # gloo does not tell when it was done, only that it is
            name = f"reduce {self.label}"
            self.trace.append(Span(dist.get_rank(), "communication", name, self.sent_s, time.perf_counter()))
        before_p = gradient_of(self.shard_p)
        set_gradient(self.shard_p, self.piece_p if before_p is None else before_p.add_(self.piece_p))
        self.reduction = self.grad_P = self.piece_p = self.grad_views = None
        self.arrived.clear()


Unit = tuple[str, list[nn.Module]]


def units_of(model: nn.Module) -> list[Unit]:
    """The parts of a model in the order in which they run: each member of a ModuleList, and what lies between lists.

    A model that has parameters of its own, beside those of its modules, is one unit.
    """
    if next(model.parameters(recurse=False), None) is not None:
        return [(type(model).__name__, [model])]
    units: list[Unit] = []
    joins_last = False
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList) or getattr(child, "run_in_order", False):  # a stage's layers have names
            blocks = child.items() if isinstance(child, nn.ModuleDict) else enumerate(child)
            units += [(f"{name}.{index}", [block]) for index, block in blocks]
            joins_last = False
        elif joins_last:
            label, modules = units[-1]
            units[-1] = (f"{label} + {name}", [*modules, child])
        else:
            units.append((name, [child]))
            joins_last = True
    return units


def unit_parameters(
    model: nn.Module, kind_of: Callable[[nn.Parameter], str] = lambda param: ""
) -> list[tuple[str, list[NamedParameter]]]:
    """(label, members) of each flat: a unit's; frozen, dtypes, kinds apart; a tied parameter in its first unit only."""
    names = {param: name for name, param in model.named_parameters()}
    flats, seen = [], set()
    for label, modules in units_of(model):
        kinds: dict[tuple, list[NamedParameter]] = {}
        for param in (param for module in modules for param in module.parameters()):
            if param not in seen:
                kinds.setdefault((param.requires_grad, param.dtype, kind_of(param)), []).append((names[param], param))
                seen.add(param)
        flats += [(label, members) for members in kinds.values()]
    return flats


def first_and_last_use(units: list[Unit], flat_of: dict[nn.Parameter, FlatShard]) -> tuple[dict, dict]:
    """Of each flat the first and the last unit that uses it: two units for one with a tied parameter."""
    uses: dict[FlatShard, list[int]] = {}
    for index, (_, modules) in enumerate(units):
        for param in (param for module in modules for param in module.parameters()):
            uses.setdefault(flat_of[param], []).append(index)
    return {flat: min(used) for flat, used in uses.items()}, {flat: max(used) for flat, used in uses.items()}
