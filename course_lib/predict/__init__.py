"""What a run on a real cluster would show: peak memory and tokens/s of a framework, from constants fitted to runs.

    rates.py        the fitted constants, each with its meaning, unit and plausible range
    nanotron.py     how nanotron cuts a model into stages, what it keeps, where its steps wait
    frameworks.py   megatron, fsdp2, torchtitan, deepspeed: what each does otherwise than the course's own engines
    prediction.py   predict(run, cluster, framework) -> Prediction: memory by kind, seconds by what they are spent on
    table.py        a table of runs in, the same table with predictions out (`course predict`)
    calibrate.py    measured runs of one cluster correct what is assumed of its GPUs and links (`course calibrate`)
    sensitivity.py  which assumption changes a ranking

The formulas of memory/ and timing/ say what the course's own engines need, to the byte. Here stands what a framework
adds to that and what a network takes away; `benchmarks/fit_rates.py` fits it, docs/PREDICTOR.md has its errors.
"""

from course_lib.predict.calibrate import Calibration, calibrate
from course_lib.predict.frameworks import How
from course_lib.predict.prediction import FRAMEWORKS, Prediction, predict, predicted_bytes
from course_lib.predict.rates import RATES, Rates
from course_lib.predict.table import predict_rows, read_rows, write_table
from course_lib.shapes import read_models

__all__ = [
    "FRAMEWORKS", "RATES", "Calibration", "How", "Prediction", "Rates", "calibrate", "predict", "predict_rows",
    "predicted_bytes", "read_models", "read_rows", "write_table",
]  # fmt: skip
