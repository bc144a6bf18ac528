"""The table of a day on GPUs: rows as they come, and the page that is made of them.

    add_row(path, part="models", name="...", outcome="measured", figures={"peak, GB": 23.1})   # any process, any time
    page(read_rows(path))                                                                     # docs/GPU.md

The table is one JSON document, replaced as a whole with each row: a program that is stopped leaves the rows before it.
A figure `measured` beside a figure `predicted` (two numbers, or two objects with the same names) is compared.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from numbers import Real
from pathlib import Path

import torch
from filelock import FileLock

from course_lib.validate import read_json

KIND = "course gpu-day"
OUTCOMES = ("measured", "passed", "failed", "skipped", "stopped", "not run")
TEXTS = ("part", "name", "outcome", "date", "device", "versions")  # of every row
NEVER = "Never run on a GPU yet: `make gpu-day` has left no table."
HEAD = """# What was measured on GPUs

Written by `course gpu-report` from the table of `make gpu-day`; nothing here is typed by hand.
"""
_MARKUP = str.maketrans({"\n": " ", "\r": " ", "|": "\\|", "<": "&lt;", "`": "'"})


def gpu_is_here() -> bool:
    """Whether torch sees a CUDA GPU."""
    return torch.cuda.is_available()


def this_machine() -> dict[str, str]:
    """Return the date, the device and the versions that stand in a row."""
    device = torch.cuda.get_device_name() if gpu_is_here() else "no GPU"
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    versions = f"Python {platform.python_version()}, torch {version('torch')}{cuda}"
    return {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "device": device, "versions": versions}


def add_row(path: str | Path, **row: object) -> None:
    """Add a row to the table, with this machine's date, device and versions: part, name, outcome, and what is told.

    seconds   how long it took;   reason   why it failed or did not run;   figures   name -> any JSON
    """
    whole = json.loads(json.dumps(this_machine() | row), parse_constant=str)  # JSON has no NaN and no infinity
    _check(path, [whole])
    _rewrite(Path(path), lambda rows: [*rows, whole])


def drop_part(path: str | Path, part: str) -> None:
    """Take the rows of a part out of the table, before it runs again."""
    _rewrite(Path(path), lambda rows: [row for row in rows if row["part"] != part])


def _rewrite(path: Path, change: Callable[[list[dict]], list[dict]]) -> None:
    """Put another table in the place of this one at once, so that a stop leaves one of the two."""
    with FileLock(f"{path}.lock"):
        rows = change(read_rows(path) if path.exists() else [])
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps({"kind": KIND, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, path)


def read_rows(path: str | Path) -> list[dict]:
    """Return the rows of a table.

    Raises   ValueError, in one sentence, for a file that is no such table
    """
    document = read_json(path)
    rows = document.get("rows") if isinstance(document, dict) and document.get("kind") == KIND else None
    if not isinstance(rows, list):
        raise ValueError(f"{path} is no table of make gpu-day; give the file that it wrote")
    _check(path, rows)
    return rows


def _check(path: str | Path, rows: Sequence[object]) -> None:
    for number, row in enumerate(rows, start=1):
        if wrong := _wrong_field(row):
            raise ValueError(f"{path}: {wrong} of row {number} is damaged; give the file that make gpu-day wrote")


def _wrong_field(row: object) -> str | None:
    """Name the first field of a row that is not as `add_row` writes it."""
    if not isinstance(row, dict):
        return "the whole"
    for name in TEXTS:
        if not isinstance(row.get(name), str):
            return name
    if row["outcome"] not in OUTCOMES:
        return "outcome"
    kinds = {"seconds": (int, float), "reason": str, "figures": dict}
    return next((name for name, kind in kinds.items() if name in row and not isinstance(row[name], kind)), None)


# --- the page


def page(rows: Sequence[Mapping]) -> str:
    """Return docs/GPU.md: how each part ended, measured beside predicted, all other figures, what did not pass."""
    if not rows:
        return f"{HEAD}\n{NEVER}\n"
    sections = {
        "How each part ended": _outcomes(rows),
        "Measured beside predicted": _beside(rows),
        "What else was measured": _others(rows),
        "What did not pass": _not_passed(rows),
    }
    tables = (f"\n## {title}\n\n{table}\n" for title, table in sections.items() if table)
    return f"{HEAD}\n{_where(rows)}\n{''.join(tables)}"


def summary(rows: Sequence[Mapping]) -> str:
    """Return one line: how many rows ended how."""
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES}
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "no rows"


def comparisons(row: Mapping) -> list[tuple[str, float, float]]:
    """Return (what, measured, predicted) of one row: of its two figures of these names, or of each of their names."""
    figures = row.get("figures", {})
    what, measured, predicted = (figures.get(name) for name in ("what", "measured", "predicted"))
    if _is_number(measured) and _is_number(predicted):
        return [(str(what or ""), measured, predicted)]
    if not (isinstance(measured, dict) and isinstance(predicted, dict)):
        return []
    both = [name for name in measured if _is_number(measured[name]) and _is_number(predicted.get(name))]
    return [(name, measured[name], predicted[name]) for name in both]


def _where(rows: Sequence[Mapping]) -> str:
    """Say which devices and versions the rows are of, and when they were made."""
    places = sorted({f"{row['device']} ({row['versions']})" for row in rows})
    days = sorted({row["date"][:10] for row in rows})
    return _text(f"{'; '.join(places)}; {days[0]}{f' to {days[-1]}' if days[1:] else ''}: {summary(rows)}.")


def _outcomes(rows: Sequence[Mapping]) -> str:
    parts = list(dict.fromkeys(row["part"] for row in rows))
    of_parts = ([row for row in rows if row["part"] == part] for part in parts)
    return _table("part | rows", [(part, summary(its)) for part, its in zip(parts, of_parts, strict=True)])


def _beside(rows: Sequence[Mapping]) -> str:
    lines = [
        (row["part"], row["name"], what, f"{measured:,.4g}", f"{predicted:,.4g}", _ratio(measured, predicted))
        for row in rows
        for what, measured, predicted in comparisons(row)
    ]
    return _table("part | name | what | measured | predicted | measured / predicted", lines)


def _others(rows: Sequence[Mapping]) -> str:
    told = [row for row in rows if row.get("figures") and not comparisons(row)]
    return _table("part | name | figures", [(row["part"], row["name"], _figures(row["figures"])) for row in told])


def _not_passed(rows: Sequence[Mapping]) -> str:
    wrong = [row for row in rows if row["outcome"] not in ("measured", "passed")]
    lines = [(row["part"], row["name"], row["outcome"], row.get("reason", "")) for row in wrong]
    return _table("part | name | outcome | why", lines)


def _table(head: str, lines: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown, or nothing where there is no line."""
    if not lines:
        return ""
    rule = " | ".join("---" for _ in head.split("|"))
    rows = (" | ".join(map(_text, line)) for line in lines)
    return "\n".join(f"| {row} |" for row in (head, rule, *rows))


def _text(text: str) -> str:
    """Return a text as a cell of a table: on one line, without Markdown or HTML of its own."""
    return str(text).translate(_MARKUP)


def _figures(figures: Mapping) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in figures.items())


def _short(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted else ""


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
