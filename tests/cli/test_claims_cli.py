"""`course claims`: the ledger as text and as JSON, and one line for what cannot be."""

import json
import subprocess
import sys

import pytest

from course_lib import cli
from course_lib.claims import claims, ledger


def test_claims_are_listed_as_text(capsys):
    assert cli.main(["claims", "--topic", "zero", "--verdict", "wrong"]) == 0
    text = capsys.readouterr().out
    assert "C056  zero, chapter 04\n    ZeRO-1 saves 4 to 8 times" in text
    assert "    Wrong.\n    Comes out: on 8 GPUs 2.9 and 4.3 times.\n" in text
    assert text.endswith(f"{len(claims('zero', 'wrong'))} of {len(ledger())} claims\n")
    assert max(map(len, text.splitlines())) <= 96


def test_all_claims_are_listed_as_json_with_what_is_computed(capsys):
    assert cli.main(["claims", "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [claim.id for claim in ledger()]
    assert rows["C061"]["values"]["gb"] == pytest.approx(31.40625) and rows["C061"]["answer"] == "31.4 GB"
    assert rows["C070"]["other_values"]["stage_3_over_2"] == pytest.approx(8.875)
    assert rows["C147"]["values"] == {} and rows["C061"]["chapters"] == ["04"]


def test_claims_are_searched_by_a_word_and_by_a_chapter(capsys):
    assert cli.main(["claims", "--word", "zigzag"]) == 0
    assert capsys.readouterr().out.startswith("C095  cp, chapter 07\n")
    assert cli.main(["claims", "--chapter", "09", "--json"]) == 0
    assert {row["topic"] for row in json.loads(capsys.readouterr().out)} == {"ep", "gpu"}
    assert cli.main(["claims", "--word", "no such word"]) == 0
    assert capsys.readouterr().out == f"0 of {len(ledger())} claims\n"


def test_a_reader_who_leaves_early_ends_the_command_without_a_stack():
    command = [sys.executable, "-m", "course_lib", "claims"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)
