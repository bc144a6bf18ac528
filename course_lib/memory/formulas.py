"""The formulas of one GPU's memory, from one place.

`states.py` has what does not depend on the batch, `activations.py` what the forward pass saves, `papers.py` the
published formulas, `budget.py` the whole: all their public names can be imported from here.
"""

from __future__ import annotations

from course_lib.memory.activations import PRECISIONS, block_terms, logits_bytes
from course_lib.memory.budget import (
    ASSUMED_OVERHEADS,
    Budget,
    budget,
    budgets,
    check_seq_len,
    fits,
    largest_that_fits,
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
    "Budget", "LoRA", "Recipe", "StateBytes", "block_terms", "budget", "budgets", "check_seq_len", "count_parameters",
    "count_tensors", "fits", "has_step_counters", "korthikanti_bytes", "korthikanti_layer_bytes",
    "korthikanti_output_bytes", "largest_that_fits", "logits_bytes", "lora_parameters", "megatron_activation_bytes",
    "parameter_shapes", "recipe_of", "rule_of_thumb_parameters", "selective_flops_share", "state_bytes",
    "zero_paper_bytes",
]  # fmt: skip
