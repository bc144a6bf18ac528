"""A pipeline's micro-batches do the same again and again: run few of them, and replay the rest from a tape.

Of each stage the first two micro-batches and the last run; they differ from all others (the first makes the gradients,
the last sends them). What F or B of the second did is on tape: bytes allocated and freed in their order, bytes sent,
FLOPs. For a micro-batch between them these are noted again at its place in the schedule. All else stays as it is:
messages between stages are real tensors, and the schedule decides how many micro-batches are kept at once. So the peak
is that of the whole run, and time to find it does not grow with accumulation; tests hold one to the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from course_lib.measure.meter import ByteMeter, CommRecord
from course_lib.measure.tracker import _UNDECIDED, MemoryTracker, _Block
from course_lib.model.moe import moe_layers
from course_lib.parallel.executor import Executor, Kept
from course_lib.parallel.weight_gradients import WeightGradientStore
from course_lib.schedules.instructions import Instruction
from course_lib.simulate.fake_world import ASK_DEVICE


class FlopMeter(TorchDispatchMode):
    """Counts the FLOPs of matrix products and attention while it is open.

    Attention counts in full where a mask leaves half, and its backward as twice its forward: the scores that a fused
    kernel computes again are not counted, as in `flops.step_flops`.
    """

    def __init__(self):
        super().__init__()
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ASK_DEVICE and isinstance(args[0], FakeTensor):  # two of three calls: no mode below need hear of it
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in _ATTENTION:
            self.flops += _ATTENTION[packet](*args)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


def _attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *others) -> int:
    """q k^T and weights v."""
    B, N, S, H = q_BNSH.shape
    return 2 * B * N * S * k_BKSH.shape[2] * (H + v_BKSH.shape[3])


def _attention_backward(grad: Tensor, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *others) -> int:
    return 2 * _attention(q_BNSH, k_BKSH, v_BKSH)


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class TapeTracker(MemoryTracker):
    """A tracker into whose record a stretch that it has seen can be put again."""

    def block_of(self, tensor: Tensor | None) -> _Block | None:
        return None if tensor is None else self._blocks.get(tensor.untyped_storage()._cdata)

    def repeat(self, block: _Block, change: int) -> None:
        """Notes once more that so many bytes of that kind came or went."""
        self._event(_Block("activations" if block.kind == _UNDECIDED else block.kind, 0, self._episode), change)


@dataclass(frozen=True)
class Stretch:
    """What one instruction did: allocations in their order, bytes sent, FLOPs, and the shape of its result."""

    changes: list[tuple[_Block, int]]
    result_block: _Block | None
    like: tuple | None  # (size, stride, dtype) of the result; None: it has none
    records: list[CommRecord]
    flops: int
    keeps_came: bool = False  # W needs what came for this I, as a linear's gradient; tp may have gathered it anew


class Tape:
    """Runs a rank's instructions of one step, or replays them: `with replaced(Executor, "compute", tape.wrap)`."""

    def __init__(self, tracker: TapeTracker, meter: ByteMeter, flop_meter: FlopMeter):
        self.tracker, self.meter, self.flop_meter = tracker, meter, flop_meter
        self.stretches: dict[tuple[int, str], Stretch] = {}  # by stage and op: the last that ran
        self.running: dict[int, set[int]] = {}  # of each stage the micro-batches that run
        self.held: dict[int, Tensor] = {}  # by stage: as large as what modules held of the last forward that ran
        self.others: dict[tuple[int, int], list[_Block | None]] = {}  # what came for a micro-batch that runs
        self.replayed = 0

    def wrap(self, compute: Callable) -> Callable:
        """`Executor.compute` that runs what must run."""

        def run_or_replay(executor: Executor, one: Instruction, came: Tensor | None) -> Tensor | None:
            self.running = self.running or _micro_batches_to_run(executor)
            if one.micro_batch in self.running[one.stage]:
                return self.record(compute, executor, one, came)
            self.replayed += 1
            return self.replay(executor, one, came)

        return run_or_replay

    def record(self, compute: Callable, executor: Executor, one: Instruction, came: Tensor | None) -> Tensor | None:
        """Runs the instruction, and puts what it did on tape. What came for it is a real tensor in a replay too."""
        others = self.others.setdefault((one.stage, one.micro_batch), [])  # W may free what came for I
        kept_x = getattr(executor.kept.get((one.stage, one.micro_batch)), "x", None)
        others += [self.tracker.block_of(x) for x in (came, kept_x)]
        del kept_x  # the instruction may free it
        if one.op == "F":
            self.held.pop(one.stage, None)
        events, records, flops = len(self.tracker._events), len(self.meter.records), self.flop_meter.flops
        result = compute(executor, one, came)
        self.stretches[one.stage, one.op] = Stretch(
            changes=[(block, change) for _, block, change in self.tracker._events[events:] if block not in others],
            result_block=self.tracker.block_of(result),
            like=None if result is None else (result.shape, result.stride(), result.dtype),
            records=self.meter.records[records:],
            flops=self.flop_meter.flops - flops,
            keeps_came=one.op == "I" and waits(executor.waiting[one.stage, one.micro_batch], came),
        )
        return result

    def replay(self, executor: Executor, one: Instruction, came: Tensor | None) -> Tensor | None:
        """Notes what the instruction would do, and gives a result of the same shape."""
        stretch, place, result = self.stretches[one.stage, one.op], (one.stage, one.micro_batch), None
        if one.op == "F":
            self.let_go(executor, one.stage)
            executor.kept[place] = Kept(came, [], None)
        else:
            self.tracker._episode += 1  # what is alive now outlives the forward pass that made it
            executor.to_come[one.stage] -= 1
        for block, change in stretch.changes:
            if block is not stretch.result_block:
                self.tracker.repeat(block, change)
            elif result is None:
                result = torch.empty_strided(*stretch.like[:2], dtype=stretch.like[2], device=executor.device)
                if one.op != "F":
                    self.tracker.claim(result, "temporary")  # made by backward
        if one.op in "BI":
            executor.kept.pop(place)
        if one.op == "I":
            executor.waiting[place] = came if stretch.keeps_came else None
        elif one.op == "W":
            executor.waiting.pop(place)
        self.meter.records += stretch.records
        self.flop_meter.flops += stretch.flops
        return result

    def let_go(self, executor: Executor, stage: int) -> None:
        """A forward that does not run does not replace the routings that modules hold of the one before it."""
        before = self.tracker.total_bytes
        for moe in moe_layers(executor.engine.stages[str(stage)]):
            moe.routing = None
        if freed := before - self.tracker.total_bytes:
            self.held[stage] = torch.empty(freed, dtype=torch.uint8, device=executor.device)


def waits(store: WeightGradientStore, came: Tensor | None) -> bool:
    """Whether what came for an I is one of the outputs' gradients that wait for W."""
    grads = [handle.grad_fn.product.grad for handle in store.handles]
    storages = [grad.untyped_storage()._cdata for grad in grads if grad is not None]
    return came is not None and came.untyped_storage()._cdata in storages


def _micro_batches_to_run(executor: Executor) -> dict[int, set[int]]:
    """Of each stage of this rank those that run: in every kind of instruction the first two and the last."""
    order: dict[tuple[int, str], list[int]] = {}
    for step in executor.steps:
        order.setdefault((step.instruction.stage, step.instruction.op), []).append(step.instruction.micro_batch)
    running: dict[int, set[int]] = {stage: set() for stage, _ in order}
    for (stage, _), micro_batches in order.items():
        running[stage] |= {*micro_batches[:2], micro_batches[-1]}
    return running
