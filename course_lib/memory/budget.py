"""How much memory a run needs: `budgets(run)`, one Budget for each rank of the pipeline. The only answer there is.

states        parameters, gradients, optimizer: counted (states.py, zero.py)
the step      every other tensor: four moments of a step, the largest of which is the peak (peak.py)
elsewhere     what was moved off the device
overheads     what is there besides tensors: assumptions, with their sources
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from math import prod

from course_lib.config import ModelConfig, Recompute
from course_lib.engines import ENGINES, EngineFacts
from course_lib.hardware import GPU, gpu
from course_lib.layout import Layout
from course_lib.memory.activations import Part, part_of
from course_lib.memory.backward import Gradients, Stage, Trained, gradients_of, stage_of
from course_lib.memory.flats import Named, adapters_of, cut_of, flats_of_ranks, placed_by, tensors_of
from course_lib.memory.peak import Pieces, after_backward, moments, moved_bytes, pieces_of
from course_lib.memory.run import Run
from course_lib.memory.states import LoRA, StateBytes, has_step_counters, quantized_shapes, recipe_of, state_bytes
from course_lib.memory.zero import bytes_by_place, five_d_states
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

    moment      the name of that moment
    elsewhere   what was moved off the device: to "host", to "disk"
    overheads   by name, what is no tensor
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
    overheads: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer at the end of backward: they do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def between_steps_bytes(self) -> int:
        """What is there between two steps: the update has freed the gradients."""
        return self.parameters + self.optimizer

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
    """The largest size, of a batch or of a sequence, a multiple of so many, whose budget fits the GPU; 0 if none does.

    budget_of   from a size to the budget of one GPU, larger ones larger
    """

    def fit(count: int) -> bool:
        return fits(budget_of(count * multiple), gpu)

    low, high = 0, 1
    while fit(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low * multiple


@lru_cache(maxsize=256)
def budgets(run: Run, tp_rank: int = 0, load: float = 1.0, engine: str = "course") -> tuple[Budget, ...]:
    """Predict the memory of each rank of the pipeline; of ranks that differ in dp, cp or tp alone, the largest.

    load     rows that reach this rank's experts, over a fair share
    engine   a name of `engines.ENGINES`
    Raises   ValueError if the model does not read so many tokens, load is impossible, or the engine cannot do the run
    """
    return tuple(budget_of_rank(run, pp_rank, tp_rank, load, engine) for pp_rank in range(run.layout.pp))


@lru_cache(maxsize=4096)
def budget_of_rank(run: Run, pp_rank: int, tp_rank: int = 0, load: float = 1.0, engine: str = "course") -> Budget:
    """Predict the memory of one rank of the pipeline; arguments as `budgets` has them."""
    _check_seq_len(run.config, run.seq_len)
    whole("pp_rank", pp_rank, 0, run.layout.pp - 1)
    one_of("engine", engine, tuple(ENGINES))
    if ENGINES[engine].log_first:
        raise ValueError(f"{engine}'s memory is its log's, of the first stage alone: ask estimate.estimate for it")
    if not 0 <= load <= run.layout.ep:
        raise ValueError(f"load is {load}; required: 0 to ep ({run.layout.ep}), where all rows reach this rank")
    return _budget_of_rank(_under(run, ENGINES[engine]), pp_rank, tp_rank, load, ENGINES[engine])


def fullest_budget(run: Run, usable_bytes: float = float("inf"), engine: str = "course") -> Budget:
    """The budget of the fullest rank of a pipeline, or of the first that is found not to fit.

    One of three is the fullest: the first rank has most micro-batches in flight, the second may be the first with
    experts, the last has the logits.
    """
    last, fullest = run.layout.pp - 1, None
    for rank in dict.fromkeys((0, last, min(1, last))):
        budget = budget_of_rank(run, rank, engine=engine)
        if fullest is None or budget.total_bytes > fullest.total_bytes:
            fullest = budget
        if budget.total_bytes > usable_bytes:
            break
    return fullest


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
    return stage_of(part_of(run, tp_rank), stage, placed_by(run.layout).splits_backward)


def _check_seq_len(config: ModelConfig, seq_len: Size) -> None:
    """Raises ValueError if the model cannot read that many tokens."""
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len is {seq_len}, but {config.name} reads at most {config.max_seq_len} tokens; choose a shorter one"
        )


def overheads_of(run: Run) -> dict[str, int]:
    """What a GPU holds besides tensors; on a CPU nothing is counted."""
    if run.device == "cpu":
        return {}
    layout = run.layout
    groups = sum(size > 1 for size in (layout.data_size, layout.tp, layout.cp, layout.pp, layout.ep))
    nccl = {"NCCL's buffers": groups * NCCL_CHANNELS * NCCL_CHANNEL_BYTES} if groups else {}
    return _ASSUMED_OVERHEADS | nccl


@checked
def states_of(run: Run, pp_rank: Index = 0, tp_rank: Index = 0) -> StateBytes:
    """Parameters, gradients and optimizer states of one rank, to the byte."""
    layout, recipe = run.layout, recipe_of(run.recipe)
    counters = run.device == "cpu" and has_step_counters(recipe, run.optimizer)
    not_flat = run.lora is not None or run.optimizer == "adafactor" or run.config.family == "xlmr"
    if not_flat and layout.zero_stage == 0 and layout.world_size == layout.dp:
        return state_bytes(run.config, recipe, run.optimizer, run.lora, step_counters=counters)
    return five_d_states(run.config, layout, pp_rank, tp_rank, recipe, run.optimizer, counters)


# ---- one rank


def _budget_of_rank(run: Run, pp_rank: int, tp_rank: int, load: float, engine: EngineFacts) -> Budget:
    part = part_of(run, tp_rank, load, engine)
    gradients, pieces = _trained(_trained_of(run), pp_rank, tp_rank)
    split = placed_by(run.layout).splits_backward
    stages = {stage: (stage_of(part, stage, split), of_stage) for stage, of_stage in gradients.items()}
    states, offload = states_of(run, pp_rank, tp_rank), run.offload
    held = sum(gradients.held for _, gradients in stages.values())
    always = _always(part, tensors_of(run.config, run.layout, pp_rank, tp_rank))
    largest, peak, moment = Counter(), Counter(), ""
    steps = moments(run.layout, pp_rank, stages, part.own_rows * run.config.d_model * part.e)
    updates = ((name, {"gradients": held, "temporary": size}) for name, size in after_backward(part, pieces))
    for name, change in chain(steps, updates):
        now = always + Counter(change)
        now["saved"] = now["activations"] + now["logits"]
        largest |= now
        if now.total() - now["saved"] > peak.total() - peak["saved"]:
            peak, moment = now, name
    alone = run.layout.zero_stage == 0 and run.layout.data_size == 1
    peak["parameters"] = states.parameters if offload.parameters == "device" else 0
    peak["optimizer"] = states.optimizer if offload.optimizer == "device" else 0
    if alone and part.recipe.grad_bytes > part.recipe.param_bytes:  # FP32 gradients are there all the time
        peak["gradients"] += states.gradients
    at_peak = {kind: peak[kind] for kind in KINDS}
    places = bytes_by_place(states, offload)
    if offload.activations != "device":
        places[offload.activations] += moved_bytes(run.layout, pp_rank, stages)
    return Budget(
        parameters=peak["parameters"],
        gradients=states.gradients,
        optimizer=peak["optimizer"],
        **{kind: largest[kind] for kind in ("activations", "logits", "temporary", "gathered", "saved")},
        at_peak=at_peak,
        moment=moment,
        overheads=overheads_of(run) | _reserve(engine, sum(at_peak.values())),
        elsewhere={place: size for place, size in places.items() if place != "device" and size},
    )


def _trained_of(run: Run) -> Trained:
    layout, recipe = run.layout, recipe_of(run.recipe)
    ranks = layout.shard_size, layout.expert_shard_size
    cut = cut_of(layout)
    return Trained(run.config, recipe, run.lora, cut, layout.zero_stage, ranks, layout.data_size, layout.num_stages)


@lru_cache(maxsize=2048)
def _trained(of: Trained, pp_rank: int, tp_rank: int) -> tuple[dict[int, Gradients], Pieces]:
    """The gradients of each stage of a rank, and what it updates."""
    itemsize = of.recipe.param_bytes
    trained = adapters_of(of.config, of.cut, of.lora) if of.lora else tensors_of(of.config, of.cut, pp_rank, tp_rank)
    flats = flats_of_ranks(of.config, of.cut, pp_rank, tp_rank, itemsize, of.lora, of.zero_stage == 3, of.ranks)
    found = {}
    for stage in placed_by(of.cut).stages_of_rank(pp_rank):
        own = [one for one in trained if one.stage == stage], [flat for flat in flats if flat.stage == stage]
        found[stage] = gradients_of(of, *own)
    return found, pieces_of(of.zero_stage, trained, flats)


# ---- what another engine has besides


def _under(run: Run, engine: EngineFacts) -> Run:
    """The run as the formulas have it in order to hold what the engine does.

    Raises   ValueError for what the engine does not have
    """
    layout, changes = run.layout, {}
    if run.loss_chunks > 1 and not engine.chunked_loss:
        able = ", ".join(name for name, one in ENGINES.items() if one.chunked_loss)
        raise ValueError(f"loss_chunks is {run.loss_chunks}, but {engine.name} has no loss in chunks; {able} have")
    if engine.name == "course":
        return run
    if layout.data_size == 1 and run.offload.parameters == "device":
        changes["zero_stage"] = 0  # there is nobody to shard over
    elif engine.pipeline_grads_whole and layout.pp > 1 and layout.zero_stage > 0:
        summed = "bf16-master-fp32-grads" if run.recipe == "bf16-master" else run.recipe
        return replace(run, layout=replace(layout, zero_stage=1), recipe=summed)
    return replace(run, layout=replace(layout, **changes)) if changes else run


def _always(part: Part, tensors: Sequence[Named]) -> Counter:
    """What an engine holds all through a step, of which the course's has nothing."""
    if part.engine.name == "course":
        return Counter()
    engine, layout, found = part.engine, part.layout, Counter()
    numel = sum(one.numel for one in tensors)
    if engine.root_gathered and layout.zero_stage == 3:
        ends = sum(one.numel for one in tensors if one.name in ("embed", "head"))
        found["gathered"] = part.recipe.param_bytes * ends
    if engine.message_buffers and layout.pp > 1:
        found["temporary"] += 2 * layout.micro_batches * part.own_rows * part.config.d_model * part.e
    if layout.tp > 1:
        found["temporary"] += engine.whole_sequences * part.rows * part.config.d_model * part.e
    found["temporary"] += engine.backward_grad_bytes * numel
    if layout.zero_stage == 0 and layout.data_size > 1:
        found["temporary"] += engine.bucket_bytes * numel
    if part.run.lora is not None and part.run.lora.four_bits:
        found["temporary"] += part.e * max(prod(shape) for shape, _ in quantized_shapes(part.config).values())
    return found


def _reserve(engine: EngineFacts, peak_bytes: int) -> dict[str, int]:
    """What the allocator takes beside tensors, where that is known of an engine."""
    size = round((engine.reserved_share - 1) * peak_bytes) + engine.unfilled_bytes
    return {"allocator's reserve": size} if size else {}
