"""What a plan is asked for: this model, on so many of these GPUs, with so many tokens in a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from course_lib.config import ModelConfig
from course_lib.engines import ENGINES
from course_lib.hardware import Cluster
from course_lib.layout import Layout
from course_lib.memory.states import RECIPES
from course_lib.run import Run
from course_lib.validate import Size, check_fields, whole


@dataclass(frozen=True)
class Job:
    """A model and what trains it.

    batch_tokens   tokens of one optimizer step, of all GPUs together: a multiple of seq_len
    recipe         dtypes of the states, a name of `memory.states.RECIPES`
    framework      the engine, a name of `engines.ENGINES`, which has a recipe of its own; None: the course's own

    Raises   ValueError where GPUs do not fill nodes, or tokens no sequences
    """

    config: ModelConfig
    cluster: Cluster
    num_gpus: Size
    seq_len: Size
    batch_tokens: Annotated[int, partial(whole, least=1)]
    recipe: Literal[tuple(RECIPES)] = "bf16-master"
    framework: Literal[tuple(ENGINES)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.framework is not None:
            object.__setattr__(self, "recipe", ENGINES[self.framework].recipe)
        per_node, low = self.cluster.gpus_per_node, self.batch_tokens // self.seq_len * self.seq_len
        if self.num_gpus > per_node and self.num_gpus % per_node:
            down = self.num_gpus // per_node * per_node
            raise ValueError(
                f"num_gpus ({self.num_gpus}) must fill nodes of {per_node}; choose {down} or {down + per_node}"
            )
        if self.batch_tokens != low:
            nearest = f"{low} or {low + self.seq_len}" if low else self.seq_len
            raise ValueError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of seq_len ({self.seq_len}); choose {nearest}"
            )

    @property
    def engine(self) -> str:
        """The engine that trains."""
        return self.framework or "course"

    @property
    def sequences(self) -> int:
        """Sequences of one step."""
        return self.batch_tokens // self.seq_len

    def run(self, layout: Layout) -> Run:
        """The run of this job under a layout."""
        return Run(self.config, layout, self.seq_len, self.recipe)
