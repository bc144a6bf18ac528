"""How much memory a run needs: `budgets(run)`, one Budget for each rank of the pipeline. The only answer there is.

States are counted (states.py); every other tensor is of a moment of a step, the fullest of which is the peak
(peak.py). What is there besides tensors are assumptions, with their sources.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from course_lib.config import ModelConfig, Recompute
from course_lib.engines import ENGINES, EngineFacts
from course_lib.hardware import GPU, gpu
from course_lib.layout import Layout
from course_lib.memory.activations import Part, part_of
from course_lib.memory.flats import flats_of, tensors_of, with_any_batch
from course_lib.memory.peak import Gradients, Held, Stage, after_backward, gradients_of, moments, most_saved, stage_of
from course_lib.memory.states import StateBytes, state_bytes, zero_state_bytes
from course_lib.run import Recipe, Run, recipe_of
from course_lib.tensors import LoRA, quantized_shapes
from course_lib.validate import Index, Size, checked, one_of, whole

KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "temporary")
# Assumptions, not measurements: `tracker.cuda_memory()` measures them on the GPU at hand.
_ASSUMED_OVERHEADS: dict[str, int] = {
    "CUDA context": 512 * 2**20,  # driver, kernels, libraries; 0.3 to 1 GiB are seen
    "cuBLAS workspace": 32 * 2**20,  # PyTorch's default on Hopper
}
# NCCL's default buffers of one channel: Simple 4 MiB, LL128 120 x 640 x 8 x 8 bytes, LL 8 x 512 x 8 x 16 bytes (the
# defines of its src/init.cc); 16 channels are assumed for each group of ranks. EFA's own buffers lie in host memory.
NCCL_CHANNELS = 16
NCCL_CHANNEL_BYTES = 4 * 2**20 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16


@dataclass(frozen=True)
class Budget:
    """Bytes that one rank needs. Each kind stands at its own largest; `at_peak` is what the largest moment is made of.

    elsewhere   what was moved off the device: to "host", to "disk"
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    temporary: int
    gathered: int  # full parameters put together from shards, for as long as they are used
    saved: int  # activations and logits at their common largest
    at_peak: dict[str, int]
    moment: str
    overheads: dict[str, int] = field(default_factory=dict)  # by name, what is no tensor
    elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer at the end of backward."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak_bytes(self) -> int:
        """All tensors of the largest moment of a step."""
        return sum(self.at_peak.values())

    @property
    def total_bytes(self) -> int:
        """The peak and the overheads: what the GPU must have."""
        return self.peak_bytes + sum(self.overheads.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """Each kind's own largest, under the tracker's names: what the loss saves is an activation."""
        own = {kind: getattr(self, kind) for kind in KINDS if kind != "logits"}
        return own | {"activations": self.saved}


@checked
def fits(budget: Budget, gpu_or_key: GPU | str) -> bool:
    """Whether the whole budget, overheads included, is within what CUDA reports as the GPU's capacity."""
    return budget.total_bytes <= (gpu(gpu_or_key) if isinstance(gpu_or_key, str) else gpu_or_key).usable_bytes


@checked
def largest_that_fits(budget_of: Callable[[int], Budget], gpu: GPU | str, multiple: Size = 1) -> int:
    """The largest multiple of a batch or a sequence whose `budget_of(size)` fits the GPU; 0 if none does."""
    high = 1
    while fits(budget_of(high * multiple), gpu):
        high *= 2
    return multiple * bisect_left(range(1, high), True, key=lambda size: not fits(budget_of(size * multiple), gpu))


@lru_cache(maxsize=256)
def budgets(run: Run, tp_rank: int = 0, load: float = 1.0, engine: str = "course") -> tuple[Budget, ...]:
    """Predict the memory of each rank of the pipeline; of ranks that differ in dp, cp or tp alone, the largest.

    load     rows that reach this rank's experts, over a fair share
    engine   a name of `engines.ENGINES`
    """
    return tuple(budget_of_rank(run, pp_rank, tp_rank, load, engine) for pp_rank in range(run.layout.pp))


@lru_cache(maxsize=4096)
def budget_of_rank(run: Run, pp_rank: int, tp_rank: int = 0, load: float = 1.0, engine: str = "course") -> Budget:
    """Predict the memory of one rank of the pipeline; arguments as `budgets` has them.

    Raises   ValueError if the model does not read so many tokens, load is impossible, or the engine cannot do the run
    """
    if run.seq_len > run.config.max_seq_len:
        what = f"{run.config.name} reads at most {run.config.max_seq_len} tokens; choose a shorter one"
        raise ValueError(f"seq_len is {run.seq_len}, but {what}")
    whole("pp_rank", pp_rank, 0, run.layout.pp - 1)
    one_of("engine", engine, tuple(ENGINES))
    facts = ENGINES[engine]
    if facts.log_first:
        raise ValueError(f"{engine}'s memory is its log's, of the first stage alone: ask estimate.estimate for it")
    if not 0 <= load <= run.layout.ep:
        raise ValueError(f"load is {load}; required: 0 to ep ({run.layout.ep}), where all rows reach this rank")
    run = _under(run, facts)
    part, layout, recipe, offload = part_of(run, tp_rank, load, facts), run.layout, recipe_of(run.recipe), run.offload
    of_run = run.config, recipe, run.lora, with_any_batch(layout)
    gradients, sizes = _trained(*of_run, pp_rank, tp_rank, facts.live_parameters)
    stages = {stage: (stage_of(part, stage), of_stage) for stage, of_stage in gradients.items()}
    states, held = states_of(run, pp_rank, tp_rank), sum(one.held for one in gradients.values())
    steps = [*moments(layout, pp_rank, stages, part.own_rows * run.config.d_model * part.e)]
    steps += [(name, Held(gradients=held, temporary=size)) for name, size in after_backward(part, sizes)]
    moment, fullest = max(steps, key=lambda step: sum(step[1]))
    always = _always(part, pp_rank, tp_rank)
    largest = Held(*map(max, zip(*(now for _, now in steps), strict=True))).plus(always)
    on_device = {
        kind: getattr(states, kind) * (getattr(offload, kind) == "device") for kind in ("parameters", "optimizer")
    }
    peak = fullest.plus(always)._asdict() | on_device
    if layout.zero_stage == 0 and layout.data_size == 1 and recipe.grad_bytes > recipe.param_bytes:
        peak["gradients"] += states.gradients - held  # FP32 gradients are there all the time, but those of buckets
    places = Counter({offload.optimizer: states.optimizer})
    places.update({offload.parameters: states.parameters})
    if part.is_away:
        moved = {one: stage.moved for one, (stage, _) in stages.items()}
        places[offload.activations] += most_saved(layout, pp_rank, moved)
    reserve = round((facts.reserved_share - 1) * sum(peak.values()))
    return Budget(
        **largest._replace(gradients=states.gradients)._asdict(),
        **on_device,
        saved=max(now.activations + now.logits for _, now in steps),
        at_peak={kind: peak[kind] for kind in KINDS},
        moment=moment,
        overheads=overheads_of(run) | ({"allocator's reserve": reserve} if reserve else {}),
        elsewhere={place: size for place, size in places.items() if place != "device" and size},
    )


def fullest_budget(run: Run, engine: str = "course") -> Budget:
    """The fullest rank's: the first has most in flight, the second may have experts or more layers, the last logits."""
    ranks = {0, min(1, run.layout.pp - 1), run.layout.pp - 1}
    return max((budget_of_rank(run, rank, engine=engine) for rank in ranks), key=lambda one: one.total_bytes)


@checked
def budget(
    config: ModelConfig,
    batch_size: Size,
    seq_len: Size,
    recipe: str = "bf16-master",
    attention: str = "fused",
    recompute: Recompute = "none",
    micro_batches: Size = 1,
    lora: LoRA | None = None,
) -> Budget:
    """The budget of one GPU that trains the whole model; `batch_size` is one micro-batch's."""
    layout = Layout(micro_batch=batch_size, micro_batches=micro_batches, recompute=recompute)
    return budgets(Run(config, layout, seq_len, recipe, attention, lora=lora))[0]


@checked
def saved_for_backward(run: Run, stage: int = 0, tp_rank: Index = 0) -> Stage:
    """Predict what one micro-batch leaves on one stage for its backward pass, term by term (activations.py)."""
    whole("stage", stage, 0, run.layout.num_stages - 1)
    return stage_of(part_of(run, tp_rank), stage)


def overheads_of(run: Run) -> dict[str, int]:
    """What a GPU holds besides tensors; on a CPU nothing is counted."""
    if run.device == "cpu":
        return {}
    layout = run.layout
    groups = sum(size > 1 for size in (layout.data_size, layout.tp, layout.cp, layout.pp, layout.ep))
    return _ASSUMED_OVERHEADS | ({"NCCL's buffers": groups * NCCL_CHANNELS * NCCL_CHANNEL_BYTES} if groups else {})


@checked
def states_of(run: Run, pp_rank: Index = 0, tp_rank: Index = 0) -> StateBytes:
    """Predict parameters, gradients and optimizer states of one rank, to the byte; on a CPU torch's counters too."""
    zero, recipe, on_cpu = run.layout.zero_stage, recipe_of(run.recipe), run.device == "cpu"
    not_flat = run.lora is not None or run.optimizer == "adafactor" or run.config.family == "xlmr"
    if not_flat and zero == 0 and run.layout.world_size == run.layout.dp:
        return state_bytes(run.config, recipe, run.optimizer, run.lora, on_cpu)
    units, total = Counter(), Counter()
    for flat in flats_of(run.config, run.layout, pp_rank, tp_rank, recipe.param_bytes):
        of_tensors = [(one.numel, one.count) for one in flat.tensors]
        for numel, count in [(flat.numel // flat.count, flat.count)] if zero else of_tensors:
            units[numel, flat.ranks] += count
    for (numel, ranks), count in units.items():
        of_one = zero_state_bytes([numel], zero, ranks, recipe, run.optimizer, on_cpu)
        total.update({kind: count * size for kind, size in vars(of_one).items()})
    return StateBytes(total["parameters"], total["gradients"], total["optimizer"])


@lru_cache(maxsize=256)
def _trained(
    config: ModelConfig, recipe: Recipe, lora: LoRA | None, layout: Layout, pp_rank: int, tp_rank: int, live: int
) -> tuple[dict[int, Gradients], list[tuple[int, int]]]:
    """The gradients of each stage of a rank, and what it updates: (elements, how many such)."""
    trained = tensors_of(config, layout, pp_rank, tp_rank, lora)
    flats = flats_of(config, layout, pp_rank, tp_rank, recipe.param_bytes, lora)
    waits = config.tied and layout.num_stages == 1 and config.family != "xlmr" and lora is None
    waits, found = waits and not layout.splits_backward, {}
    for stage in layout.stages_of_rank(pp_rank):
        own = [[one for one in whole if one.stage == stage] for whole in (trained, flats)]
        found[stage] = gradients_of(layout, recipe, *own, waits, live)
    if layout.zero_stage:
        return found, [(flat.padded // flat.ranks // flat.count, flat.count) for flat in flats]
    return found, [(one.numel, one.count) for one in trained]


def _under(run: Run, engine: EngineFacts) -> Run:
    """The run as the formulas have it in order to hold what the engine does; ValueError for what it does not have."""
    layout = run.layout
    if run.loss_chunks > 1 and not engine.chunked_loss:
        able = ", ".join(name for name, one in ENGINES.items() if one.chunked_loss)
        raise ValueError(f"loss_chunks is {run.loss_chunks}, but {engine.name} has no loss in chunks; {able} have")
    if engine.name != "course" and layout.data_size == 1 and run.offload.parameters == "device":
        return replace(run, layout=replace(layout, zero_stage=0))  # there is nobody to shard over
    if engine.pipeline_grads_whole and layout.pp > 1 and layout.zero_stage > 0:
        summed = "bf16-master-fp32-grads" if run.recipe == "bf16-master" else run.recipe
        return replace(run, layout=replace(layout, zero_stage=1), recipe=summed)
    return run


def _always(part: Part, pp_rank: int, tp_rank: int) -> Held:
    """What an engine holds all through a step, of which the course's has nothing."""
    engine, run, layout, gathered, temporary = part.engine, part.run, part.run.layout, 0, 0
    if engine.root_gathered and layout.zero_stage == 3:
        tensors = tensors_of(run.config, layout, pp_rank, tp_rank)
        ends = sum(one.numel for one in tensors if one.name in ("embed", "head"))
        gathered = recipe_of(run.recipe).param_bytes * ends
    if engine.message_buffers and layout.pp > 1:
        temporary = 2 * layout.micro_batches * part.own_rows * run.config.d_model * part.e
    if run.lora is not None and run.lora.four_bits and engine.name != "course":  # a matrix, dequantized
        temporary = part.e * max(prod(shape) for shape, _ in quantized_shapes(run.config).values())
    return Held(gathered=gathered, temporary=temporary)
