"""What every notebook must satisfy, each rule in a sentence that says what to do."""

import ast
import re
from pathlib import Path

import nbformat

from course_lib.authoring.form import (
    RANDOM_ID,
    ROOT,
    SLUG,
    TAGS,
    code_cells,
    formatted,
    read,
    tags_of,
    without_magics,
)
from course_lib.authoring.mirrors import mirror_problems

UNCOMPARED_TAGS = {"nbval-ignore-output", "nbval-skip"}
UNWANTED_WORDS = re.compile(r"\b(simply|just|obviously)\b", re.IGNORECASE)
EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u26ff\u2705\u2728\u274c\u2757\u2b50\ufe0f]")
ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")


def prose_problems(text: str) -> list[str]:
    """Words and signs that the course's prose does without; code, links and pictures are not prose."""
    prose = re.sub(
        r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|<!--.*?-->|!(?=\[)|https?://\S+", " ", text, flags=re.DOTALL
    )
    found = [match.group(0) for match in UNWANTED_WORDS.finditer(prose)]
    found += ["an exclamation mark"] if "!" in prose else []
    return found + (["an emoji"] if EMOJI.search(prose) else [])


def is_uncompared(cell) -> bool:
    """Whether nothing of a cell's output is held: a tag says so, or it shows pictures alone and asserts nothing."""
    if UNCOMPARED_TAGS & set(tags_of(cell)):
        return True
    pictures = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    return bool(pictures) and len(pictures) == len(cell.outputs) and "assert " not in cell.source


def prints_at_top(cell) -> bool:
    """Whether a cell calls print as a statement of its own, so that its output must be stored."""
    statements = [node.value for node in ast.parse(without_magics(cell.source)).body if isinstance(node, ast.Expr)]
    return any(isinstance(call, ast.Call) and ast.unparse(call.func) == "print" for call in statements)


def cell_problems(cell) -> list[str]:
    """What is wrong with one cell, apart from mirrors."""
    tags, name, problems = set(tags_of(cell)), cell["id"], []
    if unknown := tags - set(TAGS):
        problems.append(f"cell {name}: unknown tags {sorted(unknown)}; the closed list is {', '.join(TAGS)}")
    if not SLUG.fullmatch(name) or RANDOM_ID.fullmatch(name):
        problems.append(f"cell {name}: the id is not a readable slug; `make fmt` makes one")
    if cell.cell_type != "code":
        return problems + [f"cell {name}: prose has {found}" for found in prose_problems(cell.source)]
    if "widget" in tags and not tags & UNCOMPARED_TAGS:
        problems.append(f"cell {name}: a widget's output differs at each run; tag it nbval-ignore-output as well")
    if "raises-exception" not in tags and any(output.output_type == "error" for output in cell.outputs):
        problems.append(f"cell {name}: stores an error; fix the cell, or tag it raises-exception if it teaches one")
    if not tags & UNCOMPARED_TAGS and any(ADDRESS.search(text) for text in _texts(cell)):
        problems.append(f"cell {name}: prints a memory address, which differs at each run")
    if "nbval-skip" not in tags and prints_at_top(cell) and not cell.outputs:
        problems.append(f"cell {name}: prints, but no output is stored; run the notebook and `make fmt`")
    return problems


def _texts(cell) -> list[str]:
    return [str(output.get("text", "") or output.get("data", {}).get("text/plain", "")) for output in cell.outputs]


def notebook_problems(path: Path, root: Path = ROOT) -> list[str]:
    """Everything that is wrong with a notebook of notebooks/ or solutions/, each in a sentence."""
    nb = read(path)
    problems = [problem for cell in nb.cells for problem in cell_problems(cell)]
    problems += [problem for cell in code_cells(nb) for problem in mirror_problems(cell, root)]
    if nbformat.writes(formatted(path, root)).rstrip("\n") + "\n" != path.read_text(encoding="utf-8"):
        problems.append("not in its normal form (install cell and badges belong to it); `make fmt` writes it")
    if sum("setup" in tags_of(cell) for cell in code_cells(nb)) != 1:
        problems.append("exactly one cell must carry the tag setup")
    uncompared = [cell["id"] for cell in code_cells(nb) if is_uncompared(cell)]
    if len(uncompared) * 5 > len(code_cells(nb)):
        problems.append(
            f"more than a fifth of {len(code_cells(nb))} code cells is not compared: {', '.join(uncompared)}"
        )
    return [f"{path.relative_to(root)}: {problem}" for problem in problems]
