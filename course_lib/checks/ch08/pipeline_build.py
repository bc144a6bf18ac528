"""Table of chapter 08, exercise 7: 1F1B on ranks, judged by gradients, messages and the order of work."""

from functools import cache

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from course_lib.checks.ch08.nccl_order import BATCH, STUCK, recorded_calls, replay_of_all
from course_lib.checks.ch08.pipeline_schedules import limited, scheduled
from course_lib.checks.table import Exercise, Stops
from course_lib.checks.watch import Cost
from course_lib.comm import all_gather_json
from course_lib.compare.trials import PIPELINE_CONFIG as CONFIG
from course_lib.compare.trials import one_process, pipeline_micro_batches
from course_lib.measure import ByteMeter
from course_lib.minimal.one_f_one_b import PipelineRank, afab, naive
from course_lib.minimal.one_f_one_b import one_f_one_b as lists_of_1f1b
from course_lib.model import build
from course_lib.schedules import simulate

_NO_BACKWARD = -1  # of torch._C._current_graph_task_id


class InOrder(PipelineRank):
    """Executes the lists of a schedule; the wrong ones below change one thing."""

    lists = staticmethod(lists_of_1f1b)

    def step(self):
        self.run(self.lists(self.last + 1, len(self.micro_batches))[self.rank])


class Recomputing(InOrder):
    """Keeps the input of the stage alone, and runs forward again in backward."""

    def __init__(self, model, micro_batches):
        super().__init__(model, micro_batches)
        whole = self.stage.forward
        self.stage.forward = lambda x: checkpoint(whole, x, use_reentrant=False)


class SumOfLosses(InOrder):
    def F(self, i):
        super().F(i)
        x, out = self.in_flight[i]
        self.in_flight[i] = x, out * (len(self.micro_batches) if self.rank == self.last else 1)


class AllForwards(InOrder):
    lists = staticmethod(afab)


class OneByOne(InOrder):
    lists = staticmethod(naive)


class OneMoreInWarmUp(InOrder):
    lists = staticmethod(lambda p, m: limited(p, m, p, lambda p, rank, most: p - rank))


class NewestFirst(InOrder):
    def B(self, i):
        newest = max(self.in_flight)
        self.in_flight[i], self.in_flight[newest] = self.in_flight[newest], self.in_flight[i]
        super().B(i)


class HeadLeftOut(InOrder):
    """Uses the head, but its stage does not have it."""

    def __init__(self, model, micro_batches):
        super().__init__(model, micro_batches)
        head, forward = self.stage.head, self.stage.forward
        self.stage.head = torch.nn.Identity()
        self.stage.forward = lambda x: head(forward(x))


class SendsTwice(InOrder):
    def send(self, x_BSD, dst):
        super().send(x_BSD, dst)
        super().send(x_BSD, dst)

    def receive(self, src):
        super().receive(src)
        return super().receive(src)


class ReceivesInFloat32(InOrder):
    """The default dtype, whatever the model's is."""

    def receive(self, src):
        if src not in range(self.last + 1):
            return self.start()
        x_BSD = torch.empty(*self.micro_batches[0][0].shape, self.stage.config.d_model)
        self.start(dist.P2POp(dist.irecv, x_BSD, src))
        self.works.pop()[0].wait()
        return x_BSD


class StartsAlone(InOrder):
    """Each send and each receive in a call of its own: isend, then recv."""

    def start(self, *receive):
        messages, self.to_send = [*self.to_send, *receive], []
        self.works += [(message.op(message.tensor, message.peer), message) for message in messages]


class WaitsForEachSend(InOrder):
    """dist.send, which returns when the other rank receives."""

    def send(self, x_BSD, dst):
        dist.send(x_BSD, dst)


@cache
def _one_process(count):
    _, model = one_process(CONFIG, [pipeline_micro_batches(count)])
    return {name: param.grad for name, param in model.named_parameters()}


def inputs(rng):
    return [(2, rng.choice([3, 5])), (4, rng.choice([2, 3])), (4, rng.choice([6, 7]))]


def watch(answer, count):
    """One step: its gradients, then the order of forwards and backwards of all ranks, bytes, and NCCL's order."""
    model, words = build(CONFIG, dtype=torch.float64), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, *_: _note_forward(words, block))
        next(block.parameters()).register_post_accumulate_grad_hook(
            lambda _, block=block: words.append(f"B {id(block)}")
        )
    worker = answer(model, pipeline_micro_batches(count))
    with ByteMeter() as meter, recorded_calls() as calls:
        worker.step()
    mine = {name: param.grad for name, param in worker.stage.named_parameters() if param.grad is not None}
    _, stuck = replay_of_all(calls)
    rows = all_gather_json(_of_one_block(words), dist.group.WORLD)
    return (
        _gradients(mine, _one_process(count))
        | _order(rows, count)
        | {"bytes sent": Cost(meter.sent_bytes, 0.01 * meter.sent_bytes), "where ranks stand on NCCL": stuck}
    )


def _note_forward(words: list[str], block) -> None:
    """Recomputation in backward is no forward of the schedule."""
    if torch._C._current_graph_task_id() == _NO_BACKWARD:
        words.append(f"F {id(block)}")


def _of_one_block(words: list[str]) -> list[str]:
    """The order of the first block that ran, with micro-batches counted."""
    mine = [word[0] for word in words if word[2:] == words[0][2:]]
    return [f"{op}{mine[:place].count(op)}" for place, op in enumerate(mine)]


def _gradients(mine: dict, expected: dict) -> dict:
    """Which parameters have no gradient on any rank, and how far those of this rank are from one process's."""
    names = {name for of_rank in all_gather_json(sorted(mine), dist.group.WORLD) for name in of_rank}
    off = [(grad - expected[name]).abs().max() for name, grad in mine.items() if name in expected]
    return {
        "parameters without a gradient": sorted(expected.keys() - names),
        "gradients less one process's, at most": torch.stack(off).max() if off else None,
    }


def _order(rows: list[list[str]], count: int) -> dict:
    schedule, seen = scheduled(rows, len(rows), count)
    if schedule is None:
        return seen
    got = simulate(schedule)
    return {
        "micro-batches that ranks keep": tuple(map(Cost, got.peak_live)),
        "slots of the schedule": Cost(got.makespan_s),
    }


_ROOM = (
    "a message came to a buffer that is too small; make the buffer with the shape of the hidden states and the dtype "
    "of the model's parameters, here float64"
)
_WAIT = "ranks wait for each other; start each send without waiting for it, together with the next receive in one batch"
WRONG = {
    "have no gradient on any rank: worker.stage has this rank's blocks under their names in the model, the first the "
    "embedding, the last norm and head": HeadLeftOut,
    "gradients are too large; the loss is the mean over micro-batches": SumOfLosses,
    "does each gradient that is received meet the activations of its own micro-batch?": NewestFirst,
    "these are all forwards before all backwards": AllForwards,
    "rank i does p - 1 - i forwards in warm-up, not more": OneMoreInWarmUp,
    "every rank waits for the backward of one micro-batch before it starts the next": OneByOne,
    "one message a cut each way": SendsTwice,
    STUCK: StartsAlone,
    "make the buffer with the shape": Stops(ReceivesInFloat32),
    "ranks wait for each other": Stops(WaitsForEachSend),
}
SAYS = {
    "parameters without a gradient": "worker.stage has this rank's blocks under their names in the model",
    "gradients less one process's, at most": "does each one that is received meet its own micro-batch's activations?",
    "micro-batches that ranks keep": "rank i does p - 1 - i forwards in warm-up, not more",
    "slots of the schedule": "rank i does p - 1 - i forwards in warm-up, not fewer",
    "bytes sent": "one message a cut each way",
    "where ranks stand on NCCL": BATCH,
}
ERRORS = {"op.preamble.length <= op.nbytes": _ROOM, "Timed out": _WAIT, "Connection closed by peer": _WAIT}
check_pipeline = Exercise(
    InOrder, inputs, WRONG, watch, SAYS, _WAIT, right=Recomputing, seconds=60.0, errors=ERRORS, backend="gloo"
)
