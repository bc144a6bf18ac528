"""Cells that mirror the package: the chapter's algorithm in full where it is taught, held to the package."""

import ast
import copy
from pathlib import Path

from course_lib.authoring.columns import MIRRORS, without_magics
from course_lib.authoring.form import ROOT, code_cells, normalise, notebook_paths, read, tags_of, write


def mirrored_names(cell) -> list[str]:
    """The dotted names after `# mirrors:`, divided by commas; one without a dot is of the module before it."""
    header, _ = _split_header(cell.source)
    names: list[str] = []
    for name in (part.strip() for line in header for part in line.removeprefix(MIRRORS).split(",")):
        module = names[-1].rpartition(".")[0] if names and "." not in name else ""
        names.append(f"{module}.{name}" if module else name)
    return names


def _split_header(source: str) -> tuple[list[str], list[str]]:
    """The lines `# mirrors:` at the top of a cell, and the others."""
    lines = source.split("\n")
    size = next((index for index, line in enumerate(lines) if not line.startswith(MIRRORS)), len(lines))
    return lines[:size], lines[size:]


def package_source(dotted: str, root: Path = ROOT) -> str:
    """The source of a definition of the package, its docstring of a line; raises ValueError if there is none."""
    node, lines = _in_package(dotted, root)
    start, stop = _span(node)
    kept = {number: lines[number - 1] for number in range(start, stop + 1)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
            doc = inner.body[0]
            kept[doc.lineno] = kept[doc.lineno].rstrip() + '"""' * (doc.end_lineno > doc.lineno)
            for number in range(doc.lineno + 1, doc.end_lineno + 1):
                del kept[number]
    return "\n".join(kept.values())


def _in_package(dotted: str, root: Path) -> tuple[ast.stmt, list[str]]:
    """The definition, and the lines of its module."""
    module, _, name = dotted.rpartition(".")
    base = root.joinpath(*module.split("."))
    path = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    node = _definitions(ast.parse(text)).get(name)
    if node is None:
        raise ValueError(f"mirrors: {dotted} is not defined at the top level of {module}; name what stands there")
    return node, text.split("\n")


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
    starts = [decorator.lineno for decorator in _decorators(node)]
    return min([node.lineno, *starts]), node.end_lineno


def _decorators(node: ast.stmt) -> list[ast.expr]:
    """Those that a reader needs: `checked` only refuses what nobody means, and is left out."""
    return [
        decorator
        for decorator in getattr(node, "decorator_list", [])
        if getattr(getattr(decorator, "func", decorator), "id", "") != "checked"
    ]


def _tree(node: ast.stmt) -> str:
    """The syntax tree of a definition as text, without docstrings (comments are in no tree)."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            inner.decorator_list = _decorators(inner)
            if ast.get_docstring(inner) is not None:
                inner.body = inner.body[1:] or [ast.Pass()]
    return ast.dump(node)


def _agrees(here: ast.stmt, there: ast.stmt) -> bool:
    """Whether a cell's definition is the package's, and each of its docstrings the beginning of the package's."""
    return _tree(here) == _tree(there) and all(
        whole.startswith(said.rstrip(".")) for said, whole in zip(_docstrings(here), _docstrings(there), strict=True)
    )


def _docstrings(node: ast.stmt) -> list[str]:
    inner = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    return [" ".join((ast.get_docstring(each) or "").split()) for each in inner]


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
            there, _ = _in_package(dotted, root)
        except ValueError as error:
            problems.append(f"cell {cell['id']}: {error}")
            continue
        if short not in here or not _agrees(here[short], there):
            problems.append(f"cell {cell['id']}: differs from {dotted}; `make mirrors` rewrites the cell")
    return problems


def rewrite_mirror(source: str, names: list[str], root: Path = ROOT) -> str:
    """The source of a mirror cell with each named definition as the package has it; other statements stay."""
    for dotted in names:
        here = _definitions(ast.parse(source)).get(dotted.rpartition(".")[2])
        wanted = package_source(dotted, root)
        if here is None:
            header, rest = ("\n".join(lines) for lines in _split_header(source))
            source = f"{header}\n{wanted}\n" + (f"\n\n{rest.lstrip()}" if rest.strip() else "")
        elif not _agrees(here, _in_package(dotted, root)[0]):
            lines = source.split("\n")
            start, stop = _span(here)
            source = "\n".join([*lines[: start - 1], wanted, *lines[stop:]])
    return source.rstrip("\n")


def rewrite_mirrors(root: Path = ROOT) -> list[Path]:
    """Rewrite the mirror cells that differ from the package; returns the notebooks that changed."""
    changed = []
    for path in notebook_paths("notebooks", "solutions", root=root):
        nb = read(path)
        for cell in code_cells(nb):
            cell.source = rewrite_mirror(cell.source, mirrored_names(cell), root)
        if write(normalise(nb), path):
            changed.append(path)
    return changed
