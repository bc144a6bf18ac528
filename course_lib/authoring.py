"""Notebooks as source code: one normal form, cells that mirror the package, exercises made from solutions.

`python -m course_lib.authoring fmt | mirrors | exercises | check | badges owner/name`; `make` calls these.
CONTRIBUTING.md says how a chapter is made; tests/test_notebooks.py holds every notebook to `notebook_problems`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import linecache
import re
import sys
import tomllib
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
TAGS = ("setup", "mirror", "widget", "gpu", "nbval-ignore-output", "nbval-skip", "raises-exception")
UNCOMPARED_TAGS = {"nbval-ignore-output", "nbval-skip"}
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
MIRRORS = "# mirrors:"
COLAB = "https://colab.research.google.com/"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){0,4}(-[0-9a-f]{12})?")
UNWANTED_WORDS = re.compile(r"\b(simply|just|obviously)\b", re.IGNORECASE)
EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u26ff\u2705\u2728\u274c\u2757\u2b50\ufe0f]")
REDRAWN = re.compile(r"^.*\r(?=[^\n])", re.MULTILINE)  # a bar that redraws itself leaves its last state, as in nbval
ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")


# Reading and writing ------------------------------------------------------------------------------------------------


def notebook_paths(*folders: str, root: Path = ROOT) -> list[Path]:
    """The notebooks of the named folders, in reading order."""
    return [path for folder in folders for path in sorted((root / folder).glob("*.ipynb"))]


def read(path: Path):
    """A notebook file as a notebook object (nbformat 4)."""
    return nbformat.read(path, as_version=4)


def write(nb, path: Path) -> bool:
    """Write a notebook if its file would change; says whether it did."""
    text = nbformat.writes(nb).rstrip("\n") + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def code_cells(nb) -> list:
    """The code cells of a notebook, in order."""
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def tags_of(cell) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


# The normal form ----------------------------------------------------------------------------------------------------


def normalise(nb):
    """A copy of a notebook in the one form in which the repository stores it.

    Counts run 1..n; ids are slugs; no timestamps, widget state or editor's metadata; one stdout and one stderr a cell.
    Solutions get nbgrader's metadata: cells with solution marks and cells that call a `check_...`.
    """
    nb = copy.deepcopy(nb)
    nb.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.cells = [cell for cell in nb.cells if cell.source.strip()]
    graded = any(BEGIN in cell.source for cell in nb.cells)
    taken: set[str] = set()
    for cell in nb.cells:
        cell.source = cell.source.strip("\n")
        cell["id"] = _readable_id(cell, taken)
        cell.metadata = nbformat.from_dict(_cell_metadata(cell, graded))
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


def _cell_metadata(cell, graded: bool) -> dict:
    tags = tags_of(cell)
    metadata: dict = {}
    if tags:
        known = [tag for tag in TAGS if tag in tags]
        metadata["tags"] = known + sorted({tag for tag in tags if tag not in TAGS})
    if graded and cell.cell_type == "code" and (BEGIN in cell.source or is_check_cell(cell)):
        metadata["nbgrader"] = _nbgrader_metadata(cell["id"], is_check=BEGIN not in cell.source)
    return metadata


def _nbgrader_metadata(cell_id: str, is_check: bool) -> dict:
    metadata = {"grade": is_check, "grade_id": cell_id, "locked": is_check, "schema_version": 3}
    metadata |= {"solution": not is_check, "task": False}
    return metadata | ({"points": 1} if is_check else {})


def _normal_outputs(outputs, count: int) -> list:
    kept, streams = [], {}
    for output in outputs:
        if output.output_type == "stream":
            if output.name in streams:
                streams[output.name].text += output.text
                continue
            streams[output.name] = output
        elif output.output_type in ("display_data", "execute_result"):
            if WIDGET_VIEW in output.data:
                continue
            output.metadata = nbformat.from_dict({})
            if output.output_type == "execute_result":
                output.execution_count = count
        kept.append(output)
    for stream in streams.values():
        stream.text = REDRAWN.sub("", stream.text)
    return kept


# Mirrors: the chapter's algorithm in full in a cell, held to the package ----------------------------------------------


def mirrored_names(cell) -> list[str]:
    """The dotted names after `# mirrors:` in a cell's first line; several are separated by commas."""
    first = cell.source.split("\n", 1)[0]
    return [name.strip() for name in first.removeprefix(MIRRORS).split(",")] if first.startswith(MIRRORS) else []


def package_source(dotted: str, root: Path = ROOT) -> str:
    """The source of a function, class or constant of the package, its docstring cut to the first line.

    Raises   ValueError if no such name stands at the top level of that module
    """
    module, _, name = dotted.rpartition(".")
    base = root.joinpath(*module.split("."))
    path = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    node = _definitions(ast.parse(text)).get(name)
    if node is None:
        raise ValueError(f"mirrors: {dotted} is not defined at the top level of {module}; name what stands there")
    lines = text.split("\n")
    start, stop = _span(node)
    kept = _with_short_docstring(node, lines)
    return "\n".join(kept[line] for line in range(start, stop + 1) if line in kept)


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = node
    return found


def _span(node: ast.stmt) -> tuple[int, int]:
    starts = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min([node.lineno, *starts]), node.end_lineno


def _with_short_docstring(node: ast.stmt, lines: list[str]) -> dict[int, str]:
    """Line number -> text, for the lines of a definition; of each docstring in it the first line stays."""
    start, stop = _span(node)
    kept = {number: lines[number - 1] for number in range(start, stop + 1)}
    for inner in ast.walk(node):
        if not isinstance(inner, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(inner) is None:
            continue
        doc = inner.body[0]
        if doc.end_lineno > doc.lineno:
            kept[doc.lineno] = kept[doc.lineno].rstrip() + '"""'
            for number in range(doc.lineno + 1, doc.end_lineno + 1):
                del kept[number]
    return kept


def _tree(node: ast.stmt) -> str:
    """The syntax tree of a definition as text, without docstrings (comments are in no tree)."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.dump(node)


def mirror_problems(cell, root: Path = ROOT) -> list[str]:
    """Where a mirror cell differs from the package, in words; empty if it agrees."""
    names = mirrored_names(cell)
    if bool(names) != ("mirror" in tags_of(cell)):
        return [f"cell {cell['id']}: the tag `mirror` and a first line `{MIRRORS} course_lib...` go together"]
    here = _definitions(ast.parse(without_magics(cell.source))) if names else {}
    problems = []
    for dotted in names:
        short = dotted.rpartition(".")[2]
        try:
            there = _definitions(ast.parse(package_source(dotted, root)))[short]
        except ValueError as error:
            problems.append(f"cell {cell['id']}: {error}")
            continue
        if short not in here or _tree(here[short]) != _tree(there):
            problems.append(f"cell {cell['id']}: differs from {dotted}; `make mirrors` rewrites the cell")
    return problems


def rewrite_mirror(source: str, names: list[str], root: Path = ROOT) -> str:
    """The source of a mirror cell with each named definition as the package has it; other statements stay."""
    for dotted in names:
        here = _definitions(ast.parse(source)).get(dotted.rpartition(".")[2])
        wanted = package_source(dotted, root)
        if here is None:
            header, _, rest = source.partition("\n")
            source = f"{header}\n{wanted}\n" + (f"\n\n{rest.lstrip()}" if rest.strip() else "")
        elif _tree(here) != _tree(_definitions(ast.parse(wanted))[dotted.rpartition(".")[2]]):
            lines = source.split("\n")
            start, stop = _span(here)
            source = "\n".join([*lines[: start - 1], wanted, *lines[stop:]])
    return source.rstrip("\n")


# Exercises: one source, solutions/ ----------------------------------------------------------------------------------


def is_check_cell(cell) -> bool:
    """Whether a cell calls a grader: `check_...(...)` at its top level."""
    return cell.cell_type == "code" and re.search(r"^check_\w+\(", cell.source, re.MULTILINE) is not None


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


def exercise_from(nb):
    """The notebook that a learner opens: a solution notebook without its solutions and without outputs."""
    nb = normalise(nb)
    nb.cells[0].source = nb.cells[0].source.replace("/blob/main/solutions/", "/blob/main/exercises/")
    for cell in code_cells(nb):
        cell.source = without_solutions(cell.source)
        cell.outputs, cell.execution_count = [], None
    return nb


def load_solution(path_or_stem: str | Path, root: Path = ROOT) -> dict:
    """The names that a solution (or exercise) notebook defines, without its launches, prints and checks.

    Of each code cell run: imports, functions, classes, and assignments that call nothing. In the setup cell and in
    cells with solution marks assignments may call. Everything else is left out, magics too.
    """
    path = Path(path_or_stem)
    path = path if path.suffix == ".ipynb" else root / "solutions" / f"{path}.ipynb"
    namespace: dict = {"__name__": "__main__"}  # so that cloudpickle sends its functions to ranks by value
    for cell in code_cells(read(path)):
        source = without_magics(cell.source)
        may_call = "setup" in tags_of(cell) or BEGIN in source
        run_definitions(source, namespace, f"{path.parent.name}/{path.stem}#{cell['id']}", may_call)
    return namespace


def run_definitions(source: str, namespace: dict, filename: str, may_call: bool = False) -> None:
    """Execute the definitions of one cell in a namespace (see `load_solution` for which statements those are)."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if _is_definition(node, may_call)]
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(tree, filename, "exec"), namespace)


def _is_definition(node: ast.stmt, may_call: bool) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return may_call or not any(isinstance(inner, ast.Call) for inner in ast.walk(node))
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


# What a notebook must satisfy ---------------------------------------------------------------------------------------


def colab_address(path: Path, root: Path = ROOT) -> str:
    """Where a notebook's Colab badge leads: this very notebook in the repository that pyproject.toml names."""
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    repository = urls["Repository"].removeprefix("https://github.com/")
    return f"{COLAB}github/{repository}/blob/main/{path.relative_to(root).as_posix()}"


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


def without_magics(source: str) -> str:
    """Code with its `%magic` and `!shell` lines blanked, so that Python can parse it."""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in source.split("\n"))


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
        problems.append(f"cell {name}: stores an error; mend the cell, or tag it raises-exception if it teaches one")
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
    if nbformat.writes(normalise(nb)).rstrip("\n") + "\n" != path.read_text(encoding="utf-8"):
        problems.append("not in its normal form; `make fmt` writes it")
    if f"({colab_address(path, root)})" not in (nb.cells[0].source if nb.cells else ""):
        problems.append(
            f"the first cell has no badge that leads to {colab_address(path, root)}; `make fmt` mends a link"
        )
    if sum("setup" in tags_of(cell) for cell in code_cells(nb)) != 1:
        problems.append("exactly one cell must carry the tag setup")
    uncompared = [cell["id"] for cell in code_cells(nb) if is_uncompared(cell)]
    if len(uncompared) * 5 > len(code_cells(nb)):
        problems.append(
            f"more than a fifth of {len(code_cells(nb))} code cells is not compared: {', '.join(uncompared)}"
        )
    return [f"{path.relative_to(root)}: {problem}" for problem in problems]


def exercise_problems(root: Path = ROOT) -> list[str]:
    """Where exercises/ is not what solutions/ gives."""
    problems = []
    for path in notebook_paths("solutions", root=root):
        exercise = root / "exercises" / path.name
        wanted = nbformat.writes(exercise_from(read(path))).rstrip("\n") + "\n"
        if not exercise.exists() or exercise.read_text(encoding="utf-8") != wanted:
            problems.append(f"exercises/{path.name}: not what solutions/ gives; `make exercises` writes it")
    stems = {
        folder: {p.stem for p in notebook_paths(folder, root=root)}
        for folder in ("notebooks", "solutions", "exercises")
    }
    for folder in ("solutions", "exercises"):
        for stem in sorted(stems["notebooks"] ^ stems[folder]):
            problems.append(f"{stem}.ipynb stands in only one of notebooks/ and {folder}/")
    return problems


# Commands -----------------------------------------------------------------------------------------------------------


def fmt(root: Path = ROOT) -> list[Path]:
    """Write notebooks and solutions in their normal form, badges and all; returns those that changed."""
    changed = []
    for path in notebook_paths("notebooks", "solutions", root=root):
        nb = normalise(read(path))
        title = nb.cells[0]
        title.source = re.sub(rf"\({re.escape(COLAB)}[^)]*\)", f"({colab_address(path, root)})", title.source)
        if write(nb, path):
            changed.append(path)
    return changed


def mirrors(root: Path = ROOT) -> list[Path]:
    """Rewrite the mirror cells that differ from the package; returns the notebooks that changed."""
    changed = []
    for path in notebook_paths("notebooks", "solutions", root=root):
        nb = read(path)
        for cell in code_cells(nb):
            cell.source = rewrite_mirror(cell.source, mirrored_names(cell), root)
        if write(normalise(nb), path):
            changed.append(path)
    return changed


def exercises(root: Path = ROOT) -> list[Path]:
    """Write exercises/ from solutions/; returns the notebooks that changed."""
    paths = notebook_paths("solutions", root=root)
    return [root / "exercises" / p.name for p in paths if write(exercise_from(read(p)), root / "exercises" / p.name)]


def badges(repository: str, root: Path = ROOT) -> list[Path]:
    """Make this the course of the GitHub repository `owner/name`: its address, and every Colab badge."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"repository ({repository!r}) must be owner/name, as in https://github.com/owner/name")
    old = re.search(r'Repository = "(https://github\.com/[^"]+)"', (root / "pyproject.toml").read_text()).group(1)
    changed = []
    for path in [root / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")]:
        text = path.read_text(encoding="utf-8")
        if repository not in text and old in text:
            path.write_text(text.replace(old, f"https://github.com/{repository}"), encoding="utf-8")
            changed.append(path)
    return changed + fmt(root) + exercises(root)


def main(argv: list[str] | None = None) -> int:
    """The command line: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.authoring", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, doc in (("fmt", fmt), ("mirrors", mirrors), ("exercises", exercises), ("check", notebook_problems)):
        commands.add_parser(name, help=doc.__doc__.splitlines()[0])
    commands.add_parser("badges", help=badges.__doc__).add_argument("repository", metavar="owner/name")
    options = parser.parse_args(argv)
    if options.command == "check":
        paths = notebook_paths("notebooks", "solutions")
        problems = [problem for path in paths for problem in notebook_problems(path)] + exercise_problems()
        print("\n".join(problems) or f"{len(paths)} notebooks are as they should be")
        return 1 if problems else 0
    arguments = [options.repository] if options.command == "badges" else []
    changed = {"fmt": fmt, "mirrors": mirrors, "exercises": exercises, "badges": badges}[options.command](*arguments)
    print("\n".join(f"wrote {path.relative_to(ROOT)}" for path in changed) or "nothing to change")
    return 0


if __name__ == "__main__":
    sys.exit(main())
