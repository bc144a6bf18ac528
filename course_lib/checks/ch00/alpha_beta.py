"""Tables of exercise 7: when latency decides and when bandwidth does. Arithmetic alone, no ranks."""

import math
from dataclasses import replace

from course_lib.checks import Exercise
from course_lib.hardware import Link


def _random_link(rng) -> Link:
    bytes_per_s = rng.uniform(5e9, 500e9)
    return Link("a link", rng.uniform(1e-6, 5e-5), bytes_per_s, 2 * bytes_per_s, "drawn at random", "drawn at random")


# ------------------------------------------------------------------------------------ a. the crossover
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


# ------------------------------------------------------------------------------------ b. ring or doubling
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
