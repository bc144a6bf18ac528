"""The course's own implementations against PyTorch's own, in one run: `course bench`.

Both are built in the same ranks and take turns, so that whatever else the machine does hits both. A round's ratio is
PyTorch's time over ours: 1.1 means that ours is a tenth faster. Reported is the median of the rounds; the spread is
the middle half of them. Seconds on a CPU say nothing of clusters; that the hand-written code wastes none, they do say.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from course_lib import model
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.native import context as native_context
from course_lib.native import data as native_data
from course_lib.native import expert as native_expert
from course_lib.native import pipeline as native_pipeline
from course_lib.native import sequence as native_sequence
from course_lib.native import tensor as native_tensor
from course_lib.native import zero as native_zero
from course_lib.parallel import context as parallel_context
from course_lib.parallel import data as parallel_data
from course_lib.parallel import expert as parallel_expert
from course_lib.parallel import pipeline as parallel_pipeline
from course_lib.parallel import sequence as parallel_sequence
from course_lib.parallel import tensor as parallel_tensor
from course_lib.parallel import zero as parallel_zero
from course_lib.parallel.engine import accumulate_gradients
from course_lib.validate import LARGEST_SIZE, whole


@dataclass(frozen=True)
class Technique:
    """Two modules with the same calls, and on what they are timed. A pipeline needs a micro-batch for each rank."""

    scratch: ModuleType
    pytorch: ModuleType
    preset: str = "mini"
    micro_batches: int = 1


TECHNIQUES = {
    "data": Technique(parallel_data, native_data),
    "zero": Technique(parallel_zero, native_zero),  # stage 3, and FSDP2
    "tensor": Technique(parallel_tensor, native_tensor),  # by hand, and DTensor
    "sequence": Technique(parallel_sequence, native_sequence),
    "context": Technique(parallel_context, native_context),  # a ring, zigzag
    "pipeline": Technique(parallel_pipeline, native_pipeline, micro_batches=4),  # 1F1B, one stage a rank
    "expert": Technique(parallel_expert, native_expert, preset="mini-moe"),  # experts over all ranks
}
_LOWEST_RATIO = 0.9  # what `--check` asks for
ROUNDS = 30
WARM_UP_ROUNDS = 3  # DDP rebuilds its buckets in its second step


def bench(techniques: Sequence[str] | None = None, ranks: Sequence[int] = (2, 4), rounds: int = ROUNDS) -> list[dict]:
    """One record for each technique and number of ranks: technique, ranks, ratio, spread, rounds, medians in seconds.

    A step here is forward, backward and what they communicate on the preset `mini` (2.9 million parameters; experts
    on `mini-moe`, 8.8 million), with one micro-batch of 64 tokens on every rank, so that communication weighs much; for
    a pipeline, which needs several, with 4 of them. The optimizer is left out: it is the same on both sides.

    Raises   ValueError for an unknown technique, or fewer than 2 rounds
    """
    names = list(TECHNIQUES) if techniques is None else list(techniques)
    unknown = sorted(set(names) - set(TECHNIQUES))
    if unknown:
        raise ValueError(f"techniques {unknown} are unknown; choose from {', '.join(TECHNIQUES)}")
    whole("rounds", rounds, least=2, most=LARGEST_SIZE)  # a spread needs two
    return [summarise(name, size, launch(times, size, name, rounds, quiet=True)) for name in names for size in ranks]


def times(technique: str, rounds: int) -> list[tuple[float, float]]:
    """In a rank: seconds of a step (from scratch, PyTorch's own) in each round; who goes first alternates."""
    timed, group = TECHNIQUES[technique], dist.group.WORLD
    modules = (timed.scratch, timed.pytorch)
    engines = [module.build(model.build(preset(timed.preset)), group) for module in modules]
    generator = torch.Generator().manual_seed(0)  # the same tokens on all ranks
    batches = [torch.randint(256, (1, 65), generator=generator) for _ in range(timed.micro_batches)]
    micro_batches = [(tokens_BS[:, :-1], tokens_BS[:, 1:]) for tokens_BS in batches]
    measured = []
    for index in range(rounds + WARM_UP_ROUNDS):
        seconds = [0.0, 0.0]
        for side in (0, 1) if index % 2 else (1, 0):
            dist.barrier(group)
            start_s = time.perf_counter()
            accumulate_gradients(engines[side], micro_batches)
            seconds[side] = time.perf_counter() - start_s
            engines[side].zero_grad()
        measured.append((seconds[0], seconds[1]))
    return measured[WARM_UP_ROUNDS:]


def summarise(technique: str, ranks: int, seconds_of_rank: Sequence[Sequence[tuple[float, float]]]) -> dict:
    """A step takes as long as its slowest rank; the ratio is taken round by round, then its median and quartiles."""
    slowest = [[max(pair) for pair in zip(*of_rounds, strict=True)] for of_rounds in zip(*seconds_of_rank, strict=True)]
    scratch_s, pytorch_s = ([pair[side] for pair in slowest] for side in (0, 1))
    lower, middle, upper = statistics.quantiles(
        [p / s for s, p in zip(scratch_s, pytorch_s, strict=True)], n=4, method="inclusive"
    )
    return {
        "technique": technique,
        "ranks": ranks,
        "ratio": round(middle, 3),
        "spread": [round(lower, 3), round(upper, 3)],
        "rounds": len(slowest),
        "scratch_s": round(statistics.median(scratch_s), 5),
        "pytorch_s": round(statistics.median(pytorch_s), 5),
    }


def bench_table(records: Sequence[dict]) -> str:
    lines = ["technique   ranks   from scratch   PyTorch's own   ratio   middle half of rounds"]
    for r in records:
        lines.append(
            f"{r['technique']:<12}{r['ranks']:>5}{r['scratch_s'] * 1e3:>12.1f} ms{r['pytorch_s'] * 1e3:>13.1f} ms"
            f"{r['ratio']:>8.2f}   {r['spread'][0]:.2f} to {r['spread'][1]:.2f}"
        )
    return "\n".join(lines)


def main(as_json: bool = False, check: bool = False, rounds: int = ROUNDS) -> int:
    """Prints the records; with `check`, 1 if a ratio is below LOWEST_RATIO, otherwise 0."""
    records = bench(rounds=rounds)
    print(json.dumps(records, indent=2) if as_json else bench_table(records))
    return 1 if check and min(record["ratio"] for record in records) < _LOWEST_RATIO else 0
