"""Binary floating-point formats by their bits: what they hold, and what a number becomes in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    specials   which codes are no numbers: all of the highest exponent (infinities and NaNs), the highest code alone
               (FP8 E4M3), or none (FP4)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Literal["exponent", "code", "none"] = "exponent"

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
        """The largest finite number."""
        if self.specials == "exponent":
            return 2.0**self.bias * (2 - 2.0**-self.mantissa_bits)
        last = 2 if self.specials == "code" else 1  # steps below the next power of two
        return 2.0 ** (2**self.exponent_bits - 1 - self.bias) * (2 - last * 2.0**-self.mantissa_bits)

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


# Source: IEEE 754-2019 (fp32, fp16); torch.finfo; OCP 8-bit floating point specification (OFP8); fp4: OCP Microscaling
# formats (MX) 1.0. The 255 numbers of int8 from -127 to 127 are equally far apart: one exponent bit, and a scale.
FORMATS = {
    "fp32": FloatFormat("fp32", 8, 23),
    "tf32": FloatFormat("tf32", 8, 10),
    "bf16": FloatFormat("bf16", 8, 7),
    "fp16": FloatFormat("fp16", 5, 10),
    "fp8 e5m2": FloatFormat("fp8 e5m2", 5, 2),
    "fp8 e4m3": FloatFormat("fp8 e4m3", 4, 3, "code"),
    "fp4 e2m1": FloatFormat("fp4 e2m1", 2, 1, "none"),
    "int8": FloatFormat("int8", 1, 6, "none"),
}


@dataclass(frozen=True)
class BlockFormat:
    """Numbers of a format in blocks, each with one scale; a scale of the whole tensor is not counted.

    block   elements that share a scale
    """

    numbers: FloatFormat
    block: int
    scale_bits: int = 8

    @property
    def bits(self) -> float:
        """Bits per element, with its share of the block's scale."""
        return self.numbers.bits + self.scale_bits / self.block


# Source: OCP Microscaling formats (MX) 1.0, table 1: the scale is E8M0, a power of two; NVFP4 (arXiv:2509.25149),
# section 2: the scale is E4M3, with one in FP32 for the tensor
BLOCK_FORMATS = {
    "mxfp8": BlockFormat(FORMATS["fp8 e4m3"], 32),
    "mxfp4": BlockFormat(FORMATS["fp4 e2m1"], 32),
    "nvfp4": BlockFormat(FORMATS["fp4 e2m1"], 16),
}
