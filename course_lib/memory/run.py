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
        layout, zero, place, how = self.layout, self.layout.zero_stage, self.offload.parameters, self.layout.recompute
        if self.lora is not None:
            lora_shapes(self.config, self.lora)
            _check_undivided(self, "the engines do not cut adapters")
        if self.operators:
            require_dense(self.config, "recomputation of operators")
        refused = {
            f"attention is {self.attention!r}, but cp is {layout.cp}: blocks that arrive one by one are merged, no "
            "score matrix is kept; choose fused": layout.cp > 1 and self.attention != "fused",
            f"optimizer 'adafactor' keeps sums of a matrix's rows and columns, which the flat shards of zero ({zero}) "
            f"cut apart; choose zero_stage 0, or another of {', '.join(OPTIMIZERS)}": self.optimizer == "adafactor"
            and zero,
            f"the engines do not shard adapters, but zero_stage is {zero}; choose zero_stage 0": self.lora and zero,
            f"operators are recomputed, and recompute is {how!r}; choose none": self.operators and how != "none",
            f"offload.parameters is {place!r}, but zero_stage is {zero}; choose zero_stage 3": place != "device"
            and zero != 3,
        }
        for why, is_refused in refused.items():
            if is_refused:
                raise ValueError(why)

    @property
    def implementation(self) -> str:
        """How AdamW goes over its tensors: as asked for, or as torch chooses on that device."""
        return self.optimizer_implementation or ("foreach" if self.device == "cuda" else "for-loop")


def _check_layout(run: Run) -> None:
    """An encoder has a budget, but no engine cuts it: then only its data can be divided."""
    config = run.config
    if config.family != "xlmr":
        return run.layout.check_model(config, run.seq_len)
    _check_undivided(run, f"{config.name} is of the xlmr family, which no engine cuts")
    if run.seq_len > (most := config.max_seq_len):
        raise ValueError(f"seq_len ({run.seq_len}) exceeds the positions of {config.name}; choose at most {most}")


def _check_undivided(run: Run, why: str) -> None:
    for axis in ("cp", "tp", "pp", "ep"):
        if (size := getattr(run.layout, axis)) > 1:
            raise ValueError(f"{why}, but {axis} is {size}; choose {axis} 1")
