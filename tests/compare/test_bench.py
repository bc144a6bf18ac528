"""`course bench`: its arithmetic by hand, its records on a short run, its exit status. Speed itself: `--check`."""

import json

import pytest

from course_lib import cli
from course_lib.compare import bench as bench_module
from course_lib.compare.bench import bench, bench_table, main, summarise

pytestmark = pytest.mark.launches

RECORD = {
    "technique": "data",
    "ranks": 2,
    "ratio": 0.95,
    "spread": [0.9, 1.0],
    "rounds": 30,
    "scratch_s": 0.02,
    "pytorch_s": 0.019,
}


def test_a_ratio_is_the_median_of_rounds_and_a_step_lasts_until_its_slowest_rank():
    first_rank = [(1.0, 1.0), (2.0, 1.0), (1.0, 4.0)]
    second_rank = [(0.5, 2.0), (1.0, 1.5), (1.0, 1.0)]  # slowest: (1, 2), (2, 1.5), (1, 4); ratios 2, 0.75, 4
    record = summarise("data", 2, [first_rank, second_rank])
    assert record["ratio"] == 2.0 and record["spread"] == [1.375, 3.0] and record["rounds"] == 3
    assert (record["scratch_s"], record["pytorch_s"]) == (1.0, 2.0)


def test_a_short_bench_runs_both_sides_in_one_launch():
    (record,) = bench(["data"], ranks=(2,), rounds=6)
    assert set(record) == set(RECORD)
    assert (record["technique"], record["ranks"], record["rounds"]) == ("data", 2, 6)
    lower, upper = record["spread"]
    assert 0 < lower <= record["ratio"] <= upper
    assert 0.3 < record["ratio"] < 3  # six rounds on a busy machine: far wrong is all that can be seen


@pytest.mark.parametrize(
    "arguments, part", [({"techniques": ["warp"]}, "choose from data"), ({"rounds": 1}, "from 2 to")]
)
def test_bad_arguments_are_refused(arguments, part):
    with pytest.raises(ValueError, match=part):
        bench(**arguments)


@pytest.mark.parametrize("ratio, check, status", [(0.95, True, 0), (0.85, True, 1), (0.85, False, 0)])
def test_check_fails_below_nine_tenths_only(monkeypatch, capsys, ratio, check, status):
    monkeypatch.setattr(bench_module, "bench", lambda rounds: [RECORD, RECORD | {"ratio": ratio}])
    assert main(as_json=True, check=check) == status
    assert [record["ratio"] for record in json.loads(capsys.readouterr().out)] == [0.95, ratio]


@pytest.mark.parametrize("given, rounds", [([], 30), (["--rounds", "8"], 8)])
def test_the_command_hands_its_rounds_on(monkeypatch, given, rounds):
    asked = []
    monkeypatch.setattr(bench_module, "bench", lambda rounds: asked.append(rounds) or [RECORD])
    assert cli.main(["bench", *given]) == 0 and asked == [rounds]


def test_the_table_names_both_times_the_ratio_and_its_spread():
    line = bench_table([RECORD]).splitlines()[1]
    assert line.split() == ["data", "2", "20.0", "ms", "19.0", "ms", "0.95", "0.90", "to", "1.00"]
