"""A training run as one frozen record: which model, how it lies on its ranks, and in which numbers it computes.

    run = Run(preset("llama-3.1-8b"), Layout.parse("dp=8,zero_stage=1"), seq_len=8192)

Every formula of the package takes this record. It is checked when it is made, so no formula checks it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from course_lib.config import ModelConfig, require_dense
from course_lib.layout import Layout
from course_lib.tensors import LoRA, lora_shapes
from course_lib.validate import Checked, Count, Size, check_fields, one_of


@dataclass(frozen=True)
class Recipe(Checked):
    """How many bytes each parameter costs, by kind. `moment_bytes` is both of Adam's moments together."""

    name: str
    param_bytes: Count
    grad_bytes: Count
    master_bytes: Count
    moment_bytes: Count
    compute_bytes: Count  # size of one activation number
    note: str = ""

    @property
    def bytes_per_param(self) -> int:
        """Bytes of model state a parameter, with AdamW."""
        return self.param_bytes + self.grad_bytes + self.master_bytes + self.moment_bytes


_RECIPES = (
    Recipe("fp32", 4, 4, 0, 8, 4, "everything in FP32"),
    Recipe("autocast", 4, 4, 0, 8, 2, "FP32 states; matmuls run on BF16 casts, which are kept during the step"),
    Recipe("bf16-master", 2, 2, 4, 8, 2, "BF16 parameters and gradients, FP32 master copy (ZeRO paper, playbook)"),
    Recipe("bf16-master-fp32-grads", 2, 4, 4, 8, 2, "gradients kept in FP32 only (Megatron-Core's estimator: 18)"),
    Recipe("bf16-master-both-grads", 2, 6, 4, 8, 2, "a BF16 gradient and its FP32 accumulator (playbook: 20)"),
    Recipe("fp16-master-fp32-grads", 2, 4, 4, 8, 2, "FP16 with loss scaling: the same bytes as with BF16"),
    Recipe("bf16", 2, 2, 0, 4, 2, "pure BF16, moments too: small updates are lost"),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
FP64 = Recipe("fp64", 8, 8, 0, 16, 8, "everything in FP64, in which equality to one process is tested")
OPTIMIZERS = ("adamw", "adamw-8bit", "adafactor", "sgd-momentum", "sgd")


def recipe_of(recipe: Recipe | str) -> Recipe:
    """Look a recipe up by its name, ValueError if it is unknown; a Recipe passes through."""
    if isinstance(recipe, Recipe):
        return recipe
    one_of("recipe", recipe, tuple(RECIPES))
    return RECIPES[recipe]


Place = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Offload(Checked):
    """Where a rank's shards wait: "device", "host" or "disk". Parameters elsewhere need stage 3.

    activations   where they wait between the forward and the backward pass of their micro-batch
    Source        Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv:2104.07857)
    """

    optimizer: Place = "device"
    parameters: Place = "device"
    activations: Place = "device"


@dataclass(frozen=True)
class Run:
    """A model, its layout and the numbers it computes in.

    seq_len     tokens of a whole sequence, of which a rank has seq_len / cp
    recipe      dtypes of the states, a name of `RECIPES`, or a record like those
    attention   "fused" | "standard" (the score matrices are materialized)
    device      "cuda" | "cpu": what every rank computes on
    optimizer   a name of `OPTIMIZERS`
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
