"""What each technique of the course splits, holds and sends, for one model on eight GPUs: the table of the index."""

from dataclasses import dataclass

from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.run import Run
from course_lib.traffic.step import sent
from course_lib.validate import Size, check_fields, checked


@dataclass(frozen=True)
class Technique:
    """A technique: its chapter, its layout on eight GPUs, what it splits over them and what its ranks send."""

    chapter: Size
    name: str
    layout: str
    splits: str
    sends: str
    model_name: str = "llama-3.1-8b"

    def __post_init__(self):
        check_fields(self)


TECHNIQUES = (
    Technique(1, "one GPU", "micro_batches=8", "nothing", "nothing"),
    Technique(2, "recomputation", "micro_batches=8,recompute=full", "nothing", "nothing"),
    Technique(3, "data parallel", "dp=8", "the batch", "gradients"),
    Technique(4, "ZeRO-1", "dp=8,zero_stage=1", "optimizer states", "gradients, parameters"),
    Technique(4, "ZeRO-2", "dp=8,zero_stage=2", "and gradients", "gradients, parameters"),
    Technique(4, "ZeRO-3", "dp=8,zero_stage=3", "and parameters", "gradients, 2 x parameters"),
    Technique(5, "tensor parallel", "tp=8,micro_batches=8", "matrices, heads", "activations"),
    Technique(6, "and sequence parallel", "tp=8,sequence_parallel=true,micro_batches=8", "and norms", "activations"),
    Technique(7, "context parallel", "cp=8,micro_batches=8", "the sequence", "keys, values; gradients"),
    Technique(8, "pipeline parallel", "pp=8,micro_batches=8", "layers", "activations of a boundary"),
    Technique(9, "Mixtral, data parallel", "dp=8", "the batch", "gradients", "mixtral-8x7b"),
    Technique(9, "and expert parallel", "dp=8,ep=8", "experts", "tokens; gradients", "mixtral-8x7b"),
)


@dataclass(frozen=True)
class TechniqueCost:
    """Predicted bytes of a technique on its most loaded rank: states, saved for backward, peak; sent in a step."""

    technique: Technique
    states_bytes: int
    saved_bytes: int
    peak_bytes: int
    sent_bytes: int


@checked
def cost_of(technique: Technique, seq_len: Size = 4096) -> TechniqueCost:
    """Return what a technique needs for a step of eight sequences, whatever the layout."""
    layout = Layout.parse(technique.layout)
    run = Run(preset(technique.model_name), layout, seq_len)
    ranks = budgets(run)
    return TechniqueCost(
        technique,
        max(rank.states_bytes for rank in ranks),
        max(rank.saved for rank in ranks),
        max(rank.peak_bytes for rank in ranks),
        max(sum(sent(run, rank).values()) for rank in range(layout.world_size)),
    )


@checked
def technique_table() -> str:
    """Return the table as text: a line for each technique, GB of the most loaded of eight GPUs."""
    lines = [
        "Predicted, GB on the most loaded GPU: Llama 3.1 8B, a step of 8 sequences of 4,096 tokens",
        f"{'chapter, technique':26}{'splits':17}{'states':>7}{'saved':>7}{'peak':>7}{'sent':>7}  of what",
    ]
    for technique in TECHNIQUES:
        cost = cost_of(technique)
        sizes = (cost.states_bytes, cost.saved_bytes, cost.peak_bytes, cost.sent_bytes)
        numbers = "".join(f"{size / 1e9:7.1f}" for size in sizes)
        name = f"{technique.chapter:02} {technique.name}"
        lines.append(f"{name:26}{technique.splits:17}{numbers}  {technique.sends}")
    return "\n".join(lines)
