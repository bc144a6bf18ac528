"""Three short runs of your own cluster correct what predictions assume of its GPUs and of its links.

A cluster differs from the fitted one in few numbers: what its GPUs keep up (power caps, cooling, drivers) and what its
links reach. `calibrate` fits these and nothing of a model or a framework, in logarithms, held near 1 where the runs say
little: as many numbers as there are runs, at most three.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from course_lib.hardware import Cluster
from course_lib.validate import Checked, Positive, Size, checked, json_lines, read_json, show

if TYPE_CHECKING:
    import numpy as np

HELD = 0.02  # of a step's error weighs as much as a factor of e away from 1
STARTS = (0.0, -1.0)  # logarithms of a link's factor from which the search begins
BOUNDS = (0.1, 4.0)  # of a factor
STEP_S = (1e-6, 1e6)  # of an optimizer step: no cluster takes less or more
_WARM_UP_STEPS = 3  # of a log: caches, compilation


@dataclass(frozen=True)
class Calibration(Checked):
    """Factors on what a cluster was assumed to reach: its GPUs' products, the network's and the node's link."""

    compute: Positive = 1.0
    network: Positive = 1.0
    node_link: Positive = 1.0

    def of(self, cluster: Cluster) -> Cluster:
        gpu, inside, between = cluster.gpu, cluster.inside, cluster.between
        return replace(
            cluster,
            gpu=replace(gpu, sustained=gpu.sustained * self.compute),
            inside=replace(inside, achieved_share=inside.achieved_share * self.node_link),
            between=replace(between, achieved_share=between.achieved_share * self.network),
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """From what `save` wrote."""
        told = read_json(path)
        if not isinstance(told, dict) or not set(told) <= set(cls.__dataclass_fields__):
            raise ValueError(f"{path} is no calibration; required: {', '.join(cls.__dataclass_fields__)}")
        try:
            return cls(**told)
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from None


@checked
def calibrate(predicted_s: Callable[[Calibration], Sequence[float]], measured_s: Sequence[Positive]) -> Calibration:
    """Fit the factors that bring predicted steps, of the same runs in the same order, nearest to measured ones."""
    import numpy as np  # here: floor 0 imports without it

    if not len(measured_s):
        raise ValueError("there is no measured run; give one to three")

    def off(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(predicted_s(_factors(np.exp(logs)))) - np.log(measured_s), HELD * logs])

    def descend(logs: np.ndarray) -> np.ndarray:
        """Gauss-Newton; steps are smooth in these but where a link begins to be hidden."""
        for _ in range(8):
            change = np.clip(np.linalg.lstsq(_slopes(off, logs), -off(logs), rcond=None)[0], -0.7, 0.7)
            logs = np.clip(logs + change, *np.log(BOUNDS))
            if np.abs(change).max() < 1e-3:
                break
        return logs

    starts = ([0.0, link, link][: len(measured_s)] for link in STARTS)  # a hidden link has no slope
    logs = min((descend(np.array(start)) for start in starts), key=lambda one: float(off(one) @ off(one)))
    return _factors(np.exp(logs).round(4))


def _factors(values: np.ndarray) -> Calibration:
    """As many of the factors as there are values, in order; the others stay 1."""
    return Calibration(*values.tolist())


def _slopes(off: Callable[[np.ndarray], np.ndarray], logs: np.ndarray) -> np.ndarray:
    """A row for each value of off, a column for each number that it is a function of."""
    import numpy as np

    return np.stack([(off(moved) - off(logs)) / 0.02 for moved in logs + 0.02 * np.eye(len(logs))], axis=1)


@checked
def ranges(
    predicted_s: Callable[[Calibration], Sequence[float]], found: Calibration, num_runs: Size
) -> dict[str, tuple[float, float]]:
    """Return for each fitted factor between which values it fits nearly as well: one standard deviation to each side.

    Steps are taken to be measured to HELD; a factor that the runs say nothing of spans 1 / e to e times its value.
    """
    import numpy as np

    fitted = dict(list(asdict(found).items())[:num_runs])
    slopes = _slopes(lambda logs: np.log(predicted_s(_factors(np.exp(logs)))), np.log(list(fitted.values())))
    sigmas = HELD * np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes + HELD**2 * np.eye(len(fitted)))))
    return {
        name: (float(value / np.exp(sigma)), float(value * np.exp(sigma)))
        for (name, value), sigma in zip(fitted.items(), sigmas, strict=True)
    }


@checked
def measured_step_s(row: Mapping[str, str], tokens_a_step: Positive, folder: Path) -> float:
    """Seconds of a step that a row tells: step_s, or tok_s_gpu, or log: a trainer's file of JSON lines."""
    step_s = _told_step_s(row, tokens_a_step, folder)
    if not STEP_S[0] <= step_s <= STEP_S[1]:
        raise ValueError(f"a measured step takes {step_s:g} s; required: {STEP_S[0]:g} to {STEP_S[1]:g} s")
    return step_s


def _told_step_s(row: Mapping[str, str], tokens_a_step: float, folder: Path) -> float:
    for column in ("step_s", "tok_s_gpu"):
        if row.get(column):
            try:
                value = float(row[column])
            except ValueError:
                raise ValueError(f"{column} is {row[column]!r}; required: a number") from None
            if not 0 < value < float("inf"):
                raise ValueError(f"{column} is {value}; required: a number above 0")
            return value if column == "step_s" else tokens_a_step / value / int(row["gpus"])
    if not row.get("log"):
        raise ValueError("a measured run tells no step; required: step_s, tok_s_gpu or log")
    path = folder / row["log"]
    if not path.is_file():
        raise ValueError(f"there is no log {path}; give the trainer's file of JSON lines")
    lines = json_lines(path.read_text(encoding="utf-8", errors="replace"))
    seconds = [line["seconds"] for line in lines if "seconds" in line][_WARM_UP_STEPS:]
    if not seconds:
        raise ValueError(f"{path} has no step after the first {_WARM_UP_STEPS}; let the run take more")
    for value in seconds:
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{path} has {show(value)} seconds in a line; give a log that the trainer wrote")
    return median(seconds)
