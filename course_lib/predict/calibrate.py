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

import numpy as np

from course_lib.hardware import Cluster
from course_lib.validate import Positive, check_fields, checked

HELD = 0.02  # of a step's error weighs as much as a factor of e away from 1
STARTS = (0.0, -1.0)  # logarithms of a link's factor from which the search begins
WARM_UP_STEPS = 3  # of a log: caches, compilation


@dataclass(frozen=True)
class Calibration:
    """Factors on what a cluster was assumed to reach: its GPUs' products, the network's and the node's link."""

    compute: Positive = 1.0
    network: Positive = 1.0
    node_link: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def of(self, cluster: Cluster) -> Cluster:
        """The same cluster with rates as calibrated."""
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
        """From what `save` wrote.

        Raises   ValueError if the file is no such thing
        """
        told = json.loads(Path(path).read_text())
        if not isinstance(told, dict) or not set(told) <= set(cls.__dataclass_fields__):
            raise ValueError(f"{path} is no calibration; required: {', '.join(cls.__dataclass_fields__)}")
        return cls(**told)


@checked
def calibrate(predicted_s: Callable[[Calibration], Sequence[float]], measured_s: Sequence[Positive]) -> Calibration:
    """Fit the factors that bring predicted steps nearest to measured ones.

    predicted_s   the steps of the same runs, in the same order, under a calibration
    """
    if not len(measured_s):
        raise ValueError("there is no measured run; give one to three")
    names = list(Calibration.__dataclass_fields__)[: len(measured_s)]

    def off(logs: np.ndarray) -> np.ndarray:
        factors = Calibration(**{name: float(np.exp(log)) for name, log in zip(names, logs, strict=True)})
        return np.concatenate([np.log(predicted_s(factors)) - np.log(measured_s), HELD * logs])

    starts = ([0.0 if name == "compute" else link for name in names] for link in STARTS)  # a hidden link has no slope
    logs = min((_descend(off, np.array(start)) for start in starts), key=lambda one: float(off(one) @ off(one)))
    return Calibration(**{name: round(float(np.exp(log)), 4) for name, log in zip(names, logs, strict=True)})


def _descend(off: Callable[[np.ndarray], np.ndarray], logs: np.ndarray) -> np.ndarray:
    """Gauss-Newton; steps are smooth in these but where a link begins to be hidden."""
    for _ in range(8):
        here, slopes = off(logs), []
        for index in range(len(logs)):
            moved = logs.copy()
            moved[index] += 0.02
            slopes.append((off(moved) - here) / 0.02)
        change = np.clip(np.linalg.lstsq(np.array(slopes).T, -here, rcond=None)[0], -0.7, 0.7)
        logs = np.clip(logs + change, np.log(0.1), np.log(4))
        if np.abs(change).max() < 1e-3:
            break
    return logs


@checked
def measured_step_s(row: Mapping[str, str], tokens_a_step: Positive, folder: Path) -> float:
    """Seconds of a step that a row tells: step_s, or tok_s_gpu, or log: a trainer's file of JSON lines.

    Raises   ValueError if it tells none of these
    """
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
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    seconds = [line["seconds"] for line in lines if "seconds" in line][WARM_UP_STEPS:]
    if not seconds:
        raise ValueError(f"{path} has no step after the first {WARM_UP_STEPS}; let the run take more")
    return median(seconds)
