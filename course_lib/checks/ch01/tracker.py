"""Grader of chapter 01, the last exercise: a memory tracker, held to small scenes and to PyTorch's own tracker."""

import random
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.checks.ch01.single_gpu_memory import random_llama
from course_lib.checks.core import fail, grader, observed
from course_lib.config import ModelConfig
from course_lib.minimal.peaks import peak_by_torch
from course_lib.model import build
from course_lib.training import loss_of

FP32 = 4  # bytes
MANY = 40  # storages, so that some lie where others were


@grader
def check_tracker(answer, rng):
    """Bytes of storages alive and their peak, in small scenes first, then in training steps, as PyTorch counts them."""
    size = rng.randrange(20, 90)
    for scene, per_element in SCENES:
        for (what, got, misconception), each in zip(observed(scene, answer, size), per_element, strict=True):
            _expect(got, each * size, misconception, what)
    for options in ({"foreach": False}, {"foreach": True}):
        _expect_peak_of_a_step(answer, rng, options)


Told = list[tuple[str, object, str]]  # what the tracker told: its name, its value, and what a wrong one means


def _expect(got: object, want: int, misconception: str, what: str) -> None:
    if isinstance(got, bool) or not isinstance(got, int):
        fail(f"{what} is {got!r}; it must be a whole number of bytes")
    if got != want:
        fail(f"{what} is {got:,}, and {want:,} is right: {misconception}")


# ------------------------------------------------------------------------------------ scenes
def _existing(tracker_type: type, size: int) -> Told:
    x = torch.zeros(size)
    with tracker_type([x, x.view(-1)]) as tracker:
        now = "now_bytes", tracker.now_bytes, "a storage that is given counts once, from the start"
        return [now, ("peak_bytes", tracker.peak_bytes, "what is alive at the start belongs to the peak")]


def _views(tracker_type: type, size: int) -> Told:
    x = torch.zeros(size, 2)
    with tracker_type([x]) as tracker:
        seen = [x.view(-1), x.t(), x[1:], x.add_(1)]
        message = "a view and the result of an operator in place have a storage that was counted already"
        told = [("now_bytes", tracker.now_bytes, message)]
    del seen
    return told


def _results(tracker_type: type, size: int) -> Told:
    with tracker_type([]) as tracker:
        x = torch.ones(size)
        pair = torch.sort(x)  # values, and their places in int64
        told = [("now_bytes", tracker.now_bytes, "an operator may return several tensors; each counts")]
    del pair
    return told


def _slices(tracker_type: type, size: int) -> Told:
    first = torch.ones(size)[:1]
    with tracker_type([first]) as tracker:
        return [("now_bytes", tracker.now_bytes, "a slice keeps its whole storage alive, not only what it shows")]


def _releases(tracker_type: type, size: int) -> Told:
    with tracker_type([]) as tracker:
        x = torch.ones(size)
        y = x * 2
        z, storage = y.view(-1), weakref.ref(y.untyped_storage())
        del y
        told = [("now_bytes", tracker.now_bytes, "a storage lives as long as any of its views does")]
        del z
        held = "a storage must not be held, or it is never freed"
        why = held if storage() else "a freed storage must be subtracted; a weak reference calls only while it is kept"
        told.append(("now_bytes", tracker.now_bytes, why))
        told.append(("peak_bytes", tracker.peak_bytes, "the peak stays when memory is freed"))
        del x
    return told


def _again(tracker_type: type, size: int) -> Told:
    """A new storage often lies where an old one was."""
    with tracker_type([]) as tracker:
        freed = [torch.ones(size) for _ in range(MANY)]
        del freed
        kept = [torch.ones(size) for _ in range(MANY)]
        message = "a new storage may have the address of one that was freed: forget an address when it is freed"
        told = [("now_bytes", tracker.now_bytes, message)]
    del kept
    return told


SCENES: tuple[tuple[Callable[[type, int], Told], tuple[int, ...]], ...] = (  # and the right bytes for each of `size`
    (_existing, (FP32, FP32)),
    (_results, (2 * FP32 + 8,)),
    (_views, (2 * FP32,)),
    (_slices, (FP32,)),
    (_releases, (2 * FP32, FP32, 2 * FP32)),
    (_again, (MANY * FP32,)),
)


# ------------------------------------------------------------------------------------ steps
def _expect_peak_of_a_step(tracker_type: type, rng: random.Random, options: dict) -> None:
    """The second step of a small Llama: with few tokens its update is the peak, with many the start of backward."""
    case = random_llama(rng, tied=False), options, (rng.randrange(1, 4), rng.choice([8, 64]))
    want, got = peak_by_torch(*_second_step(*case)), observed(_peak_of_a_step, tracker_type, *case)
    if got != want:
        fail(
            f"the peak of a training step is {got:,} bytes, and PyTorch's MemTracker counts {want:,}; "
            "does a view of a view, a result inside a tuple or a list, or a freed gradient go wrong?"
        )


def _second_step(config: ModelConfig, options: dict, shape: tuple[int, int]) -> tuple[Callable, nn.Module, Optimizer]:
    """A step to be taken, after one that made the optimizer's states; its model and its optimizer."""
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    ids_BS = torch.randint(config.vocab_size, shape)

    def step() -> None:
        loss_of(model, ids_BS.clone(), ids_BS.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step, model, optimizer


def _peak_of_a_step(tracker_type: type, *case) -> int:
    step, model, optimizer = _second_step(*case)
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    with tracker_type([*model.parameters(), *states]) as tracker:
        step()
    return tracker.peak_bytes
