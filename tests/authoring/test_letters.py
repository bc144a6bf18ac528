"""One letter, one meaning (docs/SYMBOLS.md): N is query heads and never ranks, W is no bandwidth."""

import re

import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

from course_lib.authoring import ROOT, read

RANKS = re.compile(
    r"(?<![\w\\])N ?- ?1\b"  # N - 1 others
    r"|\\frac\{?1\}?\{?N\b|/ ?N\b(?<!K/N)(?<!K / N)(?<!K // N)|\bmod N\b|log_?2\(? ?N\b"
    r"|(?<!\w)\$?N\$? (data-parallel |world |of the )?(ranks|GPUs|processes|devices|pieces|nodes)\b"
    r"|(?<![\w])N_?\{?ranks|number of ranks (is )?\$N"
)
BANDWIDTH = re.compile(
    r"/ ?\(?W\b|\\frac\{[^{}]*\}\{W|\{W ?/ ?1e9|\bW = published|bandwidth (is )?\$?W\b|\$W\$ bytes per s"
)
PATHS = sorted(path for folder in ("notebooks", "solutions") for path in (ROOT / folder).glob("*.ipynb"))


def other_meanings(nb) -> list[str]:
    """Lines in which N counts ranks, or W is a bandwidth."""
    lines = [(cell["id"], line) for cell in nb.cells for line in cell.source.split("\n")]
    return [f"{cell}: {line}" for cell, line in lines if RANKS.search(line) or BANDWIDTH.search(line)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_n_is_never_ranks_and_w_is_never_a_bandwidth(path):
    assert other_meanings(read(path)) == []


@pytest.mark.parametrize(
    "line",
    [
        r"$$2\,\frac{N-1}{N}\,n$$",
        r"$L = \frac1N\sum_r L_r$",
        "$12\\psi/N$ bytes",
        "we start $N$ processes",
        "formula = 2 * (N - 1) * P",
        "$\\log_2 N$ steps",
        r"\frac{2n\,\frac{dp-1}{dp}/W}{2nT/R}",
        "W = published_link(nodes)",
    ],
)
def test_a_second_meaning_is_seen(line):
    assert other_meanings(new_notebook(cells=[new_markdown_cell(line)]))


@pytest.mark.parametrize("line", ["$12\\,L\\,N\\,H\\,S$", "N // K", "$n = N/c$ heads", "I before W", "$(p-1)(F+I-2W)$"])
def test_query_heads_and_half_of_backward_keep_their_letters(line):
    assert not other_meanings(new_notebook(cells=[new_markdown_cell(line)]))
