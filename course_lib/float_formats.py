"""Binary floating-point formats by their bits: what they hold, and what a number becomes in them."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
        if math.isinf(value):
            return value
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
