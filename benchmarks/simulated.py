"""The memory of the package's sums beside simulated ranks: runs drawn at random, and the peaks that were simulated.

    python benchmarks/simulated.py --count 300        # simulates those that simulated_peaks.csv has not, and adds them

A run is a model of one of four families as people train them, on a layout along every axis. Of each the rank whose
predicted peak is the highest is simulated: the engine's own code, tensor by tensor (course_lib/simulate).
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tyro

from course_lib.config import MlaConfig, ModelConfig, MoeConfig
from course_lib.layout import Layout
from course_lib.layout.check import CHOICES
from course_lib.memory.budget import budgets
from course_lib.run import Run

PEAKS = Path(__file__).with_name("simulated_peaks.csv")
CARD_BYTES = 80e9
FAMILIES = ("llama", "gpt", "experts", "latent")
_SIZES = {
    "dp": (1, 2, 4, 8, 16, 64),
    "cp": (1, 1, 1, 2, 4),
    "tp": (1, 1, 2, 4, 8),
    "pp": (1, 1, 2, 4, 8),
    "ep": (1, 2, 4),
}
_OTHERS = {"v": (1, 2), "dp_replicate": (1, 1, 2), "micro_batch": (1, 1, 2, 4), "micro_batches": (1, 2, 4, 8)}
_RECIPES = ("bf16-master", "bf16-master", "bf16-master-fp32-grads", "fp32")


def random_runs(family: str, count: int, seed: int = 0) -> list[Run]:
    """So many runs of one family, the same ones for the same seed."""
    draw, found = random.Random(f"{family} {seed}"), []
    while len(found) < count:
        config, seq_len = _model(draw, family), draw.choice((1024, 2048, 4096))
        choices = {name: draw.choice(values) for name, values in (_SIZES | _OTHERS | CHOICES).items()}
        choices["ep"] = choices["ep"] if config.moe else 1
        choices["sequence_parallel"] = choices["sequence_parallel"] and choices["tp"] > 1
        choices["regather"] = choices["regather"] and choices["sequence_parallel"]
        choices["v"] = choices["v"] if choices["schedule"] == "interleaved" else 1
        recipe, per_stage = draw.choice(_RECIPES), draw.choice((1, 2))
        attention = "standard" if choices["cp"] == 1 and seq_len < 4096 and draw.random() < 0.2 else "fused"
        try:
            layout = Layout(**choices)
            config = replace(config, num_layers=max(2, per_stage * layout.num_stages), max_seq_len=seq_len)
            layout.check_model(config, seq_len)
            found.append(Run(config, layout, seq_len, recipe, attention))
        except ValueError:
            continue
    return found


def _model(draw: random.Random, family: str) -> ModelConfig:
    width, head, vocab = draw.choice((1024, 2048, 4096, 8192)), draw.choice((64, 128)), draw.choice((32_000, 128_256))
    heads = width // head
    pairs = draw.choice((heads, max(1, heads // 4)))
    shape = {"num_layers": 2, "d_model": width, "num_heads": heads, "vocab_size": vocab, "max_seq_len": 8192}
    if family == "gpt":
        return ModelConfig("gpt", num_kv_heads=heads, d_ff=4 * width, tied=draw.random() < 0.7, family="gpt", **shape)
    moe = MoeConfig(
        draw.choice((8, 16)), draw.choice((2, 4)), d_expert=draw.choice((768, 1536)),
        num_shared_experts=draw.choice((0, 1)), first_dense_layers=draw.choice((0, 1)),
        score=draw.choice(("softmax", "sigmoid")),
    )  # fmt: skip
    inner = int(3.5 * width)
    if family == "latent":
        mla = MlaConfig(draw.choice((768, 1536)), 512, *draw.choice(((128, 64, 128), (64, 32, 64), (96, 32, 128))))
        shape["num_heads"] = draw.choice((16, 32))
        few = moe if draw.random() < 0.5 else None
        head_dim = mla.nope_dim + mla.rope_dim
        return ModelConfig(
            "latent", num_kv_heads=shape["num_heads"], head_dim=head_dim, d_ff=inner, mla=mla, moe=few, **shape
        )
    chosen = {"moe": moe} if family == "experts" else {"qk_norm": draw.random() < 0.3, "tied": draw.random() < 0.25}
    return ModelConfig(family, num_kv_heads=pairs, d_ff=inner, **chosen, **shape)


def fullest(run: Run) -> tuple[int, int]:
    """(rank of the pipeline, bytes) of the highest predicted peak."""
    predicted = [budget.peak_bytes for budget in budgets(run)]
    return predicted.index(max(predicted)), max(predicted)


def simulated_bytes(run: Run, pp_rank: int) -> int:
    """Simulate the peak of one rank of the pipeline."""
    from course_lib.simulate import simulate_rank  # here: the stored peaks need no torch

    return simulate_rank(run, run.layout.mesh.rank(pp=pp_rank, dp=0, cp=run.layout.cp - 1, tp=0)).peak_bytes


def stored_peaks(family: str) -> dict[int, tuple[int, int]]:
    """Read the simulated peaks of a family: number of the run -> (rank of the pipeline, bytes)."""
    with PEAKS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == family]
    return {int(row["number"]): (int(row["pp_rank"]), int(row["peak_bytes"])) for row in rows}


def figures(family: str) -> tuple[list[float], float]:
    """How far predicted peaks are off the stored ones, the nearest first; the share of which one alone fits 80 GB."""
    peaks = stored_peaks(family)
    runs = random_runs(family, max(peaks) + 1)
    pairs = [(fullest(runs[number])[1], simulated) for number, (_, simulated) in peaks.items()]
    differ = sum((predicted > CARD_BYTES) != (simulated > CARD_BYTES) for predicted, simulated in pairs)
    return sorted(abs(predicted / simulated - 1) for predicted, simulated in pairs), differ / len(pairs)


def line(family: str) -> str:
    """A line of the table of simulated runs."""
    errors, differ = figures(family)
    told = (errors[len(errors) // 2], errors[int(0.9 * len(errors)) - 1], errors[-1], differ)
    return f"| {family} | {len(errors)} | {' | '.join(f'{100 * share:.2f} %' for share in told)} |"


def main(count: int = 300, families: Sequence[str] = FAMILIES) -> None:
    """Simulate the first runs of each family that are not stored yet, and store their peaks.

    Args:
        count: runs of each family
        families: of these families
    """
    for family in families:
        have = stored_peaks(family)
        for number, run in enumerate(random_runs(family, count)):
            if number not in have:
                pp_rank, _ = fullest(run)
                with PEAKS.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow(
                        [family, number, pp_rank, simulated_bytes(run, pp_rank)]
                    )
        print(line(family), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
