"""The package speaks Korean where that is asked for, with values in place and particles that agree."""

import json

import polib
import pytest

from course_lib import language, units
from course_lib.language import told, told_svg

ENTRIES = {
    "rank {0} was ended by {1}": "rank {0}[이/가] {1}[으로/로] 끝났습니다",
    "{0} holds no checkpoint; {1}": "{0}에 checkpoint가 없습니다. {1}",
    "save one first": "먼저 저장하세요",
    "Bytes of a rank": "rank 하나의 바이트",
    "{0} of {1} ranks": "{1}개 rank 중 {0}개",
    "a block of {0}\nhas {1} elements": "블록 {0}\n원소 {1}개",
    "has {0} elements": "원소 {0}개",
    "rank {0} of {1}{2} {3}": "rank {1}개 중 rank {0}{2}: {3}",
    "rank {0} of {1}": "rank {1}개 중 rank {0}",
    "failed:": "실패했습니다:",
    "had returned": "이미 반환했음",
    "rank {0} had returned": "rank {0} 이미 반환했음",
    "nine in ten of the published runs needed {0}, pipelines {1}.": "열에 아홉 {0}, {1}.",
}


@pytest.fixture
def in_korean(tmp_path, monkeypatch):
    catalogue = polib.POFile()
    for english, korean in ENTRIES.items():
        catalogue.append(polib.POEntry(msgid=english, msgstr=korean))
    catalogue.save(str(tmp_path / "ko.po"))
    monkeypatch.setattr(language, "CATALOGUE", tmp_path / "ko.po")
    monkeypatch.setenv("COURSE_LANG", "ko")
    _forget()
    yield
    _forget()


def _forget():
    for remembered in (language.language, language._looked_up, language._catalogue):
        remembered.cache_clear()


@pytest.mark.usefixtures("in_korean")
@pytest.mark.parametrize(
    "english, korean",
    [
        ("rank 3 was ended by SIGTERM", "rank 3이 SIGTERM으로 끝났습니다"),
        ("rank 2 was ended by node 7", "rank 2가 node 7로 끝났습니다"),
        ("rank 2 was ended by tp", "rank 2가 tp로 끝났습니다"),  # two letters, each read by its name
        ("rank 2 was ended by a step", "rank 2가 a step으로 끝났습니다"),
        ("runs/x holds no checkpoint; save one first", "runs/x에 checkpoint가 없습니다. 먼저 저장하세요"),
        ("Bytes of a rank\n3 of 4 ranks", "rank 하나의 바이트\n4개 rank 중 3개"),
        ("  Bytes of a rank:", "  rank 하나의 바이트:"),
        ("has 4,096 elements", "원소 4,096개"),  # a line of two has an entry of its own
        ("Byte of a rank", "Byte of a rank"),  # other words than the catalogue's
        ("the fastest of all the ranks", "the fastest of all the ranks"),  # a value is no sentence
        ("12 GB", "12 GB"),
        # a long text's value ends with its sentence
        ("nine in ten of the published runs needed 1, pipelines 2. save one first", "열에 아홉 1, 2. 먼저 저장하세요"),
        ("rank 1 of 16 failed:", "rank 16개 중 rank 1: 실패했습니다:"),  # of two side by side one is not there
        ("rank 1 of 16: loss", "rank 16개 중 rank 1: loss"),  # the colon is of no number
        ("rank 1 of 16(b) failed:", "rank 16개 중 rank 1(b): 실패했습니다:"),
        ("rank 0 had returned", "rank 0 이미 반환했음"),
        ("loss  had returned  3 of 4 ranks", "loss  이미 반환했음  4개 rank 중 3개"),  # columns
        ("rank 3 of 4 of them ended", "rank 3 of 4 of them ended"),  # "4 of them ended" is no number
    ],
)
def test_a_text_is_told_in_korean_with_its_values(english, korean):
    assert told(english) == korean


@pytest.mark.usefixtures("in_korean")
def test_the_words_of_a_picture_are_told_and_its_markup_stays():
    svg = '<svg><title>Bytes of a rank</title><text x="1">3 of 4 ranks</text><path d="M0 0"/></svg>'
    wanted = '<svg><title>rank 하나의 바이트</title><text x="1">4개 rank 중 3개</text><path d="M0 0"/></svg>'
    assert told_svg(svg) == wanted


def test_without_being_asked_everything_is_english(monkeypatch):
    monkeypatch.delenv("COURSE_LANG", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    _forget()
    assert told("Bytes of a rank") == "Bytes of a rank"


@pytest.mark.parametrize(
    "notebook, wanted", [({"metadata": {"course_language": "ko"}}, "ko"), ({"metadata": {}}, "en"), ([], "en")]
)
def test_a_korean_notebook_asks_for_korean(tmp_path, monkeypatch, notebook, wanted):
    path = tmp_path / "lesson.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    monkeypatch.delenv("COURSE_LANG", raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    _forget()
    assert language.language() == wanted
    _forget()


def test_columns_of_korean_are_as_wide_as_they_are_seen(monkeypatch):
    monkeypatch.setattr(units, "told", {"GB": "용량", "fits": "들어감"}.get)
    assert units.aligned([("GB", "fits"), ("GB", "GB")], (5, -1)) == [" 용량  들어감", " 용량  용량"]
