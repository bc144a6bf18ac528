"""How a picture reaches a notebook: twice as sharp as it is shown, with its size and its words."""

from base64 import b64decode

import matplotlib.pyplot as plt
import nbclient
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from course_lib.language import spoken
from course_lib.plots import style
from course_lib.plots.style import describe, speak_korean

DRAW = """import matplotlib.pyplot as plt
from course_lib.plots.style import (finish)
figure, axes = plt.subplots(figsize=(4, 2), dpi=80)
axes.plot([1, 2], label="ring")
axes.set(title="Time falls", xlabel="ranks", ylabel="ms")
axes.legend()
finish(figure)
assert plt.get_fignums() == []"""
WORDS = "Picture: Time falls. Horizontal axis: ranks. Vertical axis: ms. Colours: ring."


@pytest.mark.long
@pytest.mark.launches
def test_a_notebook_stores_a_picture_with_its_words_and_two_pixels_for_each_that_is_shown(monkeypatch):
    monkeypatch.delenv("MPLBACKEND")
    nb = new_notebook(cells=[new_code_cell(DRAW)])
    nbclient.NotebookClient(nb, kernel_name="python3").execute()
    (output,) = nb.cells[0].outputs
    shown = output.metadata["image/png"]
    assert shown["alt"] == WORDS and output.data["text/plain"] == "<Figure size 320x160 with 1 Axes>"
    pixels = int.from_bytes(b64decode(output.data["image/png"])[16:20])
    assert pixels // 2 == shown["width"] and 250 < shown["width"] < 400


def test_a_figure_without_a_title_is_described_by_what_is_written_in_it():
    figure, axes = plt.subplots()
    axes.text(0, 0, "rank 0\nholds all")
    assert describe(figure) == "Picture: rank 0 holds all."
    plt.close(figure)


def test_in_korean_the_names_at_an_axis_are_told_as_titles_and_legends_are(monkeypatch):
    monkeypatch.setattr(style, "korean_font", lambda: "DejaVu Sans")  # whatever fonts this machine has
    figure, axes = plt.subplots()
    axes.barh([0, 1], [2, 1], label="measured")
    axes.set_yticks([0, 1], ["parameters", "rank 3"])
    axes.set(xlabel="sequence length", title="Memory")
    axes.legend()
    speak_korean(figure)
    assert axes.get_xlabel() == "sequence length"  # nobody asked for Korean
    with spoken("ko"):
        speak_korean(figure)
        assert describe(figure) == "그림: 메모리. 가로축: 시퀀스 길이. 색: 측정."
    assert [label.get_text() for label in axes.get_yticklabels()] == ["파라미터", "rank 3"]
    plt.close(figure)
