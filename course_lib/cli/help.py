"""`--help` in the reader's language: what tyro lays out is told, and a letter of Hangul is two columns wide."""

import re
from functools import cache

from course_lib.language import told

_HANGUL = re.compile("[가-힣]")
_SECOND_COLUMN = "\0"  # behind a letter of Hangul while tyro counts letters
_WORDS = ("usage:", "options", "subcommands", "(required)", "(repeatable)")  # single ones, of tyro; others are names


@cache
def speak_help() -> list[str]:
    """Let tyro's helps and errors speak; return the list to which it adds each docstring and comment."""
    from tyro import _fmtlib, _strings  # private ones: English helps do not depend on them

    texts, joined, init, render = [], _strings.remove_single_line_breaks, _fmtlib._Text.__init__, _fmtlib._Text.render

    def joined_and_told(text: str) -> str:
        texts.append(joined(text))
        return _told(texts[-1])

    def init_told(element, *parts, delimiter: str | None = None) -> None:
        wide = (_HANGUL.sub(rf"\g<0>{_SECOND_COLUMN}", _told(p)) if isinstance(p, str) else p for p in parts)
        init(element, *wide, delimiter=delimiter)

    def rendered(element, width: int | None = None) -> list[str]:
        return [line.replace(_SECOND_COLUMN, "") for line in render(element, width)]

    _strings.remove_single_line_breaks = joined_and_told
    _fmtlib._Text.__init__, _fmtlib._Text.render = init_told, rendered
    return texts


def _told(text: str) -> str:
    """A text in the reader's language, once; names of commands stay, and the value of "(default: full)"."""
    if _HANGUL.search(text) or not (" " in text or text in _WORDS):
        return text
    head, colon, value = text.partition(": ") if text.startswith("(") else (text, "", "")
    return f"{told(head)}{colon}{value}"
