"""The graders of chapter 08 accept right answers that are arranged otherwise, three of each."""

import sys
from fractions import Fraction

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from harness import sampled
from torch.utils.checkpoint import checkpoint

from course_lib.checks import ch08
from course_lib.layout import even_layers
from course_lib.minimal.one_f_one_b import PipelineRank, one_f_one_b
from course_lib.parallel.stages import cut
from course_lib.schedules import from_lists, make, simulate
from course_lib.training import loss_of

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ 1. the bubble
def bubble_by_slots(p, m, v):
    wait, work = (p - 1) * 3 / v, m * 3
    return wait / work, wait / (wait + work)


def bubble_by_fractions(p, m, v):
    ideal = Fraction(p - 1, v * m)
    return float(ideal), float(ideal / (1 + ideal))


def bubble_by_the_clock(p, m, v):
    one = simulate(make("interleaved", p, m, v))
    return one.bubble_of_ideal, one.bubble_of_total


# ------------------------------------------------------------------------------------ 2. layers kept
def kept_by_the_clock(name, L, p, m, i):
    return simulate(make(name, p, m)).peak_live[i] * (L // p)


def kept_by_cases(name, L, p, m, i):
    if name == "naive":
        return L / p
    return (m if name == "afab" or m < p - i else p - i) * L / p


def kept_by_counting(name, L, p, m, i):
    held = most = 0
    for one in make(name, p, m).instructions[i]:
        held += 1 if one.op == "F" else -1
        most = max(most, held)
    return most * L // p


# ------------------------------------------------------------------------------------ 3. a limit of memory
def limited_from_1f1b(p, m, most):
    """Backwards are moved forward until the memory is enough."""
    rows = []
    for rank, words in enumerate(one_f_one_b(p, m)):
        most_here, row, done, forwards = min(most, p - rank), [], 0, 0
        for word in words:
            if word[0] == "F":
                while forwards - done >= most_here:
                    row.append(f"B{done}")
                    done += 1
                row.append(word)
                forwards += 1
            elif int(word[1:]) >= done:
                row.append(word)
                done += 1
        rows.append(row)
    return rows


def limited_greedily(p, m, most):
    rows = []
    for rank in range(p):
        forwards = backwards = 0
        row = []
        while backwards < m:
            if forwards < m and forwards - backwards < min(most, p - rank):
                row.append(("F", forwards))
                forwards += 1
            else:
                row.append(("B", backwards))
                backwards += 1
        rows.append(row)
    return rows


def limited_by_slices(p, m, most):
    rows = []
    for rank in range(p):
        lead = min(most - 1, p - 1 - rank, m)
        f, b = [f"F{i}" for i in range(m)], [f"B{i}" for i in range(m)]
        middle = [word for pair in zip(f[lead:], b[: m - lead], strict=True) for word in pair]
        rows.append(tuple(f[:lead] + middle + b[m - lead :]))
    return tuple(rows)


# ------------------------------------------------------------------------------------ 4. layers of stages
def layers_by_search(L, p, layer, embed, head):
    """The smallest longest stage that is enough, then filled from the front."""
    ends = [embed if stage == 0 else head if stage == p - 1 else 0 for stage in range(p)]
    lengths = sorted({end + layer * count for end in ends for count in range(1, L + 1)})
    for longest in lengths:
        room = [int((longest - end) / layer + 1e-9) for end in ends]
        if min(room) >= 1 and sum(room) >= L:
            break
    layers = [1] * p
    for stage in range(p):
        layers[stage] += min(room[stage] - 1, L - sum(layers))
    return layers


def layers_from_the_back(L, p, layer, embed, head):
    layers, costs = [1] * p, [layer] * p
    costs[0], costs[-1] = costs[0] + embed, costs[-1] + head
    for _ in range(L - p):
        stage = min(reversed(range(p)), key=lambda s: costs[s])
        layers[stage], costs[stage] = layers[stage] + 1, costs[stage] + layer
    return layers


def layers_by_moving(L, p, layer, embed, head):
    layers = [L // p + (stage < L % p) for stage in range(p)]

    def costs():
        return [count * layer + embed * (s == 0) + head * (s == p - 1) for s, count in enumerate(layers)]

    while True:
        now = costs()
        src = max((s for s in range(p) if layers[s] > 1), key=lambda s: now[s])
        dst = min(range(p), key=lambda s: now[s])
        if now[dst] + layer >= now[src]:
            return layers
        layers[src], layers[dst] = layers[src] - 1, layers[dst] + 1


# ------------------------------------------------------------------------------------ 5. two halves
class KeepsADict:
    @staticmethod
    def input_half(x, linears, grad):
        inputs, masks = [], []
        for W in linears:
            inputs.append(x)
            x = torch.relu(x @ W.T)
            masks.append(x > 0)
        kept = {}
        for k in reversed(range(len(linears))):
            grad = grad * masks[k]
            kept[k] = {"x": inputs[k], "dz": grad}
            grad = grad @ linears[k]
        return grad, kept

    @staticmethod
    def weight_half(kept):
        return [kept[k]["dz"].T @ kept[k]["x"] for k in sorted(kept)]


class Recursive:
    @classmethod
    def input_half(cls, x, linears, grad):
        if not linears:
            return grad, []
        z = x @ linears[0].T
        grad_y, kept = cls.input_half(z.clamp(min=0), linears[1:], grad)
        dz = torch.where(z > 0, grad_y, 0)
        return dz @ linears[0], [(x, dz), *kept]

    @staticmethod
    def weight_half(kept):
        return tuple(torch.einsum("to,ti->oi", dz, x) for x, dz in kept)


class KeepsTwoLists:
    @staticmethod
    def input_half(x, linears, grad):
        hidden = [x]
        for W in linears:
            hidden.append(torch.nn.functional.relu(torch.nn.functional.linear(hidden[-1], W)))
        grads = []
        for W, y in zip(linears[::-1], hidden[:0:-1], strict=True):
            grads.insert(0, grad * (y > 0))
            grad = torch.matmul(grads[0], W)
        return grad, (hidden[:-1], grads)

    @staticmethod
    def weight_half(kept):
        return [torch.matmul(dz.T, h) for h, dz in zip(*kept, strict=True)]


# ------------------------------------------------------------------------------------ 6. messages both ways
def exchange_even_ranks_first(down, up):
    """In two rounds: ranks at even places send down and up while others receive, then the other way."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before, behind = (torch.empty_like(x) if end else None for x, end in ((down, rank > 0), (up, rank < last)))
    works = []
    for sends in ((True, False), (False, True))[rank % 2]:
        if sends:
            works += [dist.isend(up, rank - 1)] if rank > 0 else []
            works += [dist.isend(down, rank + 1)] if rank < last else []
        else:
            works += [dist.irecv(before, rank - 1)] if rank > 0 else []
            works += [dist.irecv(behind, rank + 1)] if rank < last else []
    for work in works:
        work.wait()
    return before, behind


def exchange_in_one_call(down, up):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before, behind, ops = None, None, []
    if rank > 0:
        before = torch.zeros_like(down)
        ops += [dist.P2POp(dist.isend, up, rank - 1), dist.P2POp(dist.irecv, before, rank - 1)]
    if rank < last:
        behind = torch.zeros_like(up)
        ops += [dist.P2POp(dist.isend, down, rank + 1), dist.P2POp(dist.irecv, behind, rank + 1)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return before, behind


def exchange_a_batch_of_each_pair(down, up):
    """In two rounds: pairs of an even rank and the rank behind it, then the other pairs."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before, behind = (torch.empty_like(x) if end else None for x, end in ((down, rank > 0), (up, rank < last)))
    pairs = [(rank - 1, up, before), (rank + 1, down, behind)]
    for other, out, received in pairs if rank % 2 else reversed(pairs):
        if received is not None:
            ends = ((dist.isend, out), (dist.irecv, received))
            for work in dist.batch_isend_irecv([dist.P2POp(way, x, other) for way, x in ends]):
                work.wait()
    return before, behind


# ------------------------------------------------------------------------------------ 7. 1F1B on ranks
class ByLists(PipelineRank):
    """Executes a list, as the lesson does."""

    def step(self):
        self.run(one_f_one_b(self.last + 1, len(self.micro_batches))[self.rank])


class ReceivesEarly:
    """The package's stage, receives that are started one instruction early, and a group for each direction."""

    def __init__(self, model, micro_batches):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.stage = cut(model, self.rank, even_layers(model.config.num_layers, self.size))
        self.micro_batches, self.dtype = micro_batches, model.embed.weight.dtype
        self.down, self.up = dist.new_group(), dist.new_group()

    def start(self, src):
        x = torch.empty(*self.micro_batches[0][0].shape, self.stage.config.d_model, dtype=self.dtype)
        return dist.irecv(x, src, self.down if src < self.rank else self.up), x

    def step(self):
        m, first, last = len(self.micro_batches), self.rank == 0, self.rank == self.size - 1
        arriving = None if first else self.start(self.rank - 1)
        kept, sends, done = [], [], 0
        for i in range(m + min(self.size - 1 - self.rank, m)):
            if i < m:
                x, y_BS = self.micro_batches[i]
                if not first:
                    arriving[0].wait()
                    x = arriving[1].requires_grad_()
                    arriving = self.start(self.rank - 1) if i + 1 < m else None
                out = loss_of(self.stage, x, y_BS) / m if last else self.stage(x)
                if not last:
                    sends.append((dist.isend(out.detach(), self.rank + 1, self.down), out))
                kept.append((x, out))
            if i >= self.size - 1 - self.rank or i >= m:
                self.backward(*kept[done], sends)
                kept[done] = None
                done += 1
        for work, _ in sends:
            work.wait()

    def backward(self, x, out, sends):
        grad = None
        if self.rank < self.size - 1:
            work, grad = self.start(self.rank + 1)
            work.wait()
        torch.autograd.backward(out, grad)
        if self.rank > 0:
            sends.append((dist.isend(x.grad, self.rank - 1, self.up), x))


class Recomputing(PipelineRank):
    """Keeps the input of the stage alone, and runs forward again in backward."""

    def __init__(self, model, micro_batches):
        super().__init__(model, micro_batches)
        whole = self.stage.forward
        self.stage.forward = lambda x: checkpoint(whole, x, use_reentrant=False)

    def step(self):
        self.run(one_f_one_b(self.last + 1, len(self.micro_batches))[self.rank])


# ------------------------------------------------------------------------------------ 8. shorter
def zb_h1_from_the_package(p, m):
    return make("zb_h1", p, m).instructions


def shorter_on_the_clock(p, m):
    """Each rank does I if it can, then F if there is room, else W: a list from a clock."""
    rows, count = [[] for _ in range(p)], [{"F": 0, "I": 0, "W": 0} for _ in range(p)]
    done: set[tuple[str, int, int]] = set()
    while any(of_rank["W"] < m for of_rank in count):
        ended = set(done)
        for rank in range(p):
            c = count[rank]
            i, f = c["I"], c["F"]
            own = ("F", i, rank) in ended and (rank == p - 1 or ("I", i, rank + 1) in ended)
            room = f < m and f - i < p - rank and (rank == 0 or ("F", f, rank - 1) in ended)
            op = "I" if i < f and own else "F" if room else "W" if c["W"] < i else ""
            if op:
                rows[rank].append(f"{op}{c[op]}")
                done.add((op, c[op], rank))
                c[op] += 1
    return rows


def whole_backwards_on_rank_0(p, m):
    """Rank 0 puts nothing off: its backward may stay whole."""
    rows = [[f"{one.op}{one.micro_batch}" for one in row] for row in make("zb_h1", p, m).instructions]
    rows[0] = [word.replace("I", "B") for word in rows[0] if word[0] != "W"]
    assert from_lists(rows).pp == p
    return rows


RIGHT = {
    "check_bubble": (bubble_by_slots, bubble_by_fractions, bubble_by_the_clock),
    "check_layers_kept": (kept_by_the_clock, kept_by_cases, kept_by_counting),
    "check_limited": (limited_from_1f1b, limited_greedily, limited_by_slices),
    "check_layers": (layers_by_search, layers_from_the_back, layers_by_moving),
    "check_split_backward": (KeepsADict, Recursive, KeepsTwoLists),
    "check_exchange": (exchange_even_ranks_first, exchange_in_one_call, exchange_a_batch_of_each_pair),
    "check_pipeline": (ByLists, ReceivesEarly, Recomputing),
    "check_shorter": (zb_h1_from_the_package, shorter_on_the_clock, whole_backwards_on_rank_0),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"), sampled([(check, answer) for check, answers in RIGHT.items() for answer in answers], 8)
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    getattr(ch08, check)(answer)
    assert f"{check}: passed" in capsys.readouterr().out
