"""Numbers as a reader wants them: three digits, bytes and seconds with a unit that fits; tokens as 4M; in columns."""

import re
from collections.abc import Sequence
from unicodedata import east_asian_width

from course_lib.language import told
from course_lib.validate import Amount


def three_digits(value: float) -> str:
    """A number as a reader wants it: 0.0123, 1.23, 12.3, 123, 1,234."""
    for least, form in ((99.95, ",.0f"), (9.995, ".1f"), (0.9995, ".2f")):
        if abs(value) >= least:
            return f"{value:{form}}"
    return f"{value or 0:.3g}"


_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS = _DECIMAL | _BINARY


def unit_for(value_bytes: Amount, binary: bool = False) -> str:
    """The largest unit in which the value is at least one: decimal (MB, GB) or binary (MiB, GiB)."""
    units = _BINARY if binary else _DECIMAL
    return max((name for name in units if value_bytes >= units[name]), key=units.get, default="B")


def show_bytes(value_bytes: Amount, unit: str | None = None) -> str:
    """Bytes with a named unit, such as `16.1 GB`; without `unit` the largest decimal one that fits."""
    unit = unit or unit_for(value_bytes)
    return f"{three_digits(value_bytes / UNITS[unit])} {unit}"


TIME_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def time_unit_for(value_s: Amount) -> str:
    """s, ms or µs: the largest in which the value is at least one."""
    return next((name for name, size in TIME_UNITS.items() if value_s >= size), "µs")


def show_seconds(value_s: Amount) -> str:
    """Seconds with a fitting unit, such as `2.34 ms`."""
    unit = time_unit_for(value_s)
    return f"{three_digits(value_s / TIME_UNITS[unit])} {unit}"


_TOKENS = {"": 1, "k": 2**10, "m": 2**20}


def read_tokens(text: str) -> int:
    """4194304 or 4M: M is 2^20, K 2^10, as batches are powers of two; raises ValueError for no whole number."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)([kKmM]?)", text)
    tokens = float(match[1]) * _TOKENS[match[2].lower()] if match else 0.5
    if match and "." not in match[1]:
        tokens = int(match[1]) * _TOKENS[match[2].lower()]
    elif tokens != int(tokens):
        raise ValueError(f"{text!r} is no number of tokens; give one such as 4194304 or 4M (M is 2^20, K is 2^10)")
    return int(tokens)


def aligned(rows: Sequence[Sequence[object]], least: Sequence[int]) -> list[str]:
    """Lines of a table in the reader's language; a letter of Hangul is two columns wide.

    least   the least width of each column: right-aligned, or left-aligned if it is negative
    """
    said = [[told(str(cell)) for cell in row] for row in rows]
    widths = [max(abs(width), *map(_width, column)) for width, *column in zip(least, *said, strict=True)]
    lines = []
    for row in said:
        spaces = [" " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = zip(row, spaces, least, strict=True)
        lines.append("  ".join(cell + space if left < 0 else space + cell for cell, space, left in cells).rstrip())
    return lines


def _width(text: str) -> int:
    return sum(1 + (east_asian_width(letter) == "W") for letter in text)
