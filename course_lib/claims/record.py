"""The ledger: every claim as one frozen record, read from ledger.toml."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from course_lib.validate import Amount, check_fields, checked, one_of

_LEDGER = Path(__file__).with_name("ledger.toml")
VERDICTS = ("right", "right-if", "wrong", "ambiguous")
TOPICS = {  # -> the chapter that answers it
    "network": "00", "memory": "01", "throughput": "02", "dp": "03", "zero": "04", "tp": "05", "sp": "06", "cp": "07",
    "pp": "08", "ep": "09", "5d": "10", "gpu": "13", "ops": "",
}  # fmt: skip
_Topic, _Verdict = Literal[tuple(TOPICS)], Literal[VERDICTS]


@dataclass(frozen=True)
class Claim:
    """One claim: what is said, the formula that recomputes it, and what to say; ledger.toml says what each field is."""

    id: str
    topic: _Topic
    claim: str
    verdict: _Verdict
    answer: str
    source: str
    compute: str = ""
    arguments: dict = field(default_factory=dict)
    otherwise: dict = field(default_factory=dict)
    stated: dict = field(default_factory=dict)
    tolerance: Amount = 0.05
    condition: str = ""
    say: str = ""
    where: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if bool(self.compute) != bool(self.stated):
            raise ValueError(f"{self.id} has a computation or stated values alone; give both, or neither")
        conditional = self.verdict in ("right-if", "ambiguous")
        if conditional != bool(self.condition):
            raise ValueError(f"{self.id} is {self.verdict}; a condition belongs to right-if and ambiguous claims alone")
        if conditional and self.compute and not self.otherwise:
            raise ValueError(f"{self.id} is {self.verdict}; give in otherwise what makes it wrong")
        if self.verdict == "wrong" and not self.say:
            raise ValueError(f"{self.id} is wrong; say what to say instead")

    @property
    def chapters(self) -> tuple[str, ...]:
        """Numbers of the chapters whose notebooks answer it."""
        stems = (place.removeprefix("notebooks/") for place in self.where if place.startswith("notebooks/"))
        return tuple(sorted({stem[:2] for stem in stems if stem[:2].isdigit()}))


@cache
def ledger() -> tuple[Claim, ...]:
    """Read all claims, in the order of their ids."""
    rows = tomllib.loads(_LEDGER.read_text(encoding="utf-8"))["claim"]
    return tuple(Claim(**row | {"where": tuple(row["where"])}) for row in rows)


@checked
def claims(
    topic: _Topic | None = None, verdict: _Verdict | None = None, word: str = "", chapter: str = ""
) -> tuple[Claim, ...]:
    """Return the claims of a topic, a verdict and a chapter ("04") that have a word in what is said or to be said."""
    if chapter:
        one_of("chapter", chapter, tuple(sorted({number for claim in ledger() for number in claim.chapters})))
    begins_a_word = re.compile(rf"(?<!\w){re.escape(word)}", re.IGNORECASE)  # "ring" finds "rings", but not "during"
    return tuple(
        claim
        for claim in ledger()
        if topic in (None, claim.topic)
        and verdict in (None, claim.verdict)
        and (not chapter or chapter in claim.chapters)
        and begins_a_word.search(" ".join((claim.id, claim.claim, claim.answer, claim.condition, claim.say)))
    )


@checked
def claims_named(ids: Sequence[str]) -> tuple[Claim, ...]:
    """Return the claims of those ids, in that order."""
    known = {claim.id: claim for claim in ledger()}
    for name in ids:
        one_of("id", name, tuple(known))
    return tuple(known[name] for name in ids)
