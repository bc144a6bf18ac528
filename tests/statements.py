"""Which statements of a notebook a part of it needs: its own, and what defines the names that it uses."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
FILLING = ("save_pretrained",)  # methods that change what they are called for


def cells_of(path: str | Path) -> list[dict]:
    """The cells of a notebook; without nbformat, which a machine with a GPU may lack."""
    return json.loads(Path(path).read_text(encoding="utf-8"))["cells"]


def cells_tagged(path: str | Path, tag: str) -> list[int]:
    """The numbers of a notebook's cells with a tag."""
    return [index for index, cell in enumerate(cells_of(path)) if tag in cell["metadata"].get("tags", [])]


def statements(path: str | Path) -> Iterator[tuple[int, ast.stmt]]:
    """(cell, statement) of all code cells."""
    for index, cell in enumerate(cells_of(path)):
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            source = "\n".join("" if line.startswith(("%", "!")) else line for line in lines)
            yield from ((index, statement) for statement in ast.parse(source).body)


def names(node: ast.AST, context: type) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def made_by(statement: ast.stmt) -> set[str]:
    """Names that a statement binds, or whose attributes and items it sets."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    changed = {
        name
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
        for name in names(node, ast.Load)
    }
    inner = [node for node in ast.walk(statement) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return names(statement, ast.Store) | changed | {node.name for node in inner}


def needed(path: str | Path, launchers: set[str]) -> list[tuple[int, ast.stmt]]:
    """The statements that call a launcher, or a function that does, and all on which they depend."""
    everything, calling = list(statements(path)), set(launchers)
    for _, statement in everything:
        if isinstance(statement, ast.FunctionDef) and names(statement, ast.Load) & calling:
            calling.add(statement.name)
    return with_needs(everything, [
        number
        for number, (_, statement) in enumerate(everything)
        if not isinstance(statement, DEFINITIONS) and names(statement, ast.Load) & calling
    ])  # fmt: skip


def needed_by_cell(path: str | Path, index: int) -> list[tuple[int, ast.stmt]]:
    """The statements of a cell, and all above it that made the names as it finds them."""
    above, of_functions = [(cell, statement) for cell, statement in statements(path) if cell <= index], set()
    while True:
        chosen, wanted = [], set(of_functions)
        for cell, statement in reversed(above):
            if cell == index or made_by(statement) & wanted:
                chosen.append((cell, statement))
                wanted = wanted - bound_anew(statement) | first_loaded(statement)
        definitions = [one for _, one in chosen if isinstance(one, ast.FunctionDef | ast.ClassDef)]
        looked_up = set().union(*(names(one, ast.Load) for one in definitions))  # when called, maybe further down
        if looked_up <= of_functions:
            return chosen[::-1]
        of_functions |= looked_up


def first_loaded(statement: ast.stmt) -> set[str]:
    """Names that a statement loads without having bound them on a line before; of a definition none, till its call."""
    if isinstance(statement, DEFINITIONS):
        return set()
    lines: dict[type, dict[str, int]] = {ast.Load: {}, ast.Store: {}}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and type(node.ctx) in lines:
            seen = lines[type(node.ctx)]
            seen[node.id] = min(seen.get(node.id, node.lineno), node.lineno)
    loaded, stored = lines[ast.Load], lines[ast.Store]
    return {name for name, line in loaded.items() if stored.get(name, line) >= line}


def bound_anew(statement: ast.stmt) -> set[str]:
    """Names that hang on no earlier value once the statement has run."""
    if isinstance(statement, DEFINITIONS):
        return made_by(statement)
    return names(statement, ast.Store) if isinstance(statement, ast.Assign) else set()


def with_needs(everything: list[tuple[int, ast.stmt]], starts: list[int]) -> list[tuple[int, ast.stmt]]:
    """The statements of these numbers, and all on which they depend."""
    chosen, before = set(starts), -1
    wanted = set().union(*(names(everything[number][1], ast.Load) for number in starts))
    while len(chosen) > before:  # a function may use what is defined below it
        before = len(chosen)
        for number, (_, statement) in enumerate(everything):
            if made_by(statement) & wanted or fills(statement, wanted):
                chosen.add(number)
                wanted |= names(statement, ast.Load)
    return [everything[number] for number in sorted(chosen)]


def fills(statement: ast.stmt, wanted: set[str]) -> bool:
    """Whether a statement is a call for its effect on something wanted: not one that prints or draws it."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = ast.unparse(statement.value.func).split(".")
    return called[-1] in FILLING and bool(names(statement, ast.Load) & wanted)
