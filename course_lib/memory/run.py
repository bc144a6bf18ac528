"""A training run as one frozen record: which model, how it lies on its ranks, and in which numbers it computes.

    run = Run(preset("llama-3.1-8b"), Layout.parse("dp=8,zero_stage=1"), seq_len=8192)

Every formula of the package takes this record. It is checked when it is made, so no formula checks it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from course_lib.config import ModelConfig, require_dense
from course_lib.layout import Layout
from course_lib.memory.states import OPTIMIZERS, RECIPES, LoRA, Offload, Recipe, lora_shapes
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
    operators   recomputation of operators: outputs of attention and of every second product are kept

    The last two are other engines' (course_lib/engines.py).

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
        config, layout, zero = self.config, self.layout, self.layout.zero_stage
        place, is_encoder = self.offload.parameters, self.config.family == "xlmr"
        if self.operators:
            require_dense(config, "recomputation of operators")
        if not is_encoder:
            layout.check_model(config, self.seq_len)
        if self.lora is not None:
            lora_shapes(config, self.lora)
        for axis in ("cp", "tp", "pp", "ep") if is_encoder or self.lora else ():
            what = f"{config.name} is of the xlmr family, which no engine cuts"
            why = what if is_encoder else "the engines do not cut adapters"
            if (size := getattr(layout, axis)) > 1:
                raise ValueError(f"{why}, but {axis} is {size}; choose {axis} 1")
        refused = {
            f"seq_len ({self.seq_len}) exceeds the positions of {config.name}; choose at most "
            f"{config.max_seq_len}": is_encoder and self.seq_len > config.max_seq_len,
            f"attention is {self.attention!r}, but cp is {layout.cp}: blocks that arrive one by one are merged, no "
            "score matrix is kept; choose fused": layout.cp > 1 and self.attention != "fused",
            f"optimizer 'adafactor' keeps sums of a matrix's rows and columns, which the flat shards of zero ({zero}) "
            f"cut apart; choose zero_stage 0, or another of {', '.join(OPTIMIZERS)}": self.optimizer == "adafactor"
            and zero,
            f"the engines do not shard adapters, but zero_stage is {zero}; choose zero_stage 0": self.lora and zero,
            f"operators are recomputed, and recompute is {layout.recompute!r}; choose none": self.operators
            and layout.recompute != "none",
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
