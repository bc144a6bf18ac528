"""Tables of chapter 03, exercises 5 and 6: hooks that overlap, and accumulation under DDP."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.checks.core import fresh_seed, numbers, ranks_and_seeds
from course_lib.checks.table import Exercise, Stops
from course_lib.checks.watch import Kept, copied
from course_lib.measure import ByteMeter


# ------------------------------------------------------------------------------------ 5. hooks
class WatchedWork:
    """A collective that was called: whether somebody waited for it, and whether its tensor was written before.

    elements   of the longest tensor that it was given: the input of a reduce-scatter is longer than its output
    """

    def __init__(self, name: str, work: dist.Work | None, given: list[list[Tensor]]) -> None:
        self.name, self._work, self._x, self._version = name, work, given[0][0], given[0][0]._version
        self.elements = max(sum(x.numel() for x in of_one) for of_one in given)
        self.blocks = self.waited = work is None
        self.written = False

    def _note(self) -> None:
        self.written |= not self.waited and self._x._version != self._version
        self.waited = True

    def wait(self, *args) -> object:
        self._note()
        return self.blocks or self._work.wait(*args)

    def __getattr__(self, name: str):
        if name == "get_future":
            self._note()
        return getattr(self._work, name)


@contextmanager
def watched_works(*names: str, then: Callable = lambda works: None) -> Iterator[list[WatchedWork]]:
    """Give a list that gets each call of these functions of torch.distributed; `then` is told after each."""
    originals, works = {name: getattr(dist, name) for name in names}, []

    def watching(name: str) -> Callable:
        def watched(*args, **kwargs):
            work = originals[name](*args, **kwargs)
            given = [
                x if isinstance(x, list) else [x] for x in (*args, *kwargs.values()) if isinstance(x, Tensor | list)
            ]
            works.append(WatchedWork(name, work, given))
            then(works)
            return None if work is None else works[-1]

        return watched

    for name in names:
        setattr(dist, name, watching(name))
    try:
        yield works
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    for work in works:
        work.wait()


def in_flight(works: list[WatchedWork]) -> int:
    """Return how many of the calls nobody has waited for."""
    return sum(not work.waited for work in works)


WRITTEN = "was written between the start of its all-reduce and its wait(), so divide before the start or after the wait"


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


def overlap(model, group, params=lambda model: model.parameters(), how=()):
    """Hooks that average each gradient during backward, once a parameter, for tied and frozen parameters too."""
    works, trained = [], [param for param in params(model) if param.requires_grad]

    def start(param):
        if "sums" not in how and "divides under way" not in how:
            param.grad /= group.size() ** (2 if "divides twice" in how else 1)
        works.append(dist.all_reduce(param.grad, group=group, async_op="blocks" not in how))
        if "divides under way" in how:
            param.grad /= group.size()

    for param in trained if "after backward" not in how else []:
        param.register_post_accumulate_grad_hook(start)

    def finish():
        for param in trained if "after backward" in how else []:
            start(param)
        for work in works if "never waits" not in how else []:
            if work is not None:
                work.wait()
        if "keeps the handles" not in how:
            works.clear()

    return finish


def _watch_hooks(answer, seed):
    """Two steps: collectives under way are counted, and whether their tensors were written meanwhile."""
    model, before, of_steps = TiedModel(seed), [], []
    finish = answer(model, dist.group.WORLD)
    if not callable(finish):
        return {"kind of what is returned": type(finish).__name__}
    for step in (0, 1):
        generator = torch.Generator().manual_seed(seed + 100 * step + dist.get_rank())
        model.zero_grad()
        seen, before = _watch_step(model, torch.randint(11, (3, 5), generator=generator), finish, before)
        of_steps.append(seen)
    joined = {what: [seen[what] for seen in of_steps] for what in of_steps[0]}
    return {"kind of what is returned": "function without arguments"} | joined


def _watch_step(model: nn.Module, x_BS: Tensor, finish: Callable, before: list) -> tuple[dict, list]:
    """What was seen of a step, and its all-reduces under way; `before` are those of the step before."""
    for work in before:
        work.waited = False
    with watched_works("all_reduce") as works:
        model(x_BS).square().mean().backward()
        during_backward = len(works)
        finish()
        seen = {
            "a dist.all_reduce was called": bool(works),
            "an all-reduce had started when backward was over": during_backward > 0,
            "all-reduces": len(works),
            "all-reduces that block": sum(work.blocks for work in works[:during_backward]),
            "all-reduces never waited for": in_flight(works),
            "all-reduces of the step before waited for once more": sum(work.waited for work in before),
            "gradients written under way": sum(work.written for work in works),
        }
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return seen | {"the gradients": copied(grads, as_results=True)}, [work for work in works if not work.blocks]


_WRONG_HOOKS = {
    "when backward was over, no all-reduce had started; start it in the hook, only wait in finish": {
        "how": "after backward"
    },
    "a tied parameter has two names and one gradient": {
        "params": lambda model: [param for _, param in model.named_parameters(remove_duplicate=False)]
    },
    "some trainable parameters were left out": {
        "params": lambda model: [param for name, param in model.named_parameters() if "weight" in name]
    },
    "the hook waits for its all-reduce, and backward with it; start it with async_op=True": {"how": "blocks"},
    "gradients may be read too early: wait in finish": {"how": "never waits"},
    "empty the list of handles in finish, or it grows with every step": {"how": "keeps the handles"},
    f"a gradient {WRITTEN}": {"how": "divides under way"},
    "summed, not averaged": {"how": "sums"},
    "divided by the number of ranks twice": {"how": "divides twice"},
    "must return finish": Stops(lambda model, group: overlap(model, group) and None),
}
_SAYS_HOOKS = {
    "kind of what is returned": "your function must return finish, a function without arguments that waits",
    "all-reduces": "one for each trainable parameter; a tied one has two names and one gradient",
    "gradients written under way": f"a gradient {WRITTEN}",
    "all-reduces that block": "start it with async_op=True",
    "all-reduces never waited for": "gradients may be read too early",
    "all-reduces of the step before waited for once more": "empty the list of handles in finish",
}
check_overlap = Exercise(overlap, ranks_and_seeds, _WRONG_HOOKS, _watch_hooks, _SAYS_HOOKS, ranks=True)


# ------------------------------------------------------------------------------------ 6. accumulation
class _Row(nn.Module):
    """A linear layer to one number, which notes what was kept when a forward pass began."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(5, 1, dtype=torch.float64)), Kept()

    def forward(self, x_BD: Tensor) -> Tensor:
        with self.kept.by_a_forward():
            return x_BD @ self.weight


def _rows(parts):
    return sum(len(y) for _, y in parts)


def accumulate(engine, parts, loss_of, share=lambda part, parts: _rows([part]) / _rows(parts), synced=-1, skip=()):
    """Under DDP: one average a step, for micro-batches of unequal size, each freed before the next."""
    for index, part in enumerate(parts):
        if index not in skip:
            engine.require_backward_grad_sync = synced == "each" or index == len(parts) + synced
            (loss_of(engine, *part) * share(part, parts)).backward()


def _one_backward(engine, parts, loss_of):
    (sum(loss_of(engine, x, y) * len(y) for x, y in parts) / _rows(parts)).backward()


def _one_backward_but_for_the_last(engine, parts, loss_of):
    with engine.no_sync():
        (sum(loss_of(engine, x, y) * len(y) for x, y in parts[:-1]) / _rows(parts)).backward()
    (loss_of(engine, *parts[-1]) * len(parts[-1][1]) / _rows(parts)).backward()


def _own_gradient(engine, parts, loss_of):
    whole = sum(loss_of(engine.module, *part) * len(part[1]) for part in parts) / _rows(parts)
    own = torch.autograd.grad(whole, engine.module.weight)
    accumulate(engine, parts, loss_of)
    (engine.module.weight.grad,) = own


def _micro_batches(rng: random.Random) -> list[tuple]:
    return [(size, rng.sample([1, 2, 3, 5], 4), fresh_seed(rng)) for size in (2, rng.choice([3, 4]))]


def _watch_sum(answer, rows, seed):
    model = _Row()
    engine = DistributedDataParallel(model)
    parts = [(numbers(seed + 10 * dist.get_rank() + i, b, 5), numbers(seed + 5 + i, b)) for i, b in enumerate(rows)]
    with ByteMeter() as meter:
        answer(engine, parts, (lambda model, x_BD, y_B: (model(x_BD).squeeze(1) - y_B).square().mean()))
    return {
        "all-reduces": meter.calls.get("all_reduce", 0),
        "micro-batches kept when a forward pass begins": model.kept.most(slack=1),
        "the gradient": model.weight.grad,
    }


_NO_SYNC = "all micro-batches but the last belong in no_sync(), their forward pass too"
WHOLE = (
    "one backward for the sum of {} losses needs the memory of all of them: a forward pass began while those before "
    "it still kept what they saved for backward; call backward() after each"
)
WRONG_SUM = {
    f"an all-reduce for each micro-batch, and 1 is required: {_NO_SYNC}": {"synced": "each"},
    "it called no all-reduce, and 1 is required: the last micro-batch must run outside no_sync()": {"synced": 0},
    WHOLE.format("all"): _one_backward,
    WHOLE.format("all but the last"): _one_backward_but_for_the_last,
    "every micro-batch counted alike, however many rows it has": {"share": lambda part, parts: 1 / len(parts)},
    "the micro-batches' means were added up; weigh each by its share of the rows": {"share": lambda part, parts: 1},
    "divided by the number of ranks as well; DDP has done that": {
        "share": lambda part, parts: _rows([part]) / _rows(parts) / dist.get_world_size()
    },
    "only the last micro-batch is in it": {"skip": (0, 1, 2)},
    "this is the rank's own gradient": _own_gradient,
}
check_accumulate = Exercise(accumulate, _micro_batches, WRONG_SUM, _watch_sum, {"all-reduces": _NO_SYNC}, ranks=True)
