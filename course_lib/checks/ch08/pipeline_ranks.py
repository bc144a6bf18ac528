"""Tables of chapter 08, exercises 5 and 6: backward in two halves, and messages to both neighbours at once."""

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from course_lib.checks import Cost, Exercise, Stops, agree, fresh_generator, fresh_seed, numbers
from course_lib.checks.ch08.nccl_order import BATCH, STUCK, recorded_calls, replay_of_all


# ------------------------------------------------------------------------------------ 5. backward in two halves
class Split:
    """Both halves. A mistake has zeros of h or none, keeps other tensors, or makes other products of the two kept."""

    zeros, back = "of y", False
    keep, product = lambda h, y, grad, dz: (h, dz), lambda h, dz: dz.T @ h

    @classmethod
    def input_half(cls, x, linears, grad):
        hidden, kept = [x], []
        for W in linears:
            hidden.append(torch.relu(hidden[-1] @ W.T))
        for W, h, y in zip(linears[::-1], hidden[-2::-1], hidden[:0:-1], strict=True):
            dz = grad * (y > 0) if cls.zeros == "of y" else grad
            kept.append(cls.keep(h, y, grad, dz))
            grad = (dz @ W) * (h > 0) if cls.zeros == "of h" else dz @ W
        return grad, kept if cls.back else kept[::-1]

    @classmethod
    def weight_half(cls, kept):
        return [cls.product(*pair) for pair in kept]


def by_autograd(x, linears, grad):
    """Both halves at once."""
    x.requires_grad_()
    h = x
    for W in linears:
        h = torch.relu(h @ W.T)
    h.backward(grad)
    return x.grad, linears


def stages(rng):
    """Relu lets neither nothing nor everything through anywhere: mistakes would not show then."""
    while True:
        generator, tokens = fresh_generator(rng), rng.randrange(5, 9)
        widths = [rng.randrange(3, 7) for _ in range(rng.choice([3, 4]))]
        linears = [numbers(generator, b, a) for a, b in pairwise(widths)]
        x, grad = numbers(generator, tokens, widths[0]), numbers(generator, tokens, widths[-1])
        hidden, shares = x, []
        for W in linears:
            hidden = torch.relu(hidden @ W.T)
            shares.append((hidden > 0).double().mean())
        if min(shares) > 0.1 and max(shares) < 0.9:
            return [(x, linears, grad)]


def _watch_split(answer, x, linears, grad):
    """Without autograd, which would do both halves at once."""
    try:
        with torch.inference_mode():
            pair = answer.input_half(x, linears, grad)
            if not isinstance(pair, tuple) or len(pair) != 2:
                say = "input_half: return two things: the gradient of x, and what weight_half needs"
                return {"error": f"no pair\n{say}"}
            kept = [part for part in tree_leaves(pair[1]) if isinstance(part, Tensor)]
            products = answer.weight_half(pair[1])
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        return {"error": "autograd\nautograd does both halves at once; write the products yourself"}
    if not isinstance(products, list | tuple) or len(products) != len(linears):
        return {"error": f"no list\nweight_half: return {len(linears)} gradients, one for each weight"}
    early = [k for k in kept if any(k.shape == p.shape and torch.allclose(k, p) for p in products)]
    return {
        "the gradient of x": pair[0].clone(),
        "gradients of weights that input_half has computed": len(early),
        "the gradients of the weights": [product.clone() for product in products],
    }


EARLY = "input_half: it has computed the gradient of a weight already; nothing is delayed then"
WRONG = {
    "relu passes no gradient where it gave 0": {"zeros": ""},
    "relu's zeros are those of its output; these are of the input of the linear before it": {"zeros": "of h"},
    "weight_half: gradients come in the order of backward; return them in the order of the weights": {"back": True},
    "this is its transpose; a gradient has the shape of its weight": {"product": lambda h, dz: h.T @ dz},
    "it has dy where dz belongs: relu's zeros are missing": {"keep": lambda h, y, grad, dz: (h, grad)},
    "averaged over tokens; it is their sum": {"product": lambda h, dz: dz.T @ h / len(h)},
    "it has the output of its linear where the input belongs": {"keep": lambda h, y, grad, dz: (y, dz)},
    EARLY: {"keep": lambda h, y, grad, dz: (dz.T @ h,), "product": lambda product: product},
    "autograd does both halves at once": Stops({"input_half": by_autograd}),
}
SAYS = {"gradients of weights that input_half has computed": EARLY}
check_split_backward = Exercise(Split, stages, WRONG, _watch_split, SAYS)


# ------------------------------------------------------------------------------------ 6. both neighbours
def _ends():
    """(neighbour, whether the message down goes to it) of this rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return [(other, down) for other, down in ((rank - 1, False), (rank + 1, True)) if 0 <= other <= last]


def exchange(down, up, start=dist.batch_isend_irecv, arrived=1.0, swapped=False):
    """All messages in one call. A mistake starts them otherwise, does not wait until all has arrived, or swaps."""
    messages, received = [], {}
    for other, goes_down in _ends():
        received[goes_down] = torch.zeros_like(up if goes_down else down)
        messages.append(dist.P2POp(dist.irecv, received[goes_down], other))
        messages.append(dist.P2POp(dist.isend, down if goes_down else up, other))
    for work in start(messages):
        work.wait()
    for x in received.values():
        x[int(arrived * len(x)) :] = 0  # as if the rest had not arrived yet, which no run can promise
    return received.get(swapped), received.get(not swapped)


def _even_ranks_first(messages):
    """In two rounds of calls: ranks at even places send while others receive, then the other way."""
    first = (dist.isend, dist.irecv)[dist.get_rank() % 2]
    return [message.op(message.tensor, message.peer) for message in sorted(messages, key=lambda m: m.op is not first)]


def _one_by_one(messages, order):
    """Each message in a call of its own; those of a kind block if the order says so."""
    works = []
    for kind in order.split():
        op = dist.isend if kind.startswith("send") else dist.irecv
        for message in messages:
            if message.op is op:
                works.append(op(message.tensor, message.peer))
                if kind.endswith(",blocking"):
                    works.pop().wait()
    return works


def _along_the_chain(messages):
    """Blocking: what goes down before what goes up, and a rank receives before it sends on."""
    rank = dist.get_rank()
    for m in sorted(messages, key=lambda m: ((m.peer > rank) == (m.op is dist.irecv), m.op is dist.isend)):
        m.op(m.tensor, m.peer).wait()
    return []


DOWN, UP = 0, 1
LATE = "{} came, and the rest is whatever stood in the buffer; wait for the receive"
_ENDS = "there is no such rank; return None (the chain is no ring)"


def _watch_exchange(answer, seed):
    """Large messages both ways along a chain: what came, and how the same calls run in NCCL's order."""
    rank = dist.get_rank()
    with recorded_calls() as calls:
        got = answer(_message(rank, DOWN, seed), _message(rank, UP, seed))
    rounds, stuck = replay_of_all(calls)
    if not isinstance(got, tuple) or len(got) != 2:
        return {"error": "no pair\nreturn two things, from the rank before and from the rank behind"}
    return {
        "from the rank before": _in_words(got[0], rank - 1, DOWN, seed),
        "from the rank behind": _in_words(got[1], rank + 1, UP, seed),
        "where ranks stand on NCCL": stuck,
        "rounds of messages": Cost(rounds, 2 - rounds),  # even ranks first, then odd ones: 2
    }


def _in_words(got, other: int, way: int, seed: int) -> str:
    if not isinstance(got, Tensor):
        return repr(got)
    right = _message(other, way, seed)
    known = {"its message": right, "the other way's": _message(other, 1 - way, seed), "no number": 0 * right}
    part = "a part of its message" if got.shape == right.shape and (got == right).any() else "other numbers"
    return next((name for name, x in known.items() if agree(got, x)), part)


def _message(rank: int, way: int, seed: int) -> Tensor:
    return numbers(seed + 10 * rank + way, 400_000 + 1000 * way)


_WRONG_EXCHANGE = {
    LATE.format("no number"): {"arrived": 0.0},
    LATE.format("a part"): {"arrived": 0.5},
    _ENDS: {"swapped": True},
    STUCK: [{"start": partial(_one_by_one, order=order)} for order in ("send recv,blocking", "recv send")],
    "messages go one after the other along the chain; start all before you wait for any": {"start": _along_the_chain},
    "wait for each other": Stops({"start": partial(_one_by_one, order="send,blocking recv,blocking")}),
    "return two things": Stops(lambda down, up: list(exchange(down, up))),
}
_BLOCKED = "ranks wait for each other: a blocking call waits for one that nobody has reached"
SAYS_EXCHANGE, ERRORS = {"where ranks stand on NCCL": BATCH}, {"Timed out waiting": _BLOCKED}
check_exchange = Exercise(
    exchange,
    lambda rng: [(size, fresh_seed(rng)) for size in (2, rng.choice([4, 5]))],
    _WRONG_EXCHANGE,
    _watch_exchange,
    SAYS_EXCHANGE,
    ranks=_BLOCKED,
    right=partial(exchange, start=_even_ranks_first),
    errors=ERRORS,
    backend="gloo",
)
