"""The table of a day on GPUs: rows that no stop loses, files that are refused, and the page that is made of it."""

import json
import os
from pathlib import Path

import pytest

from course_lib.cli import main
from course_lib.labs import gpu_day
from course_lib.labs.gpu_day import add_row, drop_part, page, read_rows, summary

DOCS = Path(__file__).parents[2] / "docs"
ROW = {
    "part": "a",
    "name": "n",
    "outcome": "passed",
    "date": "2026-01-02 03:04:05",
    "device": "X",
    "versions": "torch 2",
}


@pytest.fixture
def table(tmp_path) -> Path:
    path = tmp_path / "table.json"
    add_row(
        path, part="models", name="1B", outcome="measured", figures={"measured": {"GB": 21.0}, "predicted": {"GB": 20}}
    )
    add_row(path, part="models", name="1B", outcome="passed", seconds=3.5)
    add_row(path, part="kernels", name="tile", outcome="measured", figures={"off_by": float("nan"), "tile": (16, 32)})
    add_row(path, part="kernels", name="tile", outcome="failed", reason="a | b\n<script>")
    return path


def test_each_row_has_device_versions_and_date_and_a_part_can_begin_again(table):
    rows = read_rows(table)
    assert len(rows) == 4 and all(
        row["device"] and "torch" in row["versions"] and row["date"][4] == "-" for row in rows
    )
    assert rows[2]["figures"] == {"off_by": "NaN", "tile": [16, 32]}
    drop_part(table, "models")
    assert {row["part"] for row in read_rows(table)} == {"kernels"}


def test_a_stop_while_a_row_is_written_loses_no_earlier_row(table, monkeypatch):
    def stop(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        add_row(table, part="launch", name="late", outcome="passed")
    assert len(read_rows(table)) == 4


def test_the_page_puts_measured_beside_predicted_and_says_what_did_not_pass(table):
    text = page(read_rows(table))
    assert "| models | 1B | GB | 21 | 20 | 1.05 |" in text
    assert "| kernels | tile | off_by NaN, tile [16, 32] |" in text
    assert "| kernels | tile | failed | a \\| b &lt;script> |" in text
    assert "| models | 1 measured, 1 passed |" in text
    assert summary(read_rows(table)) == "2 measured, 1 passed, 1 failed"


def document(**changed) -> str:
    return json.dumps({"kind": gpu_day.KIND, "rows": [ROW | changed]})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no JSON"),
        ("[1, 2]", "is no table of make gpu-day"),
        ('{"lab": "05", "runs": []}', "is no table of make gpu-day"),
        ('{"kind": "course gpu-day", "rows": {"a": 1}}', "is no table of make gpu-day"),
        ('{"kind": "course gpu-day", "rows": ["__import__(\'os\').abort()"]}', "the whole of row 1 is damaged"),
        (document(outcome="won"), "outcome of row 1 is damaged"),
        (document(date=None), "date of row 1 is damaged"),
        (document(seconds="3"), "seconds of row 1 is damaged"),
        (document(figures=[1]), "figures of row 1 is damaged"),
        ("\x80\x05cposix\nsystem\n", "is no JSON"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence_and_leaves_the_page(text, told, tmp_path, capsys):
    file = tmp_path / "file.json"
    file.write_text(text)
    assert main(["gpu-report", str(file), "--folder", str(tmp_path / "docs")]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
    assert not (tmp_path / "docs").exists()


def test_the_report_keeps_the_table_beside_the_page(table, tmp_path, capsys):
    docs = tmp_path / "docs"
    assert main(["gpu-report", "--folder", str(docs)]) == 0
    assert gpu_day.NEVER in (docs / "GPU.md").read_text()
    assert main(["gpu-report", str(table), "--folder", str(docs)]) == 0
    written = (docs / "GPU.md").read_text()
    assert written == page(read_rows(docs / "gpu_day.json")) and "1.05" in written
    assert main(["gpu-report", "--folder", str(docs)]) == 0
    assert (docs / "GPU.md").read_text() == written


def test_the_page_of_this_project_is_that_of_its_table():
    table = DOCS / "gpu_day.json"
    assert (DOCS / "GPU.md").read_text() == page(read_rows(table) if table.exists() else [])
