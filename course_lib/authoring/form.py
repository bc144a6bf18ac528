"""The one form in which a notebook is stored: counts 1..n, readable ids, outputs that stay as they are."""

import copy
import math
import re
from pathlib import Path

import nbformat

from course_lib.authoring.address import INSTALL, add_address, write_text
from course_lib.authoring.columns import narrowed
from course_lib.authoring.links import with_links

ROOT = Path(__file__).resolve().parents[2]
TAGS = ("setup", "mirror", "widget", "gpu", "nbval-ignore-output", "nbval-skip", "raises-exception")
HIDDEN = ("outputs_hidden", "source_hidden")  # folded until the reader opens them
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CHECK = re.compile(r"^(check_\w+)\(", re.MULTILINE)
_TIME = re.compile(r"(?m)^\*(\d+)(?: to (\d+))? minutes, (easy|medium|hard)")
_LEVELS = ("easy", "medium", "hard")
SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){0,4}(-[0-9a-f]{12})?")
_REDRAWN = re.compile(r"^.*\r(?=[^\n])", re.MULTILINE)  # a bar that redraws itself leaves its last state, as in nbval


def notebook_paths(*folders: str, root: Path = ROOT) -> list[Path]:
    """The notebooks of the named folders, in reading order."""
    return [path for folder in folders for path in sorted((root / folder).glob("*.ipynb"))]


def read(path: Path):
    """A notebook file as a notebook object (nbformat 4)."""
    return nbformat.read(path, as_version=4)


def write(nb, path: Path) -> bool:
    """Write a notebook if its file would change; says whether it did."""
    return bool(write_text(nbformat.writes(nb).rstrip("\n") + "\n", path))


def code_cells(nb) -> list:
    """The code cells of a notebook, in order."""
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def tags_of(cell) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


def is_picture(output) -> bool:
    """Whether an output has a picture: a PNG with its words in the metadata, or an SVG that has them inside."""
    return any(kind in output.get("data", {}) for kind in ("image/png", "image/svg+xml"))


def is_check_cell(cell) -> bool:
    """Whether a cell calls a grader: `check_...(...)` at its top level."""
    return cell.cell_type == "code" and CHECK.search(cell.source) is not None


def add_graders(nb, chapter: str) -> None:
    """Let each check cell import its own grader, so that no earlier cell can put another under its name."""
    for cell in nb.cells:
        if is_check_cell(cell):
            call = CHECK.search(cell.source)
            cell.source = f"from course_lib.checks.ch{chapter} import {call[1]}\n\n{cell.source[call.start() :]}"


def without_solutions(source: str) -> str:
    """Code with each marked solution replaced by a NotImplementedError that names what is to be written."""
    out, inside, name = [], False, "this"
    for line in source.split("\n"):
        mark = line.strip()
        if mark == BEGIN:
            if inside:
                raise ValueError(f"two {BEGIN} marks in a row; close the first with {END}")
            inside = True
            out.append(f'{line[: line.index("#")]}raise NotImplementedError("{name}: your code goes here")')
        elif mark == END:
            if not inside:
                raise ValueError(f"{END} without {BEGIN}")
            inside = False
        elif not inside:
            defined = re.match(r"\s*(?:def|class) (\w+)", line)
            name = defined.group(1) if defined else name
            out.append(line)
    if inside:
        raise ValueError(f"{BEGIN} is never closed; add {END}")
    return "\n".join(out)


def normalise(nb):
    """A copy of a notebook in the one form in which the repository stores it.

    Comments and docstrings keep to the columns; counts run 1..n; ids are slugs;
    no timestamps, widget state or editor's metadata; one stdout and one stderr a cell.
    Solutions get nbgrader's metadata: cells with solution marks and cells that call a `check_...`.
    """
    nb = copy.deepcopy(nb)
    nb.metadata = nbformat.from_dict({"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.cells = [cell for cell in nb.cells if cell.source.strip()]
    graded = any(BEGIN in cell.source for cell in nb.cells)
    taken: set[str] = set()
    for cell, points in zip(nb.cells, points_of(nb), strict=True):
        cell.source = cell.source.strip("\n")
        if cell.cell_type == "code":
            cell.source = narrowed(cell.source)
        cell["id"] = _readable_id(cell, taken)
        cell.metadata = nbformat.from_dict(_cell_metadata(cell, points if graded else None))
    for count, cell in enumerate(code_cells(nb), start=1):
        cell.execution_count = count
        cell.outputs = _normal_outputs(cell.outputs, count)
    return nb


def _readable_id(cell, taken: set[str]) -> str:
    name = cell.get("id", "")
    if not SLUG.fullmatch(name) or RANDOM_ID.fullmatch(name):
        definition = re.search(r"^(?:def|class) (\w+)", cell.source, re.MULTILINE) if cell.cell_type == "code" else None
        words = re.findall(r"[a-z0-9]+", (definition.group(1) if definition else cell.source).lower().replace("_", " "))
        first = next((index for index, word in enumerate(words) if word[0].isalpha()), len(words))
        name = "-".join(words[first : first + 4])[:48].strip("-") or "cell"
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    taken.add(unique)
    return unique


def points_of(nb) -> list[float]:
    """Return what each cell of a notebook is worth: 0, or the points of a check cell.

    An exercise has a point for each five minutes that its heading tells (of "40 to 55" the middle, rounded up), one
    more if it is medium, two more if it is hard. Its checks share them. A check below no such heading has one point.
    """
    exercise, exercises = 0, {0: 1.0}
    checks = []
    for cell in nb.cells:
        told = _TIME.search(cell.source) if cell.cell_type == "markdown" else None
        if told:
            exercise += 1
            minutes = (int(told[1]) + int(told[2] or told[1])) / 2
            exercises[exercise] = math.ceil(minutes / 5) + _LEVELS.index(told[3])
        checks.append(exercise if is_check_cell(cell) else None)
    return [0 if one is None else exercises[one] / (checks.count(one) if one else 1) for one in checks]


def _cell_metadata(cell, points: float | None) -> dict:
    tags = tags_of(cell)
    metadata: dict = {}
    if tags:
        known = [tag for tag in TAGS if tag in tags]
        metadata["tags"] = known + sorted({tag for tag in tags if tag not in TAGS})
    hidden = {name: True for name in HIDDEN if cell.metadata.get("jupyter", {}).get(name)}
    if hidden or "setup" in tags:
        metadata["jupyter"] = hidden | ({"source_hidden": True} if "setup" in tags else {})
    if cell.cell_type == "markdown" and cell.metadata.get("quotes"):
        metadata["quotes"] = cell.metadata["quotes"]
    if cell["id"] == INSTALL:  # folded in JupyterLab and in Colab
        metadata |= {"cellView": "form", "jupyter": {"source_hidden": True}}
    if points is not None and cell.cell_type == "code" and (BEGIN in cell.source or is_check_cell(cell)):
        is_check = BEGIN not in cell.source and points > 0
        nbgrader = {"grade": is_check, "grade_id": cell["id"], "locked": is_check, "schema_version": 3}
        nbgrader |= {"solution": not is_check, "task": False}
        nbgrader |= {"points": int(points) if points == int(points) else points} if is_check else {}
        metadata["nbgrader"] = nbgrader
    return metadata


def _normal_outputs(outputs, count: int) -> list:
    kept, streams = [], {}
    for output in outputs:
        if output.output_type == "stream":
            if output.name in streams:
                streams[output.name].text += output.text
                continue
            streams[output.name] = output
        elif output.output_type in ("display_data", "execute_result"):
            if output.data.pop(WIDGET_VIEW, None) and not is_picture(output):
                continue
            shown = {key: output.metadata.get("image/png", {}).get(key) for key in ("alt", "height", "width")}
            shown = {key: value for key, value in shown.items() if value is not None}
            output.metadata = nbformat.from_dict({"image/png": shown} if shown else {})
            if output.output_type == "execute_result":
                output.execution_count = count
        kept.append(output)
    for stream in streams.values():
        stream.text = _REDRAWN.sub("", stream.text)
    return kept


def formatted(path: Path, root: Path = ROOT):
    """A notebook as `make fmt` writes it: in its normal form, with links, badges, the install cell and graders."""
    nb = read(path)
    add_address(nb, path, root)
    add_graders(nb, path.name[:2])
    return with_links(normalise(nb), path, root)


def format_notebooks(root: Path = ROOT) -> list[Path]:
    """Write notebooks and solutions as `formatted` has them; returns those that changed."""
    paths = notebook_paths("notebooks", "solutions", root=root)
    return [path for path in paths if write(formatted(path, root), path)]
