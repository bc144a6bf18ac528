"""The picture of a run draws the numbers of its logs."""

import matplotlib.pyplot as plt
import pytest
import run_logs

from course_lib.plots.run_log import run_rows, show_run
from course_lib.train.watch import read_run


def test_the_rows_are_what_the_logs_say_and_the_parts_of_a_step_add_up(tmp_path):
    for rank in range(2):
        run_logs.write(tmp_path, rank, run_logs.steps(rank, 5 - rank, own_s=0.3 if rank else 0.1))
    rows = run_rows(read_run(tmp_path), window=3)
    assert rows.loss == ([0, 1, 2, 3, 4], [5.0, 4.9, 4.8, 4.7, 4.6]) and rows.ranks == [0, 1]
    assert rows.tokens_per_s == [([0, 1, 2, 3, 4], [100.0] * 5), ([0, 1, 2, 3], [101.0] * 4)]
    assert rows.memory == [(200_000_000, 300_000_000), (200_000_001, 300_000_000)]
    assert rows.seconds["forward"] == pytest.approx([0.025, 0.075])
    assert rows.seconds["waits for others"] == pytest.approx([0.3, 0.1])
    assert [sum(column) for column in zip(*rows.seconds.values(), strict=True)] == pytest.approx([0.5, 0.5])


def test_what_a_gpus_log_does_not_split_is_the_rest(tmp_path):
    parts = dict.fromkeys(("forward_s", "backward_s", "optimizer_s", "data_s", "communication_s"))
    run_logs.write(tmp_path, 0, [run_logs.line(0, 0, **parts)])
    rows = run_rows(read_run(tmp_path))
    assert rows.seconds["rest"] == [0.5] and sum(map(sum, rows.seconds.values())) == 0.5


def test_the_picture_has_four_panels_with_these_numbers(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.gcf()))
    for rank in range(4):
        run_logs.write(tmp_path, rank, run_logs.steps(rank, 5, own_s=0.3 if rank == 2 else 0.1))
    run = show_run(tmp_path)
    (figure,) = drawn
    loss, speed, memory, seconds = figure.axes
    assert figure.get_suptitle() == run.verdict and "rank 2 is slow" in run.verdict
    assert list(loss.lines[0].get_ydata()) == [5.0, 4.9, 4.8, 4.7, 4.6]
    assert [line.get_label() for line in speed.lines] == [f"rank {rank}" for rank in range(4)]
    assert [bar.get_height() for bar in memory.patches] == pytest.approx([200] * 4, rel=1e-6)
    widths = [bar.get_width() for bar in seconds.patches]
    assert widths[:4] == pytest.approx([0.025, 0.025, 0.075, 0.025]) and sum(widths) == pytest.approx(4 * 0.5)


def test_a_run_without_a_step_has_no_picture_yet(tmp_path):
    run_logs.write(tmp_path, 0, [{"event": "start"}])
    with pytest.raises(ValueError, match="no step yet; look again"):
        show_run(tmp_path)
