"""What number formats make of a weight, and of an update that is added to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Box, Lanes


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    `finite_only`: no infinities, so that the highest exponent holds numbers too (FP8 E4M3).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite_only: bool = False

    @property
    def bits(self) -> int:
        """All bits, the sign among them."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is taken from the stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest(self) -> float:
        """The largest finite number. In a finite-only format the top pattern alone is not a number."""
        if self.finite_only:
            return 2.0 ** (2**self.exponent_bits - 1 - self.bias) * (2 - 2 * 2.0**-self.mantissa_bits)
        return 2.0**self.bias * (2 - 2.0**-self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above zero (subnormal)."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits

    def stored(self, value: float) -> float:
        """Return the nearest number that the format has, of two the even one; too large is infinite."""
        exponent = max(math.frexp(value)[1] - 1, 1 - self.bias)
        step = 2.0 ** (exponent - self.mantissa_bits)
        nearest = round(value / step) * step
        return math.copysign(math.inf, value) if abs(nearest) > self.largest else nearest


# Source: IEEE 754-2019 (fp32, fp16); torch.finfo; OCP 8-bit floating point specification (OFP8)
FORMATS = {
    "fp32": FloatFormat("fp32", 8, 23),
    "tf32": FloatFormat("tf32", 8, 10),
    "bf16": FloatFormat("bf16", 8, 7),
    "fp16": FloatFormat("fp16", 5, 10),
    "fp8 e5m2": FloatFormat("fp8 e5m2", 5, 2),
    "fp8 e4m3": FloatFormat("fp8 e4m3", 4, 3, finite_only=True),
}
SHOWN = ("fp32", "bf16", "fp16")


def verdict(weight: float, update: float, after: float) -> str:
    """Say what became of an update that was added to a weight, all three as stored."""
    if math.inf in (weight, update, after):
        return "overflows"
    if update == 0:
        return "the update underflows to zero"
    if weight == 0:
        return "the weight underflows to zero"
    if after == weight:
        return "the update is swallowed"
    arrived = (after - weight) / update
    return "kept" if abs(arrived - 1) < 0.05 else f"{100 * arrived:.0f} % of the update arrive"


def add(name: str, weight: float, update: float) -> tuple[float, float, float]:
    """Return weight, update and their sum as the format stores them; sums are taken in FP32 and then rounded."""
    format = FORMATS[name]
    stored, change = format.stored(weight), format.stored(update)
    if math.inf in (stored, change):
        return stored, change, math.inf
    return stored, change, format.stored(FORMATS["fp32"].stored(stored + change))


def _draw_precision(weight: float, update: float) -> Shown:
    """The range of each format with the weight and the update in it, and what becomes of their sum."""
    lanes, notes, said = {}, {}, []
    for name in SHOWN:
        stored, change, after = add(name, weight, update)
        found = verdict(stored, change, after)
        lanes[name] = [Box(math.log10(FORMATS[name].smallest), math.log10(FORMATS[name].largest), "range")]
        notes[name] = found
        said.append(f"{name}: {stored:.6g} + {change:.4g} gives {after:.9g}, {found}.")
    marks = {f"weight {weight:g}": math.log10(weight), f"update {update:g}": math.log10(update)}
    title = "Numbers of each format, by their power of ten"
    return [Lanes(title, lanes, -46, 39, "exponent", marks, notes)], " ".join(said)


def _magnitudes(lowest: int, highest: int) -> tuple[tuple[str, float], ...]:
    values = [digit * 10.0**power for power in range(lowest, highest) for digit in (1, 3)] + [10.0**highest]
    return tuple((f"{value:g}", value) for value in values)


PRECISION = Panel(
    "A weight and an update in three formats",
    {
        "weight": Control("weight", _magnitudes(-8, 5), 1.0, "slider"),
        "update": Control("update", _magnitudes(-12, 5), 1e-3, "slider"),
    },
    _draw_precision,
)
