"""Numbers in prose that stand in an output above: each text cell records its own, and a check compares them.

`make quotes` records them in a cell's metadata, `make check` compares. `make fmt` and `make notebooks` leave them
alone: so a number that changes in the prose or in an output is told until somebody looks.
Why they are recorded: of the numbers in prose that have three digits, more than half stand in no output above. They are
computed in the sentence, or come from a paper. No rule without a record tells them from a wrong number.
"""

import re
from decimal import Decimal
from pathlib import Path

from course_lib.authoring.form import ROOT, is_picture, notebook_paths, read, write

NUMBER = re.compile(
    r"(?<![\w.^])((?:(?<![^\s($\[])-)?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?))(?!\.?\d|[A-Za-z_])"
)
_SMALL_OR_YEAR = re.compile(r"-?\d|19[89]\d|20[0-3]\d")
_LABELLED = r"(?:section|chapter|exercise|figure|table)s? \d[\d.a-z]*(?:(?:, | and | to )\d[\d.a-z]*)*"
_NO_PROSE = re.compile(
    rf"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+|arXiv:\S+|[\^_]\{{?-?[\d.]+\}}?|(?i:{_LABELLED})", re.DOTALL
)
UNIT = re.compile(r"\s*(?:\\?%|[kKMGT]i?B\b|[mu]?s\b|days\b|times\b|TFLOP)")  # what a number below 100 has behind it
HEADING = re.compile(r"^#+ ", re.MULTILINE)


def numbers_in(text: str, prose: bool = False) -> list[str]:
    """Return the numbers of a text without thousands separators: not digits that stand alone, not years.

    prose   leaves out code, addresses, numbers of sections, and whole numbers below 100 without a unit
    """
    text = _NO_PROSE.sub(" ", text) if prose else text
    for latex, sign in (("{,}", ","), (r"\,", " "), ("−", "-"), ("\u00a0", " "), ("\u202f", " "), ("$", " ")):
        text = text.replace(latex, sign)
    found = [match for match in NUMBER.finditer(text) if not _SMALL_OR_YEAR.fullmatch(match[1])]
    if prose:
        found = [match for match in found if len(match[1].strip("-")) > 2 or UNIT.match(text, match.end())]
    return [match[1].replace(",", "") for match in found]


def is_printed(number: str, printed: set[str]) -> bool:
    """Whether a number of the prose is one of those printed, or one of them rounded; words may carry its sign."""
    digits = len(number.partition(".")[2])
    signless = printed | {other.lstrip("-") for other in printed}
    longer = [Decimal(other) for other in signless if len(other.partition(".")[2]) > digits]
    return number in signless or Decimal(number) in [round(other, digits) for other in longer]


def _prose_and_printed(nb):
    """Yield each text cell that stands below code of its section, its numbers, and the numbers printed there."""
    above = []
    for cell in nb.cells:
        if cell.cell_type == "code":
            for output in cell.outputs:  # what stands behind a picture is not printed
                data = {} if is_picture(output) else output.get("data", {})
                text = output.get("text", "") + data.get("text/plain", "")
                above += numbers_in(text + re.sub("<[^>]*>", " ", data.get("text/html", "")))
            continue
        before = HEADING.split(cell.source)[0]
        yield cell, numbers_in(before, prose=True), set(above)
        if HEADING.search(cell.source):
            above = []


def quotes_of(cell) -> list[str]:
    """Return the recorded numbers of a text cell."""
    return cell.metadata.get("quotes", "").split()


def record_quotes(nb) -> None:
    """Record in each text cell its numbers printed above; one recorded that no output has any more stays told."""
    for cell, numbers, printed in _prose_and_printed(nb):
        recorded = quotes_of(cell)
        quotes = [number for number in numbers if number in recorded or is_printed(number, printed)]
        cell.metadata.pop("quotes", None)
        if quotes:
            cell.metadata["quotes"] = " ".join(quotes)


def quote_problems(nb) -> list[str]:
    """Where prose and outputs no longer say the same number, each in a sentence."""
    if not any(cell.metadata.get("quotes") for cell in nb.cells):
        return []
    problems = []
    for cell, numbers, printed in _prose_and_printed(nb):
        name, recorded = cell["id"], quotes_of(cell)
        for number in dict.fromkeys(recorded):
            if numbers.count(number) < recorded.count(number):
                problems.append(f"cell {name}: its prose no longer says {number}; if that is right, `make quotes`")
            elif not is_printed(number, printed):
                problems.append(f"cell {name}: its prose says {number}, which no output above prints any more")
        counts = {number: numbers.count(number) for number in numbers if is_printed(number, printed)}
        new = [number for number, count in counts.items() if count > recorded.count(number)]
        if new:
            problems.append(f"cell {name}: `make quotes` records {', '.join(new)}, printed above and said here")
    return problems


def write_quotes(root: Path = ROOT) -> list[Path]:
    """Record which numbers of the prose stand in an output above; returns the notebooks that changed."""
    changed = []
    for path in notebook_paths("notebooks", "solutions", root=root):
        nb = read(path)
        record_quotes(nb)
        changed += [path] if write(nb, path) else []
    return changed
