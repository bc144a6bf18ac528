"""Bytes on the wire: one meter for hand-written collectives and for PyTorch's own (DDP, FSDP2, DTensor, pipelining).

    with ByteMeter() as meter:
        ring_all_reduce(grad_P, group)
    meter.sent_bytes, meter.by_collective, meter.calls, meter.records

What is counted: the bytes that this rank sends, if every collective travels around a ring (G ranks, rank r, neighbours
r - 1 and r + 1). The ring is a convention: NCCL may choose a tree, gloo has its own algorithms. Where pieces differ in
size, a rank's count depends on its place; over all ranks the sums in the last column are always exact.

    collective       rank r sends                                            all ranks together
    all_reduce       all but piece r, then all but piece r + 1               2 (G - 1) payloads
    reduce_scatter   all but piece r                                         G - 1
    all_gather       all but piece r + 1                                     G - 1
    all_to_all       what goes to others                                     -
    broadcast        the payload, along a chain src, src + 1, ...            G - 1   (the last in it sends nothing)
    reduce           the payload, along a chain to dst                       G - 1   (dst sends nothing)
    gather           its own shard, straight to dst                          G - 1 shards
    scatter          src alone: the pieces of the others                     G - 1 pieces
    send, recv       the tensor, nothing
    barrier          nothing                                                 (its messages carry no payload)

A payload is the whole tensor: for all_gather the gathered result, for reduce_scatter the input. Pieces are cut as
`tensor_split` cuts: the first numel % G of them hold one number more.

How it sees them: each of these collectives is an operator in torch's dispatcher, and a TorchDispatchMode sees every
operator that runs inside it. Autograd hands the mode on to its worker threads; threads that you start are not seen.
An operator that the meter does not know raises: nothing is dropped silently.
Seeing every operator costs some 20 microseconds each: measure bytes and seconds in separate runs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
_NOT_COMMUNICATION = {"wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"}
OTHER_AXIS = "other"  # in by_axis: groups that were given no name


@dataclass(frozen=True)
class CommRecord:
    """One call of one collective, as one rank saw it."""

    collective: str
    payload_bytes: int
    group_size: int
    sent_bytes: int
    axis: str | None = None


class ByteMeter(TorchDispatchMode):
    """Counts what this rank sends while it is open.

    axes: names for groups, such as `make_groups(mesh)`: {"dp": group, ...}; then `by_axis` tells them apart. A name may
    stand for several groups: {"pp": [group, ...]}.
    Raises   NotImplementedError at a collective that it has no rule for
    """

    def __init__(self, axes: Mapping[str, dist.ProcessGroup | Sequence[dist.ProcessGroup]] | None = None):
        super().__init__()
        self.records: list[CommRecord] = []
        self.axis_of_group = {
            group.group_name: axis
            for axis, groups in (axes or {}).items()
            for group in ([groups] if isinstance(groups, dist.ProcessGroup) else groups)
        }

    @property
    def sent_bytes(self) -> int:
        return sum(record.sent_bytes for record in self.records)

    @property
    def by_collective(self) -> dict[str, int]:
        """Bytes sent by each collective that was called."""
        return self._sent_by(lambda record: record.collective)

    @property
    def by_axis(self) -> dict[str, int]:
        """Bytes sent along each named axis; groups without a name are under "other"."""
        return self._sent_by(lambda record: record.axis or OTHER_AXIS)

    @property
    def calls(self) -> dict[str, int]:
        """How often each collective was called."""
        return dict(Counter(record.collective for record in self.records))

    def _sent_by(self, key: Callable[[CommRecord], str]) -> dict[str, int]:
        totals = Counter()
        for record in self.records:
            totals[key(record)] += record.sent_bytes
        return dict(totals)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__ in a guard that costs as much as the counting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs or {})
        elif any(tensor_type.__module__.startswith("torch.distributed.") for tensor_type in types):
            return NotImplemented  # let a DTensor take itself apart first: its collectives come back to us
        return func(*args, **(kwargs or {}))

    def _count(self, func, args: tuple, kwargs: dict) -> None:
        name = func._schema.name.split("::")[1]
        if name in _NOT_COMMUNICATION:
            return
        if name not in _RULES:
            raise NotImplementedError(
                f"ByteMeter has no rule for the operator {func}; add one to course_lib.measure.meter._RULES"
            )
        names = (argument.name for argument in func._schema.arguments)
        arguments = dict(zip(names, args, strict=False)) | kwargs  # those that are left out have defaults
        group = _group_of(arguments)
        axis = self.axis_of_group.get(group.group_name)
        for collective, payload_bytes, sent_bytes in _RULES[name](arguments, group.size(), group.rank()):
            self.records.append(CommRecord(collective, payload_bytes, group.size(), sent_bytes, axis))


def _group_of(arguments: dict) -> dist.ProcessGroup:
    """The group of a call: c10d operators carry a boxed ProcessGroup, functional ones its name."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


# -------------------------------------------------------------------------------------------- the ring's rules
def _piece_bytes(tensor: torch.Tensor, size: int, index: int) -> int:
    quotient, remainder = divmod(tensor.numel(), size)
    return (quotient + (index < remainder)) * tensor.element_size()


def _as_list(arguments: dict, *names: str) -> list[torch.Tensor]:
    value = next(arguments[name] for name in names if name in arguments)
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# -------------------------------------------------------------------------------------------- one rule an operator
_INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")  # names of arguments


# rule(arguments of the operator by name, group size, my rank in the group) -> [(collective, payload_bytes, sent_bytes)]
def _all_reduce(arguments, size, rank):
    tensors = _as_list(arguments, *_INPUTS)
    skipped = sum(_piece_bytes(tensor, size, piece) for tensor in tensors for piece in (rank, (rank + 1) % size))
    return [("all_reduce", _nbytes(tensors), 2 * _nbytes(tensors) - skipped)]


def _by_input(collective: str, bytes_of: Callable, names: Sequence[str] = _INPUTS) -> Callable:
    """The rule of bytes_of(nbytes, size, rank, root) -> (payload, sent): equal pieces, of one tensor or several."""

    def rule(arguments, size, rank):
        root = arguments.get("root_rank", arguments.get("src"))
        return [(collective, *bytes_of(_nbytes(_as_list(arguments, *names)), size, rank, root))]

    return rule


def _all_but_own(nbytes: int, size: int, *_) -> tuple[int, int]:
    return nbytes, nbytes - nbytes // size


_all_gather_one = _by_input("all_gather", lambda shard, size, *_: (shard * size, shard * (size - 1)))
_reduce_scatter_one = _by_input("reduce_scatter", _all_but_own)
_shard_dim_all_to_all = _by_input("all_to_all", _all_but_own)
_broadcast = _by_input("broadcast", lambda whole, size, rank, src: (whole, 0 if (rank + 1) % size == src else whole))
_reduce = _by_input("reduce", lambda whole, size, rank, dst: (whole, 0 if rank == dst else whole))
_gather = _by_input("gather", lambda shard, size, rank, dst: (shard * size, 0 if rank == dst else shard))
_scatter = _by_input(
    "scatter",
    lambda piece, size, rank, src: (piece * size, piece * (size - 1) if rank == src else 0),
    names=("output_tensors",),
)
_send = _by_input("send", lambda nbytes, *_: (nbytes, nbytes))
_recv = _by_input("recv", lambda nbytes, *_: (nbytes, 0))


def _by_list(collective: str, name: str, own: int = 0) -> Callable:
    """The rule of a list of pieces, which may differ: all are sent but that of rank + own."""

    def rule(arguments, size, rank):
        pieces = arguments[name][0] if isinstance(arguments[name][0], list) else arguments[name]
        return [(collective, _nbytes(pieces), _nbytes(pieces) - pieces[(rank + own) % size].nbytes)]

    return rule


_all_gather_list = _by_list("all_gather", "output_tensors", own=1)
_reduce_scatter_list = _by_list("reduce_scatter", "input_tensors")
_all_to_all_list = _by_list("all_to_all", "input_tensors")


def _all_to_all_single(arguments, size, rank):
    whole, rows = arguments["input"], arguments["input_split_sizes"]
    kept = whole.nbytes * rows[rank] // max(1, sum(rows)) if rows else whole.nbytes // size
    return [("all_to_all", whole.nbytes, whole.nbytes - kept)]


def _batch_p2p(arguments, size, rank):
    rules = {"isend": _send, "irecv": _recv}
    pairs = zip(arguments["op_list"], arguments["tensors"], strict=True)
    return [rules[op]({"tensor": tensor}, size, rank)[0] for op, tensor in pairs]


def _barrier(arguments, size, rank):
    return [("barrier", 0, 0)]


_OPERATORS = {  # of each rule: those of c10d (torch.distributed, DDP, FSDP2) and functional ones (DTensor, traced code)
    _all_reduce: "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
    _all_gather_list: "allgather_",
    _all_gather_one: (
        "allgather_coalesced_ allgather_into_tensor_coalesced_ _allgather_base_ all_gather_into_tensor "
        "all_gather_into_tensor_out all_gather_into_tensor_coalesced"
    ),
    _reduce_scatter_list: "reduce_scatter_",
    _reduce_scatter_one: (
        "reduce_scatter_tensor_coalesced_ _reduce_scatter_base_ reduce_scatter_tensor "
        "reduce_scatter_tensor_out reduce_scatter_tensor_coalesced"
    ),
    _all_to_all_list: "alltoall_",
    _all_to_all_single: "alltoall_base_ all_to_all_single",
    _broadcast: "broadcast_ broadcast",
    _reduce: "reduce_",
    _gather: "gather_ gather_into_tensor_",  # the second since torch 2.15
    _scatter: "scatter_",
    _send: "send isend",
    _recv: "recv_ recv_any_source_ irecv",
    _barrier: "barrier monitored_barrier_",
    _shard_dim_all_to_all: "shard_dim_alltoall",
    _batch_p2p: "batch_p2p_ops",
}
_RULES = {name: rule for rule, names in _OPERATORS.items() for name in names.split()}
