"""The colours of course_lib/palette.py, under the name from which pictures import them."""

from course_lib.palette import (
    AXIS_COLORS,
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    EXPOSED_COLOR,
    KIND_COLORS,
    KIND_HATCHES,
    KINDS,
    LIMIT_COLOR,
    MEASURED_COLOR,
    NEUTRAL_COLOR,
    OKABE_ITO,
    PREDICTED_COLOR,
    RANK_COLORS,
    channels,
    luminance,
    mix,
    text_on,
)

__all__ = [
    "AXIS_COLORS", "COMMUNICATION_COLOR", "COMPUTE_COLOR", "EXPOSED_COLOR", "KINDS", "KIND_COLORS",
    "KIND_HATCHES", "LIMIT_COLOR", "MEASURED_COLOR", "NEUTRAL_COLOR", "OKABE_ITO",
    "PREDICTED_COLOR", "RANK_COLORS", "channels", "luminance", "mix", "text_on",
]  # fmt: skip
