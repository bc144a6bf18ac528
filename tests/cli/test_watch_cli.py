"""`course watch` prints what the logs say, once or until the run has ended."""

import json
import time

import run_logs

from course_lib.cli import commands as cli
from course_lib.cli import watch as watching


def test_once_prints_the_table_and_as_json_the_numbers(tmp_path, capsys):
    for rank in range(2):
        run_logs.write(tmp_path, rank, run_logs.steps(rank, 3, own_s=0.3 if rank else 0.1))
    assert cli.main(["watch", str(tmp_path), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1].startswith("rank 1 is slow: it computes 3.0 times")
    assert cli.main(["watch", str(tmp_path), "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in told["ranks"]] == [2, 2] and told["finding"] == lines[-1] and not told["ended"]


def test_the_table_is_renewed_until_the_run_has_ended(tmp_path, capsys, monkeypatch):
    run_logs.write(tmp_path, 0, run_logs.steps(0, 1))

    def next_step(seconds: float) -> None:
        assert seconds == 0.25
        done = capsys.readouterr().out.splitlines()[-2].split()[1]
        run_logs.write(tmp_path, 0, [run_logs.line(0, int(done))] if done < "3" else [{"event": "end"}])

    monkeypatch.setattr(watching.time, "sleep", next_step)
    started_s = time.monotonic()
    assert cli.main(["watch", str(tmp_path), "--every", "0.25"]) == 0
    last = capsys.readouterr().out.splitlines()[-2].split()
    assert (last[1], last[-1]) == ("3", "ended") and time.monotonic() - started_s < 60
