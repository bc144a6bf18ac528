"""Tables of chapter 03, exercises 5 and 6: hooks that overlap, and accumulation under DDP."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.checks import Exercise, Stops, copied, numbers, ranks_and_seeds
from course_lib.checks.watch import Kept
from course_lib.config import ModelConfig
from course_lib.measure import ByteMeter
from course_lib.model import build


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

    def __getattr__(self, name: str):
        if name in ("wait", "get_future"):
            self.written |= not self.waited and self._x._version != self._version
            self.waited = True
        return getattr(self._work, name)


@contextmanager
def watched_works(*names: str, then: Callable = lambda works: None) -> Iterator[list[WatchedWork]]:
    """Give a list that gets each call of these functions of torch.distributed; `then` is told after each."""
    works: list[WatchedWork] = []

    def watched(original: Callable, *args, **kwargs):
        work = original(*args, **kwargs)
        given = [x if isinstance(x, list) else [x] for x in (*args, *kwargs.values()) if isinstance(x, Tensor | list)]
        works.append(WatchedWork(original.__name__, work, given))
        then(works)
        return None if work is None else works[-1]

    with ExitStack() as stack:
        for name in names:
            original = getattr(dist, name)
            stack.callback(setattr, dist, name, original)
            setattr(dist, name, partial(watched, original))
        yield works
    for work in works:
        if not work.blocks:
            work.wait()


def in_flight(works: list[WatchedWork]) -> int:
    """Return how many of the calls nobody has waited for."""
    return sum(not work.waited for work in works)


WRITTEN = "was written between the start of its all-reduce and its wait(), so divide before the start or after the wait"


_TIED = ModelConfig("tied", 1, 8, num_heads=2, num_kv_heads=2, d_ff=16, vocab_size=11, max_seq_len=8, tied=True)


def overlap(model, group, params=nn.Module.parameters, divisor=dist.get_world_size, async_op=True, how=()):
    """Hooks that average each gradient during backward, once a parameter, for tied and frozen parameters too."""
    works, trained = [], [param for param in params(model) if param.requires_grad]

    def start(param):
        if "divides under way" not in how:
            param.grad /= divisor(group)
        works.append(dist.all_reduce(param.grad, group=group, async_op=async_op))
        if "divides under way" in how:
            param.grad /= divisor(group)

    for param in trained if "after backward" not in how else []:
        param.register_post_accumulate_grad_hook(start)

    def finish():
        for param in trained if "after backward" in how else []:
            start(param)
        for work in works if async_op and "never waits" not in how else []:
            work.wait()
        if "keeps the handles" not in how:
            works.clear()

    return finish


def _watch_hooks(answer, seed):
    """Two steps: collectives under way are counted, and whether their tensors were written meanwhile."""
    model, before, of_steps = build(_TIED, seed=seed, dtype=torch.float64), [], []
    model.blocks[0].mlp.requires_grad_(False)
    finish = answer(model, dist.group.WORLD)
    if not callable(finish):
        return {"kind of what is returned": type(finish).__name__}
    for step in (0, 1):
        generator = torch.Generator().manual_seed(seed + 100 * step + dist.get_rank())
        model.zero_grad()
        for work in before:
            work.waited = False
        with watched_works("all_reduce") as works:
            model(torch.randint(11, (3, 5), generator=generator)).square().mean().backward()
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
        of_steps.append(seen | {"the gradients": copied(grads, as_results=True)})
        before = [work for work in works if not work.blocks]
    joined = {what: [seen[what] for seen in of_steps] for what in of_steps[0]}
    return {"kind of what is returned": "function without arguments"} | joined


_WRONG_HOOKS = {
    "when backward was over, no all-reduce had started; start it in the hook, only wait in finish": {
        "how": "after backward"
    },
    "a tied parameter has two names and one gradient": {
        "params": lambda model: [*model.parameters(), model.head.weight]
    },
    "some trainable parameters were left out": {"params": lambda model: list(model.parameters())[1:]},
    "the hook waits for its all-reduce, and backward with it; start it with async_op=True": {"async_op": False},
    "gradients may be read too early: wait in finish": {"how": "never waits"},
    "empty the list of handles in finish, or it grows with every step": {"how": "keeps the handles"},
    f"a gradient {WRITTEN}": {"how": "divides under way"},
    "summed, not averaged": {"divisor": lambda group: 1},
    "divided by the number of ranks twice": {"divisor": lambda group: group.size() ** 2},
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
def _rows(parts):
    return sum(len(y) for _, y in parts)


def accumulate(
    engine, parts, loss_of, share=lambda part, parts: _rows([part]) / _rows(parts), synced=-1, skip=(), together=0
):
    """Under DDP: one average a step, for micro-batches of unequal size, each freed before the next.

    together   so many of the first losses share a backward, which is wrong
    """
    waiting = []
    for index, part in enumerate(parts):
        if index not in skip:
            engine.require_backward_grad_sync = synced == "each" or index == len(parts) + synced
            waiting.append(loss_of(engine, *part) * share(part, parts))
        if waiting and index + 1 >= together:
            sum(waiting).backward()
            waiting.clear()


def _own_gradient(engine, parts, loss_of):
    whole = sum(loss_of(engine.module, *part) * len(part[1]) for part in parts) / _rows(parts)
    own = torch.autograd.grad(whole, engine.module.weight)
    accumulate(engine, parts, loss_of)
    (engine.module.weight.grad,) = own


def _watch_sum(answer, rows, seed):
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    model.weight.data.fill_(1)
    kept, engine = Kept(model), DistributedDataParallel(model)
    parts = [(numbers(seed + 10 * dist.get_rank() + i, b, 5), numbers(seed + 5 + i, b)) for i, b in enumerate(rows)]
    with ByteMeter() as meter:
        answer(engine, parts, (lambda model, x_BD, y_B: (model(x_BD).squeeze(1) - y_B).square().mean()))
    return {
        "all-reduces": meter.calls.get("all_reduce", 0),
        "micro-batches kept when a forward pass begins": kept.most(slack=1),
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
    WHOLE.format("all"): {"together": 4},
    WHOLE.format("all but the last"): {"together": 3},
    "every micro-batch counted alike, however many rows it has": {"share": lambda part, parts: 1 / len(parts)},
    "the micro-batches' means were added up; weigh each by its share of the rows": {"share": lambda part, parts: 1},
    "divided by the number of ranks as well; DDP has done that": {
        "share": lambda part, parts: _rows([part]) / _rows(parts) / dist.get_world_size()
    },
    "only the last micro-batch is in it": {"skip": (0, 1, 2)},
    "this is the rank's own gradient": _own_gradient,
}
check_accumulate = Exercise(
    accumulate,
    lambda rng: [(size, rng.sample([1, 2, 3, 5], 4), seed) for size, seed in ranks_and_seeds(rng)],
    WRONG_SUM,
    _watch_sum,
    {"all-reduces": _NO_SYNC},
    ranks=True,
)
