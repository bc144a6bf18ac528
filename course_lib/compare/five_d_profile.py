"""A layout measured: a toy trained on real ranks, what each holds and sends beside the formulas."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from course_lib.compare.profile import SENT_OVER, STATES, Comparison, KindComparison
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure.meter import ByteMeter
from course_lib.measure.tracker import KINDS, MemoryTracker
from course_lib.memory.budget import Budget, budgets, states_of
from course_lib.model.moe import MoE
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.run import Run
from course_lib.traffic import sent
from course_lib.training import data
from course_lib.training.precision import engine_dtypes

MOST_RANKS = 16  # they share this machine's cores
_WIDEST = 256  # d_model: two steps on a CPU take seconds


@dataclass(frozen=True)
class Seen:
    """What one rank saw: the largest of each kind, bytes sent by axis, and which experts its tokens chose."""

    largest_bytes: dict[str, int]
    sent_by_axis: dict[str, int]
    choices: list[torch.Tensor]  # expert_Tk, -1 where dropped: of each micro-batch and layer, as they came


def measure_five_d(config: ModelConfig, layout: Layout, seq_len: int = 64, recipe: str = "fp32") -> Comparison:
    """Train two steps on real ranks, and lay what each held and sent on the formulas.

    Raises   ValueError if the model cannot lie so, is too large, or no engine takes the recipe; before a rank starts
    """
    dtypes = engine_dtypes(recipe)
    if layout.world_size > MOST_RANKS or config.d_model > _WIDEST:
        raise ValueError(
            f"{config.name} on {layout.world_size:,} ranks is not measured here: at most {MOST_RANKS} ranks and a toy; "
            "choose toy, toy-moe or speaks, and sizes whose product is small"
        )
    layout.check_model(config, seq_len)
    start_s = time.perf_counter()
    seen = launch(_one_rank, layout.world_size, config, layout, seq_len, dtypes, quiet=True)
    run = Run(config, layout, seq_len, recipe, device=seen.device_type)
    predicted = budgets(run)
    of_ranks = tuple(_rows(run, rank, seen, predicted) for rank in range(layout.world_size))
    what = f"{config.name}, {layout}, {recipe}, sequences of {seq_len} tokens"
    return Comparison(what, of_ranks, time.perf_counter() - start_s)


def _rows(run: Run, rank: int, seen: Sequence[Seen], predicted: Sequence[Budget]) -> tuple[KindComparison, ...]:
    config, layout = run.config, run.layout
    here, routings = layout.mesh.coordinates(rank), None
    if config.moe is not None:
        members = layout.members(rank)["ep"]
        routings = list(zip(*(seen[member].choices for member in members), strict=True))
    states = states_of(run, here["pp"], here["tp"])
    of_stage = predicted[here["pp"]].by_kind | {kind: getattr(states, kind) for kind in STATES}
    rows = [KindComparison(kind, of_stage[kind], seen[rank].largest_bytes[kind]) for kind in KINDS]
    listed = sent(run, rank, routings=routings)
    measured = seen[rank].sent_by_axis
    axes = [axis for axis in listed | measured if listed.get(axis, 0) or measured.get(axis, 0)]
    return (*rows, *(KindComparison(SENT_OVER + axis, listed.get(axis, 0), measured.get(axis, 0)) for axis in axes))


# ------------------------------------------------------------------------------------ on each rank
def _one_rank(
    config: ModelConfig,
    layout: Layout,
    seq_len: int,
    dtypes: tuple[torch.dtype, torch.dtype | None] = (torch.float32, None),
) -> Seen:
    """One step under the tracker, one under the meter: each sees every operator, so they do not share a step."""
    engine = five_d.build(config, layout, dtype=dtypes[0], grad_dtype=dtypes[1])
    optimizer = engines.make_optimizer(engine)
    text_T, choices = data.tokens(20_000) % config.vocab_size, []
    dp_rank = engine.groups.dp.rank()
    micro_batches = [
        data.batch(text_T, index * layout.dp + dp_rank, layout.micro_batch, seq_len)
        for index in range(layout.micro_batches)
    ]
    with MemoryTracker(engine, optimizer) as tracker:
        engines.step(engine, micro_batches, optimizer)
    for moe in (module for module in engine.modules() if isinstance(module, MoE)):
        moe.router.register_forward_hook(lambda *call: choices.append(call[-1]))
    with ByteMeter(axes=engine.axes) as meter:
        engines.step(engine, micro_batches, optimizer)
    kept = [torch.where(one.kept_Tk, one.expert_Tk, -1) for one in choices]
    kept = first_times(kept) if layout.recompute == "full" else kept
    columns = tracker.timeline.bytes_by_kind
    sent = {axis: size for axis, size in meter.by_axis.items() if size}
    return Seen({kind: max(columns[kind]) for kind in KINDS}, sent, kept)


def first_times(choices: list[torch.Tensor]) -> list[torch.Tensor]:
    """With full recomputation each router runs twice on the same tokens: the first of each two, in order."""
    first, not_again = [], []
    for chosen in choices:
        again = next((i for i, earlier in enumerate(not_again) if torch.equal(earlier, chosen)), None)
        if again is None:
            first.append(chosen)
            not_again.append(chosen)
        else:
            not_again.pop(again)
    return first
