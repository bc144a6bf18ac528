"""What a run on a real cluster would show: peak memory and tokens/s of a framework, from constants fitted to runs.

    rates.py       the fitted constants, each with its meaning, unit and plausible range
    nanotron.py    how nanotron cuts a model into stages, what it keeps, where its steps wait
    prediction.py  predict(run, cluster) -> Prediction: memory by kind, seconds by what they are spent on, and why
    table.py       a table of runs in, the same table with predictions out (`course predict`)

The formulas of memory/ and timing/ say what the course's own engines need, to the byte. Here stands what a framework
adds to that and what a network takes away; `benchmarks/fit_rates.py` fits it, docs/PREDICTOR.md has its errors.
"""

from course_lib.predict.prediction import Prediction, predict
from course_lib.predict.rates import RATES, Rates
from course_lib.predict.table import predict_table

__all__ = ["RATES", "Prediction", "Rates", "predict", "predict_table"]
