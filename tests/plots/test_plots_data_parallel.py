"""The records behind the pictures of data parallelism: boxes, buckets, streams; and that each picture draws."""

from itertools import pairwise

import pytest
from pictures import drawn

from course_lib.plots import data_parallel as plots

SIZES = {"embed.weight": 4, "block.weight": 6, "head.weight": 2}
BUCKETS = [["head.weight", "block.weight"], ["embed.weight"]]


def test_each_rank_has_its_own_sequences_and_gradient_and_the_same_mean():
    boxes = plots.replica_boxes([[1, 2], [3, 4]], [2.5, 12.5], 7.5, (1, 0.25))
    rows = {row: [box.text for box in boxes if box.row == row] for row in range(6)}
    assert rows[0] == ["x = 1", "x = 2", "x = 3", "x = 4"]
    assert rows[2] == ["2.5", "12.5"] and rows[4] == ["7.5", "7.5"]
    assert rows[1] == ["w = 1"] * 2 and rows[5] == ["w = 0.25"] * 2 and len(rows[3]) == 1


def test_a_gradient_for_each_rank_is_asked_for():
    with pytest.raises(ValueError, match="own has 1 gradients for 2 ranks"):
        plots.replica_boxes([[1], [2]], [1.0], 1.0, (1, 0))


def test_parameters_lie_in_model_order_and_know_their_bucket():
    placed = plots.falls(SIZES, BUCKETS)
    assert [(fall.start, fall.size, fall.bucket) for fall in placed] == [(0, 4, 1), (4, 6, 0), (10, 2, 0)]


def test_a_parameter_that_is_in_no_bucket_is_told():
    with pytest.raises(ValueError, match="each parameter once"):
        plots.falls(SIZES, [["embed.weight"]])


def test_a_stream_works_in_order_and_the_wait_holds_the_optimizer_not_the_cpu():
    spans = plots.backward_on_streams(3)
    lanes = {lane: [s for s in spans if s.lane == lane] for lane in (plots.CPU, plots.COMPUTE, plots.COMMUNICATION)}
    for lane in lanes.values():
        assert all(before.stop_s <= after.start_s for before, after in pairwise(lane))
    computed = {s.name: s.stop_s for s in lanes[plots.COMPUTE]}
    for index, send in enumerate(lanes[plots.COMMUNICATION]):
        assert send.start_s >= computed[f"backward {index}"]
    last_sent_s, optimizer = lanes[plots.COMMUNICATION][-1].stop_s, lanes[plots.COMPUTE][-1]
    assert optimizer.start_s == last_sent_s > lanes[plots.CPU][-1].stop_s
    assert lanes[plots.COMMUNICATION][0].start_s < computed["backward 2"]  # they overlap


def test_at_the_critical_batch_size_steps_and_tokens_are_twice_the_least():
    assert plots.times_the_least(1) == (2, 2)
    assert plots.times_the_least(1 / 64) == (65, 1 + 1 / 64)


def test_the_pictures_draw_what_they_are_given(monkeypatch):
    texts = drawn(monkeypatch, plots.show_replicas, [[1, 2], [3, 4]], [2.5, 12.5], 7.5, (1, 0.25))
    assert {"x = 4", "12.5", "all-reduce: mean over ranks"} <= set(texts)
    texts = drawn(monkeypatch, plots.show_buckets, SIZES, BUCKETS, "title")
    assert {"bucket 0\n8 elements", "bucket 1\n4 elements", "head", "order of backward"} <= set(texts)
    texts = drawn(monkeypatch, plots.show_streams, plots.backward_on_streams(), "title")
    assert {"all-reduce 2", "optimizer", "wait()"} <= set(texts)
    assert "twice the batch:\nhalf the steps" in drawn(monkeypatch, plots.show_batch_tradeoff)
