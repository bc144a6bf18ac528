"""The ledger for people: lines for a terminal, statements of a quiz, and docs/CLAIMS.md."""

from collections import Counter
from dataclasses import dataclass
from textwrap import fill

from course_lib.claims.recompute import recompute, texts_of
from course_lib.claims.record import TOPICS, VERDICTS, Claim, claims, claims_named
from course_lib.language import told
from course_lib.validate import Checked, checked

_LABELS = {"right": "Right", "right-if": "Right if", "wrong": "Wrong", "ambiguous": "It depends: right if"}
NAMES = {
    "network": "Links and collectives", "memory": "Memory", "throughput": "Speed and utilisation",
    "dp": "Data parallelism", "zero": "ZeRO", "tp": "Tensor parallelism", "sp": "Sequence parallelism",
    "cp": "Context parallelism", "pp": "Pipeline parallelism", "ep": "Expert parallelism",
    "5d": "All axes together", "gpu": "Inside a GPU, and eight bits", "ops": "Operation",
}  # fmt: skip
HEAD = """# What to say instead

Claims that circulate on the training of language models, each recomputed by a function of this package:
{counts}. `course claims` lists them all, and `course claims --json` with the numbers.
Written by `make fmt` from course_lib/claims/ledger.toml; the numbers are computed when it is written.
"""


def _verdict_of(claim: Claim) -> str:
    """Return the verdict with its condition, as a sentence: "Right if the score matrices are saved for backward."""
    return f"{told(_LABELS[claim.verdict])} {told(claim.condition) if claim.condition else ''}".strip() + "."


def as_lines(claim: Claim) -> str:
    """Return what a terminal shows of a claim, in lines of at most 96 columns."""
    answer, say = texts_of(claim)
    chapter = f", chapter {', '.join(claim.chapters)}" if claim.chapters else ""
    parts = [
        told(claim.claim),
        _verdict_of(claim),
        f"{told('Comes out:')} {told(answer)}.",
        say,
        f"{told('Source:')} {told(claim.source)}.",
    ]
    said = [fill(part, 96, initial_indent="    ", subsequent_indent="      ") for part in parts if part]
    return "\n".join([f"{claim.id}  {claim.topic}{chapter}", *said])


def as_record(claim: Claim) -> dict:
    """Return a claim with all that is computed of it, as `course claims --json` prints it."""
    found, (answer, say) = recompute(claim), texts_of(claim)
    computed = {"values": found.values, "other_values": found.other} if found else {"values": {}, "other_values": {}}
    return vars(claim) | computed | {"answer": answer, "say": say, "chapters": claim.chapters}


@dataclass(frozen=True)
class Quiz(Checked):
    """Statements to judge. A notebook shows them with folded answers, a terminal without answers."""

    claims: tuple[Claim, ...]

    def __repr__(self) -> str:
        return "\n".join(fill(f"{i}. {told(claim.claim)}", 96) for i, claim in enumerate(self.claims, 1))

    def _repr_markdown_(self) -> str:
        folded = []
        for number, claim in enumerate(self.claims, 1):
            answer, say = texts_of(claim)
            text = " ".join(filter(None, (_verdict_of(claim), f"{answer[:1].upper()}{answer[1:]}.", say)))
            folded.append(f"<details><summary>{number}. {told(claim.claim)}</summary>\n\n{text}\n</details>")
        return "\n\n".join(folded)


@checked
def chapter_quiz(chapter: str, ids: tuple[str, ...] = ()) -> Quiz:
    """Return statements of a chapter ("04") to judge, all or those of ids; raises ValueError for what it has not."""
    found = claims(chapter=chapter)
    foreign = [claim.id for claim in claims_named(ids) if claim not in found]
    if foreign:
        raise ValueError(f"chapter {chapter} does not answer {', '.join(foreign)}; choose from {_ids(found)}")
    return Quiz(claims_named(ids) or found)


def _ids(found: tuple[Claim, ...]) -> str:
    return ", ".join(claim.id for claim in found)


def claims_page() -> str:
    """Return docs/CLAIMS.md: of each topic the wrong claims with what to say, then those with a condition."""
    count = Counter(claim.verdict for claim in claims())
    words = {"right": "right", "right-if": "right under a condition", "wrong": "wrong", "ambiguous": "ambiguous"}
    counts = ", ".join(f"{count[verdict]} {told(words[verdict])}" for verdict in VERDICTS)
    parts = ["\n".join(map(told, HEAD.format(counts=counts).split("\n")))]
    for topic in TOPICS:
        chapter = told(f"(in chapter {TOPICS[topic]})") if TOPICS[topic] else ""
        parts.append(f"## {told(NAMES[topic])} {chapter}".rstrip() + "\n")
        wrong, conditional = claims(topic, "wrong"), claims(topic, "right-if") + claims(topic, "ambiguous")
        rows = [(claim, *texts_of(claim)) for claim in wrong]
        parts += _table(("wrong", "what comes out", "what to say"), rows)
        rows = [(claim, _verdict_of(claim), "{}. {}".format(*texts_of(claim))) for claim in conditional]
        parts += _table(("said", "verdict", "what comes out"), rows)
        if right := claims(topic, "right"):
            parts += [f"{told('Right')}: {_ids(right)}.", ""]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[Claim, str, str]]) -> list[str]:
    """Lines of a table in Markdown: of each claim its words and two more cells."""
    lines = [list(map(told, head)), *([f"{claim.id}: {told(claim.claim)}", *cells] for claim, *cells in rows)]
    lines = [f"| {' | '.join(cell.strip().replace('|', '/') for cell in line)} |" for line in lines]
    return [lines[0], "|---|---|---|", *lines[1:], ""] if rows else []
