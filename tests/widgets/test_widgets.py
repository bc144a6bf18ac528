"""Panels in a notebook: values set and buttons pressed in a plain Python process."""

import ipywidgets
import pytest
from widget_tree import all_of, control, texts

from course_lib.compare.profile import Comparison
from course_lib.panels.collectives import OVERLAP
from course_lib.panels.one_gpu import BLOCKS, MEMORY, RECOMPUTE
from course_lib.panels.pipeline import PUZZLE
from course_lib.panels.plans import PLAN
from course_lib.panels.record import Panel
from course_lib.panels.runs import KNOWN, LAYOUT, TENSOR_SEQUENCE, ZERO
from course_lib.widgets import measure_layout, measure_memory, measure_zero, play
from course_lib.widgets.host import OWN

pytestmark = pytest.mark.launches

# ---------------------------------------------------------------- the host


@pytest.mark.parametrize(
    ("panel", "label", "value"),
    [(MEMORY, "micro-batch", 8), (OVERLAP, "micro-batches", 4), (ZERO, "ZeRO stage", 2), (LAYOUT, "SP", False)],
)
def test_moving_a_control_replaces_the_picture_and_the_words(panel, label, value):
    box = play(panel)
    (name,) = [name for name, one in panel.controls.items() if one.label == label]
    before, after = panel.answer(), panel.answer(**{name: value})
    assert before.svg in texts(box)
    control(box, label).value = value
    assert after.svg in texts(box) and before.svg not in texts(box) and len(all_of(box, ipywidgets.HTML)) == 2


def test_a_panel_starts_at_given_values_and_refuses_others():
    box = play(TENSOR_SEQUENCE, tp=4, seq_len=8192)
    assert control(box, "tp").value == 4 and TENSOR_SEQUENCE.answer(tp=4, seq_len=8192).svg in texts(box)
    with pytest.raises(ValueError, match="tp is 3; choose from 1, 2, 4"):
        play(TENSOR_SEQUENCE, tp=3)


def test_an_impossible_choice_is_told_without_a_picture_and_the_next_one_works():
    box = play(MEMORY, model="gpt2", seq_len=1024)
    control(box, "sequence").value = 2048
    assert "Not possible" in texts(box) and "choose at most 1024" in texts(box) and "<svg" not in texts(box)
    control(box, "sequence").value = 512
    assert "Not possible" not in texts(box) and "<svg" in texts(box)


def test_a_known_layout_sets_all_controls_at_once_and_a_change_makes_it_ones_own(monkeypatch):
    asked, answer = [], Panel.answer
    monkeypatch.setattr(Panel, "answer", lambda self, **values: asked.append(values) or answer(self, **values))
    box = play(LAYOUT)
    menu, drawn = control(box, "start from"), len(asked)
    menu.value = "one laptop (toy), 8 ranks"
    assert asked[drawn:] == [LAYOUT.start | KNOWN[menu.value][0]]  # nothing in between
    assert "press Measure" in texts(box) and control(box, "ep").value == 2
    control(box, "ZeRO stage").value = 3
    assert menu.value == OWN and "press Measure" not in texts(box)


def test_blocks_are_switched_one_by_one_and_by_a_preset():
    box = play(RECOMPUTE)
    control(box, "0").value = True
    assert "1 of 16 blocks are computed again" in texts(box)
    control(box, "start from").value = "every block"
    assert all(control(box, str(layer)).value for layer in range(BLOCKS)) and "16 of 16" in texts(box)


def test_the_puzzle_is_solved_by_pressing_cells_and_by_typing():
    box = play(PUZZLE)
    cell = {one.tooltip: one for one in all_of(box, ipywidgets.Button) if one.tooltip}
    control(box, "place").value = "B"
    cell["rank 2, column 5"].click()
    assert [cell[f"rank 2, column {c}"].description for c in range(4, 8)] == ["F0", "B0", "-", "."]
    assert control(box, "or type").value.split("\n")[2].startswith(". . . . F0 B0 - .") and "Good so far" in texts(box)
    cell["rank 1, column 7"].click()
    assert "Not possible yet" in texts(box) and "so B0@1 can be in column 8 at the earliest" in texts(box)
    cell["rank 1, column 8"].click()  # the second slot of this B: it is taken away
    assert cell["rank 1, column 7"].description == "." and "Good so far" in texts(box)
    control(box, "or type").value = "F0 <b>\n.\n."
    assert "Not possible" in texts(box) and "&lt;" in texts(box) and "<b>'" not in texts(box)
    control(box, "or type").value = PUZZLE.presets["1F1B"][0]["chart"]
    assert "Complete and right" in texts(box) and cell["rank 2, column 4"].description == "F0"
    control(box, "start from").value = "a beginning"
    assert "Good so far" in texts(box) and cell["rank 2, column 5"].style.button_color is None


def test_a_stored_notebook_keeps_the_first_picture_as_svg_with_its_words():
    box = play(ZERO)
    control(box, "ZeRO stage").value = 1
    data, metadata = box._repr_mimebundle_()
    assert set(data) == {"image/svg+xml", "text/plain", "application/vnd.jupyter.widget-view+json"} and metadata == {}
    assert data["image/svg+xml"] == ZERO.answer().svg and data["text/plain"].startswith("stage 3: fits")


# ---------------------------------------------------------------- buttons


def test_measure_lays_measured_on_predicted_and_a_new_choice_takes_it_away():
    box = play(MEMORY, measure=measure_memory, seq_len=64)
    control(box, "Measure").click()
    assert "Measured in" in texts(box) and "scaled down" in texts(box) and not control(box, "Measure").disabled
    assert texts(box).count("<svg") == 2
    control(box, "precision").value = "fp32"
    assert "Measured in" not in texts(box) and texts(box).count("<svg") == 1


def test_a_measurement_that_fails_is_told_and_leaves_the_button_usable():
    box = play(MEMORY, measure=measure_memory, optimizer="adamw-8bit")
    control(box, "Measure").click()  # has a formula, but cannot be run here
    assert "cannot be measured here" in texts(box) and not control(box, "Measure").disabled

    def broken(**values):
        raise RuntimeError("<no memory left>")

    box = play(MEMORY, measure=broken)
    control(box, "Measure").click()
    assert "RuntimeError: &lt;no memory left&gt;" in texts(box) and not control(box, "Measure").disabled


def test_the_search_of_the_planner_is_a_button():
    box = play(PLAN)
    control(box, "Search").click()
    assert "The planner takes dp=32,tp=2" in texts(box) and texts(box).count("<svg") == 2


def test_what_cannot_be_measured_is_refused_before_a_rank_starts():
    for values, said in [
        ({"offload": "optimizer on the CPU"}, "choose offload none"),
        ({"recipe": "autocast"}, "choose from fp32"),
    ]:
        with pytest.raises(ValueError, match=said):
            measure_zero(**ZERO.start | values)
    with pytest.raises(ValueError, match="nearest|choose"):
        measure_layout(**LAYOUT.start | {"ep": 2})
    with pytest.raises(ValueError, match="there is no row"):
        Comparison("toy", ((), ()), 1.0).row("peak")


@pytest.mark.launches
def test_a_toy_is_measured_on_real_ranks():
    charts, said = measure_zero(**ZERO.start | {"zero_stage": 2, "dp": 2})
    assert charts[0].notes["parameters, measured"].endswith(" MB, exact") and "zero_stage=2" in said
    values = LAYOUT.start | KNOWN["one laptop (toy), 8 ranks"][0] | {"dp": 1, "ep": 1}
    charts, said = measure_layout(**values)
    assert "on 4 ranks" in said and charts[0].notes["parameters, measured"].endswith(" MB, exact")
