"""A ledger of bytes: which tensors operators make, what autograd saves of them, and when each one is freed.

A formula for what is *saved* is a sum. A formula for the *peak* is not: it needs the order of events. The ledger keeps
that order with sizes alone, without numbers and without torch:

    Ledger      bytes that are there, by kind; the largest moment and its name
    Tensor      a size; its bytes leave the ledger when the last reference to them goes, as on a device
    Node        one operator in the graph: what it saved, and how its backward turns gradients into gradients

    ledger = Ledger()
    y = linear(x, weight)                 # operators.py: makes y, saves x
    ledger.backward([loss])               # runs the nodes, newest first; each frees what it saved

Backward follows autograd's rules: of all nodes whose gradients have arrived the newest runs first; a node's saved
tensors are freed after it has run; gradients that meet are added in place; a parameter's gradient goes to its parameter
at once. Checkpoints save their inputs alone, and run again when backward first asks for what they did not save.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count

MOVED_FROM_BYTES = 4096  # smaller tensors stay (offload.py)
KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "temporary")


class Storage:
    """Bytes on the device, of one kind at a time."""

    __slots__ = ("borrowed", "itemsize", "kind", "ledger", "moved", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int, kind: str, itemsize: int):
        self.ledger, self.nbytes, self.kind, self.itemsize = ledger, nbytes, kind, itemsize
        self.moved = False
        self.borrowed = False  # True: somebody else holds it as well, so nothing may be added into it
        ledger.change(kind, nbytes)

    def become(self, kind: str) -> None:
        """Counts under another kind from now on."""
        if kind != self.kind:
            self.ledger.change(self.kind, -self.nbytes, quietly=True)
            self.ledger.change(kind, self.nbytes, quietly=True)
            self.kind = kind

    def __del__(self):
        self.ledger.change(self.kind, -self.nbytes)


class Tensor:
    """A storage, seen as `numel` elements; `node` made it, None where no gradient is wanted."""

    __slots__ = ("node", "numel", "output", "storage")

    def __init__(self, storage: Storage, numel: int, node: Node | Weight | None = None, output: int = 0):
        self.storage, self.numel, self.node, self.output = storage, numel, node, output

    @property
    def itemsize(self) -> int:
        return self.storage.itemsize

    def view(self, node: Node | None = None) -> Tensor:
        """The same bytes under another node, or under none."""
        return Tensor(self.storage, self.numel, node)


class Weight:
    """A parameter: how many elements, who takes its gradient, and whether it has one."""

    __slots__ = ("frozen", "name", "numel", "receive")

    def __init__(self, name: str, numel: int, frozen: bool = False):
        self.name, self.numel, self.frozen = name, numel, frozen
        self.receive: Callable[[Weight, list[Tensor]], None] | None = None  # takes it out of the list


Backward = Callable[[list[Tensor], list[Tensor | None]], Sequence[Tensor | None]]  # (saved, grads) -> input gradients


class Node:
    """One operator of the graph; `inputs` are what its gradients go to."""

    __slots__ = ("backward", "before", "inputs", "name", "order", "saved")

    def __init__(self, name: str, order: int, inputs: tuple, saved: Saved, backward: Backward):
        self.name, self.order, self.inputs, self.saved, self.backward = name, order, inputs, saved, backward
        self.before: Callable[[], None] | None = None  # called when the gradient of its output is complete


class Saved:
    """What one node saved: its tensors, or under a checkpoint a place among those that will be made again."""

    __slots__ = ("checkpoint", "first", "tensors")

    def __init__(self, ledger: Ledger, tensors: list[Tensor], checkpoint: Checkpoint | None = None):
        self.checkpoint = checkpoint if tensors else None  # what saved nothing does not hold the checkpoint's inputs
        if self.checkpoint is None:
            self.tensors: list[Tensor | Elsewhere] | None = [ledger.keep(x) for x in tensors]
        else:
            self.first, self.tensors = checkpoint.count, None
            checkpoint.count += len(tensors)
            if checkpoint.made is not None:
                checkpoint.take(tensors)

    def take(self, how_many: int) -> list[Tensor]:
        """The saved tensors; those of a checkpoint are made now if they are not there."""
        if self.checkpoint is None:
            return [x.come_back() if isinstance(x, Elsewhere) else x for x in self.tensors]
        if how_many == 0:
            return []
        return self.checkpoint.again(self.first, how_many)


class Elsewhere:
    """A saved tensor whose bytes wait off the device, and come back when backward asks for them."""

    __slots__ = ("itemsize", "ledger", "numel")

    def __init__(self, ledger: Ledger, numel: int, itemsize: int):
        self.ledger, self.numel, self.itemsize = ledger, numel, itemsize

    def come_back(self) -> Tensor:
        return self.ledger.make(self.numel, self.itemsize, "activations")


class _Enough(Exception):
    """All that the checkpoint did not save is there again."""


class Checkpoint:
    """A part of the forward pass of which only the inputs are saved."""

    def __init__(self, ledger: Ledger, run: Callable[..., Tensor], inputs: Sequence[Tensor]):
        self.ledger, self.run = ledger, run
        self.inputs = Saved(ledger, list(inputs))
        self.count, self.made, self.total = 0, None, 0

    def take(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            if x.storage.kind == "temporary":
                x.storage.become("activations")
        self.made += [x.view() for x in tensors]
        if len(self.made) >= self.total:
            raise _Enough

    def again(self, first: int, how_many: int) -> list[Tensor | None]:
        if self.made is None:
            self.total, self.count, self.made = self.count, 0, []
            outer, self.ledger.checkpoint = self.ledger.checkpoint, self
            queue, self.ledger.queue = self.ledger.queue, None  # of this run nothing waits: the first run's products do
            inputs = [x.view(LEAF) for x in self.inputs.take(len(self.inputs.tensors))]
            try:
                self.run(*inputs)
            except _Enough:
                pass
            finally:
                self.ledger.checkpoint, self.ledger.queue = outer, queue
        given = self.made[first : first + how_many]
        self.made[first : first + how_many] = [None] * how_many
        return given


LEAF = object()  # the node of a tensor at which a graph begins


class Ledger:
    """Bytes that are there, by kind; `peak` is the largest moment, `peak_by_kind` its parts, `moment` its name."""

    def __init__(self):
        self.by_kind = dict.fromkeys(KINDS, 0)
        self.total = self.peak = 0
        self.peak_by_kind, self.moment, self.doing = dict(self.by_kind), "", ""
        self.largest = dict(self.by_kind)
        self.most_saved = 0  # activations and what the loss saves, together
        self.checkpoint: Checkpoint | None = None
        self.queue: list[tuple[list[Weight], list[Tensor]]] | None = None  # of weight gradients that wait for W
        self.offloads = False  # whether what is saved leaves the device
        self.moved_bytes = 0
        self._order = count()

    def change(self, kind: str, nbytes: int, quietly: bool = False) -> None:
        self.by_kind[kind] += nbytes
        self.total += nbytes
        if self.by_kind[kind] > self.largest[kind]:
            self.largest[kind] = self.by_kind[kind]
        if kind in ("activations", "logits"):
            self.most_saved = max(self.most_saved, self.by_kind["activations"] + self.by_kind["logits"])
        if self.total > self.peak and not quietly:
            self.peak, self.peak_by_kind, self.moment = self.total, dict(self.by_kind), self.doing

    def reset(self) -> None:
        """The peak starts anew from what is there now."""
        self.peak, self.peak_by_kind, self.moment = self.total, dict(self.by_kind), self.doing
        self.largest = dict(self.by_kind)
        self.most_saved = self.by_kind["activations"] + self.by_kind["logits"]

    def make(self, numel: int, itemsize: int, kind: str = "temporary") -> Tensor:
        """A new tensor."""
        return Tensor(Storage(self, numel * itemsize, kind, itemsize), numel)

    def keep(self, x: Tensor) -> Tensor | Elsewhere:
        """A saved tensor: on the device, or elsewhere."""
        if x.storage.kind == "temporary":
            x.storage.become("activations")
        if not self.offloads or x.storage.nbytes < MOVED_FROM_BYTES:
            return x.view()
        self.moved_bytes += 0 if x.storage.moved else x.storage.nbytes
        x.storage.moved = True
        return Elsewhere(self, x.storage.nbytes // x.itemsize, x.itemsize)

    def node(
        self, name: str, inputs: Sequence[Tensor | Weight | None], saved: list[Tensor], backward: Backward
    ) -> Node | None:
        """An operator of the graph, and what it saves; None where no input wants a gradient: nothing is saved."""
        self.doing = name
        if not any(not x.frozen if isinstance(x, Weight) else x is not None and x.node is not None for x in inputs):
            return None
        targets = tuple(x if x is None or isinstance(x, Weight) else (x.node, x.output) for x in inputs)
        order = next(self._order)
        return Node(name, order, targets, Saved(self, saved, self.checkpoint), _Counted(backward, len(saved)))

    @property
    def runs_again(self) -> bool:
        """Whether a checkpoint makes now what it did not save."""
        return self.checkpoint is not None and self.checkpoint.made is not None

    def place_in_queue(self, weights: list[Weight]) -> list[Tensor] | None:
        """Where one product's input and gradient will wait; None where the backward is in one part."""
        if self.queue is None:
            return None
        self.queue.append((weights, []))
        return self.queue[-1][1]

    def wait_in(self, place: list[Tensor], tensors: list[Tensor]) -> None:
        """Puts them there; autograd must not add into a gradient that waits."""
        for x in tensors:
            x.storage.borrowed = True
        place.extend(tensors)

    def run_queue(self, queue: list[tuple[list[Weight], list[Tensor]]]) -> None:
        """W: the weight gradients that wait, last product first."""
        while queue:
            weights, waiting = queue.pop()
            self.doing = f"weight gradient of {weights[0].name}"
            made = [self.make(weight.numel, waiting[-1].itemsize) for weight in weights]
            del waiting
            for weight in weights:
                weight.receive(weight, [made.pop(0)])

    def run_checkpoint(self, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Runs a part whose inner tensors are not saved."""
        outer, self.checkpoint = self.checkpoint, Checkpoint(self, run, inputs)
        try:
            return run(*inputs)
        finally:
            self.checkpoint = outer

    def backward(self, roots: Sequence[tuple[Node, Tensor]]) -> dict[int, Tensor]:
        """Runs the graph below the roots; returns the gradients that reached its beginnings (`LEAF`)."""
        waiting = _dependencies([node for node, _ in roots])
        buffers: dict[Node, list] = {}
        ready = []
        leaves: list[Tensor] = []
        for node, grad in roots:
            buffers.setdefault(node, {})[0] = grad
            if waiting[node] == 0:
                heapq.heappush(ready, (-node.order, node))
        del roots
        while ready:
            _, node = heapq.heappop(ready)
            self._run_node(node, buffers, waiting, ready, leaves)
        return leaves

    def _run_node(self, node, buffers, waiting, ready, leaves) -> None:
        if node.before is not None:
            node.before()
        self.doing = f"backward of {node.name}"
        grads = buffers.pop(node)
        grads = [grads.get(index) for index in range(max(grads) + 1)]
        produced = list(node.backward(node.saved, grads))
        del grads
        node.saved = node.backward = None
        for index, target in enumerate(node.inputs):
            grad, produced[index] = produced[index], None
            below, output = target if isinstance(target, tuple) else (target, 0)
            if below is None:
                continue
            if below is LEAF:
                if grad is not None:
                    _add(leaves, grad)
                continue
            waiting[below] -= 1
            if grad is not None:
                slots = buffers.setdefault(below, {})
                held = [slots.pop(output)] if output in slots else []
                _add(held, grad)
                (slots[output],) = held
                del held
            del grad
            if waiting[below] == 0 and isinstance(below, Node):
                heapq.heappush(ready, (-below.order, below))
        for below in [target for target in node.inputs if isinstance(target, Weight) and not target.frozen]:
            if waiting[below] == 0 and below in buffers:  # a tied weight waits for both of its gradients
                below.receive(below, [buffers.pop(below).pop(0)])


class _Counted:
    """A backward that is handed its own saved tensors."""

    __slots__ = ("backward", "how_many")

    def __init__(self, backward: Backward, how_many: int):
        self.backward, self.how_many = backward, how_many

    def __call__(self, saved: Saved, grads: list[Tensor | None]):
        return self.backward(saved.take(self.how_many), grads)


def _add(held: list[Tensor], grad: Tensor) -> None:
    """Adds a gradient to the one that is there: in place, unless somebody else needs that one."""
    if not held:
        held.append(grad)
    elif held[0].storage.borrowed:
        held[0] = held[0].storage.ledger.make(grad.numel, grad.itemsize)


def _dependencies(roots: Sequence[Node]) -> dict[Node | Weight, int]:
    """How many gradients each node below the roots waits for."""
    waiting, todo = dict.fromkeys(roots, 0), list(roots)
    seen = set(roots)
    while todo:
        for target in todo.pop().inputs:
            below = target[0] if isinstance(target, tuple) else target
            if below is None or below is LEAF:
                continue
            waiting[below] = waiting.get(below, 0) + 1
            if isinstance(below, Node) and below not in seen:
                seen.add(below)
                todo.append(below)
    return waiting
