"""Each claim is recomputed and held against its verdict; a wrong verdict, value or tolerance is found."""

import ast
import inspect
import re
from collections import Counter
from dataclasses import replace

import pytest

from course_lib.authoring.form import ROOT, notebook_paths, read
from course_lib.claims import (
    VERDICTS,
    Claim,
    Quiz,
    chapter_quiz,
    claims,
    claims_named,
    claims_page,
    formulas,
    ledger,
    meets,
    recompute,
    texts_of,
)
from course_lib.claims.recompute import TOLD
from course_lib.hardware import gpu
from course_lib.memory import states

BY_SOURCE_ALONE = {"C008", "C092", "C147", "C164", "C174", "C223", "C243"}  # facts that no formula gives


def verdict_problem(claim: Claim) -> str:
    """Why a claim's verdict is not what its computation gives; nothing if it is."""
    found = recompute(claim)
    if found is None:
        return ""
    should_hold = {"right": (True, True), "wrong": (False, True)}.get(claim.verdict, (True, False))
    for holds, should, arguments, values in (
        (found.holds, should_hold[0], claim.arguments, found.values),
        (found.other_holds, should_hold[1], claim.otherwise, found.other),
    ):
        if holds is not None and holds is not should:
            said = "is" if holds else "is not"
            return f"{claim.id} is {claim.verdict}, but with {arguments} {claim.stated} {said} met by {values}"
    return ""


@pytest.mark.parametrize("claim", ledger(), ids=lambda claim: claim.id)
def test_a_claim_s_verdict_is_what_its_formula_gives(claim):
    assert verdict_problem(claim) == ""


def test_claims_without_a_computation_are_a_closed_list():
    assert {claim.id for claim in ledger() if not claim.compute} == BY_SOURCE_ALONE
    assert all(recompute(claim) is None for claim in claims_named(sorted(BY_SOURCE_ALONE)))


def names_of(source: str, kind: type) -> list[str]:
    """Names that a source reads (ast.Load) or sets (ast.Store)."""
    nodes = ast.walk(ast.parse(source))
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)]


def test_every_name_of_a_computation_is_read_stated_or_told():
    for claim in ledger():
        read = {*names_of(claim.compute, ast.Load), *claim.stated, *TOLD.findall(claim.answer + claim.say), "_"}
        assert {*names_of(claim.compute, ast.Store), *claim.arguments, *claim.otherwise} <= read, claim.id


def test_every_formula_that_computations_can_name_is_named():
    read = {name for claim in ledger() for name in names_of(claim.compute, ast.Load)}
    assert all(read & vars(module).keys() for module in formulas.MODULES)
    read |= {"MODULES", *names_of(inspect.getsource(formulas), ast.Load)}
    assert {name for name in vars(formulas) if not name.startswith("__")} <= read


def test_every_claim_has_an_id_of_its_own():
    ids = [claim.id for claim in ledger()]
    assert ids == sorted(set(ids)) and all(re.fullmatch(r"C\d{3}", name) for name in ids) and len(ids) >= 234


def opposite(claim: Claim) -> Claim:
    """The same claim with a verdict that is not its own."""
    if claim.verdict == "wrong":
        return replace(claim, verdict="right", otherwise={}, answer="", say="")
    return replace(claim, verdict="wrong", answer="", say="it is not so", condition="", otherwise={})


def test_a_planted_verdict_is_found_in_every_claim():
    found = {claim.id for claim in ledger() if verdict_problem(opposite(claim))}
    assert found == {claim.id for claim in ledger()} - BY_SOURCE_ALONE


def test_a_condition_that_changes_nothing_is_found():
    (claim,) = claims_named(["C004"])
    assert "is met by" in verdict_problem(replace(claim, otherwise={"seq_len": 1024}))
    (claim,) = claims_named(["C166"])
    assert "is not met by" in verdict_problem(replace(claim, otherwise={"payload_gb": 9.0}))


def planted(claim: Claim, factor: float) -> Claim:
    """The claim with its first stated number changed."""
    name, value = next(iter(claim.stated.items()))
    changed = [each * factor for each in value] if isinstance(value, list) else value * factor
    return replace(claim, stated=claim.stated | {name: changed})


def test_a_planted_number_is_found_in_every_claim_that_is_right():
    numeric = [c for c in claims(verdict="right") if not isinstance(next(iter(c.stated.values())), str | bool)]
    assert len(numeric) > 50
    assert [c.id for c in numeric if not verdict_problem(planted(c, 1.5))] == []


@pytest.mark.parametrize(
    ("stated", "value", "tolerance", "met"),
    [
        (100, 104, 0.05, True), (100, 106, 0.05, False), (0, 0, 0.05, True), (0, 0.1, 0.05, False),
        ([1, 2], [1, 2], 0, True), ([1, 2], [1, 2.2], 0.05, False), ([1, 2], [1], 0.05, False),
        ("<= 80", 80, 0, True), ("<= 80", 80.1, 0.5, False), ("> 2", 2, 0, False), (">= 2", 2, 0, True),
        ("2..5", 5.2, 0.05, True), ("2..5", 5.3, 0.05, False), ("2..5", [2, 5], 0, True), ("2..5", [2, 6], 0, False),
        (True, True, 0, True), (True, False, 0, False), (True, 1, 0, True), ("rows", "columns", 0, False),
    ],
)  # fmt: skip
def test_what_is_stated_is_met_or_not(stated, value, tolerance, met):
    assert meets(stated, value, tolerance) is met


def test_the_values_of_a_claim_change_with_the_package(monkeypatch):
    """Nothing is stored: with other bytes per parameter the claims on states fail."""
    (claim,) = claims_named(["C061"])
    assert recompute(claim).values["gb"] == pytest.approx(31.40625)
    assert states.zero_bytes_per_parameter(1, 64) * 7.5 == pytest.approx(31.40625)
    monkeypatch.setattr(states, "zero_bytes_per_parameter", lambda stage, dp: 18)
    assert "is not met" in verdict_problem(claim)


def test_what_is_left_of_a_gpu_is_counted_in_one_unit():
    (claim,) = claims_named(["C010"])
    values = recompute(claim).values
    assert values["states_gb"] + values["left_gb"] == pytest.approx(gpu("a100-40").usable_bytes / 1e9)
    assert values["gpu_gb"] == pytest.approx(42.4, abs=0.05)  # 39.49 GiB


def test_a_record_that_says_half_is_refused():
    (claim,) = claims_named(["C004"])
    for changed, said in (
        ({"condition": ""}, "a condition belongs to"),
        ({"otherwise": {}}, "give in otherwise"),
        ({"stated": {}}, "give both, or neither"),
        ({"verdict": "wrong", "condition": "", "say": ""}, "say what to say instead"),
        ({"verdict": "true"}, "choose from right, right-if, wrong, ambiguous"),
        ({"topic": "zeros"}, "did you mean 'zero'"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(claim, **changed)
    with pytest.raises(ValueError, match="C004 tells size, which its computation does not give"):
        recompute(replace(claim, stated={"size": 1}))


def test_claims_are_chosen_by_topic_verdict_word_and_chapter():
    assert {claim.topic for claim in claims("zero")} == {"zero"} and len(claims()) == len(ledger())
    assert {claim.verdict for claim in claims(verdict="wrong")} == {"wrong"}
    assert "C148" in {claim.id for claim in claims(word="RING")}
    assert all("04" in claim.chapters for claim in claims(chapter="04")) and len(claims(chapter="04")) > 20
    assert {claim.id for claim in claims(chapter="12")} == {"C174", "C175"}
    assert claims(word="no such word") == ()
    anywhere = {claim.id for claim in ledger() if "ring" in claim.claim.lower()}
    assert anywhere - {claim.id for claim in claims(word="ring")}, "'during' and 'sharding' are not about rings"
    for arguments, said in (({"topic": "zer"}, "zero"), ({"verdict": "rong"}, "wrong"), ({"chapter": "4"}, "00, 01")):
        with pytest.raises(ValueError, match=said):
            claims(**arguments)
    with pytest.raises(ValueError, match="id is 'C999'"):
        claims_named(["C999"])


def test_a_chapter_s_quiz_folds_its_answers():
    quiz = chapter_quiz("04", ("C056", "C070"))
    assert repr(quiz).startswith("1. ZeRO-1 saves 4 to 8 times") and "Wrong" not in repr(quiz)
    shown = quiz._repr_markdown_()
    assert shown.count("<details>") == shown.count("</details>") == 2
    assert "Wrong. On 8 GPUs 2.9 and 4.3 times." in shown
    assert "It depends: right if there are about 9 GPUs. 2.00 times on 9 GPUs, 8.9 times on 64." in shown
    assert len(chapter_quiz("05").claims) == len(claims(chapter="05")) and isinstance(chapter_quiz("05"), Quiz)
    with pytest.raises(ValueError, match="chapter 04 does not answer C165; choose from C010"):
        chapter_quiz("04", ("C165",))


QUIZZES = [path for path in notebook_paths("notebooks") if any(cell["id"] == "statements" for cell in read(path).cells)]


@pytest.mark.parametrize("path", QUIZZES, ids=lambda path: path.stem)
def test_a_notebook_s_quiz_is_in_step_with_the_ledger(path):
    (cell,) = [cell for cell in read(path).cells if cell["id"] == "statements"]
    (call,) = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    quiz = chapter_quiz(*map(ast.literal_eval, call.args))
    (output,) = cell.outputs
    assert output["data"] == {"text/markdown": quiz._repr_markdown_(), "text/plain": repr(quiz)}, "run and save it"
    assert path.stem.startswith(ast.literal_eval(call.args[0]))


def test_the_page_is_in_step_and_says_something_instead_of_each_wrong_claim():
    page = (ROOT / "docs" / "CLAIMS.md").read_text(encoding="utf-8")
    assert page == claims_page(), "make fmt writes docs/CLAIMS.md"
    for claim in claims(verdict="wrong"):
        assert f"| {claim.id}: {claim.claim} |" in page and texts_of(claim)[1] in page
    count = Counter(claim.verdict for claim in ledger())
    assert f"{count['right']} right, " in page and f"{count['wrong']} wrong" in page and set(count) == set(VERDICTS)


def test_texts_are_plain_and_have_no_braces_left():
    for claim in ledger():
        for text in (claim.claim, claim.condition, *texts_of(claim)):
            assert not re.search(r"[{}|]|\bsimply\b|\bjust\b|\bobviously\b|!", text), claim.id
        assert claim.claim.endswith(".") and not claim.condition.endswith(".")
        assert max(map(len, claim.say.split(". "))) < 160, claim.id
