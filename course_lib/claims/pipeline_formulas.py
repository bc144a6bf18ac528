"""What claims on pipelines are recomputed with: schedules clocked, closed forms, layers of stages."""

from collections.abc import Sequence
from typing import Literal

from course_lib.hardware import PUBLISHED_1F1B_FALLS, PUBLISHED_1F1B_THROUGHPUT
from course_lib.layout.partition import even_layers
from course_lib.schedules import Costs, Simulation, bubble, interleaving_memory, make, peak_live, simulate
from course_lib.schedules.instructions import loop_placement
from course_lib.validate import Index, Positive, Size, checked, whole

Values = dict[str, object]
UNIT = Costs(1.0, 0.5, 0.5)  # forward and backward take one slot each, as the charts of the claims have them


def _clocked(schedule: str, pp: int, micro_batches: int, v: int = 1) -> Simulation:
    return simulate(make(schedule, pp, micro_batches, v), UNIT)


@checked
def bubble_shares(
    schedule: str, pp: Size, micro_batches: Sequence[Size], share: Literal["ideal", "total"] = "ideal"
) -> Values:
    """Waiting over working and waiting over all, for each number of micro-batches, and how much one of them falls."""
    forms = [bubble(schedule, pp, m) for m in micro_batches]
    shares = {"ideal": [form.of_ideal for form in forms], "total": [form.of_total for form in forms]}
    return {"of_ideal": shares["ideal"], "of_total": shares["total"], "times": shares[share][0] / shares[share][-1]}


@checked
def interleaved(pp: Size, micro_batches: Size, v: Size, share: Literal["ideal", "total"] = "ideal") -> Values:
    """The interleaved schedule beside 1F1B: bubbles clocked, activations of the first rank."""
    stages = [_clocked("1f1b", pp, micro_batches), _clocked("interleaved", pp, micro_batches, v)]
    bubbles = [each.bubble_of_ideal if share == "ideal" else each.bubble_of_total for each in stages]
    return {
        "interleaved": bubbles[1],
        "times": bubbles[0] / bubbles[1],
        "form": (pp - 1) / (v * micro_batches),
        "memory": interleaving_memory(pp, v),
    }


@checked
def ratio_to_ideal(pp: Size, cases: Sequence[Sequence[Size]]) -> Values:
    """(p - 1) / (v m) for each (m, v)."""
    return {"bubbles": [(pp - 1) / (m * v) for m, v in cases]}


@checked
def two_schedules(first: str, second: str, pp: Size, micro_batches: Size) -> Values:
    """Bubbles of two schedules, clocked, and the most micro-batches that rank 0 keeps."""
    one, other = (_clocked(name, pp, micro_batches) for name in (first, second))
    return {
        "bubble": one.bubble_of_total,
        "ratio": one.bubble_of_total / other.bubble_of_total,
        "kept": [one.peak_live[0], other.peak_live[0]],
    }


@checked
def chart(pp: Size, micro_batches: Size, rank: Index, slot: Size) -> Values:
    """What 1F1B does: a rank's instruction in a slot counted from 1, starts of the first backward, length."""
    clock = _clocked("1f1b", pp, micro_batches)
    whole("rank", rank, 0, pp - 1)
    running = [span.name for span in clock.rows[rank] if span.start_s <= slot - 1 < span.stop_s]
    first = [next(span for span in row if span.name.startswith(kind)) for row in clock.rows for kind in "FB"]
    forwards, backwards = first[::2], first[1::2]
    return {
        "instruction": running[0] if running else "nothing",
        "spread": backwards[0].start_s - backwards[-1].start_s,
        "wait": backwards[rank].start_s - forwards[rank].stop_s,
        "slots": clock.makespan_s,
    }


@checked
def published_1f1b(micro_batches: Literal["pp - 1", "32"], pp: Size) -> Values:
    """How much the playbook's tokens/s per GPU fall from half as many stages, and from 2 to 32 stages."""
    bars, falls = PUBLISHED_1F1B_THROUGHPUT[micro_batches], PUBLISHED_1F1B_FALLS[micro_batches]
    if pp not in falls:
        raise ValueError(f"pp is {pp}; choose from {', '.join(map(str, falls))}")
    theory = bubble("1f1b", pp, pp - 1 if micro_batches == "pp - 1" else 32)
    return {"fall": falls[pp], "per_gpu": bars[32] / bars[2], "theory": theory.of_total}


@checked
def mlp_gradients(x: Positive = 0.7, w: Positive = 1.3) -> Values:
    """Backward of y = z^2, z = w x by the chain rule, beside differences."""

    def loss(x: float, w: float) -> float:
        return (w * x) ** 2

    dz, step = 2 * w * x, 1e-6
    by_rule = dz * w, dz * x
    by_difference = (
        (loss(x + step, w) - loss(x - step, w)) / (2 * step),
        (loss(x, w + step) - loss(x, w - step)) / (2 * step),
    )
    return {"error": max(abs(a - b) for a, b in zip(by_rule, by_difference, strict=True))}


@checked
def kept(schedule: str, pp: Size, micro_batches: Size, rank: Index, layers: Size = 32) -> Values:
    """Most micro-batches that a rank keeps, and layers whose activations it keeps of a model with so many."""
    whole("rank", rank, 0, pp - 1)
    alive = peak_live(schedule, pp, micro_batches)[rank]
    return {"micro_batches": alive, "layers": alive * even_layers(layers, pp)[rank]}


@checked
def beside_1f1b(schedule: str, pp: Size, micro_batches: Size) -> Values:
    """A schedule with a split backward beside 1F1B, F = I = W: its bubble, and what rank 0 keeps."""
    costs = Costs(pair_s=3.0) if schedule == "dualpipe_v" else Costs()
    form, plain = bubble(schedule, pp, micro_batches, costs=costs), bubble("1f1b", pp, micro_batches)
    kept = peak_live(schedule, pp, micro_batches)[0] / peak_live("1f1b", pp, micro_batches)[0]
    return {"of_1f1b": form.idle_s / plain.idle_s, "of_ideal": form.of_ideal, "kept": kept}


@checked
def layers_of_rank(layers: Size, pp: Size, rank: Index, v: Size = 1) -> Values:
    """Layers of a rank with v stages, counted from 1."""
    whole("rank", rank, 0, pp - 1)
    sizes, placed = even_layers(layers, pp * v), loop_placement(pp, v)
    mine = [stage for stage in range(pp * v) if placed[stage] == rank]
    return {"layers": [sum(sizes[:stage]) + i + 1 for stage in mine for i in range(sizes[stage])]}
