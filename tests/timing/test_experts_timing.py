"""Rows of one micro-batch travel while another one is computed: what stays exposed."""

from itertools import pairwise

import pytest

from course_lib.timing import exposed_s
from course_lib.timing.timelines import expert_layer_spans

SECONDS = {"attention": 4, "dispatch": 2, "experts": 4, "combine": 2}


@pytest.mark.parametrize(
    ("micro_batches", "overlap", "end_s"), [(1, True, 12), (2, False, 24), (2, True, 18), (4, True, 34)]
)
def test_two_micro_batches_hide_all_but_the_last_combine(micro_batches, overlap, end_s):
    spans = expert_layer_spans(SECONDS, micro_batches, overlap)
    assert max(span.stop_s for span in spans) == end_s and len(spans) == 4 * micro_batches
    if overlap and micro_batches > 1:
        assert exposed_s(spans) == 2


def test_a_part_starts_when_the_part_before_it_is_done_and_lanes_do_one_thing_at_a_time():
    spans = expert_layer_spans(SECONDS | {"dispatch": 9}, 3)
    for lane in ("compute", "communication"):
        mine = [span for span in spans if span.lane == lane]
        assert all(a.stop_s <= b.start_s for a, b in pairwise(mine))
    for index in range(3):
        own = [span for span in spans if span.name.endswith(str(index))]
        assert all(a.stop_s <= b.start_s for a, b in pairwise(own))


def test_a_part_without_seconds_is_refused():
    with pytest.raises(ValueError, match="give more than 0 for each of attention, dispatch, experts, combine"):
        expert_layer_spans({"attention": 1})
