"""Pipelines as lanes, drawn as a panel draws them: schedules, messages, what ranks did, stages, what is in flight."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median

from course_lib.panels.pipeline import schedule_chart
from course_lib.panels.svg import Arrow, Box, Chart, bars
from course_lib.plots.concepts import show_charts
from course_lib.schedules.instructions import Schedule, needs, read_instruction
from course_lib.schedules.simulator import Costs, Simulation
from course_lib.span import Span
from course_lib.units import show_seconds
from course_lib.validate import Amount, checked

Traces = Sequence[Sequence[Span]]


def percent(share: Amount) -> str:
    """A share as a reader wants it: 27.3 %, 75 %, 0 %."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def chart_title(simulation: Simulation) -> str:
    """What the chart shows, in one sentence: the bubble by both definitions."""
    p, m = simulation.schedule.pp, simulation.schedule.num_micro_batches
    return (
        f"{simulation.schedule.name}, {p} rank{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}: "
        f"bubble {percent(simulation.bubble_of_ideal)} of ideal time, {percent(simulation.bubble_of_total)} of total"
    )


@checked
def show_schedule(simulation: Simulation) -> None:
    """Show a simulated schedule as a chart, with its bubble in both definitions as the title."""
    show_schedules([simulation])


@checked
def show_schedules(simulations: Sequence[Simulation]) -> None:
    """Show simulated schedules one above the other on one time axis, with bubbles; raises ValueError without one."""
    if not simulations:
        raise ValueError("there is no simulation to draw; give at least one simulate(schedule, costs)")
    stop_s = max(one.makespan_s for one in simulations)
    charts = [schedule_chart(chart_title(one), one.schedule, one.rows, stop_s) for one in simulations]
    show_charts("Pipeline schedules in simulated time", *charts)


def warm_ups(simulation: Simulation) -> list[int]:
    """Count the forwards of each rank before its first backward: its warm-up, and the first of the steady state."""
    ops = ["".join(one.op for one in row) for row in simulation.schedule.instructions]
    return [len(row) - len(row.lstrip("F")) for row in ops]


@checked
def show_warm_up(simulation: Simulation) -> None:
    """Show a chart until its last rank has done its first backward, with each rank's forwards before it behind."""
    counts = warm_ups(simulation)
    end_s = max(row[count][1] for count, row in zip(counts, simulation.times, strict=True))
    rows = [[span for span in row if span.stop_s <= end_s] for row in simulation.rows]
    title = f"{simulation.schedule.name}: forwards before the first backward"
    notes = {f"rank {rank}": f"{count} before" for rank, count in enumerate(counts)}
    show_charts(title, replace(schedule_chart(title, simulation.schedule, rows, end_s), notes=notes))


def message_arrows(simulation: Simulation) -> list[Arrow]:
    """Return each message between two ranks, from the end of what made it to the start of what needed it."""
    at = {one: (f"rank {rank}", span) for rank, row in enumerate(simulation.timed) for one, span in row}
    return [
        Arrow(at[need][0], at[need][1].stop_s, label, span.start_s)
        for one, (label, span) in at.items()
        for need in needs(one, simulation.schedule)
        if at[need][0] != label
    ]


@checked
def show_messages(simulation: Simulation, title: str) -> None:
    """Show a simulated schedule as a chart, with an arrow for each message."""
    chart = schedule_chart("simulated time (slots)", simulation.schedule, simulation.rows, simulation.makespan_s)
    show_charts(title, replace(chart, title=title, arrows=message_arrows(simulation)))


def in_order(traces: Traces) -> list[list[Span]]:
    """Return spans from as many ends as came before each to as many as have come with its own."""
    ends = sorted(span.stop_s for trace in traces for span in trace)
    return [
        [replace(s, start_s=float(bisect(ends, s.start_s)), stop_s=float(bisect(ends, s.stop_s))) for s in trace]
        for trace in traces
    ]


@checked
def show_trace(schedule: Schedule, traces: Traces, title: str) -> None:
    """Show in which order the ranks of a schedule computed what: a place for each end, whatever its seconds."""
    rows = in_order(traces)
    chart = schedule_chart("", schedule, rows, max(span.stop_s for row in rows for span in row))
    show_charts(title, replace(chart, title=f"{title} (not time)"))


def from_zero(schedule: Schedule, traces: Traces) -> list[list[Span]]:
    """Return traces from the start of the first instruction; raises ValueError unless there is one for each rank."""
    if len(traces) != schedule.pp or not any(traces):
        raise ValueError(f"got {len(traces)} traces; give one for each of {schedule.pp} ranks, from a step with trace")
    first_s = min(span.start_s for trace in traces for span in trace)
    return [[replace(s, start_s=s.start_s - first_s, stop_s=s.stop_s - first_s) for s in trace] for trace in traces]


def is_in_order(schedule: Schedule, traces: Traces) -> bool:
    """Whether every rank executed its instructions in the order of the schedule."""
    names = [[span.name for span in trace] for trace in traces]
    return names == [[str(one) for one in row] for row in schedule.instructions]


@checked
def show_measured(simulation: Simulation, traces: Traces) -> None:
    """Show what ranks did above the schedule, simulated with measured costs; raises ValueError as `from_zero`."""
    schedule, rows = simulation.schedule, from_zero(simulation.schedule, traces)
    measured_s = max(span.stop_s for row in rows for span in row)
    order = "Executed in the order drawn" if is_in_order(schedule, traces) else "NOT executed in the order drawn"
    titles = f"measured, {show_seconds(measured_s)}", f"simulated, {show_seconds(simulation.makespan_s)}"
    stop_s = max(measured_s, simulation.makespan_s)
    charts = [
        replace(schedule_chart(title, schedule, of, stop_s), unit="seconds")
        for title, of in zip(titles, (rows, simulation.rows), strict=True)
    ]
    show_charts(order, *charts)


@checked
def measured_costs(schedule: Schedule, traces: Traces) -> Costs:
    """What to simulate a measured step with: for each stage the median seconds of its forwards and backwards.

    A stage that ran only whole backwards gets half of their time for each part.
    Raises   ValueError if a stage has no forward or no backward in the traces
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for trace in traces:
        for span in trace:
            one = read_instruction(span.name, span.rank, f"rank {span.rank}")
            seconds.setdefault((one.op, one.stage), []).append(span.seconds)
    medians = {key: median(values) for key, values in seconds.items()}
    stages = range(schedule.num_stages)
    missing = [s for s in stages if ("F", s) not in medians or not {("B", s), ("I", s)} & set(medians)]
    if missing:
        raise ValueError(f"stages {missing} have no forward or no backward in the traces; give those of a whole step")
    input_s = [medians.get(("I", s), medians.get(("B", s), 0.0) / 2) for s in stages]
    weight_s = [medians.get(("W", s), medians.get(("B", s), 0.0) - input_s[s]) for s in stages]
    return Costs([medians["F", s] for s in stages], input_s, [max(seconds, 0.0) for seconds in weight_s])


@checked
def show_stages_of_model(
    layers_of_stage: Sequence[int], rank_of_stage: Sequence[int] | None = None, parameters_of_rank: Sequence[float] = ()
) -> None:
    """Show which layers are where, with embedding and head; behind it the parameters of each rank, if given.

    Without `rank_of_stage` stage s is on rank s.
    Raises   ValueError if there is no stage, a negative number of layers, or not one rank for each stage
    """
    owners = list(range(len(layers_of_stage)) if rank_of_stage is None else rank_of_stage)
    if not layers_of_stage or len(owners) != len(layers_of_stage) or min(layers_of_stage) < 0:
        raise ValueError(
            f"got {len(layers_of_stage)} stages with layers {list(layers_of_stage)} and {len(owners)} ranks; "
            "give the layers of each stage, 0 or more, and the rank of each"
        )
    layers, boxes = sum(layers_of_stage), [[] for _ in range(1 + max(owners))]
    boxes[owners[0]].append(Box(-2, 0, "embed", "embed"))
    for stage, (rank, stop) in enumerate(zip(owners, accumulate(layers_of_stage), strict=True)):
        own = range(stop - layers_of_stage[stage], stop)
        boxes[rank] += [Box(layer, layer + 1, "layer", str(layer), 0.4 * (stage % 2)) for layer in own]
    boxes[owners[-1]].append(Box(layers, layers + 2, "head", "head"))
    ends = "rank 0 has both ends of the model" if owners[-1] == 0 else "embedding on the first, head on the last"
    title = f"{layers} layers in {len(owners)} stages on {len(boxes)} ranks: {ends}"
    rows = {f"rank {rank}": row for rank, row in enumerate(boxes)}
    notes = {f"rank {rank}": f"{size / 1e9:.2f} billion" for rank, size in enumerate(parameters_of_rank)}
    show_charts(title, Chart(title, rows, layers + 2, -2, "count", notes=notes, ground=True))


@checked
def peaks_of(simulation: Simulation) -> list[float]:
    """Most micro-batches in flight at once on each rank; 1 is one micro-batch through all of the rank's layers."""
    return [peak / simulation.schedule.v for peak in simulation.peak_live]


@checked
def show_live(simulation: Simulation) -> None:
    """Show how many micro-batches' activations each rank keeps over time, from F to B or I; its peak at the right."""
    end_s, peaks = simulation.makespan_s, peaks_of(simulation)
    rows = {}
    for rank, changes in enumerate(simulation.live):
        stops = [at for at, _ in changes[1:]] + [end_s]
        counts = [(start, stop, n / simulation.schedule.v) for (start, n), stop in zip(changes, stops, strict=True)]
        rows[f"rank {rank}"] = [
            Box(start, stop, "in flight", f"{n:.3g}", 0.8 * (1 - n / max(peaks)))
            for start, stop, n in counts
            if n and stop > start
        ]
    notes = {label: f"peak {peak:.3g}" for label, peak in zip(rows, peaks, strict=True)}
    title = f"{simulation.schedule.name}: micro-batches in flight"
    show_charts(title, Chart(title, rows, end_s, unit="count", notes=notes, ground=True))


@checked
def show_tradeoff(simulations: Sequence[Simulation]) -> None:
    """Show bubbles, with the most in flight on a rank, and those without a barrier; raises ValueError for none."""
    rows = {one.schedule.name: {"bubble": one.bubble_of_ideal} for one in simulations}
    notes = {
        one.schedule.name: f", {percent(one.bubble_of_ideal_back_to_back)} step to step; {max(peaks_of(one)):.3g} kept"
        for one in simulations
    }
    title = "Bubble of ideal time, and micro-batches in flight on the fullest rank"
    show_charts(title, bars(title, rows, "share", notes=notes))
