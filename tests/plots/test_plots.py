"""Every picture draws numbers that a pure function computed: those numbers, and that each picture can be drawn."""

import re
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from harness import sampled

matplotlib.use("Agg")

from course_lib.config import preset
from course_lib.hardware import GPUS, LINKS, PUBLISHED_BUS_BANDWIDTH, gpu
from course_lib.measure.tracker import KINDS as TRACKED_KINDS
from course_lib.measure.tracker import Timeline
from course_lib.memory.budget import budget
from course_lib.plots import comparison, curves, ladder, memory, palette, style, timeline
from course_lib.span import Span
from course_lib.timing import collective_s, dp_spans, exposed_s, fastest

# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency"
COLOR_VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(color: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of a colour as that vision sees it."""
    c = np.array(palette.channels(color))
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    x = TO_XYZ @ np.clip(COLOR_VISION[vision] @ linear, 0, 1) / WHITE
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: str, other: str) -> float:
    """How far two colours are apart for the vision that tells them apart least (2.3 is just noticeable)."""
    return min(float(np.linalg.norm(lab(one, v) - lab(other, v))) for v in COLOR_VISION)


@pytest.fixture
def drawn(monkeypatch):
    """Collects what `plt.show` would have shown, as (title, size of the PNG)."""
    seen = []

    def show():
        assert plt.get_fignums(), "plt.show() was called without a figure"
        for number in plt.get_fignums():
            figure = plt.figure(number)
            size = png_size(figure)
            titles = [figure.get_suptitle(), *(axes.get_title("left") for axes in figure.axes)]
            seen.append((next(title for title in titles if title), size))

    monkeypatch.setattr(plt, "show", show)
    yield seen
    assert plt.get_fignums() == [], "a figure stayed open"


def png_size(figure) -> int:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return len(buffer.getvalue())


# ---------------------------------------------------------------- palette and style


def test_neighbouring_kinds_are_far_apart_for_every_colour_vision():
    kinds = list(palette.KIND_COLORS)
    pairs = {(a, b): distance(palette.KIND_COLORS[a], palette.KIND_COLORS[b]) for a, b in pairwise(kinds)}
    assert min(pairs.values()) > 25, pairs


def test_any_two_kinds_and_any_two_axes_can_be_told_apart():
    for colors in (palette.KIND_COLORS, palette.AXIS_COLORS):
        names = list(colors)
        pairs = {(a, b): distance(colors[a], colors[b]) for i, a in enumerate(names) for b in names[i + 1 :]}
        assert min(pairs.values()) > 15, min(pairs, key=pairs.get)


def test_the_distance_sees_a_pair_that_the_colour_blind_confuse():
    assert distance("#A05000", "#608000") < 10 < np.linalg.norm(lab("#A05000", "normal") - lab("#608000", "normal"))


def test_every_tracked_kind_has_a_colour_and_similar_colours_have_different_hatches():
    assert set(TRACKED_KINDS) <= set(palette.KIND_COLORS)
    assert set(palette.KIND_HATCHES) == set(palette.KIND_COLORS)
    names = list(palette.KIND_COLORS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            if distance(palette.KIND_COLORS[a], palette.KIND_COLORS[b]) < 20:
                assert palette.KIND_HATCHES[a] != palette.KIND_HATCHES[b], (a, b)


def test_text_has_contrast_on_every_colour():
    for color in [*palette.KIND_COLORS.values(), *palette.AXIS_COLORS.values(), *palette.RANK_COLORS]:
        light, dark = sorted([palette.luminance(color), palette.luminance(palette.text_on(color))], reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 4.5, color


def test_mixing_goes_from_one_colour_to_the_other():
    assert palette.mix("#000000", "#FFFFFF", 0.0) == "#000000"
    assert palette.mix("#000000", "#FFFFFF", 1.0) == "#FFFFFF"
    assert palette.mix("#FF0000", "#0000FF", 0.5) == "#800080"


def test_a_style_ends_with_its_block():
    before = dict(matplotlib.rcParams)
    with style.style():
        assert matplotlib.rcParams["figure.dpi"] == 80
    assert dict(matplotlib.rcParams) == before


def test_numbers_carry_their_unit():
    assert style.show_bytes(16_060_522_496) == "16.1 GB"
    assert style.show_bytes(16_060_522_496, "GiB") == "15.0 GiB"
    assert style.show_bytes(999) == "999 B"
    assert style.unit_for(2**30, binary=True) == "GiB"
    assert style.show_seconds(0.00234) == "2.34 ms"
    assert [style.three_digits(x) for x in (0, 0.0123, 9.996, 99.96, 1234)] == ["0", "0.0123", "10.0", "100", "1,234"]


# ---------------------------------------------------------------- memory


def made_up_timeline(steps: int = 3) -> Timeline:
    """Activations rise to 30 and fall, gradients grow to 10; the optimizer's 20 come with the first step's end."""
    times, columns, marks = [], {kind: [] for kind in TRACKED_KINDS}, []
    for step in range(steps):
        for phase, rows in (("forward", [10, 20, 30]), ("backward", [20, 10, 0]), ("optimizer", [0, 0])):
            marks.append((float(len(times)), phase))
            for i, activations in enumerate(rows):
                now = {
                    "parameters": 10,
                    "activations": activations,
                    "optimizer": 20 if step or phase == "optimizer" else 0,
                }
                now["gradients"] = {"forward": 0, "backward": 3 * (i + 1), "optimizer": 10}[phase]
                times.append(float(len(times)))
                for kind in columns:
                    columns[kind].append(now.get(kind, 0))
    return Timeline(times, columns, marks)


def test_a_timeline_keeps_its_peak_and_its_phases():
    picture = memory.timeline_picture(made_up_timeline())
    assert picture.peak_bytes == 60 and picture.xs[10] == 10  # second step, end of forward
    at_peak = {kind: values[10] for kind, values in picture.bytes_by_kind.items()}
    assert at_peak == {"parameters": 10, "gradients": 0, "optimizer": 20, "activations": 30}
    assert list(picture.bytes_by_kind) == ["parameters", "gradients", "optimizer", "activations"]  # no empty kinds
    assert [name for name, _, _ in picture.phases] == ["forward", "backward", "optimizer"] * 3
    assert picture.phases[1] == ("backward", 3, 6)


def test_a_long_timeline_is_thinned_without_losing_its_peak():
    n = 50_000
    values = [1] * n
    values[31_415] = 99
    picture = memory.timeline_picture(Timeline([i / 1e3 for i in range(n)], {"activations": values}, []))
    assert len(picture.xs) <= 1502 and picture.peak_bytes == 99
    assert picture.bytes_by_kind["activations"][picture.xs.index(31_415)] == 99


def test_an_empty_timeline_is_refused():
    with pytest.raises(ValueError, match="at least one training step"):
        memory.timeline_picture(Timeline([], {"activations": []}, []))


def test_a_budget_bar_adds_up_to_the_budget_and_fits_where_the_formula_says():
    needed = budget(preset("llama-3.2-1b"), 1, 2048)
    (bar,) = memory.budget_bars(needed, memory.gpu_limits([GPUS["t4"], GPUS["h100"]]))
    assert bar.total_bytes == needed.total_bytes
    assert bar.bytes_by_kind["overhead"] == sum(needed.overheads.values())
    assert bar.fits == ("H100 SXM 80 GB",)
    assert needed.total_bytes > gpu("t4").usable_bytes


def test_a_budget_equal_to_the_limit_fits_and_one_byte_more_does_not():
    bars = memory.budget_bars({"a": {"parameters": 100}, "b": {"parameters": 101}}, {"GPU": 100})
    assert [bar.fits for bar in bars] == [("GPU",), ()]
    with pytest.raises(ValueError, match="have no colour"):
        memory.kinds_of({"weights": 3})


def test_limits_that_coincide_become_one_line():
    merged = memory.merge_limits({"A": 100, "B": 101, "C": 150})
    assert merged == [("A, B", 100), ("C", 150)]


def test_labels_that_would_touch_go_up_one_line():
    assert memory.label_levels([(10, "x" * 10), (11, "x" * 10), (90, "x" * 10)], 100) == [0, 1, 0]


def test_a_step_gains_against_the_one_above():
    said = [ladder.gain_text(*step) for step in ((100.0, 100.0), (100.0, 50.0), (50.0, 60.0), (100.0, 98.75))]
    assert said == ["", "  (−50 %)", "  (+20 %)", "  (−1.2 %)"]


def test_a_comparison_leaves_out_what_is_empty_and_words_its_error():
    row = SimpleNamespace
    rows = [row(kind="gathered", predicted_bytes=0, measured_bytes=0, error_percent=0.0),
            row(kind="peak", predicted_bytes=99, measured_bytes=100, error_percent=-1.0)]  # fmt: skip
    assert [pair.kind for pair in comparison.comparison_pairs(rows)] == ["peak"]
    assert [comparison.error_text(e) for e in (0.0, 0.001, -1.0, 2.5)] == [
        "exact", "under 0.005 % off", "−1.00 %", "+2.50 %",
    ]  # fmt: skip


# ---------------------------------------------------------------- time, mesh, curves, formats


def test_exposed_communication_is_what_no_computation_covers():
    spans = dp_spans(0.01, 0.02, [0.004] * 5)
    picture = timeline.overlap_picture(spans)
    assert picture.exposed_s[0] == pytest.approx(exposed_s(spans))
    assert picture.rows == ["compute", "communication"] and picture.others == "communication"
    two_ranks = [Span(rank, lane, "a", 0, 1) for rank in (0, 1) for lane in ("copy", "compute")]
    picture = timeline.overlap_picture(two_ranks)
    assert picture.rows == ["rank 0 compute", "rank 0 copy", "rank 1 compute", "rank 1 copy"]
    assert picture.others == "copy"
    early = [Span(0, "comm", "wait", 0, 2), Span(0, "compute", "forward", 1, 3), Span(0, "comm", "again", 1.5, 4)]
    assert timeline.overlap_picture(early).exposed_s[0] == pytest.approx(2.0)  # 0 to 1 and 3 to 4
    assert timeline.subtract((0, 10), [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert timeline.subtract((0, 10), [(1, 6), (2, 3)]) == [(0, 1), (6, 10)]  # one inside another


ONE_STEP = [
    Span(0, "compute", "forward", 0.0, 0.4),
    Span(0, "compute", "backward", 0.4, 2.0),
    Span(0, "all-reduce 0", "all-reduce 0", 0.9, 1.1),
    Span(0, "all-reduce 1", "all-reduce 1", 2.1, 2.5),
    Span(0, "compute", "optimizer", 2.5, 2.6),
]


def test_a_picture_of_the_order_has_a_place_for_each_start_and_stop_and_no_seconds():
    places = [(span.start_s, span.stop_s) for span in timeline.in_order(ONE_STEP)]
    assert places == [(0, 1), (1, 4), (2, 3), (5, 6), (6, 7)]
    slower = [replace(span, start_s=span.start_s**3, stop_s=span.stop_s**3) for span in ONE_STEP]
    assert timeline.in_order(slower) == timeline.in_order(ONE_STEP)
    with style.picture_axes(2.0) as axes:
        timeline.draw_overlap(axes, timeline.overlap_picture(timeline.in_order(ONE_STEP)), only_order=True)
        drawn = {bar.get_y() + bar.get_height() / 2: (bar.get_x(), bar.get_width()) for bar in axes.patches}
        said = [text.get_text() for text in axes.texts] + [axes.get_xlabel()]
        assert not list(axes.get_xticks()) and not any(re.search(r"\d m?s", text) for text in said)
    assert drawn[1.0] == (2, 1) and drawn[2.0] == (5, 1)


def test_a_way_is_named_where_it_is_the_fastest():
    picture = curves.alpha_beta_picture("all_reduce", 8, LINKS["nvlink4"])
    for size, way in picture.ways:
        best = fastest("all_reduce", size, 8, LINKS["nvlink4"])
        assert way == f"{best.algorithm}, {best.protocol}"
    with style.picture_axes(3.0) as axes:
        curves.draw_alpha_beta(axes, picture, 1e6)
        named = {text.get_text(): text for text in axes.texts if text.get_text() in dict(picture.ways).values()}
        axes.figure.canvas.draw()
        for size, way in picture.ways:  # 1 MB goes around the ring: no other name stands over it
            left = axes.transData.inverted().transform(named[way].get_window_extent())[0, 0]
            assert left >= size


def test_overlapping_communication_is_exposed_once():
    spans = [Span(0, "comm", "a", 0, 2), Span(0, "other", "b", 1, 3), Span(0, "compute", "c", 5, 6)]
    assert timeline.overlap_picture(spans).exposed_s[0] == pytest.approx(3.0)


def test_the_two_limits_meet_at_the_crossover_and_the_time_lies_above_both():
    link = LINKS["nvlink4"]
    size = curves.crossover_bytes("all_reduce", 8, link)
    assert size == pytest.approx(15e-6 * 480e9 * 8 / 14)  # ring with LL for the smallest, the switch for the largest
    picture = curves.alpha_beta_picture("all_reduce", 8, link)
    assert picture.sizes_bytes[0] == 1e3 and picture.sizes_bytes[-1] == 1e10
    assert [way for _, way in picture.ways] == ["ring, LL", "nvls, Simple"]
    for total, bandwidth in zip(picture.total_s, picture.bandwidth_s, strict=True):
        assert total > max(picture.latency_s, bandwidth)
    assert picture.total_s[-1] == pytest.approx(picture.bandwidth_s[-1], rel=0.01)
    assert curves.interpolated(picture, 1e9) == pytest.approx(collective_s("all_reduce", 1e9, 8, link), rel=0.01)
    with pytest.raises(ValueError, match="at least 2 ranks"):
        curves.crossover_bytes("all_reduce", 1, link)


def test_the_published_bandwidth_falls_thirteenfold():
    bandwidth = PUBLISHED_BUS_BANDWIDTH["all_reduce"]
    assert bandwidth[1] / bandwidth[64] == pytest.approx(13.2, abs=0.1)


def test_points_too_close_to_be_labelled_carry_one_number():
    assert curves.value_labels_of([{1: 100.0}, {1: 50.0}, {1: 49.0}]) == [(1, 100.0, True), (1, 50.0, False)]


def test_a_number_goes_below_its_point_where_a_line_passes_above():
    labels = curves.value_labels_of([{1: 100.0, 2: 90.0, 3: 90.0}], lines=[{1: 105.0, 2: 80.0, 3: 150.0}])
    assert labels == [(1, 100.0, False), (2, 90.0, True), (3, 90.0, True)]


def test_exposed_pieces_a_hair_apart_are_framed_together():
    assert timeline.joined([(1, 2.0, 3.0), (1, 3.05, 4.0), (1, 5.0, 6.0), (2, 6.0, 7.0)], 0.1) == [
        (1, 2.0, 4.0),
        (1, 5.0, 6.0),
        (2, 6.0, 7.0),
    ]


# ---------------------------------------------------------------- every picture can be drawn

ROWS = [
    SimpleNamespace(kind=k, predicted_bytes=9, measured_bytes=10, error_percent=-10.0) for k in ("parameters", "peak")
]
PICTURES = {
    "timeline": lambda: memory.show_memory_timeline(made_up_timeline(), title="t"),
    "budget": lambda: memory.show_budgets(budget(preset("llama-3.1-8b"), 1, 4096), GPUS.values(), title="t"),
    "budgets": lambda: memory.show_budgets({"a": {"parameters": 5}, "b": {"gathered": 9}}, {"GPU": 7}, title="t"),
    "no GPU": lambda: memory.show_budgets({"parameters": 5 * 10**9}, title="t", unit="GiB"),
    "ladder": lambda: ladder.show_ladder({"a": 3.0, "b": 2.0, "c": 2.5}, "t", limits={"GPU": 2.2}),
    "comparison": lambda: comparison.show_comparison(ROWS, "t"),
    "overlap": lambda: timeline.show_overlap({"a": dp_spans(1, 2, [0.5] * 3), "b": dp_spans(1, 2, [1.5])}, "t"),
    "bandwidth": lambda: curves.show_bandwidth(PUBLISHED_BUS_BANDWIDTH, {"model": {1: 4e11, 64: 3e10}}, "t"),
    "throughput": lambda: curves.show_throughput({8: 40e3, 256: 15e3}, {8: 40e3, 256: 20e3}, "t"),
    "alpha-beta": lambda: curves.show_alpha_beta(8, LINKS["efa"], title="t"),
}


@pytest.mark.parametrize("name", sampled([*PICTURES], 5))
def test_a_picture_is_shown_once_and_closed(name, drawn):
    assert PICTURES[name]() is None
    ((title, png_bytes),) = drawn
    assert title == "t"
    assert 3_000 < png_bytes < 60_000
