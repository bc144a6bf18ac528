"""Graders of chapter 02 whose answers are arithmetic: LoRA's bytes, MFU and HFU, the first step that fits."""

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from course_lib.checks.core import expect_close, expect_equal, fail, fresh_generator, grader, numbers, observed
from course_lib.config import preset
from course_lib.flops import flops_per_token, forward_flops_per_token, step_flops
from course_lib.memory.budget import budget
from course_lib.memory.states import LoRA


# ------------------------------------------------------------------------------------ 5. LoRA
@grader
def check_merged_weight(answer, rng):
    """The weight with the adapter added in; the frozen weight itself stays as it was."""
    generator, rank, alpha = fresh_generator(rng), rng.randrange(2, 4), float(rng.randrange(8, 12))  # unlike d_out
    d_out = rng.randrange(5, 8)
    shapes = ((d_out, d_out), (rank, d_out), (d_out, rank))  # square, so that a swapped product has the right shape
    weight, lora_a, lora_b = (numbers(generator, *shape) for shape in shapes)
    got, kept = observed(_merged, answer, weight.clone(), lora_a, lora_b, alpha)
    if not torch.equal(kept, weight):
        fail("your function changed the frozen weight; return a new tensor, so that the adapter can still be taken off")
    product = lora_b @ lora_a
    expect_close(
        got,
        weight + alpha / rank * product,
        "the merged weight",
        {
            "alpha was not divided by the rank": weight + alpha * product,
            "alpha was divided by d_in, the width; divide it by the rank": weight + alpha / d_out * product,
            "the product was not scaled by alpha / rank": weight + product,
            "the product is transposed: it is B A": weight + alpha / rank * product.t(),
            "the adapter alone: the frozen weight is missing": alpha / rank * product,
        },
    )


def _merged(answer: Callable, weight: Tensor, *args) -> tuple[object, Tensor]:
    """What the answer returned, and the frozen weight after it."""
    return answer(weight, *args), weight


@grader
def check_lora_bytes(answer, rng):
    """Bytes of all states of a bf16 model with FP32 master weights that is fine-tuned by LoRA."""
    width, rank = rng.choice([256, 320, 384]), rng.choice([4, 8, 16])
    shapes = {"embed": (1000, width), "q": (width, width), "v": (width // 4, width), "down": (width, 3 * width)}
    targets = rng.choice([("q", "v"), ("v", "down")])
    base = sum(rows * columns for rows, columns in shapes.values())
    others = sum(rows * columns for name, (rows, columns) in shapes.items() if name not in targets)
    adapters = sum(rank * sum(shapes[name]) for name in targets)
    full = sum(rank * rows * columns for rows, columns in (shapes[name] for name in targets))
    only_a = sum(rank * shapes[name][1] for name in targets)
    everywhere = sum(rank * sum(shape) for shape in shapes.values())
    expect_equal(
        answer(shapes, targets, rank),
        2 * base + 16 * adapters,
        "the bytes of the states",
        {
            "the frozen weights are missing: they stay resident, 2 bytes each": 16 * adapters,
            "every weight was counted as trained": 16 * (base + adapters),
            "frozen weights have no gradients": 4 * base + 16 * adapters,
            "an adapter has rank (d_in + d_out) numbers, not rank d_in d_out": 2 * base + 16 * full,
            "each adapter has two matrices, and one is missing": 2 * base + 16 * only_a,
            "the adapters need gradients, master weights and moments too": 2 * base + 2 * adapters,
            "the adapters' FP32 master weights are missing": 2 * base + 12 * adapters,
            "adapters stand beside the targets only": 2 * base + 16 * everywhere,
            "2 bytes are missing: an adapter has weights and gradients in bf16": 2 * base + 14 * adapters,
            "the targets' own matrices are missing: they stay too, frozen": 2 * others + 16 * adapters,
        },
    )


# ------------------------------------------------------------------------------------ 6. utilisation
@grader
def check_utilisation(answer, rng):
    """MFU and HFU of a run, as shares from 0 to 1."""
    config, seq_len = preset(rng.choice(["llama-3.1-8b", "smollm-1.7b"])), rng.choice([1024, 2048])
    tokens, seconds, gpus = rng.randrange(4, 9) * 2**18, rng.uniform(9.0, 14.0), rng.choice([4, 8, 16])
    peak = rng.choice([312e12, 989e12])
    got = answer(config, seq_len, tokens, seconds, gpus, peak, "full")
    if not isinstance(got, tuple | list) or len(got) != 2:
        fail(f"return two numbers, MFU and HFU; got {got!r}")
    could = seconds * gpus * peak
    model, executed = tokens * flops_per_token(config, seq_len), step_flops(config, tokens, seq_len, "full")
    forward = tokens * forward_flops_per_token(config, seq_len)
    head = tokens * 2 * config.vocab_size * config.d_model
    cases = {
        "": (model / could, executed / could),
        "the two are swapped: HFU is the larger one": (executed / could, model / could),
        "MFU counts what the model needs: recomputation is not a part of it": (executed / could, executed / could),
        "HFU counts what was executed: the second forward is missing": (model / could, model / could),
        "the peak is that of one GPU, and there are several": (model / could * gpus, executed / could * gpus),
        "divide by the seconds too": (model / could * seconds, executed / could * seconds),
        "in percent; the course's shares go from 0 to 1": (100 * model / could, 100 * executed / could),
        "only forward was counted: backward costs twice as much again": (forward / could, (2 * forward - head) / could),
        "the head was counted as recomputed: only the layers run twice": (model / could, (model + forward) / could),
    }
    pair = torch.tensor([float(value) for value in got], dtype=torch.float64)
    wrong = {message: torch.tensor(values, dtype=torch.float64) for message, values in cases.items()}
    expect_close(pair, wrong.pop(""), "(MFU, HFU)", wrong, rtol=1e-4)
    plain = answer(config, seq_len, tokens, seconds, gpus, peak, "none")
    expect_equal(round(plain[1] / plain[0], 6), 1.0, "HFU / MFU without recomputation")


# ------------------------------------------------------------------------------------ 7. the ladder
LADDER = (
    ("float32, standard attention", {"recipe": "fp32", "attention": "standard"}),
    ("bf16 with FP32 master weights", {"recipe": "bf16-master"}),
    ("fused attention", {"attention": "fused"}),
    ("micro-batch 1", {"micro_batches": 4}),
    ("full recomputation", {"recompute": "full"}),
    ("LoRA", {"lora": LoRA(8)}),
)


def _needed(config, options: dict, batch_size: int, seq_len: int, divided: bool = True) -> int:
    rows = batch_size // options.get("micro_batches", 1) if divided else batch_size
    return budget(config, rows, seq_len, **options).total_bytes


def _totals(
    config, ladder_steps, batch_size: int, seq_len: int, before: dict | None = None, divided: bool = True
) -> list[int]:
    """Bytes of each step, added to those above it; with `before`, added to these options alone."""
    options, totals = {}, []
    for _, changes in ladder_steps:
        options = (options if before is None else before) | changes
        totals.append(_needed(config, options, batch_size, seq_len, divided))
    return totals


def _choose(totals: list[int], limit: int, strict: bool = False, last: bool = False) -> str | None:
    fitting = [
        name for (name, _), total in zip(LADDER, totals, strict=True) if (total < limit if strict else total <= limit)
    ]
    return None if not fitting else fitting[-1 if last else 0]


def _limits(rng: random.Random, totals: list[int]) -> list[int]:
    """Too little for all, to the byte enough for each step, more than enough for the first."""
    return [totals[-1] - rng.randrange(1, 10**6), *reversed(totals), totals[0] + rng.randrange(1, 10**6)]


@grader
def check_first_fit(answer, rng):
    """The first step of a ladder that fits, each with all measures above it."""
    config = replace(preset("llama-3.2-1b"), num_layers=rng.randrange(12, 20))
    batch_size, seq_len = 4, rng.choice([2048, 3072, 4096])
    totals = _totals(config, LADDER, batch_size, seq_len)
    limits = _limits(rng, totals)
    got = [answer(config, batch_size, seq_len, LADDER, limit) for limit in limits]
    alone = _totals(config, LADDER, batch_size, seq_len, before=LADDER[0][1])
    forgotten = _totals(config, LADDER, batch_size, seq_len, before={})
    undivided = _totals(config, LADDER, batch_size, seq_len, divided=False)
    want = [_choose(totals, limit) for limit in limits]
    expect_equal(
        got,
        want,
        "the step for each of the limits, from tight to ample,",
        {
            "each step was tried alone; it adds to the steps above it": [_choose(alone, limit) for limit in limits],
            "the changes of the steps above were not kept": [_choose(forgotten, limit) for limit in limits],
            "a micro-batch has batch_size // micro_batches rows": [_choose(undivided, limit) for limit in limits],
            "the last step that fits costs most; the first is asked for": [
                _choose(totals, limit, last=True) for limit in limits
            ],
            "what needs exactly the limit fits": [_choose(totals, limit, strict=True) for limit in limits],
            "where no step fits, return None": [name or LADDER[-1][0] for name in want],
        },
    )
