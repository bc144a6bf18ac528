"""The course's own implementations against PyTorch's own, in one run: `course bench`.

Both are built in the same ranks and take turns, so that whatever else the machine does hits both. A round's ratio is
PyTorch's time over ours: 1.1 means that ours is a tenth faster. Reported is the median of the rounds; the spread is
the middle half of them. Seconds on a CPU say nothing of clusters; that the hand-written code wastes none, they do say.
"""

import importlib
import json
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib import model
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.parallel.engine import accumulate_gradients
from course_lib.validate import LARGEST_SIZE, whole

TECHNIQUES = {  # modules of parallel/ and of native/ with the same calls: the preset and micro-batches that are timed
    "data": ("mini", 1),
    "zero": ("mini", 1),  # stage 3, and FSDP2
    "tensor": ("mini", 1),  # by hand, and DTensor
    "sequence": ("mini", 1),
    "context": ("mini", 1),  # a ring, zigzag
    "pipeline": ("mini", 4),  # 1F1B, one stage a rank; it needs a micro-batch for each rank
    "expert": ("mini-moe", 1),  # experts over all ranks
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
    if unknown := sorted(set(names) - set(TECHNIQUES)):
        raise ValueError(f"techniques {unknown} are unknown; choose from {', '.join(TECHNIQUES)}")
    whole("rounds", rounds, least=2, most=LARGEST_SIZE)  # a spread needs two
    return [summarise(name, size, launch(times, size, name, rounds, quiet=True)) for name in names for size in ranks]


def times(technique: str, rounds: int) -> list[tuple[float, float]]:
    """In a rank: seconds of a step (from scratch, PyTorch's own) in each round; who goes first alternates."""
    (name, num_micro_batches), group = TECHNIQUES[technique], dist.group.WORLD
    modules = [importlib.import_module(f"course_lib.{side}.{technique}") for side in ("parallel", "native")]
    engines = [module.build(model.build(preset(name)), group) for module in modules]
    generator = torch.Generator().manual_seed(0)  # the same tokens on all ranks
    batches = [torch.randint(256, (1, 65), generator=generator) for _ in range(num_micro_batches)]
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
    ratios = [pytorch / scratch for scratch, pytorch in slowest]
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
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
