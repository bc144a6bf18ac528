"""Which axis may cross a thin link? Steps of the course's engine, measured on two emulated hosts of two ranks each.

The hosts were two networks of one Linux kernel, joined by a link that the kernel limited. Bytes are those of the link's
own counter; seconds show the order of the layouts, and are none of a cluster. Each layout has 8 sequences in a step, of
256 tokens, of the toy model in FP32.
"""

from collections.abc import Sequence
from typing import NamedTuple


class HostRow(NamedTuple):
    """One layout on two hosts: which axis lies inside them and which across, and a step as it was measured."""

    layout: str
    inside: str
    across: str
    link_bytes: int  # a host sent over the link, the one that sent more
    formula_bytes: int  # what the formulas of `traffic` have for the axis across, without headers of packets
    step_s: float  # of the fastest of 4 steps, with its optimizer


MEASURED_ON, LINK_BYTES_PER_S = "23 November 2026, 2 shared CPU cores, an emulated link of 4 MB/s", 4e6
MEASURED = (  # of the axes in `order` the outermost one crosses the link
    HostRow("pp=2,tp=2,micro_batch=2,micro_batches=4", "tp", "pp", 1_122_958, 1_048_576, 0.631),
    HostRow("dp=2,tp=2,micro_batch=2,micro_batches=2", "tp", "dp", 964_138, 922_112, 0.642),
    HostRow("dp=2,tp=2,micro_batch=2,micro_batches=2,order=pp-tp-cp-dp", "dp", "tp", 9_586_594, 9_461_760, 2.513),
    HostRow("pp=2,tp=2,micro_batch=2,micro_batches=4,order=tp-dp-cp-pp", "pp", "tp", 9_593_648, 9_461_760, 2.511),
)


def hosts_table(rows: Sequence[HostRow]) -> list[str]:
    """Lay rows out as text: MB are 10^6 bytes, of the host that sent more; seconds are those of one step."""
    lines = ["inside   across   MB on the link   payload by formula   link alone   step, measured"]
    return lines + [
        f"{row.inside:6}   {row.across:6}   {row.link_bytes / 1e6:14.2f}   {row.formula_bytes / 1e6:18.2f}   "
        f"{row.link_bytes / LINK_BYTES_PER_S:8.2f} s   {row.step_s:12.2f} s"
        for row in rows
    ]
