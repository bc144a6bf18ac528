"""Comments and docstrings of a cell within 88 columns; ruff does the same for its code, and leaves long strings."""

import ast
import io
import re
import textwrap
import tokenize

MIRRORS = "# mirrors:"
COLUMNS = 88
OUTPUT_COLUMNS = 100
_FOR_RUFF = re.compile(r"# (noqa|fmt|ruff|type):")


def without_magics(source: str) -> str:
    """Code with its `%magic` and `!shell` lines blanked, so that Python can parse it."""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in source.split("\n"))


def narrowed(source: str) -> str:
    """The source of a cell with its long comments and docstrings on several lines."""
    lines = source.split("\n")
    if max(map(len, lines)) <= COLUMNS:
        return source
    replaced = _comments(source, lines) | _docstrings(source, lines)
    return "\n".join(replaced.get(number, line) for number, line in enumerate(lines, start=1))


def _comments(source: str, lines: list[str]) -> dict[int, str]:
    """Line number -> text, for lines that a comment makes too long: the comment moves above the code."""
    replaced = {}
    for token in tokenize.generate_tokens(io.StringIO(without_magics(source)).readline):
        number, column = token.start
        if token.type != tokenize.COMMENT or len(lines[number - 1]) <= COLUMNS or _FOR_RUFF.match(token.string):
            continue
        code = lines[number - 1][:column].rstrip()
        mark = MIRRORS if token.string.startswith(MIRRORS) else "#"
        comment = _wrapped(token.string.removeprefix(mark).strip(), f"{_indent(lines[number - 1])}{mark} ")
        replaced[number] = f"{comment}\n{code}" if code else comment.replace(f",\n{MIRRORS}", f"\n{MIRRORS}")
    return replaced


def _docstrings(source: str, lines: list[str]) -> dict[int, str]:
    """Line number -> text, for the long lines of docstrings."""
    replaced = {}
    for node in ast.walk(ast.parse(without_magics(source))):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
            continue
        for number in range(node.body[0].lineno, node.body[0].end_lineno + 1):
            line = lines[number - 1]
            if len(line) > COLUMNS:
                replaced[number] = _wrapped(line.strip(), _indent(line))
    return replaced


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _wrapped(words: str, start: str) -> str:
    return textwrap.fill(
        words, COLUMNS, initial_indent=start, subsequent_indent=start, break_long_words=False, break_on_hyphens=False
    )
