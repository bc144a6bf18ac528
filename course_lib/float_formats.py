"""Binary floating-point formats by their bits: what they hold, and what a number becomes in them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from course_lib.validate import read_toml


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


@dataclass(frozen=True)
class BlockFormat:
    """Numbers of a format in blocks, so many to a scale; a scale of the whole tensor is not counted."""

    numbers: FloatFormat
    block: int
    scale_bits: int = 8

    @property
    def bits(self) -> float:
        """Bits per element, with its share of the block's scale."""
        return self.numbers.bits + self.scale_bits / self.block


_TABLE = read_toml(Path(__file__).with_name("float_formats.toml"))
FORMATS = {name: FloatFormat(name, *bits) for name, bits in _TABLE["formats"].items()}
BLOCK_FORMATS = {name: BlockFormat(FORMATS[numbers], block) for name, (numbers, block) in _TABLE["blocks"].items()}
