"""Links between the notebooks, written by `make fmt`: previous and next, chapters named in prose, papers."""

import re
from pathlib import Path

from nbformat.v4 import new_markdown_cell

NAVIGATION = ("navigation", "navigation-end")
_CHAPTER_FILE = re.compile(r"(\d\d)([a-z]?)_\w+")  # 04_zero, or one of a chapter's lessons: 02a_precision
_IN_DEPTH = "_in_depth"
_NOT_PROSE = re.compile(r"(```.*?```|!?\[[^\]]*\]\([^)]*\)|`[^`\n]*`|https?://\S+|^#.*?$)", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(
    r"\[([Cc]hapter \d+[a-z]?|\d+[a-z]?|arXiv:[\d.]+|`[\w/]+\.ipynb`)\]\((?:https://arxiv[^)]*|[\w./]*\.ipynb)\)"
)
NUMBER = r"\d+[a-z]?\b"
CHAPTERS = re.compile(rf"\b[Cc]hapter {NUMBER}|\b[Cc]hapters {NUMBER}(?:(?:, | and | to | or ){NUMBER})+")
_PAPER = re.compile(r"\barXiv:(\d{4}\.\d{4,5})\b")
FILE = re.compile(r"`((?:notebooks/|exercises/|solutions/)?\d\d[a-z]?_\w+\.ipynb)`")


def chapters_of(folder: Path) -> list[str]:
    """The file names of a folder's lessons in reading order, without second readings and the index."""
    names = sorted(path.name for path in folder.glob("*.ipynb"))
    return [name for name in names if _CHAPTER_FILE.match(name) and _IN_DEPTH not in name]


def _chapter_named(number: str, root: Path) -> str | None:
    """The file name of a lesson ("2b"), or of the first one of a chapter ("2"); None if there is none."""
    start = re.sub(r"^\d+", lambda found: f"{int(found.group(0)):02d}", number)
    return next((name for name in chapters_of(root / "notebooks") if name.startswith(start)), None)


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
    parts = _NOT_PROSE.split(text)  # every second part is no prose
    prose = [part if index % 2 else _link_prose(part, path, root) for index, part in enumerate(parts)]
    return "".join(FILE.sub(lambda found: _link_file(found, path, root), part) for part in prose)


def _link_prose(text: str, path: Path, root: Path) -> str:
    text = _PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return CHAPTERS.sub(lambda found: _link_chapters(found.group(0), path, root), text)


def _link_chapters(words: str, path: Path, root: Path) -> str:
    def link(found: re.Match) -> str:
        number = re.search(NUMBER, found.group(0)).group(0)
        name = _chapter_named(number, root)
        here = path.parent.name == "notebooks" and (name == path.name or number == str(_number(path.name)))
        if name is None or here:
            return found.group(0)
        return f"[{found.group(0)}]({_relative(root / 'notebooks' / name, path)})"

    return re.sub(rf"[Cc]hapter {NUMBER}|{NUMBER}", link, words)


def _number(name: str) -> int | None:
    """The number of a notebook's chapter; None for the index."""
    found = _CHAPTER_FILE.match(name)
    return int(found.group(1)) if found else None


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
