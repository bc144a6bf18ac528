"""Colours with one meaning through the whole course: Okabe and Ito's eight, which the colour-blind tell apart.

Nothing rests on colour alone: every kind of memory also has a hatch, and pictures label their parts directly.
The tables stand in palette.toml.
"""

from pathlib import Path

from course_lib.validate import Share, read_toml

_TABLE = read_toml(Path(__file__).with_name("palette.toml"))
OKABE_ITO: dict[str, str] = _TABLE["okabe_ito"]
KIND_COLORS: dict[str, str] = {kind: OKABE_ITO.get(color, color) for kind, (color, _) in _TABLE["kinds"].items()}
KIND_HATCHES: dict[str, str] = {kind: hatch for kind, (_, hatch) in _TABLE["kinds"].items()}
KINDS = tuple(KIND_COLORS)
AXIS_COLORS: dict[str, str] = {axis: OKABE_ITO[color] for axis, color in _TABLE["axes"].items()}
RANK_COLORS: tuple[str, ...] = tuple(OKABE_ITO.get(color, color) for color in _TABLE["ranks"]["colors"])

# What happens over time: two lanes, and the part of communication that nothing hides.
COMPUTE_COLOR = OKABE_ITO["sky"]
COMMUNICATION_COLOR = OKABE_ITO["orange"]
EXPOSED_COLOR = OKABE_ITO["vermillion"]

PREDICTED_COLOR = OKABE_ITO["blue"]
MEASURED_COLOR = OKABE_ITO["vermillion"]
LIMIT_COLOR = OKABE_ITO["black"]
NEUTRAL_COLOR = "#BFBFBF"


def channels(color: str) -> tuple[float, float, float]:
    """Red, green and blue of `#RRGGBB`, each from 0 to 1."""
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def mix(color: str, other: str, share: Share) -> str:
    """`color` with `share` (0 to 1) of `other` mixed in."""
    pairs = zip(channels(color), channels(other), strict=True)
    return "#" + "".join(f"{round(255 * ((1 - share) * a + share * b)):02X}" for a, b in pairs)


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.1, 0 black to 1 white."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_on(color: str) -> str:
    """Black or white, whichever reads better on `color`."""
    light = luminance(color)
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#FFFFFF"
