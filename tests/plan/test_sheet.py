"""The learner's sheet: its rows are the estimate's, its file holds words alone, its last line says what is true."""

import json
from dataclasses import replace

import pytest

from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.plan.job import work_out
from course_lib.plan.sheet import Choice, Sheet, next_step, sheet
from course_lib.traffic import sent


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_SHEETS", str(tmp_path / "sheets"))
    return tmp_path / "sheets"


def test_rows_are_what_estimate_and_traffic_say():
    made = Sheet("my-8b", Choice())
    rows = {row.name: row for row in made.rows("09")}
    for name, layout, gpus in [
        ("one GPU", "micro_batches=128", 1),
        ("ZeRO-3", "dp=16,micro_batches=8,zero_stage=3", 16),
        ("tp 8, ZeRO-1", "dp=2,tp=8,micro_batches=64,zero_stage=1", 16),
        ("pp 2, ZeRO-1", "dp=8,pp=2,micro_batches=16,zero_stage=1", 16),
    ]:
        told = work_out(made.choice.job(gpus), Layout.parse(layout))
        assert rows[name].estimate == told
        ranks = range(told.layout.world_size)
        assert rows[name].sent_bytes == pytest.approx(
            max(sum(sent(told.run, rank).values()) for rank in ranks), rel=1e-9
        )
        assert f"{told.memory_bytes / GB:.1f} GB" in rows[name].line()
        assert told.room in rows[name].line()


def test_a_chapter_adds_its_rows_and_keeps_those_before():
    made = Sheet("my-8b", Choice())
    before, after = made.rows("03"), made.rows("04")
    assert after[: len(before)] == before
    assert [row.name for row in after[len(before) :]] == ["ZeRO-1", "ZeRO-3"]


def test_experts_have_a_row_and_dense_models_none():
    dense, experts = Sheet("a", Choice()), Sheet("b", Choice(model="mixtral-8x7b", gpus=32))
    assert not [row for row in dense.rows("09") if row.chapter == "09"]
    assert [row.estimate.layout.ep for row in experts.rows("09") if row.chapter == "09"] == [8]


@pytest.mark.slow
def test_where_nothing_fits_the_planner_s_row_says_so_and_there_is_no_plan():
    too_large = Sheet("big", Choice(model="llama-3.1-405b", gpus=8))
    assert "fits 85.0 GB" in too_large.rows("10")[-1].line()
    with pytest.raises(ValueError, match="fits 85"):
        too_large.plan()


def test_a_sheet_becomes_the_planner_s_plan_or_the_one_decided_last_and_is_compared_with_the_fastest():
    made, mine = Sheet("my-8b", Choice()), "dp=2,tp=8,micro_batches=64,zero_stage=1"
    best, decided = made.plan(), replace(made, choice=replace(made.choice, decided=("dp=16", mine))).plan()
    assert best == made.rows("10")[-1].estimate
    assert decided == work_out(made.choice.job(), Layout.parse(mine))
    assert "fits" in made.compare_with_fastest(best.layout) and "\n100%" in made.compare_with_fastest(best.layout)
    assert f"\n{best.step_s / decided.step_s:.0%} of the speed" in made.compare_with_fastest(decided.layout)


def test_what_cannot_be_says_why_in_its_row():
    rows = Sheet("odd", Choice(gpus=24, seq_len=8192, batch_tokens=2**20)).rows("03")
    assert rows[-1].estimate is None
    assert "not possible: 128 sequences over dp 24" in rows[-1].line()


def test_the_next_step_is_true_of_the_rows():
    rows = Sheet("my-8b", Choice()).rows("04")
    assert "nothing fits yet" in next_step(rows[:3])
    assert "optimizer" in next_step(rows[:3])
    one = rows[0].estimate
    assert f"lacks {(one.memory_bytes - one.usable_bytes) / GB:.1f} GB" in next_step(rows[:1])
    assert max(rows[1].estimate.bytes_by_kind, key=rows[1].estimate.bytes_by_kind.get) == "optimizer"
    assert "ZeRO-3 fits" in next_step(rows)
    tensor = [row for row in Sheet("my-8b", Choice()).rows("05") if row.chapter == "05"]
    assert "for tp" in next_step(tensor)


def test_a_choice_stays_in_its_file_and_a_decision_with_it(folder, capsys):
    sheet("mine", gpus=8, batch_tokens=2**19).decide("dp=8,zero_stage=3,micro_batches=8")
    assert sorted(json.loads((folder / "mine.json").read_text())) == sorted(Choice.__dataclass_fields__)
    again = sheet("mine")
    assert (again.choice.gpus, again.choice.decided) == (8, ("dp=8,zero_stage=3,micro_batches=8",))
    again.upto("04")
    told = capsys.readouterr().out
    assert told.count("ZeRO-3") >= 1
    assert "decided: layout 1" in told


def test_without_a_file_it_is_the_course_s_own_job_and_writes_nothing(folder):
    assert sheet("my-8b").choice == Choice()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sheet("../x"), "letters"),
        (lambda: sheet("a", card="h100"), "a sheet has no card"),
        (lambda: sheet("a", gpu="h1000"), "h1000"),
        (lambda: sheet("a", gpus=12), "choose 8 or 16"),
        (lambda: sheet("my-8b").decide("dp=4"), "it must be 16"),
    ],
)
def test_what_is_no_job_is_refused_and_not_kept(folder, call, says):
    with pytest.raises(ValueError, match=says):
        call()
    assert not folder.exists()


@pytest.mark.parametrize("text", ["[]", '{"gpus": "8"}', '{"gpus": 12}', '{"cards": 8}', '{"decided": 3}', "{"])
def test_a_file_that_no_sheet_wrote_is_refused(folder, text):
    folder.mkdir()
    (folder / "mine.json").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.json is no"):
        sheet("mine")


def test_a_folder_that_cannot_be_written_is_said_and_the_sheet_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_SHEETS", str(tmp_path / "file"))
    assert sheet("mine", gpus=8).choice.gpus == 8
    assert "not kept" in capsys.readouterr().out
