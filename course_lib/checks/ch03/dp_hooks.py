"""Graders of chapter 03, exercises 5 and 6: hooks that overlap, and accumulation under DDP."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.checks.core import expect_close, fail, fresh_seed, grader, numbers, run_ranks
from course_lib.measure.meter import ByteMeter


# ------------------------------------------------------------------------------------ 5. hooks
class TiedModel(nn.Module):
    """An embedding tied to the head, and a frozen layer between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed, self.up = nn.Embedding(11, 6), nn.Linear(6, 6)
            self.frozen, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, x_BS: Tensor) -> Tensor:
        return self.head(self.frozen(torch.tanh(self.up(self.embed(x_BS)))))


class WatchedWork:
    """A collective under way: whether somebody waited for it, and whether its tensor was written before."""

    def __init__(self, work: dist.Work, x: Tensor) -> None:
        self._work, self._x, self._version = work, x, x._version
        self.waited, self.written = False, False

    def _note(self) -> None:
        self.written |= not self.waited and self._x._version != self._version
        self.waited = True

    def wait(self, *args) -> object:
        self._note()
        return self._work.wait(*args)

    def __getattr__(self, name: str):
        if name == "get_future":
            self._note()
        return getattr(self._work, name)


WRITTEN = "was written between the start of its all-reduce and its wait(): divide before the start, or after the wait"


@dataclass(frozen=True)
class Hooked:
    """What one rank saw of one step: all-reduces during backward and in all, blocking ones, those never waited for.

    waited_again   all-reduces of the step before that were waited for once more
    written        tensors written while they were being summed
    """

    during_backward: int
    total: int
    blocking: int
    never_waited: int
    waited_again: int
    written: int
    got: dict[str, Tensor]
    own: dict[str, Tensor]


@grader
def check_overlap(answer, rng):
    """Hooks that average each gradient during backward, once a parameter, for tied and frozen parameters too."""
    for world_size in (2, rng.choice([3, 4])):
        ranks = run_ranks(_hooked_steps, world_size, answer, fresh_seed(rng))
        for step in (0, 1):
            own = [steps[step].own for steps in ranks]
            for rank, steps in enumerate(ranks):
                _expect_hooked(steps[step], own, f"rank {rank} of {world_size}, step {step + 1}")


def _hooked_steps(answer: Callable, seed: int) -> list[Hooked]:
    model, alone, steps, before = TiedModel(seed), TiedModel(seed), [], []
    finish = answer(model, dist.group.WORLD)
    if not callable(finish):
        raise TypeError("your function must return finish, a function without arguments that waits")
    for step in (0, 1):
        generator = torch.Generator().manual_seed(seed + 100 * step + dist.get_rank())
        x_BS = torch.randint(11, (3, 5), generator=generator)
        for one in (model, alone):
            one.zero_grad()
        alone(x_BS).square().mean().backward()
        seen, before = _watch_step(model, alone, x_BS, finish, before)
        steps.append(seen)
    return steps


def _watch_step(model: nn.Module, alone: nn.Module, x_BS: Tensor, finish: Callable, before: list) -> tuple:
    """What was seen of a step, and its all-reduces under way; `before` are those of the step before."""
    original, works = dist.all_reduce, []
    for work in before:
        work.waited = False

    def watched(*args, **kwargs):
        work = original(*args, **kwargs)
        x = args[0] if args else kwargs["tensor"]
        works.append(WatchedWork(work, x) if work is not None else None)
        return works[-1]

    dist.all_reduce = watched
    try:
        model(x_BS).square().mean().backward()
        during_backward = len(works)
        finish()
    finally:
        dist.all_reduce = original
    blocking, under_way = sum(work is None for work in works[:during_backward]), [*filter(None, works)]
    never_waited = sum(not work.waited for work in under_way)
    again, written = sum(work.waited for work in before), sum(work.written for work in under_way)
    for work in under_way:
        work.wait()
    counts = during_backward, len(works), blocking, never_waited, again, written
    return Hooked(*counts, _gradients(model), _gradients(alone)), under_way


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def _expect_hooked(seen: Hooked, own: list[dict[str, Tensor]], where: str) -> None:
    want = len(own[0])
    if seen.total == 0:
        fail(f"{where}: no dist.all_reduce was called")
    if seen.during_backward == 0:
        fail(f"{where}: when backward was over, no all-reduce had started; start it in the hook, only wait in finish")
    if seen.total > want:
        fail(
            f"{where}: {seen.total} all-reduces for {want} parameters; a tied parameter has two names and one gradient"
        )
    if seen.total < want:
        fail(f"{where}: {seen.total} all-reduces for {want} trainable parameters; some were left out")
    if seen.blocking:
        fail(f"{where}: the hook waits for its all-reduce, and backward with it; start it with async_op=True")
    if seen.never_waited:
        fail(f"{where}: {seen.never_waited} all-reduces were never waited for; gradients may be read too early")
    if seen.waited_again:
        fail(
            f"{where}: finish waited for {seen.waited_again} all-reduces of the step before once more; empty the list "
            "of handles in finish, or it grows with every step"
        )
    if seen.written:
        fail(f"{where}: a gradient {WRITTEN}")
    for name, got in seen.got.items():
        shares = torch.stack([grads[name] for grads in own])
        wrong = {
            "summed, not averaged": shares.sum(0),
            "divided by the number of ranks twice": shares.mean(0) / len(own),
        }
        expect_close(got, shares.mean(0), f"{where}: the gradient of {name}", wrong)


# ------------------------------------------------------------------------------------ 6. accumulation
@grader
def check_accumulate(answer, rng):
    """Under DDP: one average a step, for micro-batches of unequal size, each freed before the next."""
    rows = rng.sample([1, 2, 3, 5], 3)
    for world_size in (2, rng.choice([3, 4])):
        ranks = run_ranks(_accumulated, world_size, answer, rows, fresh_seed(rng))
        for rank, (got, shares, calls, waiting) in enumerate(ranks):
            where = f"rank {rank} of {world_size}, micro-batches of {rows} rows"
            _expect_accumulated(got, shares, calls, rows, rank, where)
            if waiting:
                fail(
                    f"{where}: when a forward pass began, {waiting} before it still kept what they saved for "
                    "backward: one backward for a sum of losses needs the memory of all of them; call backward() "
                    "after each"
                )


class _Saved:
    """A tensor saved for backward, and the forward pass that saved it."""

    def __init__(self, x: Tensor, forward: int) -> None:
        self.x, self.forward = x, forward


class WaitingForwards(nn.Linear):
    """A linear layer that counts the forward passes whose backward has not run when the next one begins."""

    most_waiting, _count = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        alive = self.__dict__.setdefault("_alive", weakref.WeakSet())
        self.most_waiting = max(self.most_waiting, len({saved.forward for saved in alive}))
        self._count += 1

        def pack(saved: Tensor) -> _Saved:
            packed = _Saved(saved, self._count)
            alive.add(packed)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.x):
            return super().forward(x)


def _mean_loss(model: nn.Module, x_BD: Tensor, y_B: Tensor) -> Tensor:
    return (model(x_BD).squeeze(1) - y_B).square().mean()


def _accumulated(answer: Callable, rows: list[int], seed: int) -> tuple[Tensor, Tensor, int, int]:
    """Flat gradient of the engine; of every rank and micro-batch the gradient of its mean loss; all-reduces called;
    the most forward passes that waited for backward when another began."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, alone = (make(5, 1, bias=False).double() for make in (WaitingForwards, nn.Linear))
    alone.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    parts = [[numbers(generator, *shape) for shape in ((b, 5), (b,))] for b in rows]
    own = torch.stack([torch.autograd.grad(_mean_loss(alone, *part), alone.weight)[0].flatten() for part in parts])
    engine = DistributedDataParallel(model)
    with ByteMeter() as meter:
        answer(engine, [tuple(part) for part in parts], _mean_loss)
    shares = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, own)
    grad = torch.zeros(5, dtype=torch.float64) if model.weight.grad is None else model.weight.grad.flatten()
    return grad, torch.stack(shares), meter.calls.get("all_reduce", 0), model.most_waiting


def _expect_accumulated(got: Tensor, shares: Tensor, calls: int, rows: list[int], rank: int, where: str) -> None:
    weights = torch.tensor(rows, dtype=torch.float64) / sum(rows)
    by_part = shares.mean(0)  # over ranks; one row a micro-batch
    own = weights @ shares[rank]
    if calls == 0:
        fail(f"{where}: it called no all-reduce, and 1 is required: the last micro-batch must run outside no_sync()")
    if calls > 1:
        fail(
            f"{where}: it called {calls} all-reduces, and 1 is required: all micro-batches but the last belong in "
            "no_sync(), their forward pass too"
        )
    right = weights @ by_part
    wrong = {
        "every micro-batch counted alike, however many rows it has": by_part.mean(0),
        "the micro-batches' means were added up; weigh each by its share of the rows": by_part.sum(0),
        "divided by the number of ranks as well; DDP has done that": right / len(shares),
        "only the last micro-batch is in it": weights[-1] * by_part[-1],
        "this is the rank's own gradient": own,
    }
    expect_close(got, right, f"{where}: the gradient", wrong)
