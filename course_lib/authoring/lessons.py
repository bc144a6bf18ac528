"""What a lesson must keep to, so that it is learned in one sitting: its length, its pictures, its predictions."""

import ast
import re

from course_lib.authoring.address import INSTALL
from course_lib.authoring.columns import without_magics
from course_lib.authoring.form import code_cells, tags_of
from course_lib.authoring.links import NAVIGATION

MOST_WORDS, MOST_CODE_LINES, MOST_CELL_LINES, MOST_IMPORTS, MOST_PREDICTIONS = 3000, 300, 30, 20, 8
_SHORT_CELL_LINES = 12  # of at least half of the cells
FEWEST_BREAKS = 4
_KOREAN = re.compile("[가-힣]")
SECTIONS = ("Formula == Run", "In production", "Break it", "True or false?", "Names", "Recap")


def count_words(nb) -> int:
    """Count the words of a notebook's prose, without the generated links and what has no letter (rules of tables)."""
    prose = [cell.source for cell in nb.cells if cell.cell_type == "markdown" and cell["id"] not in NAVIGATION]
    return sum(any(sign.isalpha() for sign in word) for text in prose for word in text.split())


def code_lines(source: str) -> int:
    """Count the lines of a cell that are neither empty nor a comment nor a docstring."""
    lines = {number for number, line in enumerate(source.split("\n"), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(without_magics(source))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def imported_names(source: str) -> int:
    """Count the names that a cell imports."""
    nodes = ast.walk(ast.parse(without_magics(source)))
    return sum(len(node.names) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def calls_of(source: str, name: str) -> int:
    """Count the calls of a function or method by its last name."""
    calls = [node.func for node in ast.walk(ast.parse(without_magics(source))) if isinstance(node, ast.Call)]
    return sum(getattr(func, "id", getattr(func, "attr", "")) == name for func in calls)


def lesson_problems(nb) -> list[str]:
    """Where a lesson is longer than one sitting or lacks a part, each in a sentence."""
    cells = [cell for cell in code_cells(nb) if cell["id"] != INSTALL]
    lines = {cell["id"]: code_lines(cell.source) for cell in cells}
    imports = sum(imported_names(cell.source) for cell in cells if "setup" in tags_of(cell))
    predictions = sum(calls_of(cell.source, "predict") for cell in cells)
    pictures = sum(any(key.startswith("image/") for key in out.get("data", {})) for c in cells for out in c.outputs)
    headings = [line for cell in nb.cells for line in cell.source.split("\n") if cell.cell_type == "markdown"]
    headings = [line for line in headings if line.startswith("#")]
    limits = [
        ("words", count_words(nb), MOST_WORDS),
        ("lines of code", sum(lines.values()), MOST_CODE_LINES),
        ("names imported in the setup cell", imports, MOST_IMPORTS),
        ("predictions", predictions, MOST_PREDICTIONS),
    ]
    problems = [f"{got:,} {what}; a lesson has at most {most:,}" for what, got, most in limits if got > most]
    longest = max(lines, key=lines.get)
    if lines[longest] > MOST_CELL_LINES:
        problems.append(f"cell {longest} has {lines[longest]} lines; a cell has at most {MOST_CELL_LINES}")
    if sum(n <= _SHORT_CELL_LINES for n in lines.values()) * 2 < len(lines):
        problems.append(f"fewer than half of the code cells have at most {_SHORT_CELL_LINES} lines")
    if not pictures and not any("widget" in tags_of(cell) for cell in cells):
        problems.append("neither a picture nor a widget; show what answers the lesson's question")
    problems += [f"no section is called {name!r}" for name in SECTIONS if not any(name in line for line in headings)]
    if not any(_KOREAN.search(cell.source) for cell in nb.cells if "Names" in cell.source):
        problems.append("the table of names has no Korean")
    return problems + _folding_problems(nb, cells)


def _folding_problems(nb, cells) -> list[str]:
    """Answers that a learner would see before the prediction."""
    problems = [
        f"cell {cell['id']} compares a prediction, but its output is not folded (jupyter.outputs_hidden)"
        for cell in cells
        if calls_of(cell.source, "compare") and not cell.metadata.get("jupyter", {}).get("outputs_hidden")
    ]
    problems += [
        f"cell {cell['id']}: JupyterLab shows the first line of a folded output; print a line without a number first"
        for cell in cells
        if cell.metadata.get("jupyter", {}).get("outputs_hidden")
        and any(sign.isdigit() for out in cell.outputs[:1] for sign in out.get("text", "").partition("\n")[0])
    ]
    broken = [cell.source for cell in nb.cells if cell.cell_type == "markdown" and "Break it" in cell.source]
    invitations = sum(text.count("<details>") for text in broken)
    if invitations < FEWEST_BREAKS:
        problems.append(f"{invitations} folded invitations under 'Break it'; a lesson has at least {FEWEST_BREAKS}")
    return problems
