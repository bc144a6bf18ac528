"""What a plan is asked for: this model, on so many of these GPUs, with so many tokens in a step; a layout of it."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

from course_lib.config import ModelConfig
from course_lib.engines import ENGINES, EngineFacts
from course_lib.estimate import Estimate, estimate
from course_lib.hardware import Cluster, nodes_of
from course_lib.layout import Layout
from course_lib.run import OPTIMIZERS, RECIPES, Offload, Run
from course_lib.tensors import LoRA
from course_lib.validate import Size, check_fields, checked, whole

_WHOLE_GRADS = "bf16-master-fp32-grads"  # of engines whose gradients are whole in a pipeline


@dataclass(frozen=True)
class Job:
    """A model and what trains it."""

    config: ModelConfig
    cluster: Cluster
    num_gpus: Size
    seq_len: Size
    batch_tokens: Annotated[int, partial(whole, least=1)]  # of a step, of all GPUs together: a multiple of seq_len
    recipe: Literal[tuple(RECIPES)] | None = None  # dtypes of the states; the engine's usual one where it has not this
    engine: Literal[tuple(ENGINES)] = "course"  # who trains it; what follows is as `Run` has it
    optimizer: Literal[OPTIMIZERS] = "adamw"
    lora: LoRA | None = None
    offload: Offload = field(default_factory=Offload)
    attention: Literal["fused", "standard"] = "fused"
    loss_chunks: Size = 1
    fp8: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.recipe not in self.facts.recipes:
            object.__setattr__(self, "recipe", self.facts.recipe)
        nodes_of(self.num_gpus, self.cluster.gpus_per_node)
        low = self.batch_tokens // self.seq_len * self.seq_len
        if self.batch_tokens != low:
            nearest = f"{low} or {low + self.seq_len}" if low else self.seq_len
            raise ValueError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of seq_len ({self.seq_len}); choose {nearest}"
            )

    @property
    def sequences(self) -> int:
        return self.batch_tokens // self.seq_len

    @property
    def facts(self) -> EngineFacts:
        return ENGINES[self.engine]

    def run(self, layout: Layout) -> Run:
        whole_grads = self.facts.pipeline_grads_whole and layout.pp > 1 and layout.zero_stage > 0
        recipe = _WHOLE_GRADS if whole_grads and self.recipe == "bf16-master" else self.recipe
        if self.facts.regathers and layout.sequence_parallel and not layout.regather:
            layout = replace(layout, regather=layout.tp > 1)  # as this engine always does
        how = ("optimizer", "lora", "offload", "attention", "loss_chunks", "fp8")
        return Run(self.config, layout, self.seq_len, recipe, **{name: getattr(self, name) for name in how})


@checked
def work_out(job: Job, layout: Layout) -> Estimate:
    """Estimate one layout of a job; ValueError if it has other GPUs or another global batch than the job."""
    if layout.world_size != job.num_gpus:
        raise ValueError(
            f"pp x dp x cp x tp is {layout.world_size}; it must be {job.num_gpus}, the job's GPUs (ep and SP need no "
            "ranks)"
        )
    if layout.sequences_per_step != job.sequences:
        raise ValueError(
            f"dp x micro_batch x micro_batches is {layout.sequences_per_step}; it must be {job.sequences}, the "
            "sequences of the job's global batch"
        )
    return estimate(job.run(layout), job.cluster, job.engine)
