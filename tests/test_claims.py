"""Every quantitative claim of the first chapters' topics is recomputed, in a cell of a notebook or in a test.

`claims.csv` holds the claims that circulate, one a row: what is said, what comes out, a verdict, what to teach
instead, the source, and under `where` the places that teach and recompute it, separated by spaces: a cell as
`notebooks/<file>.ipynb#<cell id>`, a test as `tests/<file>.py::<function>`. A row of a later chapter has no place yet.
"""

import ast
import csv
import re
from functools import cache

import pytest

from course_lib.authoring.form import ROOT, read
from course_lib.authoring.rules import is_uncompared

TOPICS = ("memory", "dp", "network", "throughput", "zero", "tp", "sp", "cp", "pp", "ep", "5d")  # chapters 00 to 10
LATER_TOPICS = ("ops",)
VERDICTS = ("correct", "correct-with-conditions", "wrong", "ambiguous")
PLACE = re.compile(r"(?P<notebook>notebooks/\w+\.ipynb)#(?P<cell>[\w-]+)|(?P<test>tests/[\w/]+\.py)::(?P<name>\w+)")
CLAIM = re.compile(r"(?<![A-Za-z0-9])C\d{3}(?!\d)")
NUMBER = re.compile(r"\d+\.\d+|\d{2,}")  # of two digits or more: a 2 stands everywhere

with (ROOT / "tests" / "claims.csv").open(newline="", encoding="utf-8") as file:
    CLAIMS = list(csv.DictReader(file))


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


def claim_problems(claim: dict) -> list[str]:
    """What is wrong with the places of one claim, in sentences."""
    looked = [look_up(place) for place in claim["where"].split()]
    found = [problem for problem, _, _ in looked if problem]
    if claim["topic"] in TOPICS and not any(recomputes for _, _, recomputes in looked):
        found.append("nothing recomputes it: name a code cell or a test that does")
    values = numbers(claim["recomputed_value"])
    text = "".join(text for _, text, _ in looked).replace("_", "")
    if looked and values and not values & numbers(text):
        found.append(f"none of its numbers ({', '.join(sorted(values))}) stands at the places named")
    return [f"claim {claim['id']}: {problem}" for problem in found]


def test_every_claim_of_the_first_chapters_is_recomputed_somewhere():
    assert [problem for claim in CLAIMS for problem in claim_problems(claim)] == []


CHAPTER_OF = {"dp": "03", "zero": "04", "tp": "05", "sp": "06", "cp": "07", "pp": "08", "ep": "09", "5d": "10"}


@pytest.mark.parametrize(("topic", "chapter"), CHAPTER_OF.items())
def test_claims_on_a_technique_are_answered_in_its_chapter(topic, chapter):
    missing = [c["id"] for c in CLAIMS if c["topic"] == topic and f"notebooks/{chapter}_" not in c["where"]]
    assert missing == []


def test_every_claim_has_an_id_of_its_own_a_known_topic_and_a_known_verdict():
    ids = [claim["id"] for claim in CLAIMS]
    assert len(ids) == len(set(ids)) == 174 and all(CLAIM.fullmatch(name) for name in ids)
    assert {claim["topic"] for claim in CLAIMS} == {*TOPICS, *LATER_TOPICS}
    assert {claim["verdict"] for claim in CLAIMS} == set(VERDICTS)
    assert all(claim["claim"] and claim["recomputed_value"] and claim["primary_source"] for claim in CLAIMS)


def test_every_claim_that_a_test_names_is_in_the_list():
    ids = {claim["id"] for claim in CLAIMS}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.name != "test_claims.py":
            assert set(CLAIM.findall(path.read_text(encoding="utf-8").replace("_", " "))) <= ids, path.name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"where": ""}, "nothing recomputes it"),
        ({"where": "notebooks/03_data_parallel_in_depth.ipynb#bucket-saw"}, "nothing recomputes it"),  # prose
        ({"where": "notebooks/03_data_parallel_in_depth.ipynb#widget"}, "nothing recomputes it"),  # not compared
        ({"where": "notebooks/03_data_parallel_in_depth.ipynb#no-such-cell"}, "is no cell"),
        ({"where": "notebooks/99_no_such_chapter.ipynb#title"}, "is no cell"),
        ({"where": "notebooks/03_data_parallel_in_depth.ipynb#bucketed"}, "shows nothing and asserts nothing"),
        ({"where": "tests/timing/test_timing.py::test_no_such_test"}, "is no test"),
        ({"where": "tests/test_no_such_file.py::test_it"}, "is no test"),
        ({"where": "tests/gpu/test_memory_gpu.py::test_the_cuda_context_is_measured"}, "nothing recomputes it"),
        ({"where": "chapter 3"}, "is neither"),
        (
            {"where": "tests/timing/test_timing.py::test_a_line_is_found_back", "recomputed_value": "436.0"},
            "none of its numbers",
        ),
        ({"topic": "ops", "where": "notebooks/03_data_parallel_in_depth.ipynb#no-such-cell"}, "is no cell"),
    ],
)
def test_a_planted_fault_is_found(change, problem):
    claim = {"id": "C047", "topic": "dp", "recomputed_value": "unchanged"} | change
    assert any(problem in found for found in claim_problems(claim))
    right = {"id": "C047", "topic": "dp", "recomputed_value": "unchanged"}
    assert claim_problems(right | {"where": "notebooks/03_data_parallel_in_depth.ipynb#bucket-measure"}) == []
