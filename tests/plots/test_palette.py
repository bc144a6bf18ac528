"""Colours can be told apart by every colour vision, and text can be read on them."""

from itertools import pairwise

import numpy as np

from course_lib import palette
from course_lib.measure.tracker import KINDS as TRACKED_KINDS

# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency"
COLOR_VISION = {name: np.array(matrix).reshape(3, 3) for name, matrix in {
    "normal": np.eye(3),
    "protanopia": [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    "deuteranopia": [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881],
    "tritanopia": [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900],
}.items()}  # fmt: skip
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
