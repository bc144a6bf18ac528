"""What experts on ep ranks send: rows of tokens to their experts and back, expected or of real assignments.

plain            k rows per token
once_per_rank    a row for each rank that a token reaches: on the way there with k ids and weights, back with none

    expected_places(256, places=8, top_k=8)         # 5.29: nodes that a token reaches

With skew, or a limit that follows the scores, draw a routing (panels/synthetic_routing.py) and count it (routing.py).
"""

import math
from collections.abc import Sequence

from course_lib.config import check_groups
from course_lib.layout.experts import ExpertLayout
from course_lib.run import Run, recipe_of
from course_lib.traffic.collectives import Call
from course_lib.traffic.routing import COUNT_BYTES, ID_BYTES, Routing, moe_traffic
from course_lib.validate import Index, Size, checked, one_of


def expected_calls(run: Run, num_layers: int) -> list[Call]:
    """List what one micro-batch makes a rank send on average for its layers with experts, if tokens choose evenly."""
    layout, moe, itemsize = run.layout, run.config.moe, recipe_of(run.recipe).compute_bytes
    if layout.ep == 1 or not num_layers:
        return []
    tokens = layout.micro_batch * (run.seq_len // layout.cp) // layout.fold
    row = run.config.d_model * itemsize
    plain = layout.expert_method == "plain"
    weights, ids = (0, 0) if plain else (moe.top_k * max(4, itemsize), moe.top_k * ID_BYTES)
    rows = tokens * (moe.top_k if plain else expected_places(moe.num_experts, layout.ep, moe.top_k))
    again = 2 if layout.recompute == "full" else 1

    def call(place: str, row_bytes: int, count: int) -> Call:
        payload = round(rows * row_bytes / itemsize) * itemsize
        return Call(place, "all_to_all", payload, layout.ep, itemsize, count * num_layers)

    counts = COUNT_BYTES * (moe.num_experts if plain else layout.ep)
    return [
        Call("counts", "all_to_all", counts, layout.ep, COUNT_BYTES, again * num_layers),
        call("dispatch", row + weights + ids, again),
        call("combine", row, again),
        call("combine backward", row, 1),
        call("dispatch backward", row + weights, 1),
    ]


def routed_calls(run: Run, routings: Sequence[Routing], ep_rank: Index) -> list[Call]:
    """List what leaves a rank, to the byte, layer by layer and micro-batch by micro-batch of these assignments."""
    layout, calls, itemsize = run.layout, [], recipe_of(run.recipe).compute_bytes
    if layout.ep == 1:
        return []
    experts = ExpertLayout(run.config.moe.num_experts, layout.ep)
    one_of("ep_rank", ep_rank, range(layout.ep))
    for routing in routings:
        traffic = moe_traffic(routing, experts, run.config.d_model, layout.expert_method, itemsize)
        forward = traffic.forward(ep_rank).total_bytes * (2 if layout.recompute == "full" else 1)
        sizes = {"experts forward": forward, "experts backward": traffic.backward(ep_rank).total_bytes}
        calls += [Call(place, "all_to_all", size, layout.ep, 1, to_one=True) for place, size in sizes.items()]
    return calls


@checked
def expected_places(num_experts: Size, places: Size, top_k: Size) -> float:
    """How many of `places` (nodes, or ranks) with equally many experts a token reaches on average, routed uniformly."""
    check_groups(num_experts, top_k, places)
    return places * (1 - math.comb(num_experts - num_experts // places, top_k) / math.comb(num_experts, top_k))
