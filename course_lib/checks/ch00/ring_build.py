"""Tables of exercises 7 and 8: when latency decides and when bandwidth does; a ring all-reduce from an empty cell."""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from course_lib.checks import Cost, Exercise, Stops
from course_lib.checks.ch00.ranks import one_each
from course_lib.checks.watch import collective
from course_lib.comm import all_reduce, pass_on, send
from course_lib.hardware import Link
from course_lib.minimal.ring import all_reduce_through_rank_0, send_and_receive


def _random_link(rng) -> Link:
    bytes_per_s = rng.uniform(5e9, 500e9)
    return Link("a link", rng.uniform(1e-6, 5e-5), bytes_per_s, 2 * bytes_per_s, "drawn at random", "drawn at random")


# ------------------------------------------------------------------------------------ 7a. the crossover
def crossover_bytes(world_size, link, pieces=lambda world_size: world_size):
    """The message size at which a ring all-reduce spends as long on latency as on bandwidth."""
    return pieces(world_size) * link.latency_s * link.bytes_per_s


def _ring_parts(payload_bytes, world_size, link, pieces=None):
    steps = 2 * (world_size - 1)
    return steps * link.latency_s, steps * payload_bytes / (pieces or world_size) / link.bytes_per_s


_WRONG_CROSSOVER = {
    "this weighs one latency against the whole message, but a ring sends the message in G pieces": {
        "pieces": lambda world_size: 1
    },
    "this takes both directions of the link; a ring step is bound by one": {
        "pieces": lambda world_size: 2 * world_size
    },
    "the number of steps, 2 (G - 1), stands in both terms and cancels": {"pieces": lambda size: 2 * (size - 1)},
    "G - 1 stands in both terms and cancels; the G below the message does not": {"pieces": lambda size: size - 1},
    "bytes are seconds times bytes per second; here the seconds were divided": (
        lambda world_size, link: world_size * link.latency_s / link.bytes_per_s
    ),
}
check_crossover_bytes = Exercise(
    crossover_bytes,
    lambda rng: [(rng.choice([3, 4, 8, 16, 64, 512]), _random_link(rng)) for _ in range(20)],
    _WRONG_CROSSOVER,
)


# ------------------------------------------------------------------------------------ 7b. ring or doubling
def _doubling_s(payload_bytes, world_size, link):
    return math.log2(world_size) * (link.latency_s + payload_bytes / link.bytes_per_s)


def _faster_all_reduce(payload_bytes, world_size, link, pieces=None):
    """Ring or doubling, whichever the alpha-beta model calls faster."""
    ring_s = sum(_ring_parts(payload_bytes, world_size, link, pieces))
    return "ring" if ring_s < _doubling_s(payload_bytes, world_size, link) else "doubling"


def _around_the_crossover(rng):
    drawn = [(rng.choice([4, 8, 16, 64, 512]), _random_link(rng), rng.uniform(-1.5, 1.0)) for _ in range(150)]
    return [(max(1, int(crossover_bytes(size, link) * 10**digits)), size, link) for size, link, digits in drawn]


def _in_words(*case) -> str:
    link, ring_s, doubling_s = case[2], sum(_ring_parts(*case)), _doubling_s(*case)
    return (
        f"latency {link.latency_s * 1e6:.2f} us, {link.bytes_per_s / 1e9:.1f} GB/s one way: the ring takes "
        f'{ring_s:.3g} s, doubling {doubling_s:.3g} s; return "ring" or "doubling"'
    )


_WRONG_FASTER = {
    "the slower one each time: the comparison is the wrong way round": lambda *case: (
        "doubling" if _faster_all_reduce(*case) == "ring" else "ring"
    ),
    "always the ring: it sends the fewest bytes, but each of its 2 (G - 1) steps costs a latency": lambda *case: "ring",
    "always doubling: so it would be if a ring step carried the whole message, but it carries 1 / G of it": [
        lambda *case: "doubling",
        {"pieces": 1},
    ],
    "this takes both directions of the link; each step is bound by one": lambda payload_bytes, size, link: (
        _faster_all_reduce(payload_bytes, size, replace(link, bytes_per_s=link.both_directions_bytes_per_s))
    ),
    "decided by crossover_bytes: there the ring's own two terms are equal, not ring and doubling": (
        lambda payload_bytes, *case: "ring" if payload_bytes > crossover_bytes(*case) else "doubling"
    ),
}
check_faster_all_reduce = Exercise(
    _faster_all_reduce, _around_the_crossover, _WRONG_FASTER, says={"the result": _in_words}
)


# ------------------------------------------------------------------------------------ 8. a ring all-reduce
def ring(x, group, starts=(-1, 0), steps=(1, 1), store="sum", cut=torch.Tensor.tensor_split, rest=True, to=1):
    """The lesson's ring, or to the left; an argument is a mistake. Step s of a phase sends piece r + start - s."""
    size, total, whole = group.size(), x.clone(), len(x) if rest else len(x) // group.size() * group.size()
    rank, right, left = to * group.rank() % size, (group.rank() + to) % size, (group.rank() - to) % size
    pieces = cut(total[:whole], size)
    for phase, (start, more) in enumerate(zip(starts, steps, strict=True)):
        for step in range((size - 2 + more) if more else 0):
            mine = pieces[(rank + start - 1 - step) % size]
            arrived = torch.empty_like(mine)
            send_and_receive(pieces[(rank + start - step) % size].clone(), right, arrived, left, group)
            if phase == 1 or store:
                mine.copy_(arrived + mine if phase == 0 and store == "sum" else arrived)
    return torch.cat([*pieces, total[whole:]])[: len(x)]


def padded(total, size):
    return torch.nn.functional.pad(total, (0, -len(total) % size)).view(size, -1)


def inputs(rng):
    cases = []
    for size in (4, rng.choice([2, 3])):
        whole = size * rng.randrange(4, 20)
        lengths = (size + 1, size - 1, whole, whole + rng.randrange(1, size))
        cases += [(size, one_each(rng, size, length)) for length in lengths]
    return cases


def watch(answer, inputs):
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = collective(answer, inputs, leave_out=["messages sent and received"])
    seen["sent to others than neighbours"] = sorted(set(seen.pop("sent to")) - {(rank + 1) % size, (rank - 1) % size})
    sent = seen.pop("bytes sent")
    with_padding = 2 * (size - 1) * math.ceil(len(inputs[0]) / size) * 8  # is allowed
    return seen | {"bytes sent": Cost(sent.value, max(0, with_padding - sent.value))}


def _with_own_piece(x, group):
    total = ring(x, group)
    total.tensor_split(group.size())[group.rank()].copy_(x.tensor_split(group.size())[group.rank()])
    return total


def whole_tensors(x, group):
    total, held = x.clone(), x
    for _ in range(group.size() - 1):
        held = pass_on(held, x, group)
        total += held
    return total


STARTS = (
    "the all-gather phase starts with a wrong piece: in step 0 rank r must send the piece that it has finished (in the "
    "lesson's ring piece r), and {} was sent, which is a partial sum"
)
WRONG = {
    "it has its own tensor; nothing was added": lambda x, group: x.clone(),
    "averaged, not summed": lambda x, group: ring(x, group) / group.size(),
    "phase 1 began with piece r, so rank r finishes piece r + 1, and phase 2 passes on piece r first, which is "
    "a partial sum: begin phase 1 with r - 1, or phase 2 with r + 1": {"starts": (0, 0)},
    STARTS.format("r + 1"): {"starts": (-1, 1)},
    STARTS.format("r - 1"): {"starts": (-1, -1)},
    "in phase 1 what arrives was stored; it must be added to this rank's piece": {"store": "what arrives"},
    "no piece was changed in phase 1: `a = a + b` makes a new tensor, `a += b` writes into the view": {"store": None},
    "this is what phase 1 leaves, one finished piece; in phase 2 finished pieces go around": {"steps": (1, 0)},
    "its own piece is not the sum: phase 1 finishes it in its last step, G - 2": _with_own_piece,
    "the last elements are not summed; the length does not divide by G, so pad or split": {"rest": False},
    "stop after G - 1 steps of each phase": {"steps": (1, 2)},
    "cut the tensor into G pieces, and send one a step": whole_tensors,
    "nobody receives": Stops(lambda x, group: send(x, (group.rank() + 1) % group.size(), group)),
    "sends only to its neighbours": Stops(all_reduce_through_rank_0),
    "only send and recv": Stops(lambda x, group: all_reduce(x, group)),
    "arguments changed": Stops(lambda x, group: x.copy_(ring(x, group))),
    "IndexError": Stops({"cut": lambda total, size: total.split(math.ceil(len(total) / size))}),
}
SAYS = {
    "sent to others than neighbours": "in a ring a rank sends only to its neighbours",
    "bytes sent": "2 (G - 1) pieces",
}
HANG = (
    "If all ranks begin with send, nobody receives: let both messages start at once, or let one rank begin with recv."
)
check_ring_all_reduce = Exercise(
    ring, inputs, WRONG, watch, SAYS, right=partial(ring, to=-1, cut=padded), ranks=HANG, seconds=4.0
)
