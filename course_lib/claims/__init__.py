"""Quantitative claims that circulate on the training of language models, each recomputed, with a verdict.

for claim in claims(topic="zero", verdict="wrong"):
    print(claim.claim, *texts_of(claim))

ledger.toml    the claims: what is said, its computation, verdict, what to say, source, where taught
record.py      a claim as a record; claims by topic, verdict, word and chapter
recompute.py   the computation run, and held against the verdict
formulas.py    what computations are written in
page.py        docs/CLAIMS.md, a chapter's statements for a quiz, lines for a terminal
"""

from course_lib.claims.page import Quiz, chapter_quiz, claims_page
from course_lib.claims.recompute import Recomputed, meets, recompute, texts_of
from course_lib.claims.record import TOPICS, VERDICTS, Claim, claims, claims_named, ledger
