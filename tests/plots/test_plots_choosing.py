"""The pictures of a choice: what they count, and that no text lies on another."""

import pytest
from pictures import overlapping_texts

from course_lib.layout import Layout
from course_lib.minimal.planner import cuts, front, plan
from course_lib.plan import work_out
from course_lib.plan.measured import measured_job, measured_runs
from course_lib.plots import choosing
from course_lib.plots.choosing import cut_name, cuts_of, shown_kinds

JOB = measured_job("8B", 64)
RUNS = measured_runs("8B", 64)
RANKED = plan(JOB)


def test_cuts_say_which_tp_leaves_its_node():
    found = cuts_of(cuts(64))
    assert len(found) == 28 and {cut.tp for cut in found if cut.over_nodes} == {16, 32, 64}
    assert not any(cut.over_nodes for cut in cuts_of(cuts(64), 64))


def test_bars_add_up_to_the_memory():
    for option in RANKED[:20]:
        assert sum(shown_kinds(option).values()) * 1e9 == pytest.approx(option.memory_bytes)
    assert cut_name(Layout.parse("dp=32,tp=2,zero_stage=1,micro_batch=2")) == "dp32 tp2 z1 mb2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "show",
    [
        lambda: choosing.show_steps({"Enumerate": "all", "Filter": "memory", "Score": "seconds", "Measure": "few"}),
        lambda: choosing.show_cuts(cuts(64)),
        lambda: choosing.show_paths(4),
        lambda: choosing.show_options(RANKED[:8]),
        lambda: choosing.show_front(RANKED, front(RANKED)),
        lambda: choosing.show_predicted(RUNS, [work_out(JOB, run.layout) for run in RUNS]),
        lambda: choosing.show_scaling([8, 16, 32], {"fixed": [0.4, 0.3, 0.2], "grows": [0.4, 0.41, 0.4]}),
    ],
    ids=["steps", "cuts", "paths", "options", "front", "predicted", "scaling"],
)
def test_a_picture_can_be_read(show, shown):
    show()
    (figure,) = shown
    assert overlapping_texts(figure) == []


def test_what_cannot_be_drawn_is_refused(shown):
    for show, said in (
        (lambda: choosing.show_steps({"one": "step"}), "at least 2"),
        (lambda: choosing.show_cuts([]), "1 to 256"),
        (lambda: choosing.show_paths(9), "1 to 8"),
        (lambda: choosing.show_options([]), "1 to 12"),
        (lambda: choosing.show_front([], []), "no option"),
        (lambda: choosing.show_predicted(RUNS, []), "one option for each run"),
        (lambda: choosing.show_scaling([8], {"a": [0.1, 0.2]}), "as many values"),
    ):
        with pytest.raises(ValueError, match=said):
            show()
