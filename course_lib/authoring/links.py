"""The line of links at the top and the end of each notebook, written by `make fmt`."""

import re
from pathlib import Path

from nbformat.v4 import new_markdown_cell

NAVIGATION = ("navigation", "navigation-end")
_CHAPTER_FILE = re.compile(r"(\d\d)([a-z]?)_\w+")  # 04_zero, or one of a chapter's lessons: 02a_precision
_IN_DEPTH = "_in_depth"


def chapters_of(folder: Path) -> list[str]:
    """The file names of a folder's lessons in reading order, without second readings and the index."""
    names = sorted(path.name for path in folder.glob("*.ipynb"))
    return [name for name in names if _CHAPTER_FILE.match(name) and _IN_DEPTH not in name]


def exercises_of(name: str, root: Path) -> str:
    """The file name of the exercises of a notebook: of the whole chapter, also where it has several lessons."""
    if not _CHAPTER_FILE.match(name).group(2):
        return name.replace(_IN_DEPTH, "")
    return second_reading(name, root).replace(_IN_DEPTH, "")


def second_reading(name: str, root: Path) -> str:
    """The file name of a chapter's second reading; that of a lesson without one has its own name."""
    found = [path.name for path in (root / "notebooks").glob(f"{name[:2]}_*{_IN_DEPTH}.ipynb")]
    return found[0] if found else name


def navigation(path: Path, root: Path) -> str:
    """The line of links at the top and at the end of a notebook, relative to its own folder."""
    order = ["index.ipynb", *sorted({*chapters_of(path.parent), path.name} - {"index.ipynb"})]
    if path.name == "index.ipynb":
        links = [("Next", path.parent / name) for name in order[1:2]]
        return _line(links, path, root)
    written, in_depth = root / "notebooks", _IN_DEPTH in path.name
    mine = [name for name in order if name[:2] == path.name[:2]] if in_depth else [path.name]
    before, after = order[: order.index(mine[0])], order[order.index(mine[-1]) + 1 :]
    lessons = [name for name in chapters_of(written) if name[:2] == path.name[:2]]
    links = [("Index", written / "index.ipynb")]
    links += [(_title("Lesson", name), written / name) for name in lessons if in_depth]
    links += [("Previous", path.parent / name) for name in before[-1:]]
    links += [("Next", path.parent / name) for name in after[:1]]
    if path.parent == written:
        links += [("In depth", written / second_reading(path.name, root))]
    else:
        links += [(_title("Chapter", name), written / name) for name in lessons]
    for title, folder in (("Exercises", "exercises"), ("Solutions", "solutions")):
        links += [(title, root / folder / exercises_of(path.name, root))] if folder != path.parent.name else []
    return _line(links, path, root)


def _title(word: str, name: str) -> str:
    """Lesson, or Lesson 2b where a chapter has several."""
    number, letter = _CHAPTER_FILE.match(name).groups()
    return f"{word} {int(number)}{letter}" if letter else word


def _line(links: list[tuple[str, Path]], path: Path, root: Path) -> str:
    """The links to other notebooks that are there; an exercise is written from its solution, perhaps later."""
    found = []
    for title, target in links:
        source = root / "solutions" / target.name if target.parent.name == "exercises" else target
        if source.exists() and target != path:
            folder = "" if target.parent == path.parent else f"../{target.parent.name}/"
            found.append(f"[{title}]({folder}{target.name})")
    return " · ".join(found)


def with_links(nb, path: Path, root: Path):
    """A notebook with its line of links twice."""
    cells = [cell for cell in nb.cells if cell["id"] not in NAVIGATION]
    line = navigation(path, root)
    if (root / "ko").is_dir():
        line += f" · [한국어](../ko/{path.parent.name}/{path.name})"
    top, end = (new_markdown_cell(line, id=name) for name in NAVIGATION)
    nb.cells = [*cells[:1], top, *cells[1:], end]
    return nb
