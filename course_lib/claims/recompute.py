"""What a claim states beside what its computation gives, and whether the two agree as the verdict says."""

import ast
import re
from dataclasses import dataclass
from operator import ge, gt, le, lt

from course_lib.claims import formulas
from course_lib.claims.record import Claim
from course_lib.language import told

BOUND, RANGE = re.compile(r"(<=|>=|<|>) *(\S+)"), re.compile(r"(-?[\d.]+)\.\.(-?[\d.]+)")
_MEETS = {"<=": le, ">=": ge, "<": lt, ">": gt}
TOLD = re.compile(r"\{(?:other\[)?(\w+)")  # names of values in a text


class SharedFormat(list):
    """A list whose elements share one format: f"{SharedFormat([0.5, 2]):.1f}" is "0.5, 2.0"."""

    def __format__(self, spec: str) -> str:
        return ", ".join(format(each, spec) for each in self)


@dataclass(frozen=True)
class Recomputed:
    """What a claim's computation gives: values, those of `otherwise`, and whether each meets what is stated."""

    values: dict
    holds: bool
    other: dict
    other_holds: bool | None
    answer: str
    say: str


def meets(stated: object, value: object, tolerance: float) -> bool:
    """Whether a value is what is stated: equal within a share of it, or within a bound; of a list, each of them."""
    if isinstance(value, list):
        if isinstance(stated, list):
            pairs = zip(stated, value, strict=False)
            return len(stated) == len(value) and all(meets(one, each, tolerance) for one, each in pairs)
        return all(meets(stated, each, tolerance) for each in value)
    if isinstance(stated, str) and (bound := BOUND.fullmatch(stated)):
        return _MEETS[bound[1]](value, float(bound[2]))
    if isinstance(stated, str) and (limits := RANGE.fullmatch(stated)):
        return float(limits[1]) * (1 - tolerance) <= value <= float(limits[2]) * (1 + tolerance)
    if isinstance(stated, str | bool) or isinstance(value, str | bool):
        return stated == value
    return abs(value - stated) <= tolerance * abs(stated) + 1e-12


def computed(claim: Claim, arguments: dict) -> dict:
    """Run a claim's computation; return what it states or tells of the values, by name."""
    names = {name: value for module in (*formulas.MODULES, formulas) for name, value in vars(module).items()}
    names |= arguments
    (*_, last) = ast.parse(claim.compute).body
    if isinstance(last, ast.Expr):
        values = eval(claim.compute, names)
    else:
        exec(claim.compute, names)
        values = names
    told = [*claim.stated, *TOLD.findall(claim.answer + claim.say)]
    if missing := set(told) - set(values) - {"other"}:
        raise ValueError(f"{claim.id} tells {', '.join(sorted(missing))}, which its computation does not give")
    return {name: values[name] for name in dict.fromkeys(told)}


def recompute(claim: Claim) -> Recomputed | None:
    """Run the claim's computation; None if its verdict rests on the source alone."""
    if not claim.compute:
        return None
    values = computed(claim, claim.arguments)
    other = computed(claim, claim.arguments | claim.otherwise) if claim.otherwise else {}
    holds, other_holds = _all_met(claim, values), _all_met(claim, other) if other else None
    shown = _in_one_format(values) | {"other": _in_one_format(other)}
    answer, say = (re.sub(r"(\d)%", r"\1 %", text.format(**shown)) for text in (claim.answer, claim.say))
    return Recomputed(values, holds, other, other_holds, answer, say)


def _in_one_format(values: dict) -> dict:
    return {name: SharedFormat(value) if isinstance(value, list) else value for name, value in values.items()}


def _all_met(claim: Claim, values: dict) -> bool:
    return all(meets(stated, values[name], claim.tolerance) for name, stated in claim.stated.items())


def texts_of(claim: Claim) -> tuple[str, str]:
    """(what comes out, what to say), with the numbers as they are computed now."""
    found = recompute(claim)
    return tuple(map(told, (claim.answer, claim.say) if found is None else (found.answer, found.say)))
