"""How much memory a run needs: `budgets(run)`, one Budget for each rank of the pipeline. The only answer there is.

states        parameters, gradients, optimizer: counted (states.py, zero.py, five_d.py)
the step      every other tensor: the moments of a step on a ledger (moments.py), the largest of which is the peak
elsewhere     what was moved off the device
overheads     what is there besides tensors: assumptions, with their sources
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from course_lib.config import ModelConfig, Recompute
from course_lib.hardware import GPU, gpu
from course_lib.layout import Layout
from course_lib.memory.blocks import Part
from course_lib.memory.five_d import five_d_states
from course_lib.memory.flats import (
    Flat,
    adapters_of,
    different_terms_over_tp,
    flats_of,
    layers_of,
    padded,
    schedule_of,
    steps_of,
    tensors_of,
)
from course_lib.memory.ledger import KINDS, Ledger, Weight
from course_lib.memory.moe import narrow_experts
from course_lib.memory.moments import Buckets, Change, Plain, Shard, StageOnLedger, Units
from course_lib.memory.pipeline import boundary_bytes
from course_lib.memory.run import Run
from course_lib.memory.states import LoRA, StateBytes, has_step_counters, recipe_of, state_bytes
from course_lib.memory.zero import bytes_by_place, wire_grad_bytes
from course_lib.validate import Index, Size, checked, whole

# Assumptions, not measurements: `tracker.cuda_memory()` measures them on the GPU at hand.
ASSUMED_OVERHEADS: dict[str, int] = {
    "CUDA context": 512 * 2**20,  # driver, kernels, libraries; 0.3 to 1 GiB are seen
    "cuBLAS workspace": 32 * 2**20,  # PyTorch's default on Hopper
}
# NCCL's default buffers of one channel: Simple 4 MiB, LL128 120 x 640 x 8 x 8 bytes, LL 8 x 512 x 8 x 16 bytes (the
# defines of its src/init.cc); 16 channels are assumed for each group of ranks. EFA's own buffers lie in host memory.
NCCL_CHANNELS = 16
NCCL_CHANNEL_BYTES = 4 * 2**20 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
STEADY = 2  # times pp micro-batches: a rank holds no more with more of them


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

    if not fit(1):
        return 0
    low, high = 1, 2
    while fit(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low * multiple


@lru_cache(maxsize=256)
def budgets(run: Run, tp_rank: int = 0, load: float = 1.0) -> tuple[Budget, ...]:
    """Predict the memory of each rank of the pipeline; of ranks that differ in dp, cp or tp alone, the largest.

    load     rows that reach this rank's experts, over a fair share
    Raises   ValueError if the model does not read so many tokens, or load is impossible
    """
    return tuple(budget_of_rank(run, pp_rank, tp_rank, load) for pp_rank in range(run.layout.pp))


@lru_cache(maxsize=1024)
def budget_of_rank(run: Run, pp_rank: int, tp_rank: int = 0, load: float = 1.0) -> Budget:
    """Predict the memory of one rank of the pipeline; arguments as `budgets` has them."""
    check_seq_len(run.config, run.seq_len)
    whole("pp_rank", pp_rank, 0, run.layout.pp - 1)
    if not 0 <= load <= run.layout.ep:
        raise ValueError(f"load is {load}; required: 0 to ep ({run.layout.ep}), where all rows reach this rank")
    return _budget_of_rank(run, pp_rank, tp_rank, load)


def steady(run: Run) -> Run:
    """The same run with so few micro-batches that its memory is the same and soon worked out."""
    layout, enough = run.layout, STEADY * run.layout.pp
    return run if layout.micro_batches <= enough else replace(run, layout=replace(layout, micro_batches=enough))


def fullest_budget(run: Run, usable_bytes: float = float("inf")) -> Budget:
    """The budget of the fullest rank of a pipeline, or of the first that is found not to fit.

    One of three is the fullest: the first rank has most micro-batches in flight, the second may be the first with
    experts, the last has the logits.
    """
    few, fullest = steady(run), None
    for rank in dict.fromkeys((0, run.layout.pp - 1, min(1, run.layout.pp - 1))):
        budget = budget_of_rank(few, rank)
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


@dataclass(frozen=True)
class Saved:
    """Bytes that one micro-batch leaves on one stage, from its forward to its backward pass.

    waiting   between the two parts of a split backward: what the gradients of weights need
    """

    activations: int
    logits: int
    waiting: int

    @property
    def total(self) -> int:
        """What is there when backward starts."""
        return self.activations + self.logits


@checked
def saved_for_backward(run: Run, stage: int = 0, tp_rank: Index = 0) -> Saved:
    """Predict what one micro-batch leaves on one stage for its backward pass, as the ledger has it."""
    whole("stage", stage, 0, run.layout.num_stages - 1)
    changes = RankOnLedger(run, schedule_of(run.layout).rank_of_stage[stage], tp_rank).first[stage]
    net = {op: change.net for (op, _), change in changes.items()}
    forward = net["F"]
    waiting = (
        sum(forward[kind] + net["I"][kind] for kind in ("activations", "logits", "temporary")) if "I" in net else 0
    )
    left = forward["activations"] + forward["temporary"]  # of which a checkpoint holds the tables of RoPE
    return Saved(left, forward["logits"], waiting)


@checked
def check_seq_len(config: ModelConfig, seq_len: Size) -> None:
    """Raises ValueError if the model cannot read that many tokens."""
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len is {seq_len}, but {config.name} reads at most {config.max_seq_len} tokens; choose a shorter one"
        )


def _budget_of_rank(run: Run, pp_rank: int, tp_rank: int, load: float) -> Budget:
    rank = RankOnLedger(run, pp_rank, tp_rank, load)
    states, offload = states_of(run, pp_rank, tp_rank), run.offload
    here = {
        "parameters": states.parameters if offload.parameters == "device" else 0,
        "optimizer": states.optimizer if offload.optimizer == "device" else 0,
        "gradients": states.gradients if rank.grads_always else 0,
    }
    largest, peak, moment = rank.largest, dict.fromkeys(KINDS, -1), ""
    for name, held in rank.moments():
        for kind in KINDS:
            largest[kind] = max(largest[kind], held[kind])
        if sum(held.values()) > sum(peak.values()):
            peak, moment = dict(held), name
    places = bytes_by_place(states, offload)
    if rank.moved_at_once:
        places[offload.activations] += rank.moved_bytes()
    return Budget(
        parameters=here["parameters"],
        gradients=states.gradients,
        optimizer=here["optimizer"],
        activations=largest["activations"],
        logits=largest["logits"],
        temporary=largest["temporary"],
        gathered=largest["gathered"],
        saved=largest["saved"],
        at_peak={kind: peak[kind] + here.get(kind, 0) for kind in KINDS},
        moment=moment,
        overheads=overheads_of(run),
        elsewhere={place: size for place, size in places.items() if place != "device" and size},
    )


@checked
def overheads_of(run: Run) -> dict[str, int]:
    """What a GPU holds besides tensors; on a CPU nothing is counted."""
    if run.device == "cpu":
        return {}
    layout = run.layout
    groups = sum(size > 1 for size in (layout.data_size, layout.tp, layout.cp, layout.pp, layout.ep))
    nccl = {"NCCL's buffers": groups * NCCL_CHANNELS * NCCL_CHANNEL_BYTES} if groups else {}
    return ASSUMED_OVERHEADS | nccl


@checked
def states_of(run: Run, pp_rank: Index = 0, tp_rank: Index = 0) -> StateBytes:
    """Parameters, gradients and optimizer states of one rank, to the byte."""
    counters = run.device == "cpu" and has_step_counters(run.recipe, run.optimizer)
    not_flat = run.lora is not None or run.optimizer == "adafactor" or run.config.family == "xlmr"
    if not_flat and run.layout.zero_stage == 0 and run.layout.world_size == run.layout.dp:
        return state_bytes(run.config, run.recipe, run.optimizer, run.lora, step_counters=counters)
    return five_d_states(run.config, run.layout, pp_rank, tp_rank, run.recipe, run.optimizer, counters)


def part_of(
    run: Run, layers: range, tp_rank: int = 0, is_first: bool = False, is_last: bool = False, load: float = 1.0
) -> Part:
    """What a rank computes of these layers, and in which widths."""
    recipe = recipe_of(run.recipe)
    return Part(
        narrow_experts(run.config, run.layout.tp, tp_rank),
        run.layout,
        run.seq_len,
        recipe.compute_bytes,
        layers,
        is_first,
        is_last,
        tp_rank,
        attention=run.attention,
        residual_itemsize=recipe.param_bytes,
        softmax_itemsize=recipe.param_bytes if run.device == "cuda" else None,
        load=load,
    )


class RankOnLedger:
    """One rank's step: states aside, what is there at every moment."""

    def __init__(self, run: Run, pp_rank: int, tp_rank: int = 0, load: float = 1.0):
        self.run, self.layout, self.recipe = run, run.layout, recipe_of(run.recipe)
        self.pp_rank, self.tp_rank, self.load = pp_rank, tp_rank, load
        self.schedule, self.L = schedule_of(run.layout), Ledger()
        self.L.offloads = run.offload.activations != "device"
        self.tensors = tensors_of(run.config, run.layout, pp_rank, tp_rank)
        self.trained = adapters_of(run.config, run.layout, run.lora) if run.lora else self.tensors
        self.flats = flats_of(run.config, run.layout, pp_rank, tp_rank, self.recipe.param_bytes, run.lora)
        alone = run.layout.zero_stage == 0 and run.layout.data_size == 1
        self.grads_always = alone and self.recipe.grad_bytes > self.recipe.param_bytes
        self.kept = Plain(keeps=not self.grads_always)
        self.shards: list[Shard] = []
        steps = steps_of(run.layout, pp_rank)
        ones = [step.instruction for step in steps]
        self.steps, self.in_two = steps, {(one.stage, one.micro_batch) for one in ones if one.op == "W"}
        self.first: dict[int, dict[tuple[str, bool], Change]] = {}
        self.later: dict[int, dict[tuple[str, bool], Change]] = {}
        self.largest = dict.fromkeys((*KINDS, "saved"), 0)
        self.moved_at_once = 0  # bytes of activations that one forward of all stages moves off the device
        for stage in sorted(self.schedule.stages_of_rank(pp_rank), reverse=True):
            on_ledger = self.stage_on_ledger(stage)
            ways = dict.fromkeys(
                (stage, one.micro_batch) in self.in_two for one in ones if one.stage == stage and one.op in "BI"
            )
            self.first[stage] = on_ledger.run(next(iter(ways)))
            self.moved_at_once += self.L.moved_bytes
            self.L.moved_bytes = 0
            self.later[stage] = {}
            for in_two in ways if run.layout.micro_batches > 1 else ():
                self.later[stage] |= on_ledger.run(in_two)

    def stage_on_ledger(self, stage: int) -> StageOnLedger:
        run, layers = self.run, layers_of(self.run.config, self.layout)
        part = part_of(
            run,
            range(sum(layers[:stage]), sum(layers[: stage + 1])),
            self.tp_rank,
            is_first=stage == 0,
            is_last=stage == len(layers) - 1,
            load=self.load,
        )
        mine = [one for one in self.tensors if one.stage == stage]
        weights = {one.name: Weight(one.name, one.numel, frozen=run.lora is not None) for one in mine}
        weights |= {one.name: Weight(one.name, one.numel) for one in self.trained if run.lora is not None}
        if part.is_last and "head" not in weights:  # tied, on this rank: one tensor for both ends
            embed = next(one for one in self.tensors if one.name == "embed")
            weights["head"] = weights.get("embed") or Weight("embed", embed.numel, run.lora is not None)
        return StageOnLedger(self.L, part, weights, self.keeper(stage))

    def moved_bytes(self) -> int:
        """Activations that wait off the device at once: of each micro-batch in flight, what one forward moved."""
        live = most = 0
        for step in self.steps:
            live += {"F": 1, "B": -1, "I": -1, "W": 0}[step.instruction.op]
            most = max(most, live)
        return round(self.moved_at_once / len(self.first) * most)

    def keeper(self, stage: int) -> Plain | Buckets | Units:
        zero_stage = self.layout.zero_stage
        if zero_stage == 0 and self.layout.data_size == 1:
            return self.kept
        if zero_stage < 2:  # a tied weight's gradients from both ends are in one bucket
            return self.buckets
        flats = [flat for flat in self.flats if flat.stage == stage]
        shards = [self.shard(flat, flat.ranks) for flat in flats]
        self.shards += shards
        if zero_stage == 2:
            return Buckets(shards, zero_stage, self.kept)
        units = list(dict.fromkeys(flat.unit for flat in flats))
        uses = {}
        for place, flat in enumerate(flats):
            first = last = units.index(flat.unit)
            if self.run.config.tied and any(one.name == "embed" for one in flat.tensors) and "end" in units:
                last = len(units) - 1
            uses[place] = (first, last)
        return Units(shards, units, uses)

    @cached_property
    def buckets(self) -> Buckets:
        """Of all stages, without ZeRO chapter 3's; what no other rank has stays as it is."""
        if self.layout.zero_stage == 0:
            return Buckets([self.shard(flat, 1) for flat in self.flats if flat.ranks > 1], 1, self.kept)
        self.shards = [self.shard(flat, flat.ranks) for flat in self.flats]
        return Buckets(self.shards, 1, self.kept)

    def shard(self, flat: Flat, ranks: int) -> Shard:
        """A flat, which ZeRO pads for its ranks; a bucket is not cut."""
        sizes = (self.recipe.param_bytes, wire_grad_bytes(self.recipe))
        names = tuple(one.name for one in flat.tensors)
        return Shard(self.L, padded(flat.numel, ranks), ranks, names, sizes, max(self.layout.zero_stage, 1))

    # --- the walk

    def moments(self) -> Iterator[tuple[str, dict[str, int]]]:
        """(name, bytes by kind) of every moment that could be the largest, states aside."""
        boundary = self.boundary_bytes()
        now, inbox, outbox, seen = Counter(), set(), set(), Counter()

        def with_messages(change: dict[str, int]) -> dict[str, int]:
            held = {kind: now[kind] + change.get(kind, 0) for kind in KINDS}
            held["temporary"] += boundary * (len(inbox) + len(outbox))
            return held

        for step in self.steps:
            one = step.instruction
            inbox.update(message for message, _ in step.post)
            yield f"messages before {one}", with_messages({})
            inbox.discard(step.needs)
            outbox.difference_update(step.arrived)
            key = (one.op, (one.stage, one.micro_batch) in self.in_two)
            is_first = not seen[one.op, one.stage] and key in self.first[one.stage]
            change = (self.first if is_first else self.later)[one.stage][key]
            seen[one.op, one.stage] += 1
            yield f"{one}: {change.moment}", with_messages(change.rise)
            self.note_largest(now, change.most)
            now.update(change.net)
            if step.gives is not None:
                (inbox if step.dst is None else outbox).add(step.gives)
        yield "the last message", with_messages({})
        outbox.clear()
        for name, extra in self.after_backward().items():
            yield name, with_messages({"temporary": extra})

    def note_largest(self, now: Counter, most: dict[str, int]) -> None:
        """Each kind's own largest, which need not be at the peak."""
        for kind in KINDS:
            self.largest[kind] = max(self.largest[kind], now[kind] + most[kind])
        saved = now["activations"] + now["logits"] + most["saved"]
        self.largest["saved"] = max(self.largest["saved"], saved)

    def boundary_bytes(self) -> int:
        """What crosses from stage to stage, and as a gradient back."""
        share = layout.tp if (layout := self.layout).sequence_parallel else 1
        return boundary_bytes(
            self.run.config, layout.micro_batch, self.run.seq_len, self.recipe.compute_bytes, layout.cp, share
        )

    def after_backward(self) -> dict[str, int]:
        """What the moments between the last backward and the next step need besides states."""
        e = self.recipe.grad_bytes if self.recipe.grad_bytes != 6 else 4
        pieces = self.owned_sizes()
        found = {}
        for kinds in self.summed_kinds():
            found[f"sum of gradients: {', '.join(kinds)}"] = e * sum(size for one, size in pieces if one in kinds)
        if self.layout.dp_replicate > 1:  # shards' gradients, of experts and of all others, over the replicas
            of_kind = Counter()
            for kind, size in pieces:
                of_kind[kind == "experts"] += size
            found["sum over replicas"] = e * max(of_kind.values())
        largest = max((size for _, size in pieces), default=0)
        wide = 4 * largest
        found["clipping"] = wide * (2 if e < 4 else 1)
        found["update"] = self.update_bytes(pieces)
        return found

    def owned_sizes(self) -> list[tuple[str, int]]:
        if self.layout.zero_stage == 0:
            return [(one.kind, one.numel) for one in self.trained]
        kinds = {one.name: one.kind for one in self.tensors}
        return [(kinds[next(iter(shard.names))], shard.numel // shard.ranks) for shard in self.shards]

    def summed_kinds(self) -> list[tuple[str, ...]]:
        layout, kinds = self.layout, {one.kind for one in self.tensors}
        over_tp = tuple(kind for kind in different_terms_over_tp(layout) if kind in kinds)
        return [each for each in (over_tp, ("kv",), ("tied",)) if kinds.issuperset(each) and each]

    def update_bytes(self, pieces: list[tuple[str, int]]) -> int:
        """AdamW's work space: an FP32 root of its largest tensor, and what it is made from in FP32."""
        recipe, sizes = self.recipe, [size for _, size in pieces]
        largest = max(sizes, default=0)
        if self.run.optimizer != "adamw" or self.run.offload.optimizer != "device":
            return 0
        if self.layout.zero_stage or recipe.master_bytes:  # the course's own, a tensor at a time
            return 4 * largest * (2 if recipe.grad_bytes < 4 else 1)
        itemsize = recipe.param_bytes
        one_by_one = max(before + 2 * size for before, size in pairwise([0, *sizes]))  # the last root is still there
        return itemsize * {"fused": 0, "foreach": sum(sizes), "for-loop": one_by_one}[self.run.implementation]
