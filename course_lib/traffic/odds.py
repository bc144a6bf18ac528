"""Expected traffic of tokens that choose their experts uniformly at random: closed forms.

    expected_places(256, places=8, top_k=8)         # 5.29: nodes that a token reaches
    expected_crossings(layout, top_k=8)             # rows of a token that leave their node

With skew, or a limit that follows the scores, draw a routing (synthetic_routing.py) and count it (routing.py).
"""

import math

from course_lib.layout.experts import ExpertLayout, check_choice
from course_lib.validate import Size, checked


@checked
def expected_places(num_experts: Size, places: Size, top_k: Size, max_places: Size | None = None) -> float:
    """How many of `places` (nodes, or ranks) with equally many experts a token reaches on average, routed uniformly.

    A place is missed if all k assignments fall elsewhere. max_places: from so many places only, taken at random. Places
    taken by their best scores, as `limit_groups` does, are nearly all used: draw a routing and count.
    """
    check_choice(num_experts, top_k, places, max_places)
    reachable = places if max_places is None else max_places
    width = num_experts // places
    missed = math.comb(width * (reachable - 1), top_k) / math.comb(width * reachable, top_k)
    return reachable * (1 - missed)


@checked
def expected_crossings(layout: ExpertLayout, top_k: Size) -> float:
    """Rows between nodes for one token on average, routed uniformly: of its assignments those not at home."""
    check_choice(layout.num_experts, top_k, layout.num_nodes, None)
    return top_k * (layout.num_nodes - 1) / layout.num_nodes
