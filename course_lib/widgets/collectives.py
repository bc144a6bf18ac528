"""The collective explorer: message, ranks and link, the way that NCCL's model chooses, and what it costs."""

from dataclasses import dataclass
from html import escape

import ipywidgets as widgets

from course_lib.hardware import link
from course_lib.plots.curves import alpha_beta_picture, crossover_bytes, draw_alpha_beta
from course_lib.plots.style import show_bytes, show_seconds
from course_lib.timing import bus_factor, fastest
from course_lib.validate import Size, checked
from course_lib.widgets import parts

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
SIZES = [(show_bytes(size), size) for exponent in range(3, 10) for size in (10**exponent, 3 * 10**exponent)]


@dataclass(frozen=True)
class CollectiveView:
    """One collective, modelled: the way it is done, seconds and their two parts, and bytes that a ring's rank sends."""

    way: str
    latency_s: float
    bandwidth_s: float
    sent_bytes: float
    crossover_bytes: float
    regime: str

    @property
    def total_s(self) -> float:
        """Latency and bandwidth together."""
        return self.latency_s + self.bandwidth_s


@checked
def explore_collective(collective: str, payload_bytes: int, world_size: Size, link_key: str) -> CollectiveView:
    """Turn choices into the numbers shown. `sent_bytes` is what a rank in the middle of the ring or chain sends."""
    wire = link(link_key)
    cost = fastest(collective, payload_bytes, world_size, wire)
    bandwidth_s = cost.seconds(payload_bytes) - cost.latency_s
    return CollectiveView(
        way=f"{cost.algorithm}, {cost.protocol}",
        latency_s=cost.latency_s,
        bandwidth_s=bandwidth_s,
        sent_bytes=bus_factor(collective, world_size) * payload_bytes,
        crossover_bytes=crossover_bytes(collective, world_size, wire),
        regime="latency" if bandwidth_s < cost.latency_s else "bandwidth",
    )


@checked
def describe_collective(view: CollectiveView) -> str:
    """The numbers in one line."""
    return (
        f"{show_seconds(view.total_s)} = {show_seconds(view.latency_s)} of latency + {show_seconds(view.bandwidth_s)} "
        f"of moving bytes ({view.way}; a ring sends {show_bytes(view.sent_bytes)} a rank). "
        f"{view.regime.capitalize()} rules; the two limits meet at {show_bytes(view.crossover_bytes)}."
    )


@checked
def collective_explorer() -> widgets.VBox:
    """Sliders over message size and ranks: the modelled time on its curve."""
    collective = parts.choice("collective", COLLECTIVES, "all_reduce")
    size = parts.slider("message", SIZES, 10**6)
    ranks = parts.slider("ranks", parts.powers_of_two(2, 1024), 8)
    wire = parts.choice("link", parts.ALL_LINKS, "nvlink4")

    def predict() -> tuple[bytes, str]:
        view = explore_collective(collective.value, size.value, ranks.value, wire.value)
        curve = alpha_beta_picture(collective.value, ranks.value, link(wire.value))
        png = parts.figure_png(lambda axes: draw_alpha_beta(axes, curve, size.value), 3.6, 7.2)
        return png, escape(describe_collective(view))

    return parts.picture_panel([collective, size, ranks, wire], predict)
