"""Numbers as a reader wants them: three digits, bytes and seconds with a unit that fits; tokens as 4M."""

import re

from course_lib.validate import Amount


def three_digits(value: float) -> str:
    """A number as a reader wants it: 0.0123, 1.23, 12.3, 123, 1,234."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    if abs(value) >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3g}"


UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def unit_for(value_bytes: Amount, binary: bool = False) -> str:
    """The largest unit in which the value is at least one: decimal (MB, GB) or binary (MiB, GiB)."""
    names = ("B", "KiB", "MiB", "GiB", "TiB") if binary else ("B", "KB", "MB", "GB", "TB")
    fitting = [name for name in names if value_bytes >= UNITS[name]]
    return fitting[-1] if fitting else "B"


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
    """4194304 or 4M: M is 2^20, K is 2^10, as batches and sequences are powers of two.

    Raises   ValueError where the text is no whole number of tokens
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)([kKmM]?)", text)
    tokens = float(match[1]) * _TOKENS[match[2].lower()] if match else 0.5
    if match and "." not in match[1]:
        tokens = int(match[1]) * _TOKENS[match[2].lower()]
    elif tokens != int(tokens):
        raise ValueError(f"{text!r} is no number of tokens; give one such as 4194304 or 4M (M is 2^20, K is 2^10)")
    return int(tokens)
