"""A part of what takes long: PART=2/12 in the environment is the second twelfth; without it, all.

    PART=2/12 make test-exhaustive test-long         # every twelfth case
    python tests/parts.py notebooks/*.ipynb          # the names of this part

.ci/run takes a twelfth, and after the next commit the next one.
"""

import os
import sys
from collections.abc import Iterable

import pytest


def this_part() -> tuple[int, int]:
    """(number, of how many), both from 1."""
    said = os.environ.get("PART") or "1/1"
    number, slash, count = said.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"PART must be a number and of how many, got {said!r}; try PART=1/12")
    return int(number), int(count)


def of_this_part(names: Iterable) -> list:
    """Every twelfth of them, say: those that stand side by side are alike, and the parts take as long."""
    number, count = this_part()
    return list(names)[number - 1 :: count]


def in_parts_as(item: pytest.Item) -> str | None:
    """The name by which a test is of one part, or None: its own, or its file's where tests of it share launches."""
    if not any(map(item.get_closest_marker, ("exhaustive", "long"))):
        return None
    fixtures = [of_name[-1] for of_name in item._fixtureinfo.name2fixturedefs.values()]
    of_module = any(one.scope == "module" and one.func.__module__ == item.module.__name__ for one in fixtures)
    exhaustive = any(mark.name == "exhaustive" for mark in item.getparent(pytest.Module).own_markers)
    return str(item.path) if of_module or exhaustive else item.nodeid


if __name__ == "__main__":
    print(*of_this_part(sys.argv[1:]))
