"""Quantitative claims that circulate on the training of language models, each recomputed, with a verdict.

for claim in claims(topic="zero", verdict="wrong"):
    print(claim.claim, *texts_of(claim))

ledger.toml             the claims: what is said, formula and arguments, verdict, what to say, source, where taught
record.py               a claim as a record; claims by topic, verdict, word and chapter
recompute.py            the formula called, and held against the verdict
memory_formulas.py      formulas on bytes that training holds
traffic_formulas.py     on messages between ranks
pipeline_formulas.py    on schedules
speed_formulas.py       on FLOPs, utilisation and days, with the measurements that claims are held against
page.py                 docs/CLAIMS.md, a chapter's statements for a quiz, lines for a terminal
"""

from course_lib.claims.page import Quiz, chapter_quiz, claims_page
from course_lib.claims.recompute import FORMULAS, Recomputed, meets, recompute, texts_of, verdict_problem
from course_lib.claims.record import TOPICS, VERDICTS, Claim, claims, claims_named, ledger
