"""What a claim states beside what its formula gives, and whether the two agree as the verdict says."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.claims import memory_formulas, pipeline_formulas, speed_formulas, traffic_formulas
from course_lib.claims.record import Claim
from course_lib.validate import Amount, checked

MODULES = (memory_formulas, traffic_formulas, pipeline_formulas, speed_formulas)
FORMULAS: dict[str, Callable] = {
    name: function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}
BOUND = re.compile(r"(<=|>=|<|>) *(\S+)")
RANGE = re.compile(r"(-?[\d.]+)\.\.(-?[\d.]+)")
MEETS = {
    "<=": lambda value, bound: value <= bound,
    ">=": lambda value, bound: value >= bound,
    "<": lambda value, bound: value < bound,
    ">": lambda value, bound: value > bound,
}


class Row(list):
    """A list whose elements share one format: f"{Row([0.5, 2]):.1f}" is "0.5, 2.0"."""

    def __format__(self, spec: str) -> str:
        return ", ".join(format(each, spec) for each in self)


@dataclass(frozen=True)
class Recomputed:
    """What a claim's formula gives: the values, those of `otherwise`, and whether each meets what is stated."""

    values: dict
    holds: bool
    other: dict
    other_holds: bool | None
    answer: str
    say: str


@checked
def meets(stated: object, value: object, tolerance: Amount) -> bool:
    """Whether a value is what is stated: equal within a share of it, or within a bound; of a list, each of them."""
    if isinstance(value, list):
        if isinstance(stated, list):
            pairs = zip(stated, value, strict=False)
            return len(stated) == len(value) and all(meets(one, each, tolerance) for one, each in pairs)
        return all(meets(stated, each, tolerance) for each in value)
    if isinstance(stated, str):
        if bound := BOUND.fullmatch(stated):
            return MEETS[bound[1]](value, float(bound[2]))
        if limits := RANGE.fullmatch(stated):
            return float(limits[1]) * (1 - tolerance) <= value <= float(limits[2]) * (1 + tolerance)
    if isinstance(stated, str | bool) or isinstance(value, str | bool):
        return stated == value
    return abs(value - stated) <= tolerance * abs(stated) + 1e-12


@checked
def recompute(claim: Claim) -> Recomputed | None:
    """Call the claim's formula; None if its verdict rests on the source alone."""
    if not claim.formula:
        return None
    if claim.formula not in FORMULAS:
        raise ValueError(f"{claim.id} names the formula {claim.formula!r}; choose from {', '.join(FORMULAS)}")
    formula = FORMULAS[claim.formula]
    values = formula(**claim.arguments)
    other = formula(**claim.arguments | claim.otherwise) if claim.otherwise else {}
    holds, other_holds = _all_met(claim, values), _all_met(claim, other) if other else None
    shown = _in_rows(values) | {"other": _in_rows(other)}
    answer, say = (re.sub(r"(\d)%", r"\1 %", text.format(**shown)) for text in (claim.answer, claim.say))
    return Recomputed(values, holds, other, other_holds, answer, say)


def _in_rows(values: dict) -> dict:
    return {name: Row(value) if isinstance(value, list) else value for name, value in values.items()}


def _all_met(claim: Claim, values: dict) -> bool:
    missing = set(claim.stated) - set(values)
    if missing:
        raise ValueError(f"{claim.id} states {', '.join(sorted(missing))}; {claim.formula} gives {', '.join(values)}")
    return all(meets(stated, values[name], claim.tolerance) for name, stated in claim.stated.items())


@checked
def verdict_problem(claim: Claim) -> str:
    """Say in a sentence why a claim's verdict is not what its formula gives; nothing if it is."""
    found = recompute(claim)
    if found is None:
        return ""
    should_hold, should_hold_otherwise = {
        "right": (True, True), "right-if": (True, False), "ambiguous": (True, False), "wrong": (False, True),
    }[claim.verdict]  # fmt: skip
    if found.holds is not should_hold:
        said = "is" if found.holds else "is not"
        return f"{claim.id} is {claim.verdict}, but {claim.stated} {said} met by {found.values}"
    if found.other_holds is not None and found.other_holds is not should_hold_otherwise:
        said = "is" if found.other_holds else "is not"
        return f"{claim.id} is {claim.verdict}, but with {claim.otherwise} {claim.stated} {said} met by {found.other}"
    return ""


@checked
def texts_of(claim: Claim) -> tuple[str, str]:
    """(what comes out, what to say), with the numbers as they are computed now."""
    found = recompute(claim)
    return (claim.answer, claim.say) if found is None else (found.answer, found.say)
