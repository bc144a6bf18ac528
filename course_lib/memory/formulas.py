"""Predict the memory of training before running it: one budget out of states, activations and named overheads.

`states.py` has what does not depend on the batch, `activations.py` what does, `papers.py` the published formulas.
All their public names can be imported from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from course_lib.config import ModelConfig, require_dense
from course_lib.hardware import GPU, gpu
from course_lib.memory.activations import (
    PRECISIONS,
    Activations,
    activation_bytes,
    block_terms,
    core_terms,
    logits_bytes,
    own_activations,
)
from course_lib.memory.papers import (
    KORTHIKANTI_SCORE_TERMS,
    KORTHIKANTI_TERMS,
    korthikanti_bytes,
    korthikanti_layer_bytes,
    korthikanti_output_bytes,
    megatron_activation_bytes,
    selective_flops_share,
    zero_paper_bytes,
)
from course_lib.memory.states import (
    OPTIMIZERS,
    RECIPES,
    LoRA,
    Recipe,
    StateBytes,
    count_parameters,
    count_tensors,
    has_step_counters,
    lora_parameters,
    parameter_shapes,
    recipe_of,
    rule_of_thumb_parameters,
    state_bytes,
)

__all__ = [
    "ASSUMED_OVERHEADS", "KORTHIKANTI_SCORE_TERMS", "KORTHIKANTI_TERMS", "OPTIMIZERS", "PRECISIONS", "RECIPES",
    "Activations", "Budget", "LoRA", "Recipe", "StateBytes", "activation_bytes", "block_terms", "budget",
    "check_seq_len", "core_terms", "count_parameters", "count_tensors", "fits", "has_step_counters",
    "korthikanti_bytes", "korthikanti_layer_bytes", "korthikanti_output_bytes", "logits_bytes", "lora_parameters",
    "megatron_activation_bytes", "own_activations", "parameter_shapes", "recipe_of", "rule_of_thumb_parameters",
    "selective_flops_share", "state_bytes", "temporary_bytes", "zero_paper_bytes",
]  # fmt: skip

# Assumptions, not measurements: `tracker.cuda_memory()` measures them on the GPU at hand.
ASSUMED_OVERHEADS: dict[str, int] = {
    "CUDA context": 512 * 2**20,  # driver, kernels, libraries; 0.3 to 1 GiB are seen, more with NCCL
    "cuBLAS workspace": 32 * 2**20,  # PyTorch's default on Hopper
}


@dataclass(frozen=True)
class Budget:
    """Bytes that training needs, each kind at its own largest; `overheads`, by name, are not tensors."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    temporary: int
    gradients_at_start: int = 0  # those that are there when a backward pass begins
    overheads: dict[str, int] = field(default_factory=dict)
    gathered: int = 0  # whole parameters put together from shards, for as long as they are used
    elsewhere: dict[str, int] = field(default_factory=dict)  # what was moved off the GPU: to "host", to "disk"
    message: int = 0  # gradients once more, side by side, while they are summed over ranks

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer: what does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def tensor_bytes(self) -> int:
        """All tensors, each kind at its largest: what to plan with."""
        return self.states_bytes + self.activations + self.logits + self.gathered + self.temporary

    @property
    def peak_bytes(self) -> int:
        """The peak of a whole step, without overheads: the larger of two moments.

        The backward pass begins: all activations, and such gradients as are there already. Or it has ended: all
        gradients, perhaps in a message too, no activation. Without accumulation gradients are born while activations
        die, so they never add up.
        """
        begins = self.gradients_at_start + self.activations + self.logits + self.gathered + self.temporary
        return self.parameters + self.optimizer + max(begins, self.gradients + self.message)

    @property
    def total_bytes(self) -> int:
        """All tensors and the overheads."""
        return self.tensor_bytes + sum(self.overheads.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """The tensors under the tracker's kinds: what the loss keeps is an activation."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations + self.logits,
            "gathered": self.gathered,
            "temporary": self.temporary,
        }


def budget(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    attention: str = "fused",
    recompute: str = "none",
    lora: LoRA | None = None,
    micro_batches: int = 1,
    device: str = "cuda",
) -> Budget:
    """Predict the memory of one GPU that trains a whole model, micro-batch by micro-batch.

    `batch_size` is one micro-batch's. From the second one on gradients are there while activations grow, and FP32
    gradient buffers beside BF16 parameters are there always.
    On `device="cpu"` there are no overheads, but torch's step counters (4 bytes a tensor).
    With `lora` the activations are those of full training: an upper bound, as a frozen matrix keeps no input.

    Raises   ValueError if a word is unknown, a size is below 1, or seq_len exceeds the model's
    """
    check_seq_len(config, seq_len)
    recipe = recipe_of(recipe)
    counters = device == "cpu" and has_step_counters(recipe, optimizer)
    states = state_bytes(config, recipe, optimizer, lora, step_counters=counters)
    kept = own_activations(config, batch_size, seq_len, attention, recompute, recipe.name, device)
    return Budget(
        parameters=states.parameters,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=kept.peak_bytes - kept.logits,
        logits=kept.logits,
        temporary=temporary_bytes(config, batch_size, seq_len, attention, recipe),
        gradients_at_start=states.gradients if micro_batches > 1 or recipe.grad_bytes > recipe.param_bytes else 0,
        overheads={} if device == "cpu" else dict(ASSUMED_OVERHEADS),
    )


def check_seq_len(config: ModelConfig, seq_len: int) -> None:
    """Raises ValueError if the model cannot read that many tokens."""
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len is {seq_len}, but {config.name} reads at most {config.max_seq_len} tokens; choose a shorter one"
        )


def temporary_bytes(
    config: ModelConfig, batch_size: int, seq_len: int, attention: str = "fused", recipe: Recipe | str = "bf16-master"
) -> int:
    """Estimate the largest work space of a step: a rule, not a count of operators.

    The largest of: the loss's two FP32 gradients of s b V numbers; an MLP's gradients, three of width F; with explicit
    attention two score matrices at once.
    """
    require_dense(config, "temporary_bytes", latent=True)
    tokens_in_batch, e = batch_size * seq_len, recipe_of(recipe).compute_bytes
    scores = 2 * config.num_heads * seq_len * e if attention == "explicit" else 0
    return max(
        2 * logits_bytes(config, batch_size, seq_len), 3 * tokens_in_batch * config.d_ff * e, scores * tokens_in_batch
    )


def fits(budget: Budget, gpu_or_key: GPU | str) -> bool:
    """Whether the whole budget, overheads included, is within what CUDA reports as the GPU's capacity."""
    return budget.total_bytes <= (gpu(gpu_or_key) if isinstance(gpu_or_key, str) else gpu_or_key).usable_bytes
