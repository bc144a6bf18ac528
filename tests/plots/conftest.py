"""What tests of pictures share: the figures that are shown, and axes to draw into."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest


@pytest.fixture
def shown(monkeypatch):
    """The figures that pictures show, one after the other, open until the test ends."""
    figures = []
    with monkeypatch.context() as patched:
        patched.setattr(plt, "show", lambda: figures.append(plt.gcf()))
        patched.setattr(plt, "close", lambda figure: None)
        yield figures
    plt.close("all")


@pytest.fixture
def axes():
    """Axes of a figure of their own."""
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)
