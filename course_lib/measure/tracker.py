"""Measure tensors: which bytes are alive, of what kind, when. One tracker for a CPU, a GPU and for fake tensors.

A TorchDispatchMode sees every operator that makes a tensor; a weak reference on the tensor's storage tells when its
bytes are freed. What remains is to say of each storage what it is:

- parameters, gradients: the storages of the model's parameters, and of their `.grad` and `.main_grad`
- optimizer: its state, master parameters included
- activations: made in a forward pass (or a recomputed one) and still there when the backward pass goes on
- gathered: whole parameters put together from shards: FSDP's resized storages, or what `claim` says
- temporary: the rest: what operators need and drop, gradients on their way, the optimizer's work space

A storage has one kind for its whole life. The kind may become known after the birth, as with the optimizer's state of
the first step, so the timeline is drawn from the recorded events when one asks for it.

Where gradients meet, autograd adds into the one that came first, if nothing else holds its storage (a view's base
does). Under any TorchDispatchMode it always makes a third tensor. Where the sum would be in place, it is counted where
the first was, so what is measured is the run that nobody watches.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.measure.storages import is_dtensor, local_tensors, replaced, returns_fresh_storage, sharding_propagation
from course_lib.validate import one_of

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "temporary")
_UNDECIDED = "undecided"  # made in a forward pass: an activation if a backward pass finds it alive, temporary if not
_FORWARD, _BACKWARD, _RECOMPUTE, _OPTIMIZER = "forward", "backward", "recompute", "optimizer"
_CALL = torch._ops.OpOverload.__call__.__code__  # by which one mode hands an operator to the next


@dataclass(frozen=True)
class Timeline:
    """Bytes alive after each allocation and each release, by kind; a mark is (time_s, the phase that begins)."""

    times_s: list[float]
    bytes_by_kind: dict[str, list[int]]
    marks: list[tuple[float, str]] = field(default_factory=list)

    @property
    def total_bytes(self) -> list[int]:
        """All kinds together, at each time."""
        return [sum(column) for column in zip(*(self.bytes_by_kind[kind] for kind in KINDS), strict=True)]

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes, default=0)

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """What the peak was made of (at its first moment)."""
        return self.at(self.total_bytes.index(self.peak_bytes)) if self.times_s else dict.fromkeys(KINDS, 0)

    def at(self, index: int) -> dict[str, int]:
        return {kind: self.bytes_by_kind[kind][index] for kind in KINDS}

    def between(self, start_s: float, stop_s: float) -> Timeline:
        """The same timeline, cut to a span of time (its first entry says what was alive at the start)."""
        first = max(0, sum(t <= start_s for t in self.times_s) - 1)
        last = sum(t <= stop_s for t in self.times_s)
        columns = {kind: column[first:last] for kind, column in self.bytes_by_kind.items()}
        marks = [mark for mark in self.marks if start_s <= mark[0] <= stop_s]
        return Timeline(self.times_s[first:last], columns, marks)


class _StorageRef(weakref.ref):
    """A weak reference that remembers where the storage was."""

    __slots__ = ("address",)

    def __init__(self, storage: torch.UntypedStorage, callback: Callable) -> None:
        super().__init__(storage, callback)
        self.address = storage._cdata


@dataclass(slots=True, eq=False)
class _Block:
    """One storage: its size now, its kind (perhaps undecided), and the stretch of forward computation that made it."""

    kind: str
    nbytes: int
    episode: int
    reference: _StorageRef | None = None


@dataclass(frozen=True)
class _Sum:
    """The last sum that autograd made of two gradients, the address of the first of them, and the peak until then."""

    block: _Block | None
    first: int
    peak_before: int


class MemoryTracker(TorchDispatchMode):
    """Count the bytes of tensors alive, by kind, while the `with` block runs.

    with MemoryTracker(model, optimizer) as tracker:
        train_step(...)
    tracker.peak_bytes, tracker.peak_by_kind, tracker.timeline

    Counted are the model's and the optimizer's storages, and those made inside the block on the model's device.
    Phases are marked by hooks, which are removed on leaving. Under FakeTensorMode, enter that mode first.

    Raises   ValueError if the model has no parameters, or the optimizer offers no step hooks
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        first = next(model.parameters(), None)
        if first is None:
            raise ValueError(
                "model has no parameters, so there is nothing to classify; pass the module that is trained"
            )
        if optimizer is not None and not hasattr(optimizer, "register_step_pre_hook"):
            found = type(optimizer).__name__
            raise ValueError(f"optimizer is a {found}, required: a torch.optim.Optimizer; pass that one")
        self.model, self.optimizer, self.device_type = model, optimizer, first.device.type
        self._blocks: dict[int, _Block] = {}  # address of the storage -> block
        self._events: list[tuple[float, _Block, int]] = []
        self._marks: list[tuple[float, str]] = []
        self._start_bytes: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._total = self._peak = 0
        self._sum: _Sum | None = None
        self._phase, self._episode, self._paused, self._in_optimizer = _FORWARD, 0, 0, False
        self._recomputing_task: int | None = None  # the graph task whose backward runs a forward by hand
        self._start_s = time.perf_counter()
        self._active = False  # inside the `with` block: later releases change totals, but not the record
        self._cleanup: contextlib.ExitStack | None = None

    # ---- what one asks it
    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes alive at once since the start or the last `reset`."""
        return self._peak

    @property
    def peak_by_kind(self) -> dict[str, int]:
        return self.timeline.peak_by_kind

    @property
    def total_bytes(self) -> int:
        """All bytes alive now."""
        return self._total

    @property
    def timeline(self) -> Timeline:
        """Replay the events, now that every storage's kind is known (undecided ones still alive: activations)."""
        self._classify_known()
        now = dict(self._start_bytes)
        times_s: list[float] = []
        columns: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for moment, block, change in list(self._events):
            now["activations" if block.kind == _UNDECIDED else block.kind] += change
            times_s.append(moment)
            for kind in KINDS:
                columns[kind].append(now[kind])
        return Timeline(times_s, columns, list(self._marks))

    def recorded_changes(self) -> list[tuple[int, str, int]]:
        """Return every change of bytes in order: the storage's number, its kind, and by how many bytes.

        Storages that were alive at the start come first: those released later, then one for the rest of each kind.
        """
        self._classify_known()
        numbers, rest = {}, dict(self._start_bytes)
        before, later = [], []
        for _, block, change in self._events:
            is_first = id(block) not in numbers
            number = numbers.setdefault(id(block), len(numbers))
            kind = "activations" if block.kind == _UNDECIDED else block.kind
            if is_first and change < 0:
                before.append((number, kind, -change))
                rest[kind] += change
            later.append((number, kind, change))
        left = [(kind, nbytes) for kind, nbytes in rest.items() if nbytes > 0]
        return before + [(len(numbers) + index, *one) for index, one in enumerate(left)] + later

    def current(self, kind: str) -> int:
        """Bytes of one kind that are alive now.

        Raises   ValueError if kind is none of KINDS
        """
        one_of("kind", kind, KINDS)
        return self.current_by_kind()[kind]

    def current_by_kind(self) -> dict[str, int]:
        self._classify_known()
        now = dict.fromkeys(KINDS, 0)
        for block in list(self._blocks.values()):
            now["activations" if block.kind == _UNDECIDED else block.kind] += block.nbytes
        return now

    def mark(self, name: str) -> None:
        """Note that a phase begins; forward, backward and optimizer are noted by themselves."""
        self._marks.append((time.perf_counter() - self._start_s, name))

    def claim(self, tensor: torch.Tensor, kind: str) -> None:
        """Say what a tensor is, where the tracker cannot know: parameters gathered by hand, or a buffer of gradients.

        Raises   ValueError if kind is none of KINDS
        """
        one_of("kind", kind, KINDS)
        for local in local_tensors(tensor):
            if local.device.type == self.device_type or local.device.type == "meta":
                self._set_kind(local.untyped_storage(), kind)

    def reset(self) -> None:
        """Forget the past: peak and timeline start from what is alive now. Long runs call it once a step."""
        self._start_bytes = self.current_by_kind()
        self._events, self._marks, self._peak = [], [], self._total

    # ---- entering and leaving
    def __enter__(self) -> MemoryTracker:
        with contextlib.ExitStack() as stack:
            self._active = True
            stack.callback(self._deactivate)
            self._classify_known()
            self.reset()
            self._start_s = time.perf_counter()
            for handle in self._register_hooks():
                stack.callback(handle.remove)
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", self._following_resize))
            for owner, name in sharding_propagation():
                stack.enter_context(replaced(owner, name, self._pausing))
            super().__enter__()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        try:
            super().__exit__(*exception)
        finally:
            self._classify_known()
            self._cleanup.close()

    def _deactivate(self) -> None:
        self._active, self._sum = False, None

    def _register_hooks(self) -> list:
        """Register the hooks that tell phases and gradients, and return their handles."""
        leaves = [param for param in self.model.parameters() if param.requires_grad and param.is_leaf]
        handles = [param.register_post_accumulate_grad_hook(self._after_grad) for param in leaves]
        handles.append(self.model.register_forward_pre_hook(self._before_forward))
        if self.optimizer is not None:
            handles.append(self.optimizer.register_step_pre_hook(self._before_step))
            handles.append(self.optimizer.register_step_post_hook(self._after_step))
        return handles

    def _before_forward(self, module: nn.Module, args: tuple) -> None:
        if torch._C._current_graph_task_id() == -1:  # not when the whole model is recomputed
            self.mark(_FORWARD)

    def _after_grad(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.claim(parameter.grad, "gradients")

    def _before_step(self, *args) -> None:
        self._classify_known()
        self._in_optimizer = True
        self.mark(_OPTIMIZER)

    def _after_step(self, *args) -> None:
        self._in_optimizer = False
        self._classify_known()
        self.mark("end of step")

    # ---- seeing operators
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__ in a guard that costs as much as the counting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind in types:
            if is_dtensor(kind):
                return NotImplemented  # DTensor turns it into operators on local tensors, which come here again
        if self._paused:
            return func(*args, **(kwargs or {}))
        self._note_phase()
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and _adds_for_autograd():
            self._see_sum(out, args[0])
        elif returns_fresh_storage(func):
            for leaf in [out] if isinstance(out, torch.Tensor) else tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return out

    def _note_phase(self) -> None:
        if self._in_optimizer:
            phase = _OPTIMIZER
        elif torch._C._current_graph_task_id() == -1:
            phase = _FORWARD
        else:
            phase = _RECOMPUTE if self._is_recomputing() else _BACKWARD
        if phase != self._phase:
            if phase == _BACKWARD:
                self._episode += 1
            if self._phase in (_FORWARD, _OPTIMIZER) and phase in (_BACKWARD, _RECOMPUTE):
                self.mark(_BACKWARD)
            self._phase = phase

    def _is_recomputing(self) -> bool:
        """Inside a backward pass only a checkpoint records operators, or watches what unrecorded Functions save.

        One written by hand watches nothing: from its first recorded operator on, all operators of the same graph task
        are its own, until the backward pass that it starts.
        """
        task, recorded = torch._C._current_graph_task_id(), torch.is_grad_enabled()
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return True
        if recorded or task != self._recomputing_task:
            self._recomputing_task = task if recorded else None
        return self._recomputing_task is not None

    def _see(self, tensor: torch.Tensor) -> None:
        for local in local_tensors(tensor):
            if local.device.type != self.device_type:
                continue
            storage = local.untyped_storage()
            block = self._blocks.get(storage._cdata)
            if block is None:
                kind = _UNDECIDED if self._phase in (_FORWARD, _RECOMPUTE) else "temporary"
                self._add(storage, kind)
            elif block.nbytes != storage.nbytes():
                self._resize(block, storage.nbytes())

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        nbytes = storage.nbytes()
        block = _Block(kind, nbytes, self._episode)
        block.reference = _StorageRef(storage, self._free)
        self._blocks[block.reference.address] = block
        self._event(block, nbytes)

    def _see_sum(self, total: torch.Tensor, first: torch.Tensor) -> None:
        """Count it as a tensor of its own, until the first addend, which no one else holds, is let go at once."""
        peak, storage, before = self._peak, total.untyped_storage(), first.untyped_storage()
        self._see(total)
        if before.nbytes() == storage.nbytes() and not first._is_view():  # a view's base holds the storage as well
            self._sum = _Sum(self._blocks.get(storage._cdata), before._cdata, peak)

    def _is_in_place(self, address: int) -> bool:
        """Whether what is let go at this address is where the last sum would be, if nobody watched."""
        one = self._sum
        return one is not None and address == one.first and bool(self._events) and self._events[-1][1] is one.block

    def _put_in_place(self, block: _Block) -> None:
        """Count the sum where the first addend was: as if it had never had bytes of its own."""
        total, self._peak, self._sum = self._sum.block, self._sum.peak_before, None
        self._events.pop()
        self._total -= total.nbytes
        block.reference = total.reference
        self._blocks[block.reference.address] = block

    def _free(self, reference: _StorageRef) -> None:
        block = self._blocks.pop(reference.address, None)
        if block is None:
            return
        if self._is_in_place(reference.address):
            self._put_in_place(block)
            return
        if block.kind == _UNDECIDED:
            block.kind = "temporary" if block.episode == self._episode else "activations"
        self._event(block, -block.nbytes)
        block.nbytes = 0

    def _resize(self, block: _Block, nbytes: int) -> None:
        change, block.nbytes = nbytes - block.nbytes, nbytes
        self._event(block, change)

    def _event(self, block: _Block, change: int) -> None:
        self._total += change
        if change and self._active:
            self._peak = max(self._peak, self._total)
            self._events.append((time.perf_counter() - self._start_s, block, change))

    # ---- saying what a storage is
    def _classify_known(self) -> None:
        """Name the storages of parameters, gradients and optimizer state, which FSDP and optimizers replace at will."""
        for parameter in self.model.parameters():
            self.claim(parameter, "parameters")
            # main_grad: the FP32 sum beside it
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                if gradient is not None:
                    self.claim(gradient, "gradients")
        if self.optimizer is not None:
            of_model = {id(p) for p in self.model.parameters()}
            params = [group["params"] for group in self.optimizer.param_groups]
            for leaf in tree_leaves([params, list(self.optimizer.state.values())]):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in of_model:
                    self.claim(leaf, "optimizer")

    def _set_kind(self, storage: torch.UntypedStorage, kind: str) -> None:
        block = self._blocks.get(storage._cdata)
        if block is None:
            if self._active:
                self._add(storage, kind)
        elif block.kind != "gathered" or kind == "gathered":
            block.kind = kind

    # ---- two wrappers, in place only inside the `with` block
    def _following_resize(self, resize: Callable) -> Callable:
        """FSDP frees and refills whole parameters by resizing their storage, which no operator shows."""

        def resize_and_note(storage: torch.UntypedStorage, nbytes: int):
            out = resize(storage, nbytes)
            block = self._blocks.get(storage._cdata)
            if block is not None:
                block.kind = "gathered"
                self._resize(block, storage.nbytes())
            elif storage.device.type == self.device_type:  # made empty before the tracker looked: in an earlier step
                self._add(storage, "gathered")
            return out

        return resize_and_note

    def _pausing(self, function: Callable) -> Callable:
        """DTensor tries operators on global shapes to learn the output's shape: those tensors hold no bytes."""

        def paused(*args, **kwargs):
            self._paused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._paused -= 1

        return paused


def _adds_for_autograd() -> bool:
    """Whether autograd itself adds up gradients that have met, and not a function that it runs."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code is _CALL or frame.f_code.co_name == "__torch_dispatch__"):
        frame = frame.f_back  # of this mode, and of others inside it
    return frame is None or frame.f_code.co_name == "_engine_run_backward"
