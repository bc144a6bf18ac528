"""The answers to a lab's questions, for who marks it: numbers as the package computes them, and what gives marks.

`compute` of a question in labs.toml is written in what `words_of` returns.
"""

from collections.abc import Sequence
from types import SimpleNamespace

from course_lib.estimate import Estimate
from course_lib.hardware import GB, peak_flops
from course_lib.labs.sheet import FIRST_QUESTION, Nodes, modelled, modelled_sums, sent_by_axis
from course_lib.labs.table import Lab, Question
from course_lib.tensors import count_parameters
from course_lib.timing.context import tokens_that_hide_a_hop
from course_lib.timing.rates import FLASH_ATTENTION_2
from course_lib.train.plan import Checkpoints
from course_lib.validate import checked

FULL = (
    "Full marks for a number within these bounds, with its unit and from the chapter's formula, written before the "
    "run, and for one outside that is explained; with the reason why it is so, and why the measured one differs."
)


def fastest(runs: Sequence[Estimate]) -> list[Estimate]:
    """Return runs in the order of their modelled speed, the fastest first."""
    return sorted(runs, key=lambda run: -run.tokens_per_s_per_gpu)


def words_of(lab: Lab, machine: Nodes) -> dict[str, object]:
    """Return what answers are computed from: the lab's runs as modelled, bytes that rank 0 sends by axis, formulas."""
    cluster, layouts = machine.cluster(), lab.layouts_on(machine.num_ranks)
    config, seq_len = lab.model(on_gpu=True)
    words = {
        "runs": [modelled(lab, layout, cluster) for layout in layouts],
        "sent": [sent_by_axis(lab, layout) for layout in layouts],
    }
    if not layouts:
        sums = modelled_sums(machine).values()
        words["runs"] = [SimpleNamespace(step_s=way["step_s"][0]) for way in sums]
        words["sent"] = [{"all": way["sent_bytes"]} for way in sums]
    return words | {
        "cluster": cluster, "slowest": cluster.between if machine.nodes > 1 else cluster.inside,
        "config": config, "seq_len": seq_len, "parameters": count_parameters(config),
        "GB": GB, "ATTENTION_SHARE": FLASH_ATTENTION_2, "Checkpoints": Checkpoints, "fastest": fastest,
        "peak_flops": peak_flops, "tokens_that_hide_a_hop": tokens_that_hide_a_hop,
    }  # fmt: skip


def numbers_of(question: Question, words: dict[str, object]) -> dict[str, object]:
    """Return an answer's numbers by name; a layout or a part of a step is a text."""
    numbers: dict[str, object] = {}
    exec(question.compute, dict(words), numbers)
    return numbers


@checked
def answer_sheet(lab: Lab, machine: Nodes = Nodes()) -> str:
    """Return the answers of a lab as Markdown: of each question the numbers with their tolerance, and the marks."""
    machine = machine.of(lab)
    words = words_of(lab, machine)
    lines = [f"# Answers to lab {lab.chapter}: {lab.title}", "", f"For who marks it. Modelled, on {machine}. {FULL}"]
    for place, question in enumerate(lab.questions, FIRST_QUESTION):
        numbers = numbers_of(question, words)
        answer = question.answer.format(**numbers, n=machine.num_ranks).replace("%", " %")
        lines += ["", f"{place}. {question.asks}", "", f"   {answer}", ""]
        lines += [
            _bounds(name, value, question.within) for name, value in numbers.items() if not isinstance(value, str)
        ]
        lines += [f"   - half marks: {question.half}", f"   - none: {question.none}"]
    return "\n".join(lines)


def _bounds(name: str, value: float, within: float) -> str:
    form = ",.0f" if (1 + within) * value >= 1000 else ".3g"
    told, low, high = (format(share * value, form) for share in (1, 1 - within, 1 + within))
    return f"   - {name.replace('_', ' ')}: {told}, right from {low} to {high}"
