"""Lines of Python in each folder: `make size` writes docs/SIZE.md, and tests/test_size.py holds the folders to it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "SIZE.md"
TOPS = ("course_lib", "tests")
HEAD = """# Lines of Python

Written by `make size`. A folder has at most the lines that stand here (`tests/test_size.py`).
A commit that raises a number says why.

| folder | lines |
|---|--:|
"""


def counted(root: Path = ROOT) -> dict[str, int]:
    """The lines of each folder, of the files beside them, and of all, blank lines and comments included."""
    lines = dict.fromkeys(TOPS, 0)
    for path in sorted(path for top in TOPS for path in (root / top).rglob("*.py")):
        top, *rest = path.relative_to(root).parts
        folder = f"{top}/{rest[0]}" if len(rest) > 1 else f"{top}/*.py"
        count = path.read_text(encoding="utf-8").count("\n")
        lines[folder] = lines.get(folder, 0) + count
        lines[top] += count
    return dict(sorted(lines.items()))


def page(lines: dict[str, int]) -> str:
    """The document with these lines."""
    return HEAD + "".join(f"| `{folder}` | {count} |\n" for folder, count in lines.items())


def budgets(text: str) -> dict[str, int]:
    """The lines that a document allows each folder."""
    return {folder: int(count) for folder, count in re.findall(r"^\| `(.+)` \| (\d+) \|$", text, re.MULTILINE)}


if __name__ == "__main__":
    PAGE.write_text(page(counted()), encoding="utf-8")
