"""Table of chapter 01, the last exercise: a memory tracker, in small scenes first, then in steps of training."""

import weakref
from contextlib import nullcontext

import torch
from torch.utils._pytree import tree_leaves

from course_lib.checks import Exercise, but, fresh_seed
from course_lib.checks.ch01.single_gpu_memory import random_llama
from course_lib.minimal.memory import Tracker
from course_lib.model import build
from course_lib.training import loss_of

_MANY = 40  # storages, so that some lie where others were


def _watch(tracker_type, size, config, shape, seed):
    """Bytes of storages alive and their peak; the names of what is seen are the keys of SAYS."""
    seen = _in_use(tracker_type, size) | _releases(tracker_type, size) | _again(tracker_type, size)
    torch.manual_seed(seed)
    peaks = [_peak_of_a_step(tracker_type, config, shape, foreach) for foreach in (False, True)]
    return {"kind of number": type(next(iter(seen.values()))).__name__} | seen | {"peak of a training step": peaks}


def _in_use(tracker_type, size):
    x, first = torch.zeros(size, 2), torch.ones(size)[:1]
    with tracker_type([x, x.view(-1)]) as tracker:
        seen = {"now_bytes of what is given": tracker.now_bytes, "peak_bytes of what is given": tracker.peak_bytes}
        pair = torch.sort(x)  # values, and their places in int64
        seen["now_bytes after a sort"] = tracker.now_bytes
        views = [x.view(-1), x.t(), x[1:], x.add_(1)]
        seen["now_bytes after views"] = tracker.now_bytes
    with tracker_type([first]) as tracker:
        seen["now_bytes of a slice"] = tracker.now_bytes
    del pair, views
    return seen


def _releases(tracker_type, size):
    with tracker_type([]) as tracker:
        x = torch.ones(size)
        y = x * 2
        z, storage = y.view(-1), weakref.ref(y.untyped_storage())
        del y
        seen = {"now_bytes while a view lives": tracker.now_bytes}
        del z
        seen["a freed storage is alive"] = storage() is not None
        seen["now_bytes after a release"] = tracker.now_bytes
        seen["peak_bytes after a release"] = tracker.peak_bytes
        del x
    return seen


def _again(tracker_type, size):
    """A new storage often lies where an old one was."""
    with tracker_type([]) as tracker:
        freed = [torch.ones(size) for _ in range(_MANY)]
        del freed
        kept = [torch.ones(size) for _ in range(_MANY)]
        seen = {"now_bytes where others were freed": tracker.now_bytes}
    del kept
    return seen


def _peak_of_a_step(tracker_type, config, shape, foreach):
    """Of the second step of a small Llama; with few tokens its update is the peak, with many the start of backward."""
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    ids_BS = torch.randint(config.vocab_size, shape)
    for tracked in (False, True):
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        with tracker_type([*model.parameters(), *states]) if tracked else nullcontext() as tracker:
            loss_of(model, ids_BS.clone(), ids_BS.roll(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker.peak_bytes


def _scenes(rng):
    shape = rng.randrange(1, 4), rng.choice([8, 64])
    return [(rng.randrange(20, 90), random_llama(rng, tied=False), shape, fresh_seed(rng))]


# ------------------------------------------------------------------------------------ wrong trackers
def _looking(see) -> type:
    """Return the tracker that sees other results of an operator: see(tracker, tensors)."""

    class Looking(Tracker):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            see(self, [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)])
            return out

    return Looking


def _count_views_again(tracker, tensors):
    for tensor in tensors:
        if tensor.untyped_storage()._cdata in tracker.alive:
            tracker.now_bytes += tensor.nbytes
        else:
            tracker.see(tensor)


def _count_every_tensor(tracker, tensor):
    """As if a view had memory of its own."""
    tracker.now_bytes += tensor.nbytes
    tracker.peak_bytes = max(tracker.peak_bytes, tracker.now_bytes)


def _count_what_is_shown(tracker, tensor):
    before = tracker.now_bytes
    Tracker.see(tracker, tensor)
    if tracker.now_bytes > before:
        tracker.now_bytes = before + min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _keeping(kept_of) -> type:
    """Return the tracker that keeps something else than a weak reference: kept_of(storage)."""

    def see(tracker, tensor):
        Tracker.see(tracker, tensor)
        tracker.alive[tensor.untyped_storage()._cdata] = kept_of(tensor.untyped_storage())

    return but(Tracker, see=see)


def _free_and_forget_the_peak(tracker, address, nbytes):
    Tracker.free(tracker, address, nbytes)
    tracker.peak_bytes = tracker.now_bytes


def _free_but_keep_the_address(tracker, address, nbytes):
    tracker.now_bytes -= nbytes


def _begin_in_megabytes(tracker):
    tracker.now_bytes /= 1e6
    return Tracker.__enter__(tracker)


SAYS = {
    "kind of number": "it must be a whole number of bytes",
    "now_bytes of what is given": "a storage that is given counts once, from the start",
    "peak_bytes of what is given": "what is alive at the start belongs to the peak",
    "now_bytes after a sort": "an operator may return several tensors; each counts",
    "now_bytes after views": "a view and the result of an operator in place have a storage that was counted already",
    "now_bytes of a slice": "a slice keeps its whole storage alive, not only what it shows",
    "now_bytes while a view lives": "a storage lives as long as any of its views does",
    "a freed storage is alive": "a storage must not be held, or it is never freed",
    "now_bytes after a release": ("a freed storage must be subtracted; a weak reference calls only while it is kept"),
    "peak_bytes after a release": "the peak stays when memory is freed",
    "now_bytes where others were freed": (
        "a new storage may have the address of one that was freed: forget an address when it is freed"
    ),
    "peak of a training step": ("does a view of a view, a result in a tuple or a list, or a freed gradient go wrong?"),
}
WRONG = {
    SAYS["kind of number"]: {"__enter__": _begin_in_megabytes},
    SAYS["now_bytes of what is given"]: {"see": _count_every_tensor},
    SAYS["now_bytes after a sort"]: _looking(lambda tracker, tensors: [tracker.see(tensor) for tensor in tensors[:1]]),
    SAYS["now_bytes after views"]: _looking(_count_views_again),
    SAYS["now_bytes of a slice"]: {"see": _count_what_is_shown},
    SAYS["a freed storage is alive"]: _keeping(lambda storage: storage),
    SAYS["now_bytes after a release"]: _keeping(lambda storage: None),
    SAYS["peak_bytes after a release"]: {"free": _free_and_forget_the_peak},
    SAYS["now_bytes where others were freed"]: {"free": _free_but_keep_the_address},
}
check_tracker = Exercise(Tracker, _scenes, WRONG, _watch, SAYS)
