"""Collectives: as NCCL would choose one (lesson 0), and all-reduces of buckets beside backward (lesson 3)."""

from collections.abc import Mapping

from course_lib.config import preset
from course_lib.flops import step_flops
from course_lib.hardware import GPUS, Cluster, gpu, link, peak_flops
from course_lib.panels.controls import controls, named, of_table, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Box, Chart, bars, columns
from course_lib.span import COMPUTE, Span
from course_lib.tensors import count_parameters
from course_lib.timing import bus_factor, collective_costs, collective_s, dp_spans, exposed_s, fastest
from course_lib.units import show_bytes, show_seconds

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
SIZES = tuple(digit * 10**power for power in range(3, 10) for digit in (1, 3))


def _cost_parts(cost, size: int) -> dict[str, float]:
    return {"latency": cost.latency_s, "moving bytes": cost.seconds(size) - cost.latency_s}


def _draw_collective(collective, size, ranks, gpus_per_node, inside, between) -> Shown:
    """Seconds of each way to do it, and for every size of a message the share that is latency."""
    here = min(ranks, gpus_per_node)
    place = ranks, Cluster(gpu("h100"), link(inside), link(between), gpus_per_node), here
    best = fastest(collective, size, *place)
    costs = sorted(collective_costs(collective, *place), key=lambda cost: cost.seconds(size))
    ways = {f"{cost.algorithm}, {cost.protocol}": _cost_parts(cost, size) for cost in costs[:5]}
    shares = {}
    for one in SIZES:
        cost = fastest(collective, one, *place)
        shares[show_bytes(one)] = {part: s / cost.seconds(one) for part, s in _cost_parts(cost, one).items()}
    first = next((label for label, parts in shares.items() if parts["moving bytes"] > parts["latency"]), None)
    latency, moving = map(show_seconds, _cost_parts(best, size).values())
    said = (
        f"{show_seconds(best.seconds(size))} = {latency} of latency + {moving} of moving bytes ({best.algorithm}, "
        f"{best.protocol}; a ring sends {show_bytes(bus_factor(collective, ranks) * size)} a rank). Latency decides "
        f"{f'below {first}' if first else 'for all of these sizes'}."
    )
    over = "in one node" if ranks == here else f"on {ranks // here} nodes"
    title = f"{collective} of {show_bytes(size)}, {ranks} ranks {over}: the fastest ways"
    return [
        bars(title, ways, "seconds", chosen=next(iter(ways))),
        columns("Share of the time, by the size of the message", shares, "share", chosen=show_bytes(size)),
    ], said


COLLECTIVE = Panel(
    "Time of a collective",
    {
        "collective": Control("collective", named(COLLECTIVES), "all_reduce"),
        "size": Control("message", tuple((show_bytes(size), size) for size in SIZES), 10**6, "slider"),
    }
    | controls(ranks=8, gpus_per_node=(8, powers(1, 8)), inside="nvlink4", between="efa"),
    _draw_collective,
)

_ASSUMED_MFU = 0.4  # of one GPU while it computes; published good runs on H100 reach 0.4 to 0.5
GRAD_BYTES = 4  # gradients are reduced in FP32
_SHADES = {"forward": 0.5, "backward": 0.0}


def _last_micro_batch(values: Mapping) -> list[Span]:
    """Spans of a step's last micro-batch, with an all-reduce for each bucket: before it nothing is sent.

    Assumes: each GPU computes at ASSUMED_MFU of its peak; a ring over the slowest link; equal buckets; the model fits;
    the optimizer's time is left out.
    """
    config, device = preset(values["model"]), gpu(values["gpu"])
    peak, tokens = peak_flops(device), values["micro_batch"] * values["seq_len"]
    micro_s = step_flops(config, tokens, values["seq_len"]) / (peak * _ASSUMED_MFU)
    size, buckets = GRAD_BYTES * count_parameters(config) / values["buckets"], values["buckets"] * (values["dp"] > 1)
    one_s = collective_s("all_reduce", size, values["dp"], link(values["link"]))
    return dp_spans(micro_s / 3, 2 * micro_s / 3, [one_s] * buckets, values["overlap"])


def _draw_overlap(**values) -> Shown:
    """Two lanes, computing and communication; what begins after computing has ended is not hidden."""
    spans, earlier = _last_micro_batch(values), values["micro_batches"] - 1
    micro_s = max(span.stop_s for span in spans if span.lane == COMPUTE)
    before_s, late_s = earlier * micro_s, exposed_s(spans)
    words = f"{earlier} micro-batch{'es' * (earlier > 1)} without communication"
    lanes = {"computing": [Box(0.0, before_s, "computing", words, 0.25)] * bool(earlier), "communication": []}
    for span in spans:
        start_s, stop_s, name = before_s + span.start_s, before_s + span.stop_s, span.name.removeprefix("all-reduce ")
        if span.lane == COMPUTE:
            lanes["computing"].append(Box(start_s, stop_s, "computing", name, _SHADES[name]))
            continue
        edge_s = min(max(start_s, before_s + micro_s), stop_s)
        pieces = ("communication", start_s, edge_s), ("not hidden", edge_s, stop_s)
        lanes["communication"] += [Box(*edges, part, name) for part, *edges in pieces if edges[1] > edges[0]]
    step_s = before_s + micro_s + late_s
    tokens = values["dp"] * values["micro_batch"] * values["seq_len"] * (earlier + 1)
    said = (
        f"Global batch {tokens:,} tokens. Modelled step {show_seconds(step_s)}: {show_seconds(step_s - late_s)} of "
        f"computation, {show_seconds(sum(span.seconds for span in spans if span.lane != COMPUTE))} to all-reduce "
        f"{show_bytes(GRAD_BYTES * count_parameters(preset(values['model'])))} of gradients, {show_seconds(late_s)} of "
        f"it not hidden. {tokens / step_s:,.0f} tokens per second, {1 - late_s / step_s:.0%} of the ideal."
    )
    return [Chart("Computation and communication of one step", lanes, step_s, unit="seconds", ground=True)], said


OVERLAP = Panel(
    "Data parallelism: what backward hides",
    controls(model="llama-3.2-1b", dp=(8, powers(1, 1024)), micro_batch=2, seq_len=(4096, powers(128, 131_072)))
    | controls(micro_batches=(1, powers(1, 64)), buckets=12, link="efa", gpu=("h100", of_table(GPUS)), overlap=True),
    _draw_overlap,
)
