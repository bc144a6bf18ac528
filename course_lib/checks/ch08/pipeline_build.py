"""Table of chapter 08, exercise 7: 1F1B on ranks, judged by gradients, messages and the order of work."""

from functools import cache

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from course_lib.checks import Cost, Exercise, Stops
from course_lib.checks.ch08.nccl_order import BATCH, STUCK, recorded_calls, replay_of_all
from course_lib.checks.ch08.pipeline_schedules import limited, scheduled
from course_lib.comm import all_gather_json
from course_lib.compare.trials import PIPELINE_CONFIG as CONFIG
from course_lib.compare.trials import one_process, pipeline_micro_batches
from course_lib.measure import ByteMeter
from course_lib.minimal.one_f_one_b import PipelineRank, afab, naive
from course_lib.minimal.one_f_one_b import one_f_one_b as lists_of_1f1b
from course_lib.model import build
from course_lib.schedules import simulate


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


def sum_the_losses(worker, i):
    """F whose loss is not divided by the number of micro-batches."""
    InOrder.F(worker, i)
    x, out = worker.in_flight[i]
    worker.in_flight[i] = x, out * (len(worker.micro_batches) if worker.rank == worker.last else 1)


def newest_first(worker, i):
    """B with the activations of another micro-batch."""
    newest, kept = max(worker.in_flight), worker.in_flight
    kept[i], kept[newest] = kept[newest], kept[i]
    InOrder.B(worker, i)


class HeadLeftOut(InOrder):
    """Uses the head, but its stage does not have it."""

    def __init__(self, model, micro_batches):
        super().__init__(model, micro_batches)
        head, forward = self.stage.head, self.stage.forward
        self.stage.head = torch.nn.Identity()
        self.stage.forward = lambda x: head(forward(x))


def twice(method):
    """Return the method that does its work twice."""
    return lambda worker, *given: (method(worker, *given), method(worker, *given))[1]


def receive_in_float32(worker, *receive):
    """The default dtype, whatever the model's is."""
    InOrder.start(worker, *[dist.P2POp(message.op, message.tensor.float(), message.peer) for message in receive])


def start_alone(worker, *receive):
    """Each send and each receive in a call of its own: isend, then recv."""
    messages, worker.to_send = [*worker.to_send, *receive], []
    worker.works += [(message.op(message.tensor, message.peer), message) for message in messages]


@cache
def _one_process(count):
    _, model = one_process(CONFIG, [pipeline_micro_batches(count)])
    return {name: param.grad for name, param in model.named_parameters()}


def inputs(rng):
    return [(2, rng.choice([3, 5])), (4, rng.choice([2, 3])), (4, rng.choice([6, 7]))]


def watch(answer, count):
    """One step: its gradients, then the order of forwards and backwards of all ranks, bytes, and NCCL's order."""
    model, words = build(CONFIG, dtype=torch.float64), []

    def note_forward(block, *_) -> None:
        if torch._C._current_graph_task_id() == -1:  # recomputation in backward is no forward of the schedule
            words.append(f"F {id(block)}")

    for block in model.blocks:
        block.register_forward_hook(note_forward)
        weight = next(block.parameters())
        weight.register_post_accumulate_grad_hook(lambda _, block=block: words.append(f"B {id(block)}"))
    worker = answer(model, pipeline_micro_batches(count))
    with ByteMeter() as meter, recorded_calls() as calls:
        worker.step()
    mine = {name: param.grad for name, param in worker.stage.named_parameters() if param.grad is not None}
    _, stuck = replay_of_all(calls)
    ops = [word[0] for word in words if word[2:] == words[0][2:]]  # of the first block that ran
    rows = all_gather_json([f"{op}{ops[:place].count(op)}" for place, op in enumerate(ops)], dist.group.WORLD)
    schedule, order = scheduled(rows, len(rows), count)
    if schedule is not None:
        got = simulate(schedule)
        order["micro-batches that ranks keep"] = tuple(map(Cost, got.peak_live))
        order["slots of the schedule"] = Cost(got.makespan_s)
    sent = {"bytes sent": Cost(meter.sent_bytes, 0.01 * meter.sent_bytes), "where ranks stand on NCCL": stuck}
    return _gradients(mine, _one_process(count)) | order | sent


def _gradients(mine: dict, expected: dict) -> dict:
    """Which parameters have no gradient on any rank, and how far those of this rank are from one process's."""
    names = {name for of_rank in all_gather_json(sorted(mine), dist.group.WORLD) for name in of_rank}
    off = [(grad - expected[name]).abs().max() for name, grad in mine.items() if name in expected]
    return {
        "parameters without a gradient": sorted(expected.keys() - names),
        "gradients less one process's, at most": torch.stack(off).max() if off else None,
    }


_ROOM = (
    "a message came to a buffer that is too small; make the buffer with the shape of the hidden states and the dtype "
    "of the model's parameters, here float64"
)
_WAIT = "ranks wait for each other; start each send without waiting for it, together with the next receive in one batch"
WRONG = {
    "have no gradient on any rank: worker.stage has this rank's blocks under their names in the model, the first the "
    "embedding, the last norm and head": HeadLeftOut,
    "gradients are too large; the loss is the mean over micro-batches": {"F": sum_the_losses},
    "does each gradient that is received meet the activations of its own micro-batch?": {"B": newest_first},
    "these are all forwards before all backwards": {"lists": staticmethod(afab)},
    "rank i does p - 1 - i forwards in warm-up, not more": {
        "lists": staticmethod(lambda p, m: limited(p, m, p, lambda p, rank, most: p - rank))
    },
    "every rank waits for the backward of one micro-batch before it starts the next": {"lists": staticmethod(naive)},
    "one message a cut each way": {"send": twice(InOrder.send), "receive": twice(InOrder.receive)},
    STUCK: {"start": start_alone},
    "make the buffer with the shape": Stops({"start": receive_in_float32}),
    "ranks wait for each other": Stops({"send": lambda worker, x_BSD, dst: dist.send(x_BSD, dst)}),
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
