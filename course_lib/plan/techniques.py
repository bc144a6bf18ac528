"""What each technique of the course splits and sends, and its layout of a job: the rows of the index and of a sheet."""

from dataclasses import dataclass, replace

from course_lib.config import ModelConfig, preset
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.run import Run
from course_lib.traffic import sent
from course_lib.validate import Size, checked


@dataclass(frozen=True)
class Technique:
    """A technique; `cuts` is the axis whose ranks are taken from those of data parallelism."""

    chapter: str
    name: str
    splits: str
    sends: str
    layout: str = ""
    cuts: str = "dp"


TECHNIQUES = (  # in braces: the size of an axis, as the job allows it
    Technique("01", "one GPU", "nothing", "nothing"),
    Technique("02", "one GPU, recomputation", "nothing", "nothing", "recompute=full"),
    Technique("03", "data parallel, dp {dp}", "the batch", "gradients"),
    Technique("04", "ZeRO-1", "optimizer states", "gradients, parameters", "zero_stage=1"),
    Technique("04", "ZeRO-3", "and the rest", "gradients, 2 x parameters", "zero_stage=3"),
    Technique("05", "tp {tp}, ZeRO-1", "matrices, heads", "activations", "tp={tp},zero_stage=1", "tp"),
    Technique(
        "06", "and sequence parallel", "and norms", "activations", "tp={tp},sequence_parallel=true,zero_stage=1", "tp"
    ),
    Technique("07", "cp {cp}, ZeRO-3", "the sequence", "and keys, values", "cp={cp},zero_stage=3", "cp"),
    Technique("08", "pp {pp}, ZeRO-1", "layers", "and activations", "pp={pp},zero_stage=1", "pp"),
    Technique("09", "ep {ep}, ZeRO-1", "experts", "tokens; gradients", "ep={ep},zero_stage=1"),
)


def techniques_of(config: ModelConfig, gpus: int, sequences: int, per_node: int = 8) -> list[Technique]:
    """Return the techniques with their names and layouts of a job, in micro-batches of one sequence.

    tp and ep take as many ranks of a node as divide heads and experts, cp takes 2, pp the fewest that divide layers.
    """

    def most(*divided: int) -> int:
        return max(n for n in range(1, min(per_node, gpus) + 1) if not any(size % n for size in (gpus, *divided)))

    fewest = (n for n in range(2, gpus + 1) if gpus % n == config.num_layers % n == 0)
    sizes = {"dp": 1, "tp": most(config.num_heads, config.num_kv_heads), "cp": 2, "pp": next(fewest, gpus)}
    if config.moe is not None:
        sizes["ep"] = most(config.moe.num_experts)
    found = []
    for one in TECHNIQUES[: None if "ep" in sizes else -1]:
        dp = 1 if one.splits == "nothing" else gpus // sizes[one.cuts]
        words = (f"dp={dp}", f"micro_batches={max(1, sequences // dp)}", one.layout.format(**sizes))
        name = one.name.format(**sizes | {"dp": dp})
        found.append(replace(one, name=name, layout=",".join(filter(None, words))))
    return found


@checked
def costs_gb(config: ModelConfig, layout: Layout, seq_len: Size = 4096) -> list[float]:
    """Return GB of the most loaded rank: states, saved for backward, at the peak, sent in a step."""
    run = Run(config, layout, seq_len)
    most = [max(sizes) for sizes in zip(*((r.states_bytes, r.saved, r.peak_bytes) for r in budgets(run)), strict=True)]
    return [size / 1e9 for size in (*most, max(sum(sent(run, rank).values()) for rank in range(layout.world_size)))]


def technique_table() -> str:
    """Return the techniques on eight GPUs as text: GB of the most loaded. The last two lines are Mixtral 8x7B."""
    lines = [
        "Predicted, GB on the most loaded GPU: Llama 3.1 8B, a step of 8 sequences of 4,096 tokens",
        f"{'chapter, technique':26}{'splits':17}{'states':>7}{'saved':>7}{'peak':>7}{'sent':>7}  of what",
    ]
    for config in (preset("llama-3.1-8b"), preset("mixtral-8x7b")):
        for one in techniques_of(config, 8, 8):
            if config.moe is None or one.chapter in ("03", "09"):
                numbers = "".join(f"{gb:7.1f}" for gb in costs_gb(config, Layout.parse(one.layout)))
                lines.append(f"{f'{one.chapter} {one.name}':26}{one.splits:17}{numbers}  {one.sends}")
    return "\n".join(lines)
