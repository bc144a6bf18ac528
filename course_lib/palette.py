"""Colours with one meaning through the whole course: Okabe and Ito's eight, which the colour-blind tell apart.

Nothing rests on colour alone: every kind of memory also has a hatch, and pictures label their parts directly.
"""

from course_lib.validate import Share

# Okabe and Ito 2008, "Color Universal Design", https://jfly.uni-koeln.de/color/
OKABE_ITO = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
}

# In the order in which they are stacked. logits: what the loss keeps; overhead: what is no tensor.
# Of all orders of Okabe and Ito's colours this one keeps neighbours furthest apart for every colour vision.
KIND_COLORS = {
    "parameters": OKABE_ITO["blue"],
    "gradients": OKABE_ITO["orange"],
    "optimizer": OKABE_ITO["green"],
    "activations": OKABE_ITO["vermillion"],
    "logits": OKABE_ITO["purple"],
    "gathered": OKABE_ITO["yellow"],
    "temporary": OKABE_ITO["sky"],
    "overhead": "#666666",
    "free": "#E6E6E6",
}
KINDS = tuple(KIND_COLORS)

KIND_HATCHES = {
    "parameters": "",
    "gradients": "//",
    "optimizer": "..",
    "activations": "",
    "logits": "xx",
    "gathered": "\\\\",
    "temporary": "||",
    "overhead": "",
    "free": "",
}

AXIS_COLORS = {
    "dp": OKABE_ITO["blue"],
    "cp": OKABE_ITO["sky"],
    "tp": OKABE_ITO["vermillion"],
    "pp": OKABE_ITO["purple"],
    "ep": OKABE_ITO["black"],
}

# Up to eight ranks; a rank's number always stands beside its colour.
RANK_COLORS = (
    OKABE_ITO["sky"],
    OKABE_ITO["orange"],
    OKABE_ITO["green"],
    OKABE_ITO["yellow"],
    OKABE_ITO["blue"],
    OKABE_ITO["vermillion"],
    OKABE_ITO["purple"],
    "#999999",
)

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
    """Relative luminance, 0 black to 1 white.

    Source   WCAG 2.1, "relative luminance"
    """
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_on(color: str) -> str:
    """Black or white, whichever reads better on `color`."""
    light = luminance(color)
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#FFFFFF"
