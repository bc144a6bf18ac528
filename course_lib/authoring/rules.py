"""What every notebook must satisfy, each rule in a sentence that says what to do."""

import ast
import builtins
import re
import symtable
from itertools import pairwise
from pathlib import Path

import nbformat

from course_lib.authoring.address import INSTALL
from course_lib.authoring.columns import COLUMNS, OUTPUT_COLUMNS, without_magics
from course_lib.authoring.form import RANDOM_ID, ROOT, SLUG, TAGS, code_cells, formatted, is_picture, read, tags_of
from course_lib.authoring.lessons import lesson_problems
from course_lib.authoring.links import chapters_of
from course_lib.authoring.mirrors import mirror_problems
from course_lib.authoring.quotes import quote_problems

_UNCOMPARED_TAGS = {"nbval-ignore-output", "nbval-skip"}
_UNWANTED_WORDS = re.compile(r"\b(simply|just|obviously)\b", re.IGNORECASE)
_EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u26ff\u2705\u2728\u274c\u2757\u2b50\ufe0f]")
_SENTENCE = re.compile(r"[A-Z][^\n]{20,}\.")
HEADING = re.compile(r"^(#+) ", re.MULTILINE)
_NUMBERED = re.compile(r"^## (\w+)\.(\d+) ", re.MULTILINE)
_FILE_LINK = re.compile(r"\]\((?!https?:|#|attachment:)([^)#\s]+)[^)]*\)")
# A sentence that sends the reader to a cell; he may have run no other.
ORDER = re.compile(
    r"\b(?:[Pp]ress|Run|Try|Choose|Move)\b[^.\n]*\b(?:cell below|next cell)\b|[Ii]n the next cell, choose\b"
)
ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")


def prose_problems(text: str) -> list[str]:
    """Words and signs that the course's prose does without; code, links and pictures are not prose."""
    prose = re.sub(
        r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|<!--.*?-->|!(?=\[)|https?://\S+", " ", text, flags=re.DOTALL
    )
    found = [match.group(0) for match in _UNWANTED_WORDS.finditer(prose)]
    found += ["an exclamation mark"] if "!" in prose else []
    return found + (["an emoji"] if _EMOJI.search(prose) else [])


def is_uncompared(cell) -> bool:
    """Whether nothing of a cell's output is held: a tag says so, or it shows pictures alone and asserts nothing."""
    if _UNCOMPARED_TAGS & set(tags_of(cell)):
        return True
    pictures = [output for output in cell.outputs if is_picture(output)]
    return bool(pictures) and len(pictures) == len(cell.outputs) and "assert " not in cell.source


def cell_problems(cell) -> list[str]:
    """What is wrong with one cell, apart from mirrors."""
    tags, name, problems = set(tags_of(cell)), cell["id"], []
    if unknown := tags - set(TAGS):
        problems.append(f"cell {name}: unknown tags {sorted(unknown)}; the closed list is {', '.join(TAGS)}")
    if not SLUG.fullmatch(name) or RANDOM_ID.fullmatch(name):
        problems.append(f"cell {name}: the id is not a readable slug; `make fmt` makes one")
    if cell.cell_type != "code":
        return problems + [f"cell {name}: prose has {found}" for found in prose_problems(cell.source)]
    tree = ast.parse(without_magics(cell.source))
    modules = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for imported in (f"{node.module}.{alias.name}" for node in modules for alias in node.names):
        if imported.startswith("course_lib.") and "._" in imported:
            problems.append(f"cell {name}: imports {imported}, which is private; import a public name")
    if (widest := max(map(len, cell.source.split("\n")))) > COLUMNS:
        problems.append(f"cell {name}: a line has {widest} characters; break it, at most {COLUMNS} can be read")
    if "widget" in tags and not tags & _UNCOMPARED_TAGS:
        problems.append(f"cell {name}: a widget's output differs at each run; tag it nbval-ignore-output as well")
    if "raises-exception" not in tags and any(output.output_type == "error" for output in cell.outputs):
        problems.append(f"cell {name}: stores an error; fix the cell, or tag it raises-exception if it teaches one")
    if not tags & _UNCOMPARED_TAGS and any(ADDRESS.search(text) for text in _texts(cell)):
        problems.append(f"cell {name}: prints a memory address, which differs at each run")
    prints = any(ast.unparse(statement).startswith("print(") for statement in tree.body)
    if "nbval-skip" not in tags and prints and not cell.outputs:
        problems.append(f"cell {name}: prints, but no output is stored; run the notebook and `make fmt`")
    return problems


def _picture_problems(cell) -> list[str]:
    """Pictures of a cell that say nothing to readers who do not see them."""
    words = []
    for output in filter(is_picture, cell.outputs):
        svg = re.search(r"<desc>(.*?)</desc>", output.data.get("image/svg+xml", ""), re.DOTALL)
        words.append(svg[1] if svg else output.metadata.get("image/png", {}).get("alt", ""))
    silent = not all(map(_SENTENCE.fullmatch, words))
    return [f"cell {cell['id']}: stores a picture without a sentence that says what it shows; run the cell"] * silent


def width_problems(cell) -> list[str]:
    """What a cell prints that a page cannot show without being scrolled sideways."""
    widest = max((len(line) for text in _texts(cell) for line in text.split("\n")), default=0)
    says = f"cell {cell['id']}: prints a line of {widest} characters; print at most {OUTPUT_COLUMNS} on a line"
    return [says] * (widest > OUTPUT_COLUMNS)


def _texts(cell) -> list[str]:
    return [str(output.get("text", "") or output.get("data", {}).get("text/plain", "")) for output in cell.outputs]


def _heading_problems(nb) -> list[str]:
    """Where the table of contents would have a hole: one title, and no level left out below it."""
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    levels = [len(found.group(1)) for found in HEADING.finditer(re.sub(r"```.*?```", "", prose, flags=re.DOTALL))]
    problems = [] if levels[:1] == [1] and levels.count(1) == 1 else ["one heading `#`, the title, must come first"]
    skipped = [f"{above} to {below}" for above, below in pairwise(levels) if below > above + 1]
    sections = [(chapter, int(number)) for chapter, number in _NUMBERED.findall(prose)]
    jumps = [(*above, chapter, n) for above, (chapter, n) in pairwise(sections) if (chapter, n - 1) != above]
    problems += [f"section {a}.{b} is followed by {c}.{d}; number sections one after another" for a, b, c, d in jumps]
    return problems + [f"headings go from level {jump}; leave no level out" for jump in skipped]


def link_problems(nb, path: Path) -> list[str]:
    """Links of a notebook to files that are not there."""
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    broken = [target for target in _FILE_LINK.findall(prose) if not (path.parent / target).exists()]
    return [f"a link leads to {target}, which is not there" for target in broken]


def _names_from_elsewhere(source: str) -> set[str]:
    """The names that a cell reads and neither defines nor imports."""
    tables = [symtable.symtable(without_magics(source), "cell", "exec")]
    own = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    read_names = set()
    for table in tables:  # grows below
        tables += table.get_children()
        module = table.get_type() == "module"
        read_names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (module or s.is_global())}
    return read_names - own - set(dir(builtins))


def _alone_problems(nb) -> list[str]:
    """Cells that a reader is sent to, and that raise NameError in a kernel that has run no other cell."""
    nodes = [node for cell in code_cells(nb) for node in ast.walk(ast.parse(without_magics(cell.source)))]
    imported = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    imports, problems = {alias.asname or alias.name for alias in imported}, []
    for before, cell in pairwise(nb.cells):
        if cell.cell_type != "code":
            continue
        missing = _names_from_elsewhere(cell.source) if "widget" in tags_of(cell) else set()
        missing &= imports  # what a widget shows may come from a run above it
        if before.cell_type == "markdown" and ORDER.search(before.source):
            missing = _names_from_elsewhere(cell.source)
            problems += ["the text above the install cell names another"] if cell["id"] == INSTALL else []
        if missing:
            names = ", ".join(sorted(missing))
            problems.append(f"cell {cell['id']}: a reader may run it alone, and {names} comes from another cell")
    return problems


def notebook_problems(path: Path, root: Path = ROOT) -> list[str]:
    """Everything that is wrong with a notebook of notebooks/ or solutions/, each in a sentence."""
    nb = read(path)
    problems = [problem for cell in nb.cells for problem in cell_problems(cell)]
    problems += [problem for cell in code_cells(nb) for problem in mirror_problems(cell, root)]
    if nbformat.writes(formatted(path, root)).rstrip("\n") + "\n" != path.read_text(encoding="utf-8"):
        problems += ["not in its normal form (links, badges and the install cell belong to it); `make fmt` writes it"]
    problems += [problem for cell in code_cells(nb) for problem in _picture_problems(cell)]
    problems += [problem for cell in code_cells(nb) for problem in width_problems(cell)]
    problems += _heading_problems(nb) + link_problems(nb, path) + _alone_problems(nb) + quote_problems(nb)
    if path.parent.name == "notebooks" and path.name in chapters_of(ROOT / "notebooks"):
        problems += lesson_problems(nb)
    setups = sum("setup" in tags_of(cell) for cell in code_cells(nb))
    if setups != (path.stem != "index"):
        problems.append("exactly one cell must carry the tag setup; in the index, none")
    uncompared = [cell["id"] for cell in code_cells(nb) if is_uncompared(cell)]
    if len(uncompared) * 5 > len(code_cells(nb)):
        problems += [f"more than a fifth of {len(code_cells(nb))} code cells is not compared: {', '.join(uncompared)}"]
    return [f"{path.relative_to(root)}: {problem}" for problem in problems]
