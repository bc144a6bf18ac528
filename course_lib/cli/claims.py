"""`course claims`: claims that circulate, each recomputed, with a verdict and what to say."""

import json as json_module

from course_lib.claims import claims
from course_lib.claims.page import as_lines, as_record


def list_claims(
    topic: str | None = None, verdict: str | None = None, word: str = "", chapter: str = "", json: bool = False
) -> int:
    """List quantitative claims on training, each recomputed: what is said, what comes out, what to say.

    Args:
        topic: network, memory, throughput, dp, zero, tp, sp, cp, pp, ep, 5d or ops
        verdict: right, right-if, wrong or ambiguous
        word: only claims with this text in what is said or to be said
        chapter: only claims that a chapter answers, such as 04
        json: as JSON, with all computed values
    """
    found = claims(topic, verdict, word, chapter)
    if json:
        print(json_module.dumps([as_record(claim) for claim in found], indent=1, ensure_ascii=False))
        return 0
    for claim in found:
        print(as_lines(claim), end="\n\n")
    print(f"{len(found)} of {len(claims())} claims")
    return 0
