"""One node of GPUs and its wires, as wide as their bytes per second of one direction."""

from dataclasses import dataclass

from matplotlib.patches import Rectangle

from course_lib.hardware import GB, Cluster, Link
from course_lib.plots.palette import COMMUNICATION_COLOR, COMPUTE_COLOR, NEUTRAL_COLOR, OKABE_ITO
from course_lib.plots.style import bare, labelled_box, picture_axes
from course_lib.validate import checked

WIDEST = 0.62  # the fastest wire, where neighbouring GPUs are 1 apart
ROWS = {"switch": 4.0, "gpu": 3.0, "host": 2.0, "card": 1.0, "network": 0.0}  # where each row of boxes is
ENDS = {
    ("switch", "gpu"): "GPU to the NVSwitches",
    ("gpu", "host"): "GPU to its PCIe switch",
    ("host", "card"): "network card to its switch",
    ("card", "network"): "network card to the network",
}


@dataclass(frozen=True)
class Wire:
    """The wires between two rows of boxes, one for each GPU, and the rate of one wire in one direction."""

    name: str
    above: str
    below: str
    bytes_per_s: float
    width: float


def wires_of_node(cluster: Cluster, host: Link) -> list[Wire]:
    """Return the wires from the switch down to the network; `host` joins GPUs, processors and network cards."""
    links = (
        (cluster.inside, "switch", "gpu"),
        (host, "gpu", "host"),
        (host, "host", "card"),
        (cluster.between, "card", "network"),
    )
    fastest = max(link.bytes_per_s for link, _, _ in links)
    return [
        Wire(link.name, above, below, link.bytes_per_s, WIDEST * link.bytes_per_s / fastest)
        for link, above, below in links
    ]


@checked
def show_node(cluster: Cluster, host: Link, title: str) -> None:
    """Show one node: a switch between its GPUs, PCIe to the processors, and a network card for each GPU."""
    wires, gpus = wires_of_node(cluster, host), cluster.gpus_per_node
    with picture_axes(4.3) as axes:
        for wire in wires:
            _draw_wires(axes, wire, gpus)
        _draw_boxes(axes, cluster, gpus)
        bare(axes, (-0.6, gpus + 2.9), (-0.35, 4.35))
        axes.set_title(title)


def _draw_wires(axes, wire: Wire, gpus: int) -> None:
    top, bottom = ROWS[wire.above], ROWS[wire.below]
    for gpu in range(gpus):
        corner = gpu - wire.width / 2, bottom
        axes.add_patch(Rectangle(corner, wire.width, top - bottom, facecolor=COMMUNICATION_COLOR, zorder=1))
    each_way = f"{wire.name}: {wire.bytes_per_s / GB:.0f} GB/s each way\nfrom each {ENDS[wire.above, wire.below]}"
    axes.text(gpus - 0.35, (top + bottom) / 2, each_way, va="center", fontsize=8.5)


def _draw_boxes(axes, cluster: Cluster, gpus: int) -> None:
    across = gpus - 1
    switches = "NVSwitches: every GPU reaches every other GPU"
    _box(axes, across / 2, ROWS["switch"], gpus - 0.2, switches, OKABE_ITO["green"])
    for gpu in range(gpus):
        _box(axes, gpu, ROWS["gpu"], 0.8, f"GPU {gpu}", COMPUTE_COLOR)
        _box(axes, gpu, ROWS["card"], 0.8, f"network\ncard {gpu}", NEUTRAL_COLOR)
    for half in (0, 1):
        middle = (gpus / 2 - 1) / 2 + half * gpus / 2
        _box(axes, middle, ROWS["host"], gpus / 2 - 0.2, f"processor {half} and its PCIe switches", NEUTRAL_COLOR)
    total = gpus * cluster.between.bytes_per_s / GB
    network = f"network to other nodes: {gpus} cards, {total:.0f} GB/s each way together"
    _box(axes, across / 2, ROWS["network"], gpus - 0.2, network, "#FFFFFF")


def _box(axes, middle: float, height: float, width: float, text: str, color: str) -> None:
    look = {"edgecolor": "black", "linewidth": 0.8}
    labelled_box(axes, (middle - width / 2, height - 0.22), (width, 0.44), color, text, **look)
