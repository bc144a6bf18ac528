"""Pipelines (lesson 8): schedules on the clock, and a puzzle: to place a pipeline's work on a grid by hand."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from course_lib.panels.controls import controls, named
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Box, Chart, bars, columns
from course_lib.schedules import SCHEDULES, chart_problems, from_lists, make, problems, simulate, stages_per_rank
from course_lib.schedules.check import chart_times
from course_lib.schedules.instructions import Instruction, Schedule, is_idle, loop_placement, read_instruction, words_of
from course_lib.schedules.simulator import Costs, Simulation, text_chart
from course_lib.span import Span

_MOST_BOXES = 700  # more cannot be told apart in one chart
NAMES = {
    "naive": "naive: one micro-batch after the other",
    "afab": "all forward, all backward (GPipe)",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zbv": "ZBV",
    "dualpipe_v": "DualPipeV",
}
PARTS = {"F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradients"}


def schedule_chart(title: str, schedule: Schedule, spans: Sequence[Sequence[Span]], stop_s: float) -> Chart:
    """A lane for each rank, with what ran of its work, simulated or measured; a rank's later stages are lighter."""
    rows = {}
    for rank, row in enumerate(spans):
        stages = schedule.stages_of_rank(rank)
        shades = {stage: 0.55 * place / max(1, len(stages) - 1) for place, stage in enumerate(stages)}
        instructions = [(read_instruction(span.name, rank, f"rank {rank}"), span) for span in row]
        rows[f"rank {rank}"] = [
            Box(span.start_s, span.stop_s, PARTS[one.op], str(one.micro_batch), shades[one.stage])
            for one, span in instructions
        ]
    return Chart(title, rows, stop_s, unit="count", ground=True)


def _draw_pipeline(schedule, pp, micro_batches, v, forward, input_gradient, weight_gradient, transfer) -> Shown:
    """Clock a schedule. Times are of all layers of a rank, for one micro-batch; v: stages a rank (interleaved)."""
    made, stages = make(schedule, pp, micro_batches, v), stages_per_rank(schedule, v)
    if (boxes := sum(map(len, made.instructions))) > _MOST_BOXES:
        raise ValueError(
            f"{boxes} instructions are more than one chart has room for ({_MOST_BOXES}); choose fewer micro-batches, "
            "ranks or stages a rank"
        )
    each = (forward, input_gradient, weight_gradient, transfer)
    clocked = simulate(made, Costs(*(seconds / stages for seconds in each)))
    alone, together = ([size / stages for size in clocked.peak_bytes(1, waiting)] for waiting in (0, 1))
    said = (
        f"Ideal {sum(clocked.busy_s) / pp:.4g} (all work, no waiting), simulated {clocked.makespan_s:.4g}: idle time "
        f"is {clocked.bubble_of_ideal:.1%} of the ideal time, {clocked.bubble_of_total:.1%} of the total time. "
    )
    if clocked.back_to_back_s < clocked.makespan_s - 1e-9:
        said += (
            f"Without a barrier the next step can follow after {clocked.back_to_back_s:.4g}: then "
            f"{clocked.bubble_of_ideal_back_to_back:.1%} and {clocked.bubble_of_total_back_to_back:.1%}. "
        )
    said += (
        f"Peak: activations of {max(alone):.3g} micro-batches in 1/{pp} of the layers, as many bytes as "
        f"{max(alone) / pp:.3g} in the whole model."
    )
    if together != alone:
        said += f" With those that wait for weight gradients, at most {max(together):.3g} at once."
    most = {
        f"rank {rank}": {"in flight": one, "waiting for weight gradients": both - one}
        for rank, (one, both) in enumerate(zip(alone, together, strict=True))
    }
    title = f"{NAMES.get(schedule, schedule)}: a bubble of {clocked.bubble_of_ideal:.1%} of the ideal time"
    return [
        schedule_chart(title, clocked.schedule, clocked.rows, clocked.makespan_s),
        columns("Most micro-batches kept at once, by rank", most, "count", upright=90),
    ], said


PIPELINE = Panel(
    "A pipeline schedule",
    controls(schedule=("1f1b", tuple((NAMES.get(key, key), key) for key in SCHEDULES)), pp=(4, named(range(1, 9))))
    | controls(micro_batches=(8, named((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32))))
    | controls(v=(1, named(range(1, 5))), forward=1.0, input_gradient=1.0, weight_gradient=1.0, transfer=0.0),
    _draw_pipeline,
)

RANKS, MICRO_BATCHES, SLOTS = 3, 4, 28
LENGTHS = {"F": 1, "B": 2, "I": 1, "W": 1}
_RULES = "F takes 1 slot; B takes 2, or in its place I and W, 1 each: the rank before needs only I."
_SHOWN = 3  # problems at once; the rest is counted


def cells_of(chart: str) -> list[list[str]]:
    """Return a chart's cells, SLOTS a rank: a word, "-" it goes on, "." it waits; raises ValueError for other lines."""
    rows = words_of(chart.upper())
    if len(rows) != RANKS or max(map(len, rows)) > SLOTS:
        sizes = f"{len(rows)} lines of at most {max(map(len, rows), default=0)} words"
        raise ValueError(f"the chart has {sizes}; write {RANKS}, one for each rank, of at most {SLOTS} words")
    return [[*row, *["."] * (SLOTS - len(row))] for row in rows]


def press(chart: str, rank: int, slot: int, op: str) -> str:
    """Return the chart with the next micro-batch of op placed at a slot, or without the word that lies there."""
    rows = cells_of(chart)
    row, first = rows[rank], slot
    while row[first] == "-":
        first -= 1
    stop = next((at for at in range(first + 1, SLOTS) if row[at] != "-"), SLOTS)
    if row[first] != ".":
        row[first:stop] = ["."] * (stop - first)
    else:
        clash = {"F": "F", "B": "BIW", "I": "BI", "W": "BW"}[op]
        row[slot] = next(f"{op}{i}" for i in range(SLOTS) if not {f"{one}{i}" for one in clash} & set(row))
        if row[slot + 1 : slot + LENGTHS[op]] == ["."]:
            row[slot + 1] = "-"
    return "\n".join(map(" ".join, rows))


@cache
def known_schedules(message: int) -> dict[str, Simulation]:
    """Return 1F1B and ZB-H1 on the clock, with so many slots for a message."""
    names, costs = {"1F1B": "1f1b", "ZB-H1": "zb_h1"}, Costs(1.0, 1.0, 1.0, message)
    return {label: simulate(make(name, RANKS, MICRO_BATCHES), costs) for label, name in names.items()}


def left_of(row: Sequence[Instruction], micro_batches: int) -> list[str]:
    """Return what a rank still lacks, in words without the stage."""
    placed, left = {(one.op, one.micro_batch) for one in row}, []
    for i in range(micro_batches):
        has = {op for op in "FBIW" if (op, i) in placed}
        left += [f"F{i}"] * ("F" not in has)
        left += [f"B{i}"] if not has & set("BIW") else [f"{op}{i}" for op in "IW" if not has & {"B", op}]
    return left


def shown_chart(chart: str, message: int) -> Shown:
    """Return the chart, and its slots beside 1F1B and ZB-H1; mistakes, what is missing, or how good it is.

    Told at once are mistakes that nothing placed later can mend; what is merely not placed yet is none.
    Raises   ValueError for a word that cannot be read, or another number of lines
    """
    rows, stages, known = cells_of(chart), loop_placement(RANKS, 1), known_schedules(message)
    if all(is_idle(word) for row in rows for word in row):
        raise ValueError(f"the chart is empty; place F0 on rank 0 first. {_RULES}")
    schedule = from_lists(rows, stages, MICRO_BATCHES, name="yours")
    yours = Simulation(schedule, known["1F1B"].costs, chart_times(rows, schedule))
    left = {rank: left_of(row, MICRO_BATCHES) for rank, row in enumerate(schedule.instructions)}
    lacks = "; ".join(f"rank {rank}: {' '.join(words)}" for rank, words in left.items() if words)
    wrong = [*_wrong_lengths(yours), *problems(schedule, whole=not lacks)]
    if wrong := wrong or chart_problems("\n".join(map(" ".join, rows)), stages, False, message):
        more = [f"And {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
        said = f"Not possible yet. {'. '.join([*wrong[:_SHOWN], *more])}."
    elif lacks:
        said = f"Good so far. Still to place: {lacks}. {_RULES}"
    else:
        said = _score(yours, known)
    longest_s = max(one.makespan_s for one in (yours, *known.values()))
    lanes = schedule_chart("Your schedule", schedule, yours.rows, longest_s)
    found = {"yours": yours} | known
    slots = {
        label: {"computing": sum(one.busy_s) / RANKS, "bubble": sum(one.idle_s) / RANKS} for label, one in found.items()
    }
    kept = {label: f" slots; a rank keeps {_kept(one)}" for label, one in found.items()}
    return [lanes, bars("Slots until the last rank is done", slots, "count", notes=kept, chosen="yours")], said


def _wrong_lengths(simulation: Simulation) -> Iterator[str]:
    for rank, row in enumerate(simulation.timed):
        for one, span in row:
            if span.seconds != LENGTHS[one.op]:
                word, slots = f"{one.op}{one.micro_batch}", LENGTHS[one.op]
                needs = f"{word} takes {slots} slot{'s' * (slots > 1)}; write {' '.join([word, *'-' * (slots - 1)])}"
                yield f"column {span.start_s}: on rank {rank} {needs}"


def _kept(simulation: Simulation) -> str:
    """The most micro-batches that each rank keeps, from F to B, or to W."""
    return ", ".join(f"{count:g}" for count in simulation.peak_bytes(1, 1))


def _score(yours: Simulation, known: Mapping[str, Simulation]) -> str:
    """How long, how many micro-batches a rank keeps, and both of the known schedules."""
    said = f"Complete and right: {yours.makespan_s:g} slots, a rank keeps {_kept(yours)} micro-batches."
    for label, one in known.items():
        more = yours.makespan_s - one.makespan_s
        words = f"{abs(more):g} {'more' if more > 0 else 'fewer'} than" if more else "as many as"
        said += f" That is {words} {label}, which keeps {_kept(one)}."
    return said


_BEGUN = press(press(press("\n".join("." * RANKS), 0, 0, "F"), 1, 2, "F"), 2, 4, "F")  # a message takes slot 1, slot 3

PUZZLE = Panel(
    "Place the blocks of a pipeline",
    {
        "chart": Control("place", tuple((PARTS[op], op) for op in LENGTHS), _BEGUN, "grid", cells_of, press),
        "message": Control("a message takes", (("no slot", 0), ("1 slot", 1)), 1),
    },
    shown_chart,
    {
        label: ({"chart": "\n".join(map(" ".join, cells_of(text_chart(one))))}, "")
        for label, one in known_schedules(1).items()
    }
    | {"a beginning": ({}, "")},
)
