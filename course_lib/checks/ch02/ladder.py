"""Tables of chapter 02 whose answers are arithmetic: LoRA's bytes, MFU and HFU, the first step that fits."""

from collections.abc import Callable
from dataclasses import replace

from course_lib.checks import Exercise, numbers
from course_lib.config import preset
from course_lib.flops import flops_per_token, step_flops
from course_lib.memory.budget import budget
from course_lib.tensors import LoRA


# ------------------------------------------------------------------------------------ 5. LoRA
def _merged_weight(weight, lora_a, lora_b, alpha, over=None):
    """The weight with the adapter added in; the frozen weight itself stays as it was."""
    return weight + alpha / (len(lora_a) if over is None else over) * (lora_b @ lora_a)


def _adapters(rng):
    rank, d_out = rng.randrange(2, 4), rng.randrange(5, 8)
    shapes = ((d_out, d_out), (rank, d_out), (d_out, rank))  # square, so that a swapped product has the right shape
    return [(*(numbers(rng, *shape) for shape in shapes), float(rng.randrange(8, 12)))]  # alpha is unlike d_out


_WRONG_MERGED = {
    "alpha was not divided by the rank": {"over": 1},
    "alpha was divided by d_in, the width; divide it by the rank": lambda weight, *given: _merged_weight(
        weight, *given, over=weight.shape[1]
    ),
    "the product was not scaled by alpha / rank": lambda *given: _merged_weight(*given, over=given[-1]),
    "the product is transposed: it is B A": lambda weight, *given: _merged_weight(weight.t(), *given).t(),
    "the adapter alone: the frozen weight is missing": lambda weight, *given: _merged_weight(0 * weight, *given),
    "your function changed the frozen weight; return a new tensor, so that the adapter can still be taken off": (
        lambda weight, *given: weight.copy_(_merged_weight(weight, *given))
    ),
}
check_merged_weight = Exercise(_merged_weight, _adapters, _WRONG_MERGED)


def lora_bytes(shapes, targets, rank, frozen=2, trained=16):
    """Bytes of all states of a bf16 model with FP32 master weights that is fine-tuned by LoRA."""
    base = sum(rows * columns for rows, columns in shapes.values())
    return frozen * base + trained * sum(rank * sum(shapes[name]) for name in targets)


def _matrices(rng):
    width, rank = rng.choice([256, 320, 384]), rng.choice([4, 8, 16])
    shapes = {"embed": (1000, width), "q": (width, width), "v": (width // 4, width), "down": (width, 3 * width)}
    return [(shapes, targets, rank) for targets in (("q", "v"), ("v", "down"))]


def _of_adapters(count: Callable[[int, int], int]) -> Callable:
    """Somebody's bytes, whose adapters of d_out x d_in matrices have other numbers of numbers."""
    return lambda shapes, targets, rank: (
        lora_bytes(shapes, (), rank) + 16 * sum(rank * count(*shapes[name]) for name in targets)
    )


_WRONG_LORA = {
    "the frozen weights are missing: they stay resident, 2 bytes each": {"frozen": 0},
    "every weight was counted as trained": {"frozen": 16},
    "frozen weights have no gradients": {"frozen": 4},
    "an adapter has rank (d_in + d_out) numbers, not rank d_in d_out": _of_adapters(lambda rows, cols: rows * cols),
    "each adapter has two matrices, and one is missing": [
        _of_adapters(lambda rows, columns: columns),
        _of_adapters(lambda rows, columns: rows),
    ],
    "the adapters need gradients, master weights and moments too": {"trained": 2},
    "the adapters' FP32 master weights are missing": {"trained": 12},
    "adapters stand beside the targets only": lambda shapes, targets, rank: lora_bytes(shapes, shapes, rank),
    "2 bytes are missing: an adapter has weights and gradients in bf16": {"trained": 14},
    "the targets' own matrices are missing: they stay too, frozen": lambda shapes, targets, rank: (
        lora_bytes(shapes, targets, rank) - lora_bytes({name: shapes[name] for name in targets}, (), rank)
    ),
}
check_lora_bytes = Exercise(lora_bytes, _matrices, _WRONG_LORA, says={"the result": "count what each weight keeps"})


# ------------------------------------------------------------------------------------ 6. utilisation
def utilisation(config, seq_len, tokens, seconds, gpus, peak, recompute):
    """MFU and HFU of a run, as shares from 0 to 1."""
    could = seconds * gpus * peak
    return tokens * flops_per_token(config, seq_len) / could, step_flops(config, tokens, seq_len, recompute) / could


def _runs(rng):
    config, seq_len = preset(rng.choice(["llama-3.1-8b", "smollm-1.7b"])), rng.choice([1024, 2048])
    run = rng.randrange(4, 9) * 2**18, rng.uniform(9.0, 14.0), rng.choice([4, 8, 16]), rng.choice([312e12, 989e12])
    return [(config, seq_len, *run, mode) for mode in ("full", "none")]


WRONG_MFU = {
    "the two are swapped: HFU is the larger one": lambda *run: utilisation(*run)[::-1],
    "MFU counts what the model needs: recomputation is not a part of it": lambda *run: (utilisation(*run)[1],) * 2,
    "HFU counts what was executed: the second forward is missing": lambda *run: (utilisation(*run)[0],) * 2,
    "the peak is that of one GPU, and there are several": {"gpus": 1},
    "divide by the seconds too": {"seconds": 1},
    "in percent; the course's shares go from 0 to 1": lambda *run: [100 * share for share in utilisation(*run)],
    "only forward was counted: backward costs twice as much again": lambda *run: [
        share - 2 / 3 * utilisation(*run)[0] for share in utilisation(*run)
    ],
    "the head was counted as recomputed: only the layers run twice": lambda *run: [
        utilisation(*run)[0] * times for times in (1, 4 / 3 if run[-1] == "full" else 1)
    ],
}
check_utilisation = Exercise(utilisation, _runs, WRONG_MFU, says={"the result": "return two numbers, MFU and HFU"})


# ------------------------------------------------------------------------------------ 7. the ladder
_LADDER = (
    ("float32, standard attention", {"recipe": "fp32", "attention": "standard"}),
    ("bf16 with FP32 master weights", {"recipe": "bf16-master"}),
    ("fused attention", {"attention": "fused"}),
    ("micro-batch 1", {"micro_batches": 4}),
    ("full recomputation", {"recompute": "full"}),
    ("LoRA", {"lora": LoRA(8)}),
)


def _steps(config, batch_size, seq_len, ladder_steps, before=None, divided=True):
    """(name, bytes) of each step, added to those above it; with `before`, added to these options alone."""
    options: dict = {}
    for name, changes in ladder_steps:
        options = (options if before is None else before) | changes
        rows = batch_size // options.get("micro_batches", 1) if divided else batch_size
        yield name, budget(config, rows, seq_len, **options).total_bytes


def _first_fit(config, batch_size, seq_len, ladder_steps, limit, **how):
    """The first step of a ladder that fits, each with all measures above it."""
    steps = _steps(config, batch_size, seq_len, ladder_steps, **how)
    return next((name for name, needed in steps if needed <= limit), None)


def _limits(rng):
    """Too little for all, to the byte enough for each step, more than enough for the first."""
    config = replace(preset("llama-3.2-1b"), num_layers=rng.randrange(12, 20))
    setting = config, 4, rng.choice([2048, 3072, 4096]), _LADDER
    totals = [needed for _, needed in _steps(*setting)]
    limits = [totals[-1] - rng.randrange(1, 10**6), *reversed(totals), totals[0] + rng.randrange(1, 10**6)]
    return [(*setting, limit) for limit in limits]


_WRONG_LADDER = {
    "each step was tried alone; it adds to the steps above it": {"before": _LADDER[0][1]},
    "the changes of the steps above were not kept": {"before": {}},
    "a micro-batch has batch_size // micro_batches rows": {"divided": False},
    "the last step that fits costs most; the first is asked for": lambda *case: next(
        (name for name, needed in reversed(list(_steps(*case[:-1]))) if needed <= case[-1]), None
    ),
    "what needs exactly the limit fits": lambda *case: _first_fit(*case[:-1], case[-1] - 1),
    "where no step fits, return None": lambda *case: _first_fit(*case) or _LADDER[-1][0],
}
check_first_fit = Exercise(_first_fit, _limits, _WRONG_LADDER)
