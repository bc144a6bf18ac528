"""How much, how fast, does it fit: `estimate(run, cluster, engine)` is the only answer there is.

    estimate.py     Estimate: memory by kind, seconds by what they are spent on, whether there is room, error bars
    memory.py       bytes of an engine's fullest rank: those of memory/, and what waits in the queue of launches
    nearest.py      where nothing fits: how much is missing, and the nearest that would
    table.py        a table of runs in, the same table with estimates out (`course predict`)
    calibrate.py    measured runs of one cluster correct what is assumed of its GPUs and links (`course calibrate`)
    sensitivity.py  which assumption changes a ranking

What differs between engines is data (engines.py). docs/PREDICTOR.md tells how far estimates are off;
`benchmarks/errors.py` fits the clock's seven constants and writes it.
"""

from course_lib.estimate.calibrate import Calibration, calibrate
from course_lib.estimate.estimate import Estimate, estimate
from course_lib.estimate.nearest import nearest
from course_lib.estimate.table import predict_rows, read_rows, write_table

__all__ = [
    "Calibration", "Estimate", "calibrate", "estimate", "nearest", "predict_rows", "read_rows", "write_table",
]  # fmt: skip
