"""A curve that is drawn while its points come: one picture in a cell, redrawn in place, its last state stored."""

import math
import time

import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient

from course_lib.authoring.form import normalise
from course_lib.plots.live import LiveCurve

CELL = """
from course_lib.plots.live import LiveCurve

with LiveCurve("Loss of each step", steps=5) as curve:
    for step in range(5):
        curve._next_s = 0.0  # as if half a second had passed
        curve.add("loss", 3.0 / (step + 1))
"""


def test_the_picture_draws_each_value_and_over_many_steps_their_means():
    few, many = LiveCurve("few", steps=4), LiveCurve("many", steps=80)
    for step in range(4):
        few.add("one", 4.0 - step)
        few.add("two", 1.0)
    for step in range(40):
        many.add("loss", math.nan if step == 7 else 4.0 - step / 10)
    (axes,) = few.figure().axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn == {"one": ([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]), "two": ([1, 2, 3, 4], [1.0] * 4)}
    assert axes.get_xlim() == (0, 4) and axes.get_title("left") == "few" and axes.get_ylabel() == "loss"
    (axes,) = many.figure().axes
    values, means = (list(line.get_ydata()) for line in axes.lines)
    assert values[:7] == many.values["loss"][:7] and math.isnan(values[7])
    assert means[:2] == [4.0, 3.95] and means[9:] == pytest.approx([4.05 - step / 10 for step in range(9, 40)])
    plt.close("all")


def test_what_is_no_name_or_no_number_is_refused():
    curve = LiveCurve("loss")
    for name, value in ((3, 1.0), ("loss", "low"), ("loss", True), ("loss", None)):
        with pytest.raises(TypeError, match="give the name of a curve and one number"):
            curve.add(name, value)
    assert curve.values == {}


def test_in_a_terminal_it_is_shown_once_at_the_end(monkeypatch):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.get_fignums()))
    with LiveCurve("nothing came"):
        pass
    with LiveCurve("one") as curve:
        curve._next_s = time.monotonic()
        curve.add("loss", 1.0)
        assert shown == []
    assert len(shown) == 1 and len(shown[0]) == 1 and plt.get_fignums() == []


@pytest.mark.long
@pytest.mark.launches
def test_a_cell_redraws_one_picture_and_stores_the_last_with_its_words():
    drawn = []

    class Watching(NotebookClient):
        def process_message(self, message, cell, cell_index):
            if message["msg_type"] in ("display_data", "update_display_data"):
                drawn.append((message["msg_type"], message["content"]["data"].get("image/png")))
            return super().process_message(message, cell, cell_index)

    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL, id="train")])
    Watching(nb, timeout=60, kernel_name="python3").execute()
    pictures = [(kind, png) for kind, png in drawn if png]
    assert [kind for kind, _ in pictures] == ["display_data"] + ["update_display_data"] * (len(pictures) - 1)
    assert len(pictures) == 6 and len({png for _, png in pictures}) == 5  # it moves; the last is drawn twice
    (output,) = normalise(nb).cells[0].outputs
    assert output.data["image/png"] == pictures[-1][1] and output.data["text/plain"] == "<curves: Loss of each step>"
    words = output.metadata["image/png"]
    assert words["alt"] == "Picture: Loss of each step. Horizontal axis: step. Vertical axis: loss. Colours: loss."
    assert 500 < words["width"] < 700
