"""One word, one meaning (docs/SYMBOLS.md): N is query heads and never ranks, W no bandwidth, 배치 a batch."""

import re
import tokenize
from pathlib import Path

import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

from course_lib.authoring import ROOT, read

RANKS = re.compile(
    r"(?<![\w\\])N ?- ?1\b"  # N - 1 others
    r"|\\frac\{?1\}?\{?N\b|/ ?N\b(?<!K/N)(?<!K / N)(?<!K // N)|\bmod N\b|log_?2\(? ?N\b"
    r"|(?<!\w)\$?N\$? (data-parallel |world |of the |equal |PCIe )?(ranks|GPUs|processes|devices|pieces|nodes|links)\b"
    r"|(?<![\w])N_?\{?ranks|number of ranks (is )?\$?N\b|\bN: ranks|\bmultiple of N\b"
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


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_korean_word_for_batch_stands_for_a_batch_and_another_for_a_layout(path):
    for line in "\n".join(cell.source for cell in read(path).cells).split("\n"):
        assert "배치" not in line or re.search("batch|^\\| [$]B_|micro", line), line
        assert not line.startswith("| layout") or "병렬화 구성" in line, line


def prose_of(path: Path) -> list[str]:
    """The lines of a module's docstrings, comments and other strings."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    with path.open("rb") as file:
        said = [token for token in tokenize.tokenize(file.readline) if token.type in kinds]
    return [
        f"{path.name}:{token.start[0] + n}: {line}" for token in said for n, line in enumerate(token.string.split("\n"))
    ]


def ledger_lines() -> list[str]:
    """What the course says itself of a claim; the claims quote others, with their letters."""
    lines = (ROOT / "course_lib" / "claims" / "ledger.toml").read_text(encoding="utf-8").split("\n")
    return [line for line in lines if not line.startswith("claim = ")]


def test_the_package_says_neither_of_them_in_docstrings_comments_and_shown_texts():
    paths = sorted((ROOT / "course_lib").rglob("*.py"))
    lines = [line for path in paths for line in prose_of(path)] + ledger_lines()
    assert [line for line in lines if RANKS.search(line) or BANDWIDTH.search(line)] == []


def test_docstrings_comments_and_strings_of_a_module_are_read_and_its_names_are_not(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""A.\n\n1 / N of it.\n"""\nshare = 1 / N  # N - 1 others\nsaid = f"{share} of N ranks"\n')
    found = [line.partition(": ")[2] for line in prose_of(module) if RANKS.search(line)]
    assert [text.split(" of ")[0] for text in found[:2]] == ["1 / N", "# N - 1 others"] and len(found) == 3


@pytest.mark.parametrize(
    "line",
    [
        r"$$2\,\frac{N-1}{N}\,n$$",
        r"$L = \frac1N\sum_r L_r$",
        "$12\\psi/N$ bytes",
        "we start $N$ processes",
        "padded to a multiple of N, the number of ranks N",
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
