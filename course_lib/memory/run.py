"""A training run as one frozen record: which model, how it lies on its ranks, and in which numbers it computes.

    run = Run(preset("llama-3.1-8b"), Layout.parse("dp=8,zero_stage=1"), seq_len=8192)
    memory.budget.budgets(run)      # how much memory each rank of the pipeline needs

Every formula of the package takes this record. It is checked when it is made, so no formula checks it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from course_lib.config import ModelConfig, require_dense
from course_lib.layout import Layout
from course_lib.memory.states import OPTIMIZERS, RECIPES, LoRA, Recipe, lora_shapes
from course_lib.memory.zero import Offload
from course_lib.validate import Size, check_fields

_PARALLEL = ("cp", "tp", "pp", "ep")


@dataclass(frozen=True)
class Run:
    """A model, its layout and the numbers it computes in.

    seq_len     tokens of a whole sequence, of which a rank has seq_len / cp
    recipe      dtypes of the states, a name of `memory.states.RECIPES`, or a record like those
    attention   "fused" | "standard" (the score matrices are materialized)
    device      "cuda" | "cpu": what every rank computes on
    optimizer   a name of `memory.states.OPTIMIZERS`
    optimizer_implementation   "for-loop" | "foreach" | "fused"; None: what torch chooses on that device
    lora        adapters beside frozen weights; None: all weights are trained
    offload     which states wait outside the device, and whether activations do
    loss_chunks head and loss go over the tokens in so many parts
    fp8         products of blocks in FP8: their inputs are saved as the engine has them
    operators   recomputation of operators: outputs of attention and of every second product are kept, all else is made
                again

    The last three are other engines' (course_lib/engines.py): the course's own programs have none of them.

    Raises   TypeError if config or layout are no such records, ValueError for what does not fit together
    """

    config: ModelConfig
    layout: Layout
    seq_len: Size
    recipe: Literal[tuple(RECIPES)] | Recipe = "bf16-master"
    attention: Literal["fused", "standard"] = "fused"
    device: Literal["cuda", "cpu"] = "cuda"
    optimizer: Literal[OPTIMIZERS] = "adamw"
    optimizer_implementation: Literal["for-loop", "foreach", "fused"] | None = None
    lora: LoRA | None = None
    offload: Offload = field(default_factory=Offload)
    loss_chunks: Size = 1
    fp8: bool = False
    operators: bool = False

    def __post_init__(self):
        check_fields(self)
        _check_layout(self)
        if self.layout.cp > 1 and self.attention != "fused":
            raise ValueError(
                f"attention is {self.attention!r}, but cp is {self.layout.cp}: blocks that arrive one by one are "
                "merged, no score matrix is kept; choose fused"
            )
        _check_optimizer(self)
        if self.lora is not None:
            _check_lora(self)
        if self.operators:
            require_dense(self.config, "recomputation of operators")
            if self.layout.recompute != "none":
                raise ValueError(f"operators are recomputed, and recompute is {self.layout.recompute!r}; choose none")
        if self.offload.parameters != "device" and self.layout.zero_stage != 3:
            raise ValueError(
                f"offload.parameters is {self.offload.parameters!r}, but zero_stage is {self.layout.zero_stage}; "
                "choose zero_stage 3"
            )

    @property
    def implementation(self) -> str:
        """How AdamW goes over its tensors: as asked for, or as torch chooses on that device."""
        return self.optimizer_implementation or ("foreach" if self.device == "cuda" else "for-loop")


def _check_layout(run: Run) -> None:
    """An encoder has a budget, but no engine cuts it: then only its data can be divided."""
    if run.config.family != "xlmr":
        run.layout.check_model(run.config, run.seq_len)
        return
    _check_undivided(run, f"{run.config.name} is of the xlmr family, which no engine cuts")
    if run.seq_len > run.config.max_seq_len:
        raise ValueError(
            f"seq_len ({run.seq_len}) exceeds the positions of {run.config.name}; choose at most "
            f"{run.config.max_seq_len}"
        )


def _check_optimizer(run: Run) -> None:
    if run.optimizer == "adafactor" and run.layout.zero_stage:
        raise ValueError(
            f"optimizer 'adafactor' keeps sums of a matrix's rows and columns, which the flat shards of zero "
            f"({run.layout.zero_stage}) cut apart; choose zero_stage 0, or another of {', '.join(OPTIMIZERS)}"
        )


def _check_lora(run: Run) -> None:
    lora_shapes(run.config, run.lora)
    _check_undivided(run, "the engines do not cut adapters")
    if run.layout.zero_stage:
        raise ValueError(
            f"the engines do not shard adapters, but zero_stage is {run.layout.zero_stage}; choose zero_stage 0"
        )


def _check_undivided(run: Run, why: str) -> None:
    for axis in _PARALLEL:
        if getattr(run.layout, axis) > 1:
            raise ValueError(f"{why}, but {axis} is {getattr(run.layout, axis)}; choose {axis} 1")
