"""Grader of chapter 08, exercise 7: 1F1B on ranks, judged by gradients, messages and the order of work."""

import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from course_lib.checks.ch08.nccl_order import HUNG, Started, expect_order_of_nccl, recorded_calls
from course_lib.checks.ch08.pipeline_schedules import limited
from course_lib.checks.core import CheckFailed, fail, grader, run_ranks
from course_lib.compare.trials import PIPELINE_CONFIG as CONFIG
from course_lib.compare.trials import PIPELINE_SEQ_LEN, PIPELINE_SEQUENCES, one_process, pipeline_micro_batches
from course_lib.measure import ByteMeter
from course_lib.minimal.one_f_one_b import PipelineRank, afab, naive
from course_lib.minimal.one_f_one_b import one_f_one_b as lists_of_1f1b
from course_lib.model import build
from course_lib.schedules import from_lists, one_f_one_b, problems, simulate

LIMIT_S = 60.0  # a launch takes seconds; ranks that wait for each other are told after nccl_order.HANG
MESSAGE_BYTES = PIPELINE_SEQUENCES * PIPELINE_SEQ_LEN * CONFIG.d_model * 8  # float64
NO_BACKWARD = -1  # of torch._C._current_graph_task_id
TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")  # as gloo says it


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


WRONG = {
    "the loss is the mean over micro-batches": SumOfLosses,
    "all forwards before all backwards": AllForwards,
    "waits for the backward of one micro-batch": OneByOne,
    "forwards in warm-up, not more": OneMoreInWarmUp,
    "activations of its own micro-batch": NewestFirst,
    "have no gradient on any rank, first head.weight": HeadLeftOut,
    "one message a cut each way": SendsTwice,
    "a message of 65,536 bytes came to a buffer of 32,768": ReceivesInFloat32,
    "on NCCL ranks wait for ever: rank 0 stands at its send to rank 1": StartsAlone,
    "ranks wait for each other; start each send without waiting": WaitsForEachSend,
}


@grader(right=Recomputing, wrong=WRONG)
def check_pipeline(answer, rng):
    """1F1B from an empty cell: gradients of one process, one message a cut each way, in 1F1B's time and memory.

    Run on gloo; the same calls must come through in NCCL's order.
    """
    for world_size, count in ((2, rng.choice([3, 5])), (4, rng.choice([2, 3])), (4, rng.choice([6, 7]))):
        where = f"{world_size} ranks, {count} micro-batches"
        try:
            results = list(run_ranks(_step, world_size, answer, count, timeout=LIMIT_S, backend="gloo"))
        except CheckFailed as failure:
            if any(sign in str(failure) for sign in HUNG):
                fail(
                    f"{where}: ranks wait for each other; start each send without waiting for it, together with the "
                    "next receive in one dist.batch_isend_irecv"
                )
            if sizes := TOO_LONG.search(str(failure)):
                sent, room = (f"{int(size):,}" for size in sizes.groups())
                fail(
                    f"{where}: a message of {sent} bytes came to a buffer of {room}; make the buffer with the shape of "
                    "the hidden states and the dtype of the model's parameters, here float64"
                )
            raise
        _expect_gradients([gradients for gradients, _, _, _ in results], count, where)
        _expect_order([list(words) for _, words, _, _ in results], where)
        for rank, (_, _, sent, _) in enumerate(results):
            enough = ((rank > 0) + (rank < world_size - 1)) * count * MESSAGE_BYTES
            if sent > 1.01 * enough:
                fail(f"{where}: rank {rank} sent {sent:,} bytes, and {enough:,} are enough: one message a cut each way")
        expect_order_of_nccl([calls for _, _, _, calls in results], where)


def _step(answer: Callable, count: int) -> tuple[dict, list[str], int, list[Started]]:
    """In a rank: the gradients after a step, the order of forwards and backwards, the bytes sent, the calls."""
    model = build(CONFIG, dtype=torch.float64)
    words: list[str] = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, *_: _note_forward(words, block))
        next(block.parameters()).register_post_accumulate_grad_hook(
            lambda _, block=block: words.append(f"B {id(block)}")
        )
    worker = answer(model, pipeline_micro_batches(count))
    with ByteMeter() as meter, recorded_calls() as calls:
        worker.step()
    gradients = {name: param.grad for name, param in worker.stage.named_parameters()}
    return gradients, _of_one_block(words), meter.sent_bytes, calls


def _note_forward(words: list[str], block) -> None:
    """Recomputation in backward is no forward of the schedule."""
    if torch._C._current_graph_task_id() == NO_BACKWARD:
        words.append(f"F {id(block)}")


def _of_one_block(words: list[str]) -> list[str]:
    """The order of the first block that ran, with micro-batches counted."""
    mine = [word[0] for word in words if word[2:] == words[0][2:]]
    return [f"{op}{mine[:place].count(op)}" for place, op in enumerate(mine)]


def _expect_gradients(of_ranks: list[dict], count: int, where: str) -> None:
    _, model = one_process(CONFIG, [pipeline_micro_batches(count)])
    expected = {name: param.grad for name, param in model.named_parameters()}
    found = {name: grad for of_rank in of_ranks for name, grad in of_rank.items()}
    if missing := sorted(name for name in expected if found.get(name) is None):
        fail(
            f"{where}: {len(missing)} parameters have no gradient on any rank, first {missing[0]}; worker.stage has "
            "this rank's blocks under their names in the model, the first the embedding, the last norm and head"
        )
    worst = max((found[name] - expected[name]).abs().max().item() for name in expected)
    if not worst < 1e-9:
        times = [(found[name].norm() / expected[name].norm()).item() for name in expected]
        if max(times) - min(times) < 1e-6:
            fail(f"{where}: gradients are {times[0]:.3g} times too large; the loss is the mean over micro-batches")
        fail(
            f"{where}: a gradient differs from one process by {worst:.1e}; does each gradient that is received meet "
            "the activations of its own micro-batch?"
        )


def _expect_order(rows: list[list[str]], where: str) -> None:
    p, m = len(rows), sum(word[0] == "F" for word in rows[0])
    schedule = from_lists(rows)
    if found := problems(schedule):
        fail(f"{where}: this order cannot be: {found[0]}")
    got, want = simulate(schedule), simulate(one_f_one_b(p, m))
    if any(a > b for a, b in zip(got.peak_live, want.peak_live, strict=True)):
        kept = f"{where}: ranks keep up to {got.peak_live} micro-batches, and {want.peak_live} are enough"
        if got.peak_live == (m,) * p:
            fail(f"{kept}: these are all forwards before all backwards")
        fail(f"{kept}: rank i does p - 1 - i forwards in warm-up, not more")
    if got.makespan_s > want.makespan_s:
        slow = f"{where}: your order takes {got.makespan_s:.0f} slots, and 1F1B {want.makespan_s:.0f}"
        if max(got.peak_live) == 1:
            fail(f"{slow}: every rank waits for the backward of one micro-batch before it starts the next")
        fail(f"{slow}: rank i does p - 1 - i forwards in warm-up, not fewer")
