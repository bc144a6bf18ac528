"""How many forward passes wait for their backward when the next one begins."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from course_lib.checks.watch import Cost


class _Saved:
    """A tensor that a forward pass saved for backward; autograd drops it when backward has used it."""

    def __init__(self, tensor: Tensor, of_forward: int) -> None:
        self.tensor, self.of_forward = tensor, of_forward


class Kept:
    """What forward passes saved for backward, and backward has not freed."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self.forwards, self.most_waiting = 0, 0

    @contextmanager
    def by_a_forward(self) -> Iterator[None]:
        """Inside, what is saved belongs to one forward pass."""
        waiting = len({saved.of_forward for saved in self.alive})
        self.most_waiting, self.forwards = max(self.most_waiting, waiting), self.forwards + 1

        def pack(tensor: Tensor) -> _Saved:
            saved = _Saved(tensor, self.forwards)
            self.alive.add(saved)
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            yield

    def most(self, slack: int) -> Cost:
        """Return the most that waited; one that has no target to count may wait until its name is given away."""
        return Cost(self.most_waiting, slack)
