"""A puzzle: place forwards and backwards of a pipeline by hand, and read what is wrong, what it costs, what is best."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import ipywidgets as widgets

from course_lib.plots.pipeline import SchedulePicture, chart_height_in, draw_chart, percent, picture_of
from course_lib.plots.pipeline import boxes_of as boxes_of_rows
from course_lib.plots.stages import short
from course_lib.schedules import SCHEDULES, make, stages_per_rank
from course_lib.schedules.check import problems, runnable_order
from course_lib.schedules.instructions import Instruction, Schedule, from_lists, loop_placement, needs
from course_lib.schedules.simulator import Costs, Simulation, simulate
from course_lib.span import Span
from course_lib.validate import Size, checked
from course_lib.widgets import parts

MOST_RANKS, MOST_MICRO_BATCHES = 8, 12
COSTS = Costs(forward_s=1.0, input_backward_s=1.0, weight_backward_s=1.0)
SHOWN = 4  # problems at once; the rest is counted


@dataclass(frozen=True)
class Best:
    """The shortest known schedule of one kind; among equally long ones that which keeps least alive."""

    name: str
    makespan_s: float
    peaks: tuple[int, ...]  # by rank
    simulation: Simulation


@dataclass(frozen=True)
class PuzzleAnswer:
    """What the checker says to the words placed so far.

    wrong: mistakes, each with its place. waits: ranks that cannot go on, and for what. left: what each rank still has
    to place. chart: what can run of it. simulation: the clocked schedule, once all is placed and right.
    """

    wrong: list[str]
    waits: list[str]
    left: list[list[str]]
    chart: SchedulePicture | None
    simulation: Simulation | None

    @property
    def solved(self) -> bool:
        return self.simulation is not None


@checked
def check_puzzle(rows: Sequence[str], num_micro_batches: Size) -> PuzzleAnswer:
    """Judge what is placed: a text for each rank, such as "F0 F1 B0 B1"; I and W together do the work of one B.

    Mistakes are told at once, what is merely not placed yet is not a mistake.
    """
    try:
        schedule = _read(rows, num_micro_batches)
    except ValueError as error:
        return PuzzleAnswer([str(error)], [], [[] for _ in rows], None, None)
    left = [_left(row, rank, num_micro_batches) for rank, row in enumerate(schedule.instructions)]
    wrong = _mistakes(schedule)
    if not wrong and not any(left):
        wrong = problems(schedule)
    if not wrong and not any(left):
        simulation = simulate(schedule, COSTS)
        chart = picture_of(schedule, boxes_of_rows(schedule, simulation.rows))
        return PuzzleAnswer([], [], left, chart, simulation)
    order, reached = runnable_order(schedule)
    wrong = wrong or _circle(schedule, reached)
    rows_of_spans = _clock(schedule, [one for _, group in order for one in group])
    boxes = boxes_of_rows(schedule, rows_of_spans)
    waits = [] if wrong else _waits(schedule, reached)
    return PuzzleAnswer(wrong, waits, left, picture_of(schedule, boxes) if boxes else None, None)


def _read(rows: Sequence[str], num_micro_batches: int) -> Schedule:
    """Words to a schedule with one stage a rank; commas may stand between words, and letters may be small."""
    words = [row.replace(",", " ").upper().split() for row in rows]
    if not any(words):
        return Schedule(
            "Your schedule", len(rows), num_micro_batches, loop_placement(len(rows), 1), tuple(() for _ in rows)
        )
    return from_lists(words, loop_placement(len(rows), 1), num_micro_batches, name="Your schedule")


def _left(row: Sequence[Instruction], rank: int, num_micro_batches: int) -> list[str]:
    """What a rank still lacks, in words without the stage."""
    placed = {(one.op, one.micro_batch) for one in row}
    left = []
    for micro_batch in range(num_micro_batches):
        has = {op for op in "FBIW" if (op, micro_batch) in placed}
        left += [f"F{micro_batch}"] if "F" not in has else []
        if not has & set("BIW"):
            left.append(f"B{micro_batch}")
        elif "B" not in has:
            left += [f"{op}{micro_batch}" for op in "IW" if op not in has]
    return left


def _mistakes(schedule: Schedule) -> list[str]:
    """What no further block can fix: strangers, repetitions, and what stands before something that it needs."""
    found = []
    for rank, row in enumerate(schedule.instructions):
        times = Counter((one.op, one.micro_batch) for one in row)
        place_of = {(one.op, one.micro_batch): place for place, one in reversed(list(enumerate(row)))}
        for place, one in enumerate(row):
            name, where = f"{one.op}{one.micro_batch}", f"Rank {rank}, place {place}:"
            if one.stage != rank:
                found.append(f"{where} {one} is work of rank {one.stage}; here each rank has one stage, its own.")
            elif one.micro_batch >= schedule.num_micro_batches:
                last = schedule.num_micro_batches - 1
                found.append(f"{where} there is no micro-batch {one.micro_batch}; they are 0 to {last}.")
            elif times[one.op, one.micro_batch] > 1 and place_of[one.op, one.micro_batch] == place:
                found.append(f"{where} {name} stands here {times[one.op, one.micro_batch]} times; once is right.")
            elif one.op in "IW" and times["B", one.micro_batch]:
                found.append(f"{where} {name} is a part of B{one.micro_batch}, which stands here too; take out one.")
            else:
                before = {"F": "", "B": "F", "I": "F", "W": "I"}[one.op]
                if before and place_of.get((before, one.micro_batch), -1) > place:
                    found.append(f"{where} {name} stands before {before}{one.micro_batch}, which it needs.")
    return found


def _clock(schedule: Schedule, order: Sequence[Instruction]) -> list[list[Span]]:
    """When what can run of an unfinished schedule runs; `order` has everything behind what it needs."""
    rows: list[list[Span]] = [[] for _ in range(schedule.pp)]
    stop_s: dict[Instruction, float] = {}
    for one in order:
        rank = schedule.rank_of_stage[one.stage]
        free_s = rows[rank][-1].stop_s if rows[rank] else 0.0
        start_s = max([free_s, *(stop_s[need] for need in needs(one, schedule))])
        stop_s[one] = start_s + COSTS.seconds(one)
        rows[rank].append(Span(rank, "compute", str(one), start_s, stop_s[one]))
    return rows


def _stuck(schedule: Schedule, reached: Sequence[int]) -> dict[int, tuple[Instruction, Instruction]]:
    """For each rank that cannot go on: the instruction at which it stands, and what it waits for."""
    done = {one for row, count in zip(schedule.instructions, reached, strict=True) for one in row[:count]}
    stands = {rank: row[reached[rank]] for rank, row in enumerate(schedule.instructions) if reached[rank] < len(row)}
    return {
        rank: (one, next(need for need in needs(one, schedule) if need not in done)) for rank, one in stands.items()
    }


def _waits(schedule: Schedule, reached: Sequence[int]) -> list[str]:
    """Which ranks cannot go on with what is placed, and what they wait for."""
    placed = {one for row in schedule.instructions for one in row}
    said = []
    for rank, (one, need) in _stuck(schedule, reached).items():
        how = "is placed, but waits itself" if need in placed else "is not placed yet"
        what = f"B{need.micro_batch} or I{need.micro_batch}" if need.op == "B" and need not in placed else _word(need)
        said.append(f"Rank {rank} waits at {_word(one)} for {what} of rank {need.stage}, which {how}.")
    return said


def _word(one: Instruction) -> str:
    return f"{one.op}{one.micro_batch}"


def _circle(schedule: Schedule, reached: Sequence[int]) -> list[str]:
    """Ranks that wait for each other: whatever else is placed behind, they never go on."""
    placed = {one for row in schedule.instructions for one in row}
    stuck = _stuck(schedule, reached)
    for start in stuck:
        way = [start]
        while way[-1] in stuck and stuck[way[-1]][1] in placed:
            following = stuck[way[-1]][1].stage
            if following == start:
                waits = [(rank, *stuck[rank]) for rank in way]
                chain = ", ".join(
                    f"rank {rank} waits at {_word(one)} for {_word(need)} of rank {need.stage}"
                    for rank, one, need in waits
                )
                return [f"Deadlock: {chain}. No further block can end that; change the order of one of them."]
            if following in way:
                break
            way.append(following)
    return []


# ---------------------------------------------------------------- how good


@checked
def best_known(pp: Size, num_micro_batches: Size, split: bool) -> Best:
    """The best of the course's schedules with one stage a rank, with whole backwards or with split ones.

    With whole backwards nothing is shorter: the last rank starts after pp - 1 forwards, and behind its last backward
    follow pp - 1 more.
    """
    found = []
    for name in SCHEDULES:
        if stages_per_rank(name) == 1:
            schedule = make(name, pp, num_micro_batches)
            if schedule.splits_backward == split:
                simulation = simulate(schedule, COSTS)
                found.append(Best(schedule.name, simulation.makespan_s, simulation.peak_live, simulation))
    return min(found, key=lambda best: (best.makespan_s, sum(best.peaks)))


@checked
def describe_puzzle(answer: PuzzleAnswer) -> str:
    """The answer as HTML: mistakes, or what is missing, or the score."""
    if answer.wrong:
        more = [f"and {len(answer.wrong) - SHOWN} more"] if len(answer.wrong) > SHOWN else []
        items = "".join(f"<li>{escape(text)}</li>" for text in [*answer.wrong[:SHOWN], *more])
        return f"<b>Not possible yet.</b><ul>{items}</ul>"
    if not answer.solved:
        left = "; ".join(f"rank {rank}: {_few(words)}" for rank, words in enumerate(answer.left) if words)
        waits = "".join(f"<li>{escape(text)}</li>" for text in answer.waits)
        return f"<b>Good so far.</b> Still to place: {escape(left)}" + (f"<ul>{waits}</ul>" if waits else "")
    return _score(answer.simulation)


def _few(words: Sequence[str]) -> str:
    return " ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def _score(simulation: Simulation) -> str:
    schedule = simulation.schedule
    split = schedule.splits_backward
    best = best_known(schedule.pp, schedule.num_micro_batches, split)
    behind_s = simulation.makespan_s - best.makespan_s
    peaks = simulation.peak_live
    kind = "split backwards" if split else "whole backwards"
    text = (
        f"<b>Complete and right.</b> Length {short(simulation.makespan_s)}; bubble "
        f"{percent(simulation.bubble_of_ideal)} of ideal time, {percent(simulation.bubble_of_total)} of total; "
        f"peak in-flight micro-batches, by rank: {', '.join(map(str, peaks))}. "
    )
    if behind_s > 1e-9:
        text += f"The best known with {kind}, {best.name}, takes {short(best.makespan_s)}: {short(behind_s)} less."
    elif behind_s < -1e-9:
        text += f"That is {short(-behind_s)} less than the best that this course knows, {best.name}!"
    elif sum(peaks) > sum(best.peaks):
        fewer = ", ".join(map(str, best.peaks))
        text += f"Nothing known with {kind} is shorter, but {best.name} has fewer in flight: {fewer}."
    else:
        text += f"Nothing known with {kind} is shorter or has fewer in flight."
    if not split:
        other = best_known(schedule.pp, schedule.num_micro_batches, True)
        if other.makespan_s < simulation.makespan_s - 1e-9:
            text += f" With B split into I and W, {other.name} takes {short(other.makespan_s)}: try it."
    return text


# ---------------------------------------------------------------- the widget

RULES = (
    "Each rank has one stage and works off its blocks from left to right, each as soon as what it needs has arrived. "
    "F takes 1; B takes 2, or in its place I and W, 1 each: the next rank needs only I. "
    "Type the blocks of each rank, such as <code>F0 F1 B0</code>, and press Enter; or choose a rank and press blocks."
)


@checked
def pipeline_puzzle(pp: Size = 3, num_micro_batches: Size = 4) -> widgets.VBox:
    """Place the blocks of every rank, typed or by buttons; the checker answers after each.

    Raises   ValueError for sizes that the puzzle has no room for
    """
    if not 2 <= pp <= MOST_RANKS or not 1 <= num_micro_batches <= MOST_MICRO_BATCHES:
        raise ValueError(
            f"got pp {pp} and {num_micro_batches} micro-batches; choose pp from 2 to {MOST_RANKS} and 1 to "
            f"{MOST_MICRO_BATCHES} micro-batches"
        )
    wide = widgets.Layout(width="95%")
    fields = [
        widgets.Text(description=f"rank {rank}", placeholder="F0 ...", continuous_update=False, layout=wide)
        for rank in range(pp)
    ]
    chosen = widgets.ToggleButtons(description="place on", options=[(f"rank {r}", r) for r in range(pp)], value=0)
    chosen.style.button_width = "70px"
    blocks = {
        (op, i): widgets.Button(description=f"{op}{i}", layout=widgets.Layout(width="46px"))
        for op in "FBIW"
        for i in range(num_micro_batches)
    }
    image, text = parts.picture(), widgets.HTML()
    filling: list[bool] = []  # not empty while several ranks are filled at once: one picture is enough

    def update() -> None:
        if filling:
            return

        def judge() -> None:
            answer = check_puzzle([field.value for field in fields], num_micro_batches)
            parts.note(text, describe_puzzle(answer))
            parts.set_picture(image, _puzzle_png(answer))

        if not parts.attempt(text, judge):
            parts.set_picture(image, None)
        _offer(blocks, fields[chosen.value].value)

    def append(word: str) -> None:
        field = fields[chosen.value]
        field.value = f"{field.value.strip()} {word}".strip()

    def take_back(button: widgets.Button) -> None:
        field = fields[chosen.value]
        field.value = " ".join(field.value.split()[:-1])

    def fill(rows: Sequence[str]) -> None:
        filling.append(True)
        for field, row in zip(fields, rows, strict=True):
            field.value = row
        filling.clear()
        update()

    def solve(button: widgets.Button) -> None:
        solution = best_known(pp, num_micro_batches, split=False).simulation.schedule
        fill([" ".join(map(_word, row)) for row in solution.instructions])

    for (op, i), button in blocks.items():
        button.on_click(lambda pressed, word=f"{op}{i}": append(word))
    actions = {"Take back": take_back, "Clear all": lambda button: fill([""] * pp), "Show a solution": solve}
    buttons = [widgets.Button(description=name) for name in actions]
    for button, action in zip(buttons, actions.values(), strict=True):
        button.on_click(action)
    grid = [widgets.HBox([blocks[op, i] for i in range(num_micro_batches)]) for op in "FBIW"]
    parts.follow([*fields, chosen], update)
    return parts.Explorer([widgets.HTML(RULES), *fields, chosen, *grid, widgets.HBox(buttons), text, image])


def _offer(blocks: dict[tuple[str, int], widgets.Button], placed: str) -> None:
    """Blocks that the chosen rank still can take are enabled: each once, and B or its two parts."""
    words = set(placed.replace(",", " ").upper().split())
    for (op, i), button in blocks.items():
        rivals = {"F": (), "B": ("I", "W"), "I": ("B",), "W": ("B",)}[op]
        button.disabled = bool({f"{other}{i}" for other in (op, *rivals)} & words)


def _puzzle_png(answer: PuzzleAnswer) -> bytes | None:
    if answer.chart is None:
        return None
    chart = answer.chart
    best_s = best_known(chart.num_ranks, chart.num_micro_batches, split=False).makespan_s  # a scale that stays
    title = None if answer.solved else "What can run of it so far"
    draw = lambda axes: draw_chart(axes, chart, title, max(chart.end_s, best_s))  # noqa: E731
    return parts.figure_png(draw, chart_height_in(chart) + 0.45)
