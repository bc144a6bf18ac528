"""What is seen of an answer at work, and when two observations agree: plain data, {what: value}."""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from course_lib.measure import ByteMeter


@dataclass(frozen=True)
class Cost:
    """A number that may be smaller than the reference's, and larger by `slack`."""

    value: float
    slack: float = 0


class Each(list):
    """In a case on ranks: an argument of which each rank gets its own."""


class MessageLog(TorchDispatchMode):
    """Writes down to whom this rank sends, and what, and from whom it receives; the meter keeps neither."""

    def __init__(self):
        super().__init__()
        self.messages: list[tuple[str, int]] = []
        self.sent: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("c10d::send", "c10d::recv_"):
            self.messages.append(("send" if name == "c10d::send" else "recv", args[2]))
        if name == "c10d::send":
            self.sent += [x.clone() for x in args[0]]
        return func(*args, **(kwargs or {}))


def copied(values, as_results: bool = False):
    """Return the values with tensors of their own: an answer may write into them. Results have no graph any more."""

    def of_its_own(x):
        return x.detach().clone().requires_grad_(x.requires_grad and not as_results) if isinstance(x, Tensor) else x

    return tree_map(of_its_own, values)


def call(answer: Callable, *args) -> dict:
    """Watch a plain call: what it returned, and whether it wrote into its arguments."""
    given = copied(args)
    result = answer(*given)
    return {"the result": copied(result, as_results=True), "arguments changed": not agree(given, args)}


def result(answer: Callable, *args) -> dict:
    """Watch what a plain call returned; it may write into its arguments."""
    return {"the result": copied(answer(*args), as_results=True)}


def named(what: str, none: str | None = None) -> Callable[..., dict]:
    """Watch what a plain call returned, by a name with its arguments in {}; `none`: in place of a None."""

    def watch(answer: Callable, *args) -> dict:
        found = result(answer, *args)["the result"]
        return {what.format(*args): none if found is None else found}

    return watch


def several(say: str, *names: str) -> Callable[..., dict]:
    """Watch a call that returns several things, a tuple or a list, or a dict if names are its keys; else `say`."""

    def watch(answer: Callable, *args) -> dict:
        result = answer(*args)
        if isinstance(result, dict):
            result = [result.get(name) for name in names]
        if not isinstance(result, tuple | list) or len(result) != len(names):
            return {"error": f"returned otherwise\n{say}; it is {result!r:.80}"}
        return copied(dict(zip(names, result, strict=True)), as_results=True)

    return watch


def collective(answer: Callable, *args, slack: int = 0, leave_out=()) -> dict:
    """Watch a call on this rank, the group last: calls, peers, result, and what was sent."""
    given = [arg[dist.get_rank()] if isinstance(arg, Each) else arg for arg in args]
    mine = copied(given)
    with MessageLog() as log, ByteMeter() as meter:
        result = answer(*mine, dist.group.WORLD)
    seen = {
        "other calls than send and recv": sorted(set(meter.calls) - {"send", "recv"}),
        "sent to": sorted({peer for kind, peer in log.messages if kind == "send"}),
        "the result": copied(result, as_results=True),
        "arguments changed": not agree(mine, given),
        "messages sent and received": Cost(sum(meter.calls.values())),
        "bytes sent": Cost(meter.sent_bytes, slack),
    }
    return {what: value for what, value in seen.items() if what not in leave_out}


def on_ranks(answer: Callable, *args, slack: int = 0) -> dict:
    """Watch a call on this rank, the group last: the result, and what was sent, in whatever calls."""
    not_seen = ("other calls than send and recv", "sent to", "messages sent and received")
    return collective(answer, *args, slack=slack, leave_out=not_seen)


def function(forward: Callable, backward: Callable) -> type[torch.autograd.Function]:
    """Return a Function of x and of what else it is given: forward(x, *rest) and backward(gradient, *rest)."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *rest):
            ctx.rest = rest
            return forward(x, *rest)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad.contiguous(), *ctx.rest), *[None] * len(ctx.rest)

    return Made


def crossed(apply: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> dict:
    """Watch x on its way through, and the gradient of the result on its way back."""
    x.requires_grad_()
    with ByteMeter() as forward:
        out = apply(x)
    with ByteMeter() as backward:
        if isinstance(out, Tensor) and out.shape == grad.shape and out.requires_grad:
            out.backward(grad)
    return {
        "forward": out.detach().clone() if isinstance(out, Tensor) else out,
        "the gradient": x.grad,
        "bytes sent forward": Cost(forward.sent_bytes),
        "bytes sent backward": Cost(backward.sent_bytes),
    }


class _Saved:
    """A tensor that a forward pass saved for backward; autograd drops it when backward has used it."""

    def __init__(self, tensor: Tensor, of_forward: int) -> None:
        self.tensor, self.of_forward = tensor, of_forward


class Kept:
    """What forward passes of a model saved for backward, and backward has not freed; rows: of each forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self.rows: list[int] = []
        self.most_waiting = 0
        self._forward, model.forward = model.forward, self._watched

    def _watched(self, x: Tensor) -> Tensor:
        self.most_waiting = max(self.most_waiting, len({saved.of_forward for saved in self.alive}))
        self.rows.append(len(x))

        def pack(tensor: Tensor) -> _Saved:
            saved = _Saved(tensor, len(self.rows))
            self.alive.add(saved)
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            return self._forward(x)

    def most(self, slack: int) -> Cost:
        """Return the most that waited; one that has no target to count may wait until its name is given away."""
        return Cost(self.most_waiting, slack)


def agree(got, want, within: bool = False) -> bool:
    """Whether two observations are equal up to rounding; `within`: a cost need only not be larger."""
    if isinstance(want, Cost) and isinstance(got, Cost):
        return got.value <= want.value + want.slack if within else got.value == want.value
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        if got.numel() == want.numel() == 1:
            got = got.reshape(want.shape)  # (1,) is as good as ()
        same = (got.shape, got.dtype) == (want.shape, want.dtype)
        rtol = (1e-6 if want.dtype == torch.float64 else 1e-5) if want.is_floating_point() else 0
        return same and torch.allclose(got, want, rtol=rtol, atol=1e-9, equal_nan=True)
    if isinstance(want, dict) and isinstance(got, dict):
        return got.keys() == want.keys() and all(agree(got[key], want[key], within) for key in want)
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        return len(got) == len(want) and all(agree(*pair, within) for pair in zip(got, want, strict=True))
    if isinstance(want, float) and isinstance(got, int | float | Tensor) and not isinstance(got, bool):
        got = float(got) if not isinstance(got, Tensor) or got.numel() == 1 else math.inf
        return math.isclose(got, want, rel_tol=1e-6) or (math.isnan(got) and math.isnan(want))
    if isinstance(want, int) and isinstance(got, int | float):
        same = got == want or (isinstance(got, float) and math.isclose(got, want, rel_tol=1e-12))
        return same and isinstance(got, bool) == isinstance(want, bool)
    return type(got) is type(want) and got == want


# In words -------------------------------------------------------------------------------------------------------------


def difference(got, want) -> str:
    """Say how an observation is off: the first place where it is."""
    if got is None:
        return "it is None; does your function return it?"
    if isinstance(want, Cost) and isinstance(got, Cost):
        return f"{got.value:,}, and {want.value:,} are enough"
    if isinstance(want, Tensor) and isinstance(got, Tensor) and got.shape == want.shape and want.numel() > 4:
        apart = ~torch.isclose(got.double(), want.double(), rtol=1e-6, atol=1e-9, equal_nan=True)
        if apart.any():
            at = tuple(apart.nonzero()[0].tolist())
            return f"{int(apart.sum())} of {want.numel()} are off; at {at} {got[at]:.6g}, and {want[at]:.6g} is right"
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        off = [key for key in want if not agree(got[key], want[key], within=True)]
        last = f", the last is {off[-1]}" if len(off) > 1 else ""
        return f"{len(off)} of {len(want)} are off{last}; {off[0]}: {difference(got[off[0]], want[off[0]])}"
    if isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(got) == len(want) > 1:
        at = next(i for i, pair in enumerate(zip(got, want, strict=True)) if not agree(*pair, within=True))
        return f"number {at} of {len(want)}: {difference(got[at], want[at])}"
    return f"{shown(got)}, and {shown(want)} is right"


def shown(value) -> str:
    """Return a value in a few characters."""
    if isinstance(value, Tensor):
        few = value.numel() <= 4
        return f"{value.tolist() if few else 'a tensor'} ({tuple(value.shape)}, {str(value.dtype).split('.')[-1]})"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple | list) and ("tensor(" in repr(value) or len(repr(value)) > 120):
        return f"{type(value).__name__} of {len(value)}"
    return f"{value:,}" if type(value) is int else f"{value!r:.120}"
