"""Every claim of the ledger names the cells and tests that teach and recompute it, and they do.

Under `where` stand places: a cell as `notebooks/<file>.ipynb#<cell id>`, a test as `tests/<file>.py::<function>`.
"""

import ast
import re
from dataclasses import replace
from functools import cache

import pytest

from course_lib.authoring.form import ROOT, read
from course_lib.authoring.rules import is_uncompared
from course_lib.claims import TOPICS, Claim, Recomputed, claims_named, ledger, recompute, texts_of

PLACE = re.compile(r"(?P<notebook>notebooks/\w+\.ipynb)#(?P<cell>[\w-]+)|(?P<test>tests/[\w/]+\.py)::(?P<name>\w+)")
CLAIM = re.compile(r"(?<![A-Za-z0-9])C\d{3}(?!\d)")
NUMBER = re.compile(r"\d+\.\d+|\d{2,}")  # of two digits or more: a 2 stands everywhere


@cache
def cells(notebook: str) -> dict:
    path = ROOT / notebook
    return {cell["id"]: cell for cell in read(path).cells} if path.exists() else {}


@cache
def functions(path: str) -> dict:
    """The source of each top-level function of a file."""
    if not (ROOT / path).exists():
        return {}
    source = (ROOT / path).read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def shown(cell) -> str:
    """What a code cell stores as text."""
    return "".join(output.get("text", "") for output in cell.outputs)


def look_up(place: str) -> tuple[str, str, bool]:
    """(what is wrong with a place, its text, whether it recomputes something that a run compares)."""
    match = PLACE.fullmatch(place)
    if match is None:
        return f"{place} is neither notebooks/<file>.ipynb#<cell id> nor tests/<file>.py::<function>", "", False
    if match["test"]:
        source = functions(match["test"]).get(match["name"])
        if source is None or not match["name"].startswith("test_"):
            return f"{place} is no test", "", False
        return "", source, not match["test"].startswith("tests/gpu/")  # those run on a machine with a GPU alone
    cell = cells(match["notebook"]).get(match["cell"])
    if cell is None:
        return f"{place} is no cell", "", False
    if cell.cell_type != "code":
        return "", cell.source, False  # it teaches
    asserts = re.search(r"^\s*assert ", cell.source, re.MULTILINE) is not None
    if not (asserts or cell.outputs):
        return f"{place} shows nothing and asserts nothing", "", False
    return "", cell.source + shown(cell), asserts or not is_uncompared(cell)


def numbers(text: str) -> set[str]:
    """Those of two digits or more; 1,024 is 1024, while 4,3,2,1 are four."""
    return set(NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)))


def roundings(found: Recomputed | None) -> set[str]:
    """Computed values as a place may show them: rounded, as a share or in percent."""
    computed = [*found.values.values(), *found.other.values()] if found else []
    flat = [each for value in computed for each in (value if isinstance(value, list) else [value])]
    real = [each for each in flat if isinstance(each, int | float) and (each % 1 >= 0.001 or abs(each) >= 10)]
    shown = [each * scale for each in real for scale in ((1, 100) if abs(each) < 1 else (1,))]
    return numbers(" ".join(f"{each:.{digits}f}" for each in shown for digits in range(4)))


def claim_problems(claim: Claim) -> list[str]:
    """What is wrong with the places of one claim, in sentences."""
    looked = [look_up(place) for place in claim.where]
    found = [problem for problem, _, _ in looked if problem]
    if not claim.chapters:
        found.append("no chapter teaches it: name a cell")
    if TOPICS[claim.topic] and not any(recomputes for _, _, recomputes in looked):
        found.append("nothing recomputes it: name a code cell or a test that does")
    values = numbers(" ".join((claim.claim, *texts_of(claim)))) | roundings(recompute(claim))
    text = "".join(text for _, text, _ in looked).replace("_", "")
    if looked and values and claim.id not in text and not values & numbers(text):
        found.append(
            f"neither its id nor any of its numbers ({', '.join(sorted(values)[:20])}) stand at the places named"
        )
    return [f"claim {claim.id}: {problem}" for problem in found]


@pytest.mark.slow
def test_every_claim_of_a_chapter_is_recomputed_somewhere():
    assert [problem for claim in ledger() for problem in claim_problems(claim)] == []


OF_A_TECHNIQUE = ("dp", "zero", "tp", "sp", "cp", "pp", "ep", "5d", "gpu")


@pytest.mark.parametrize("topic", OF_A_TECHNIQUE)
def test_claims_on_a_technique_are_answered_in_its_chapter(topic):
    assert [claim.id for claim in ledger() if claim.topic == topic and TOPICS[topic] not in claim.chapters] == []


def test_every_claim_that_a_test_names_is_in_the_list():
    ids = {claim.id for claim in ledger()}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.parent.name != "claims":
            assert set(CLAIM.findall(path.read_text(encoding="utf-8").replace("_", " "))) <= ids, path.name


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ((), "nothing recomputes it"),
        (("tests/test_hardware.py::test_networks_between_nodes",), "no chapter teaches it"),
        (("notebooks/03_data_parallel_in_depth.ipynb#bucket-saw",), "nothing recomputes it"),  # prose
        (("notebooks/03_data_parallel_in_depth.ipynb#widget",), "nothing recomputes it"),  # not compared
        (("notebooks/03_data_parallel_in_depth.ipynb#no-such-cell",), "is no cell"),
        (("notebooks/99_no_such_chapter.ipynb#title",), "is no cell"),
        (("notebooks/03_data_parallel_in_depth.ipynb#bucketed",), "shows nothing and asserts nothing"),
        (("tests/timing/test_timing.py::test_no_such_test",), "is no test"),
        (("tests/test_no_such_file.py::test_it",), "is no test"),
        (("tests/gpu/test_memory_gpu.py::test_the_cuda_context_is_measured",), "nothing recomputes it"),
        (("chapter 3",), "is neither"),
    ],
)
def test_a_planted_fault_is_found(where, problem):
    (claim,) = claims_named(["C047"])
    assert any(problem in found for found in claim_problems(replace(claim, where=where)))


def test_a_place_without_the_claims_numbers_is_found():
    (claim,) = claims_named(["C099"])
    elsewhere = ("tests/traffic/test_traffic.py::test_C129_stage_1_with_an_all_reduce_of_gradients_would_send_3",)
    assert any("nor any of its numbers" in found for found in claim_problems(replace(claim, where=elsewhere)))
