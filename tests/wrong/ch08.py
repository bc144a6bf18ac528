"""Wrong answers to the exercises of chapter 08, each with what its grader must say about it."""

import torch
import torch.distributed as dist

from course_lib.checks.ch08 import (
    check_bubble,
    check_exchange,
    check_layers,
    check_layers_kept,
    check_limited,
    check_pipeline,
    check_shorter,
    check_split_backward,
)
from course_lib.checks.ch08.pipeline_formulas import _rounded, _to_the_shortest
from course_lib.minimal.one_f_one_b import PipelineRank, afab, naive, one_f_one_b
from course_lib.schedules import make


# ------------------------------------------------------------------------------------ 1. the bubble
def without_v(p, m, v):
    return (p - 1) / m, (p - 1) / (m + p - 1)


def swapped(p, m, v):
    return (p - 1) / (v * m + p - 1), (p - 1) / (v * m)


def p_cuts(p, m, v):
    return p / (v * m), p / (v * m + p)


def total_divided_by_v(p, m, v):
    return (p - 1) / (v * m), (p - 1) / (m + p - 1) / v


def total_is_ideal(p, m, v):
    return ((p - 1) / (v * m),) * 2


def per_cent(p, m, v):
    return 100 * (p - 1) / (v * m), 100 * (p - 1) / (v * m + p - 1)


def v_times_the_waits(p, m, v):
    return (p * v - 1) / (v * m), (p * v - 1) / (v * m + p * v - 1)


def total_without_v(p, m, v):
    return (p - 1) / (v * m), (p - 1) / (m + p - 1)


# ------------------------------------------------------------------------------------ 2. layers kept
def _in_flight(name, m, p, i):
    return {"naive": 1, "afab": m, "1f1b": min(m, p - i)}[name]


def micro_batches_only(name, L, p, m, i):
    return _in_flight(name, m, p, i)


def divided_by_p(name, L, p, m, i):
    return L // p


def all_layers(name, L, p, m, i):
    return _in_flight(name, m, p, i) * L


def always_first_rank(name, L, p, m, i):
    return _in_flight(name, m, p, 0) * L // p


def more_than_there_are(name, L, p, m, i):
    return {"naive": 1, "afab": m, "1f1b": p - i}[name] * L // p


def as_afab(name, L, p, m, i):
    return (1 if name == "naive" else m) * L // p


def naive_as_1f1b(name, L, p, m, i):
    return _in_flight("afab" if name == "afab" else "1f1b", m, p, i) * L // p


def last_rank_ahead(name, L, p, m, i):
    return _in_flight(name, m, p, p - 1 - i) * L // p


def ahead_alone(name, L, p, m, i):
    return {"naive": 1, "afab": m, "1f1b": min(m, p - 1 - i)}[name] * L // p


# ------------------------------------------------------------------------------------ 3. a limit of memory
def _words(schedule):
    return [[f"{one.op}{one.micro_batch}" for one in row] for row in schedule.instructions]


def _ahead(p, m, ahead_of):
    rows = []
    for rank in range(p):
        ahead = max(0, min(ahead_of(rank), m))
        row = [f"F{i}" for i in range(ahead)]
        for i in range(ahead, m):
            row += [f"F{i}", f"B{i - ahead}"]
        rows.append(row + [f"B{i}" for i in range(m - ahead, m)])
    return rows


def without_the_limit(p, m, most):
    return _ahead(p, m, lambda rank: p - 1 - rank)


def afab_order(p, m, most):
    return _words(make("afab", p, m))


def always_naive(p, m, most):
    return _words(make("naive", p, m))


def one_too_many(p, m, most):
    return _ahead(p, m, lambda rank: min(p - 1 - rank, most))


def every_rank_the_limit(p, m, most):
    return _ahead(p, m, lambda rank: most - 1)


def wrong_end(p, m, most):
    return _ahead(p, m, lambda rank: min(rank, most - 1))


def last_backwards_missing(p, m, most):
    return [row[: 2 * m - 1] for row in without_the_limit(p, m, p)]


def split(p, m, most):
    return _words(make("zb_h1", p, m))


# ------------------------------------------------------------------------------------ 4. layers
def even(L, p, layer, embed, head):
    return [L // p + (stage < L % p) for stage in range(p)]


def zero_layers(L, p, layer, embed, head):
    return [L - p + 2, *[1] * (p - 2), 0]


def one_too_few(L, p, layer, embed, head):
    layers = even(L, p, layer, embed, head)
    return [layers[0] - 1, *layers[1:]]


def a_number_for_all(L, p, layer, embed, head):
    return L // p


def no_embedding(L, p, layer, embed, head):
    return _to_the_shortest(L, p, layer, 0, head)


def layers_of_cost_1(L, p, layer, embed, head):
    return _to_the_shortest(L, p, 1, embed, head)


def wrong_ends(L, p, layer, embed, head):
    return _to_the_shortest(L, p, layer, head, embed)


# ------------------------------------------------------------------------------------ 5. two halves
class _Split:
    relu_passes_all = transposed = reversed_order = averaged = early = keeps_dy = False

    @classmethod
    def input_half(cls, x, linears, grad):
        inputs, outputs = [], []
        for W in linears:
            inputs.append(x)
            x = torch.relu(x @ W.T)
            outputs.append(x)
        kept = []
        for W, h, y in zip(reversed(linears), reversed(inputs), reversed(outputs), strict=True):
            dz = grad if cls.relu_passes_all else grad * (y > 0)
            kept.append(dz.T @ h if cls.early else (h, grad if cls.keeps_dy else dz))
            grad = dz @ W
        return grad, kept if cls.reversed_order else kept[::-1]

    @classmethod
    def weight_half(cls, kept):
        if cls.early:
            return kept
        products = [dz.T @ h / (len(h) if cls.averaged else 1) for h, dz in kept]
        return [product.T for product in products] if cls.transposed else products


class NoRelu(_Split):
    relu_passes_all = True


class KeepsDy(_Split):
    keeps_dy = True


class Early(_Split):
    early = True


class Backwards(_Split):
    reversed_order = True


class Averaged(_Split):
    averaged = True


class ByAutograd:
    @staticmethod
    def input_half(x, linears, grad):
        x.requires_grad_()
        h = x
        for W in linears:
            h = torch.relu(h @ W.T)
        h.backward(grad)
        return x.grad, linears

    @staticmethod
    def weight_half(kept):
        return [W.grad for W in kept]


class Transposed(_Split):
    transposed = True


class KeepsOutputs(_Split):
    @classmethod
    def input_half(cls, x, linears, grad):
        grad, kept = super().input_half(x, linears, grad)
        outputs = []
        for W in linears:
            x = torch.relu(x @ W.T)
            outputs.append(x)
        return grad, [(y, dz) for y, (_, dz) in zip(outputs, kept, strict=True)]


class ZerosOfTheInput(_Split):
    @classmethod
    def input_half(cls, x, linears, grad):
        inputs = []
        for W in linears:
            inputs.append(x)
            x = torch.relu(x @ W.T)
        kept = []
        for W, h in zip(reversed(linears), reversed(inputs), strict=True):
            kept.append((h, grad))
            grad = (grad @ W) * (h > 0)
        return grad, kept[::-1]


# ------------------------------------------------------------------------------------ 6. exchange
def send_first(down, up):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before = behind = None
    if rank < last:
        dist.send(down, rank + 1)
    if rank > 0:
        dist.send(up, rank - 1)
        before = torch.empty_like(down)
        dist.recv(before, rank - 1)
    if rank < last:
        behind = torch.empty_like(up)
        dist.recv(behind, rank + 1)
    return before, behind


def _ends():
    """(neighbour, whether the message down goes to it) of this rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return [(other, down) for other, down in ((rank - 1, False), (rank + 1, True)) if 0 <= other <= last]


def _started(down, up, wait=True):
    messages, received = [], {}
    for other, goes_down in _ends():
        received[goes_down] = torch.zeros_like(up if goes_down else down)
        messages.append(dist.P2POp(dist.irecv, received[goes_down], other))
        messages.append(dist.P2POp(dist.isend, down if goes_down else up, other))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    if not wait:  # as if nothing had arrived yet, which no run can promise
        received = {way: torch.zeros_like(x) for way, x in received.items()}
    return received.get(False), received.get(True)


def sends_alone(down, up):
    works = [dist.isend(down if goes_down else up, other) for other, goes_down in _ends()]
    received = {}
    for other, goes_down in _ends():
        received[goes_down] = torch.empty_like(up if goes_down else down)
        dist.recv(received[goes_down], other)
    for work in works:
        work.wait()
    return received.get(False), received.get(True)


def receives_first(down, up):
    received = {goes_down: torch.empty_like(up if goes_down else down) for _, goes_down in _ends()}
    works = [dist.irecv(received[goes_down], other) for other, goes_down in _ends()]
    works += [dist.isend(down if goes_down else up, other) for other, goes_down in _ends()]
    for work in works:
        work.wait()
    return received.get(False), received.get(True)


def along_the_chain(down, up):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before, behind = (torch.empty_like(x) if end else None for x, end in ((down, rank > 0), (up, rank < last)))
    if rank > 0:
        dist.recv(before, rank - 1)
    if rank < last:
        dist.send(down, rank + 1)
        dist.recv(behind, rank + 1)
    if rank > 0:
        dist.send(up, rank - 1)
    return before, behind


def not_waited(down, up):
    return _started(down, up, wait=False)


def swapped_results(down, up):
    before, behind = _started(down, up)
    return behind, before


def a_list(down, up):
    return list(_started(down, up))


# ------------------------------------------------------------------------------------ 7. 1F1B on ranks
class InOrder(PipelineRank):
    """Executes the lists of a schedule."""

    lists = staticmethod(one_f_one_b)

    def step(self):
        self.run(self.lists(self.last + 1, len(self.micro_batches))[self.rank])


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
    @staticmethod
    def lists(p, m):
        return _ahead(p, m, lambda rank: p - rank)


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
    """Each message goes to both neighbours' side twice, as a broadcast would."""

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


# ------------------------------------------------------------------------------------ 8. shorter
def whole_backwards(p, m):
    return _words(make("1f1b", p, m))


def w_behind_i(p, m):
    return [
        [part for w in row for part in ([w] if w[0] == "F" else ["I" + w[1:], "W" + w[1:]])]
        for row in whole_backwards(p, m)
    ]


def all_w_at_the_end(p, m):
    return [[word.replace("B", "I") for word in row] + [f"W{i}" for i in range(m)] for row in whole_backwards(p, m)]


def with_more_memory(p, m):
    return _words(make("zb_h2", p, m))


WRONG = {
    "my_bubble": {
        "check": check_bubble,
        "answers": [
            (without_v, "v is missing"),
            (swapped, "wrong order"),
            (p_cuts, "p ranks have p - 1 cuts"),
            (total_divided_by_v, "stands in the denominator"),
            (total_is_ideal, "working and waiting together"),
            (v_times_the_waits, "not v times as many waits"),
            (total_without_v, "the total too has v m"),
            (per_cent, "per cent"),
        ],
    },
    "my_layers_kept": {
        "check": check_layers_kept,
        "answers": [
            (micro_batches_only, "these are micro-batches"),
            (divided_by_p, "not divided by p"),
            (all_layers, "not all of them"),
            (always_first_rank, "that is rank 0"),
            (more_than_there_are, "only m micro-batches"),
            (as_afab, "that is AFAB"),
            (naive_as_1f1b, "one micro-batch at a time"),
            (last_rank_ahead, "the other way round"),
            (ahead_alone, "works on is kept too"),
        ],
    },
    "my_limited": {
        "check": check_limited,
        "answers": [
            (without_the_limit, "1F1B without the limit"),
            (afab_order, "all forwards before all backwards"),
            (always_naive, "with room for more"),
            (one_too_many, "comes before the first backward"),
            (every_rank_the_limit, "never needs more than p - i"),
            (wrong_end, "deadlock"),
            (last_backwards_missing, "is missing, the backward"),
            (split, "use whole backwards"),
        ],
    },
    "my_layers": {
        "check": check_layers,
        "answers": [
            (even, "even numbers of layers are not even stages"),
            (zero_layers, "a stage without a layer"),
            (one_too_few, "layers together"),
            (a_number_for_all, "one for each stage"),
            (no_embedding, "the embedding costs too"),
            (layers_of_cost_1, "only if a layer costs 1"),
            (wrong_ends, "at the wrong ends"),
            (_rounded, "can be too long"),
        ],
    },
    "MySplit": {
        "check": check_split_backward,
        "answers": [
            (NoRelu, "relu passes no gradient"),
            (KeepsDy, "dy where dz belongs"),
            (Early, "already; nothing is delayed"),
            (Backwards, "come in the order of backward"),
            (Averaged, "it is their sum"),
            (ByAutograd, "autograd does both halves"),
            (Transposed, "this is its transpose"),
            (KeepsOutputs, "the output of its linear"),
            (ZerosOfTheInput, "relu's zeros are those of its output"),
        ],
    },
    "my_exchange": {
        "check": check_exchange,
        "answers": [
            (send_first, "wait for each other"),
            (not_waited, "wait for the receive"),
            (swapped_results, "there is no such rank"),
            (a_list, "return two things"),
            (
                sends_alone,
                "on NCCL ranks wait for ever: rank 0 stands at its send to rank 1, rank 1 stands at its send",
            ),
            (receives_first, "on NCCL ranks wait for ever: rank 0 stands at its receive from rank 1"),
            (along_the_chain, "start all before you wait for any"),
        ],
    },
    "MyPipeline": {
        "check": check_pipeline,
        "answers": [
            (SumOfLosses, "the loss is the mean over micro-batches"),
            (AllForwards, "all forwards before all backwards"),
            (OneByOne, "waits for the backward of one micro-batch"),
            (OneMoreInWarmUp, "forwards in warm-up, not more"),
            (NewestFirst, "activations of its own micro-batch"),
            (HeadLeftOut, "have no gradient on any rank, first head.weight"),
            (SendsTwice, "one message a cut each way"),
            (ReceivesInFloat32, "a message of 65,536 bytes came to a buffer of 32,768"),
            (StartsAlone, "on NCCL ranks wait for ever: rank 0 stands at its send to rank 1"),
            (WaitsForEachSend, "ranks wait for each other; start each send without waiting"),
        ],
    },
    "my_shorter": {
        "check": check_shorter,
        "answers": [
            (whole_backwards, "split B into I and W"),
            (w_behind_i, "W stands directly behind each I"),
            (all_w_at_the_end, "delay W where others wait"),
            (with_more_memory, "buys its time with memory"),
        ],
    },
}
