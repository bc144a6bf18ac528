"""Which axis may cross a thin link? The course's engine on two emulated hosts, timed, and its bytes on the link.

    rows = measure_two_hosts(LAYOUTS)
    print("\\n".join(table(rows)))

Bytes and seconds are measured: by the link's own counter, and on the CPU over an emulated link (hosts.py). The seconds
are none of a cluster; what they show is the order of the layouts. Each layout has the same sequences in a step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.run import Run
from course_lib.simulate.hosts import Latency, LinkRate, link_bytes, split_into_hosts, why_no_hosts
from course_lib.traffic.step import sent
from course_lib.training import data
from course_lib.validate import Size, checked

MODEL, RANKS, RANKS_PER_HOST = preset("toy"), 4, 2
BYTES_PER_S = 4e6  # of the link: so thin that a step of this small model waits for it
LAYOUTS = (  # 8 sequences a step; of the axes in `order` the outermost one crosses the link
    "pp=2,tp=2,micro_batch=2,micro_batches=4",
    "dp=2,tp=2,micro_batch=2,micro_batches=2",
    "dp=2,tp=2,micro_batch=2,micro_batches=2,order=pp-tp-cp-dp",
    "pp=2,tp=2,micro_batch=2,micro_batches=4,order=tp-dp-cp-pp",
)


@dataclass(frozen=True)
class HostRow:
    """One layout on two hosts: which axis lies inside them and which across, and a step as it was measured.

    link_bytes      a host sent over the link, the one that sent more
    formula_bytes   what the formulas of `traffic` have for the axis across, without headers of packets
    link_s          the least that the link needs for these bytes
    step_s          of the fastest step, with its optimizer
    """

    layout: str
    inside: str
    across: str
    link_bytes: int
    formula_bytes: int
    link_s: float
    step_s: float


# The fastest of 4 steps, to be shown where it cannot be measured.
MEASURED_ON = "23 November 2026, 2 shared CPU cores, an emulated link of 4 MB/s"
MEASURED = (
    HostRow(LAYOUTS[0], "tp", "pp", 1_122_958, 1_048_576, 0.281, 0.631),
    HostRow(LAYOUTS[1], "tp", "dp", 964_138, 922_112, 0.241, 0.642),
    HostRow(LAYOUTS[2], "dp", "tp", 9_586_594, 9_461_760, 2.397, 2.513),
    HostRow(LAYOUTS[3], "pp", "tp", 9_593_648, 9_461_760, 2.398, 2.511),
)


@checked
def measure_two_hosts(
    layouts: Sequence[str] = LAYOUTS,
    bytes_per_s: LinkRate = BYTES_PER_S,
    seq_len: Size = 256,
    steps: Size = 1,
    latency_s: Latency = 0.0,
) -> list[HostRow]:
    """Train each layout for some steps on two emulated hosts of two ranks each, and return what was measured.

    Raises   ValueError for a layout that is not two axes of two ranks each, or where hosts cannot be emulated, with why
    """
    parsed = [Layout.parse(text) for text in layouts]
    for layout in parsed:
        axes_of(layout)
        layout.check_model(MODEL, seq_len)
    if why := why_no_hosts():
        raise ValueError(why)
    of_ranks = launch(time_layouts, RANKS, parsed, (bytes_per_s, latency_s), seq_len, steps, quiet=True)
    rows = []
    for index, layout in enumerate(parsed):
        inside, across = axes_of(layout)
        step_s = max(times[index][0] for times in of_ranks)
        on_link = max(times[index][1] for times in of_ranks)
        formula = formula_bytes(layout, across, seq_len)
        rows.append(HostRow(str(layout), inside, across, on_link, formula, on_link / bytes_per_s, step_s))
    return rows


def axes_of(layout: Layout) -> tuple[str, str]:
    """The axis whose ranks share a host, and the one whose ranks do not."""
    axes = [axis for axis, size in layout.mesh.sizes.items() if size > 1]  # outermost first
    if layout.world_size != RANKS or len(axes) != 2:
        raise ValueError(f"layout {layout} has the axes {axes}; two hosts of two ranks take two axes of size 2")
    return axes[1], axes[0]


def formula_bytes(layout: Layout, across: str, seq_len: int) -> int:
    """What a host sends over the axis that crosses, of the host that sends more."""
    run = Run(MODEL, layout, seq_len, "fp32")
    axis = "data" if across in ("dp", "cp") else across
    of_ranks = [sent(run, rank).get(axis, 0) for rank in range(RANKS)]
    return max(sum(of_ranks[:RANKS_PER_HOST]), sum(of_ranks[RANKS_PER_HOST:]))


def time_layouts(layouts: list[Layout], link: tuple[float, float], seq_len: int, steps: int) -> list[tuple[float, int]]:
    """In a rank: for each layout the seconds of its fastest step, and this host's bytes on the link in it."""
    bytes_per_s, latency_s = link
    split_into_hosts(bytes_per_s, RANKS_PER_HOST, latency_s)
    return [min(time_steps(layout, seq_len, steps)) for layout in layouts]


def time_steps(layout: Layout, seq_len: int, steps: int) -> list[tuple[float, int]]:
    engine = five_d.build(MODEL, layout)
    optimizer, dp_rank = engines.make_optimizer(engine), engine.groups.coordinates["dp"]
    x_BS, y_BS = data.batch(data.tokens(50_000), 0, layout.sequences_per_step, seq_len, dp_rank, layout.dp)
    micro_batches = data.micro_batches(x_BS, y_BS, layout.micro_batches)
    measured = []
    for _ in range(steps):
        start_bytes = link_bytes()  # before the barrier: behind it the host's other rank may send at once
        dist.barrier()
        start_s = time.perf_counter()
        engines.step(engine, micro_batches, optimizer)
        dist.barrier()
        measured.append((time.perf_counter() - start_s, link_bytes() - start_bytes))
    return measured


@checked
def table(rows: Sequence[HostRow]) -> list[str]:
    """Lay rows out as text: MB are 10^6 bytes, of the host that sent more; seconds are those of one step."""
    lines = ["inside   across   MB on the link   payload by formula   link alone   step, measured"]
    return lines + [
        f"{row.inside:6}   {row.across:6}   {row.link_bytes / 1e6:14.2f}   {row.formula_bytes / 1e6:18.2f}   "
        f"{row.link_s:8.2f} s   {row.step_s:12.2f} s"
        for row in rows
    ]
