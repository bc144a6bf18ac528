"""One collective, modelled as NCCL would choose it: latency against moving bytes, within a node and over nodes."""

from __future__ import annotations

from course_lib.hardware import Cluster, gpu, link
from course_lib.panels.controls import controls, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Bars, Columns
from course_lib.timing import bus_factor, collective_costs, fastest
from course_lib.units import show_bytes, show_seconds

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
SIZES = tuple(digit * 10**power for power in range(3, 10) for digit in (1, 3))


def _cost_parts(cost, size: int) -> dict[str, float]:
    """Seconds of one way by what they are spent on."""
    return {"latency": cost.latency_s, "moving bytes": cost.seconds(size) - cost.latency_s}


def _draw_collective(collective, size, ranks, gpus_per_node, inside, between) -> Shown:
    """Seconds of each way to do it, and for every size of a message the share that is latency."""
    here = min(ranks, gpus_per_node)
    place = ranks, Cluster(gpu("h100"), link(inside), link(between), gpus_per_node), here
    best = fastest(collective, size, *place)
    ways = sorted(collective_costs(collective, *place), key=lambda cost: cost.seconds(size))
    names = {f"{cost.algorithm}, {cost.protocol}": _cost_parts(cost, size) for cost in ways[:5]}
    over = f"{ranks} ranks in one node" if ranks == here else f"{ranks} ranks on {ranks // here} nodes"
    title = f"{collective} of {show_bytes(size)}, {over}: the fastest ways"
    forms = [Bars(title, names, "seconds", chosen=next(iter(names)))]
    shares, first = [], None
    for one in SIZES:
        parts = _cost_parts(fastest(collective, one, *place), one)
        shares.append({part: seconds / sum(parts.values()) for part, seconds in parts.items()})
        if first is None and parts["moving bytes"] > parts["latency"]:
            first = one
    labels = [show_bytes(one) for one in SIZES]
    title = "Share of the time, by the size of the message"
    forms.append(Columns(title, shares, labels, "share", chosen=show_bytes(size)))
    parts, total = _cost_parts(best, size), best.seconds(size)
    rules = f"Latency decides below {show_bytes(first)}." if first else "Latency decides for all of these sizes."
    said = (
        f"{show_seconds(total)} = {show_seconds(parts['latency'])} of latency + "
        f"{show_seconds(parts['moving bytes'])} of moving bytes ({best.algorithm}, {best.protocol}; a ring sends "
        f"{show_bytes(bus_factor(collective, ranks) * size)} a rank). {rules}"
    )
    return forms, said


COLLECTIVE = Panel(
    "Time of a collective",
    {
        "collective": Control("collective", tuple((name, name) for name in COLLECTIVES), "all_reduce"),
        "size": Control("message", tuple((show_bytes(size), size) for size in SIZES), 10**6, "slider"),
        "ranks": Control("ranks", powers(2, 1024), 8, "slider"),
        **controls(gpus_per_node=(8, powers(1, 8)), inside="nvlink4", between="efa"),
    },
    _draw_collective,
)
