"""Grader of chapter 01, the last exercise: a memory tracker, held to small scenes and to PyTorch's own tracker."""

import random
import weakref
from collections.abc import Callable

import torch

from course_lib.checks.ch01.single_gpu_memory import random_llama
from course_lib.checks.core import fail, grader
from course_lib.minimal.peaks import peak_by_torch
from course_lib.model import build
from course_lib.training import loss_of

FP32 = 4  # bytes
MANY = 40  # storages, so that some lie where others were


@grader
def check_tracker(answer, rng):
    """Bytes of storages alive and their peak, in small scenes first, then in training steps, as PyTorch counts them."""
    size = rng.randrange(20, 90)
    for scene in SCENES:
        scene(answer, size)
    for options in ({"foreach": False}, {"foreach": True}):
        _expect_peak_of_a_step(answer, rng, options)


def _expect(got: object, want: int, misconception: str, what: str = "now_bytes") -> None:
    if isinstance(got, bool) or not isinstance(got, int):
        fail(f"{what} is {got!r}; it must be a whole number of bytes")
    if got != want:
        fail(f"{what} is {got:,}, and {want:,} is right: {misconception}")


# ------------------------------------------------------------------------------------ scenes
def _existing(tracker_type: type, size: int) -> None:
    x = torch.zeros(size)
    with tracker_type([x, x.view(-1)]) as tracker:
        _expect(tracker.now_bytes, FP32 * size, "a storage that is given counts once, from the start")
        _expect(tracker.peak_bytes, FP32 * size, "what is alive at the start belongs to the peak", "peak_bytes")


def _views(tracker_type: type, size: int) -> None:
    x = torch.zeros(size, 2)
    with tracker_type([x]) as tracker:
        seen = [x.view(-1), x.t(), x[1:], x.add_(1)]
        message = "a view and the result of an operator in place have a storage that was counted already"
        _expect(tracker.now_bytes, 2 * FP32 * size, message)
    del seen


def _results(tracker_type: type, size: int) -> None:
    with tracker_type([]) as tracker:
        x = torch.ones(size)
        pair = torch.sort(x)  # values, and their places in int64
        _expect(tracker.now_bytes, (2 * FP32 + 8) * size, "an operator may return several tensors; each counts")
    del pair


def _slices(tracker_type: type, size: int) -> None:
    first = torch.ones(size)[:1]
    with tracker_type([first]) as tracker:
        _expect(tracker.now_bytes, FP32 * size, "a slice keeps its whole storage alive, not only what it shows")


def _releases(tracker_type: type, size: int) -> None:
    with tracker_type([]) as tracker:
        x = torch.ones(size)
        y = x * 2
        z, storage = y.view(-1), weakref.ref(y.untyped_storage())
        del y
        _expect(tracker.now_bytes, 2 * FP32 * size, "a storage lives as long as any of its views does")
        del z
        held = "a storage must not be held, or it is never freed"
        why = held if storage() else "a freed storage must be subtracted; a weak reference calls only while it is kept"
        _expect(tracker.now_bytes, FP32 * size, why)
        _expect(tracker.peak_bytes, 2 * FP32 * size, "the peak stays when memory is freed", "peak_bytes")
        del x


def _again(tracker_type: type, size: int) -> None:
    """A new storage often lies where an old one was."""
    with tracker_type([]) as tracker:
        freed = [torch.ones(size) for _ in range(MANY)]
        del freed
        kept = [torch.ones(size) for _ in range(MANY)]
        message = "a new storage may have the address of one that was freed: forget an address when it is freed"
        _expect(tracker.now_bytes, MANY * FP32 * size, message)
    del kept


SCENES: tuple[Callable[[type, int], None], ...] = (_existing, _results, _views, _slices, _releases, _again)


# ------------------------------------------------------------------------------------ steps
def _expect_peak_of_a_step(tracker_type: type, rng: random.Random, options: dict) -> None:
    """The second step of a small Llama: with few tokens its update is the peak, with many the start of backward."""
    config = random_llama(rng, tied=False)
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    ids_BS = torch.randint(config.vocab_size, (rng.randrange(1, 4), rng.choice([8, 64])))

    def step() -> None:
        loss_of(model, ids_BS.clone(), ids_BS.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    want = peak_by_torch(step, model, optimizer)
    with tracker_type([*model.parameters(), *states]) as tracker:
        step()
    if tracker.peak_bytes != want:
        fail(
            f"the peak of a training step is {tracker.peak_bytes:,} bytes, and PyTorch's MemTracker counts {want:,}; "
            "does a view of a view, a result inside a tuple or a list, or a freed gradient go wrong?"
        )
