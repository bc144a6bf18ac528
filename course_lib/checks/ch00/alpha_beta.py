"""Graders of chapter 00, exercise 7: when latency decides and when bandwidth does. Arithmetic alone, no ranks."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from course_lib.checks.core import expect_number, fail, fail_by_belief, grader
from course_lib.hardware import Link


def _random_link(rng: random.Random) -> Link:
    bytes_per_s = rng.uniform(5e9, 500e9)
    return Link("a link", rng.uniform(1e-6, 5e-5), bytes_per_s, 2 * bytes_per_s, "drawn at random", "drawn at random")


def _shown(world_size: int, link: Link) -> str:
    return f"{world_size} ranks, latency {link.latency_s * 1e6:.2f} us, {link.bytes_per_s / 1e9:.1f} GB/s one way"


# ------------------------------------------------------------------------------------ a. the crossover
@grader
def check_crossover_bytes(answer, rng):
    """The message size at which a ring all-reduce spends as long on latency as on bandwidth."""
    for _ in range(20):
        world_size, link = rng.choice([3, 4, 8, 16, 64, 512]), _random_link(rng)
        want, where = world_size * link.latency_s * link.bytes_per_s, f"{_shown(world_size, link)}, bytes"
        expect_number(answer(world_size, link), want, where, _wrong_sizes(world_size, link), rtol=1e-6)


def _wrong_sizes(world_size: int, link: Link) -> dict[str, float]:
    one_latency = link.latency_s * link.bytes_per_s
    return {
        "this weighs one latency against the whole message, but a ring sends the message in G pieces": one_latency,
        "this takes both directions of the link; a ring step is bound by one": world_size
        * link.latency_s
        * link.both_directions_bytes_per_s,
        "the number of steps, 2 (G - 1), stands in both terms and cancels": 2 * (world_size - 1) * one_latency,
        "G - 1 stands in both terms and cancels; the G below the message does not": (world_size - 1) * one_latency,
        "bytes are seconds times bytes per second; here the seconds were divided": world_size
        * link.latency_s
        / link.bytes_per_s,
    }


# ------------------------------------------------------------------------------------ b. ring or doubling
Case = tuple[int, int, Link]  # payload_bytes, world_size, link


@grader
def check_faster_all_reduce(answer, rng):
    """Ring or doubling, whichever the alpha-beta model calls faster, over many sizes, ranks and links."""
    cases = [_random_case(rng) for _ in range(300)]
    got = [answer(*case) for case in cases]
    unknown = [name for name in got if name not in ("ring", "doubling")]
    if unknown:
        fail(f'it returned {unknown[0]!r}; return "ring" or "doubling"')
    fail_by_belief(got, [_faster(*case) for case in cases], cases, BELIEFS, _told)


def _told(*case) -> str:
    seconds = f"the ring takes {_ring_s(*case):.3g} s, doubling {_doubling_s(*case):.3g} s"
    return f"{case[0]:,} bytes, {_shown(*case[1:])}: {seconds}"


def _random_case(rng: random.Random) -> Case:
    world_size, link = rng.choice([4, 8, 16, 64, 512]), _random_link(rng)
    crossover_bytes = world_size * link.latency_s * link.bytes_per_s
    return max(1, int(crossover_bytes * 10 ** rng.uniform(-1.5, 1.0))), world_size, link


def _ring_s(payload_bytes: int, world_size: int, link: Link) -> float:
    return 2 * (world_size - 1) * (link.latency_s + payload_bytes / world_size / link.bytes_per_s)


def _doubling_s(payload_bytes: int, world_size: int, link: Link) -> float:
    return math.log2(world_size) * (link.latency_s + payload_bytes / link.bytes_per_s)


def _faster(payload_bytes: int, world_size: int, link: Link) -> str:
    case = (payload_bytes, world_size, link)
    return "ring" if _ring_s(*case) < _doubling_s(*case) else "doubling"


def _slower(payload_bytes: int, world_size: int, link: Link) -> str:
    return "doubling" if _faster(payload_bytes, world_size, link) == "ring" else "ring"


def _with_both_directions(payload_bytes: int, world_size: int, link: Link) -> str:
    return _faster(payload_bytes, world_size, replace(link, bytes_per_s=link.both_directions_bytes_per_s))


def _by_crossover(payload_bytes: int, world_size: int, link: Link) -> str:
    return "ring" if payload_bytes > world_size * link.latency_s * link.bytes_per_s else "doubling"


BELIEFS: dict[str, Callable[[int, int, Link], str]] = {
    "the slower one each time: the comparison is the wrong way round": _slower,
    "always the ring: it sends the fewest bytes, but each of its 2 (G - 1) steps costs a latency": lambda *case: "ring",
    "always doubling: so it would be if a ring step carried the whole message, but it carries 1 / G of it": (
        lambda *case: "doubling"
    ),
    "this takes both directions of the link; each step is bound by one": _with_both_directions,
    "decided by crossover_bytes: there the ring's own two terms are equal, not ring and doubling": _by_crossover,
}
