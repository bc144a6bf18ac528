"""Links between the notebooks, written by `make fmt`: previous and next, chapters named in prose, papers."""

import re
from pathlib import Path

from nbformat.v4 import new_markdown_cell

NAVIGATION = ("navigation", "navigation-end")
CHAPTER_FILE = re.compile(r"(\d\d)[a-z]?_\w+")
IN_DEPTH = "_in_depth"
NOT_PROSE = re.compile(r"(```.*?```|!?\[[^\]]*\]\([^)]*\)|`[^`\n]*`|https?://\S+|^#.*?$)", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(r"\[([Cc]hapter \d+|\d+|arXiv:[\d.]+|`[\w/]+\.ipynb`)\]\((?:https://arxiv[^)]*|[\w./]*\.ipynb)\)")
CHAPTERS = re.compile(r"\b[Cc]hapter \d+\b|\b[Cc]hapters \d+(?:(?:, | and | to | or )\d+)+\b")
PAPER = re.compile(r"\barXiv:(\d{4}\.\d{4,5})\b")
FILE = re.compile(r"`((?:notebooks/|exercises/|solutions/)?\d\d[a-z]?_\w+\.ipynb)`")


def chapters_of(folder: Path) -> list[str]:
    """The file names of a folder's chapters in reading order, without second readings and the index."""
    names = sorted(path.name for path in folder.glob("*.ipynb"))
    return [name for name in names if CHAPTER_FILE.match(name) and not name.endswith(f"{IN_DEPTH}.ipynb")]


def chapter_named(number: int, root: Path) -> str | None:
    """The file name of the first notebook of a chapter, or None if there is no such chapter."""
    return next((name for name in chapters_of(root / "notebooks") if int(name[:2]) == number), None)


def navigation(path: Path, root: Path) -> str:
    """The line of links at the top and at the end of a notebook, relative to its own folder."""
    lesson = path.name.replace(IN_DEPTH, "")
    order = ["index.ipynb", *sorted({*chapters_of(path.parent), lesson} - {"index.ipynb"})]
    position = order.index(lesson)
    links = [("Index", root / "notebooks" / "index.ipynb"), ("Lesson", path.parent / lesson)]
    links += [("Previous", path.parent / name) for name in order[max(position - 1, 0) : position]]
    links += [("Next", path.parent / name) for name in order[position + 1 : position + 2]]
    links += [("In depth", path.with_stem(path.stem + IN_DEPTH))]
    for title, folder in (("Chapter", "notebooks"), ("Exercises", "exercises"), ("Solutions", "solutions")):
        links += [(title, root / folder / lesson)] if folder != path.parent.name and position else []
    there = [(title, target) for title, target in links if _is_written(target, root) and target != path]
    return " · ".join(f"[{title}]({_relative(target, path)})" for title, target in there)


def _is_written(target: Path, root: Path) -> bool:
    """Whether a notebook is there; an exercise is written from its solution, perhaps later."""
    return (root / "solutions" / target.name if target.parent.name == "exercises" else target).exists()


def _relative(target: Path, path: Path) -> str:
    return target.name if target.parent == path.parent else f"../{target.parent.name}/{target.name}"


def linked(text: str, path: Path, root: Path) -> str:
    """A cell's prose with chapters, notebooks and papers as links; headings, code and other links stay."""
    text = WRITTEN.sub(r"\1", text)
    parts = NOT_PROSE.split(text)  # every second part is no prose
    prose = [part if index % 2 else _link_prose(part, path, root) for index, part in enumerate(parts)]
    return "".join(FILE.sub(lambda found: _link_file(found, path, root), part) for part in prose)


def _link_prose(text: str, path: Path, root: Path) -> str:
    text = PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return CHAPTERS.sub(lambda found: _link_chapters(found.group(0), path, root), text)


def _link_chapters(words: str, path: Path, root: Path) -> str:
    def link(found: re.Match) -> str:
        name = chapter_named(int(re.search(r"\d+", found.group(0)).group(0)), root)
        if name is None or (path.parent.name, path.name[:2]) == ("notebooks", name[:2]):
            return found.group(0)
        return f"[{found.group(0)}]({_relative(root / 'notebooks' / name, path)})"

    return re.sub(r"[Cc]hapter \d+|\d+", link, words)


def _link_file(found: re.Match, path: Path, root: Path) -> str:
    folder, _, name = found.group(1).rpartition("/")
    target = (root / folder if folder else path.parent) / name
    return (
        f"[{found.group(0)}]({_relative(target, path)})"
        if _is_written(target, root) and target != path
        else found.group(0)
    )


def with_links(nb, path: Path, root: Path):
    """A notebook with its links as they are to be: the line of navigation twice, and links in its prose."""
    cells = [cell for cell in nb.cells if cell["id"] not in NAVIGATION]
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, path, root)
    top, end = (new_markdown_cell(navigation(path, root), id=name) for name in NAVIGATION)
    nb.cells = [*cells[:1], top, *cells[1:], end]
    return nb
