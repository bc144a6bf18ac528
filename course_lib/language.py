"""The language that the package speaks to people: English, or Korean where the catalogue has the words.

`COURSE_LANG=ko`, or a notebook of the Korean edition, asks for Korean. The code is written in English throughout;
what leaves it for people (a command's lines, an error, a picture's words, a grader's message) goes through `told`.
`locale/ko.po` has an entry for each text of the package, made by `make korean`: `{0}` in it is a value that the
text is filled with, and `{0}[이/가]` the particle that agrees with how that value is read.
"""

import bz2
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from html import escape, unescape
from pathlib import Path

CATALOGUE = Path(__file__).parent / "locale" / "ko.po"
_FIELD = re.compile(r"\{(\d+)\}(?:\[([가-힣]*)/([가-힣]*)\])?")
_ENDS = [re.compile(end) for end in (r"(?<=\n)", r"(?<=  )(?=\S)", r"(?<=[.!?]) +", r"(?<=[:;]) +", r"(?<=,) +")]
LONG = 50  # letters of a text that is not taken for another one, whatever its values are
_LONG_VALUE = r"(?:(?![.!?] [A-Z]).)*?"  # not beyond a sentence's end
_VALUE = r"(?:(?!  |[.!?:;] )[^\n])*?"  # within a sentence; below a line's end of several lines
_ENGLISH = re.compile(r"\d+[:;,]|[^가-힣]*\b(?:[a-z]{2,}|\d+) (?!ms\b)[a-z]{2,}\b(?![./=])[^가-힣]*")  # no value
_BARE = re.compile(r"\s*\(?(.*?)[:;,.)]*\s*", re.DOTALL)  # "(the result:"
SVG_TEXT = re.compile(r"(<(?:text|tspan|title|desc)\b[^>]*>)([^<]+)")
_CLOSED = re.compile(r"[013678lmnLMNR]$|ng$|(?<!\b[cdepst])p$|le$|out$|put$|et$")  # what is read with a final consonant


@cache
def language() -> str:
    """`ko` where Korean is asked for, else `en`: by COURSE_LANG, else by the notebook that the kernel runs."""
    if asked := os.environ.get("COURSE_LANG"):
        return "ko" if asked.lower().startswith("ko") else "en"
    notebook = Path(os.environ.get("JPY_SESSION_NAME", ""))  # Jupyter's servers name the notebook so
    with suppress(ValueError, LookupError, TypeError, AttributeError, OSError):  # no notebook that can be read
        return json.loads(notebook.read_text(encoding="utf-8"))["metadata"].get("course_language", "en")
    return "en"


@contextmanager
def spoken(wanted: str) -> Iterator[None]:
    """Within the `with` the package speaks that language, whatever is asked for outside."""
    before = os.environ.get("COURSE_LANG", "")  # an empty one asks for nothing
    os.environ["COURSE_LANG"] = wanted
    language.cache_clear()
    try:
        yield
    finally:
        os.environ["COURSE_LANG"] = before
        language.cache_clear()


def told(text: str) -> str:
    """A text for people in their language; what the catalogue has not stays English, sentence by sentence."""
    return text if language() == "en" else _in_korean(text)


def told_svg(svg: str) -> str:
    """A picture with its words in the reader's language."""
    in_korean = partial(SVG_TEXT.sub, lambda m: m[1] + escape(told(unescape(m[2])), quote=False))
    return svg if language() == "en" else in_korean(svg)


def _in_korean(text: str) -> str:
    """The text whole if the catalogue has it so; else its lines, sentences, clauses: of each the longest run it has."""
    for part in (text.strip(), _BARE.fullmatch(text)[1]):
        if (whole := _looked_up(part)) is not None:
            return text.replace(part, whole)
    bounds = next(filter(None, ([match.end() for match in end.finditer(text.rstrip())] for end in _ENDS)), [])
    bounds = [*bounds, len(text)] if bounds else []
    said, start = "", 0
    while bounds:
        runs = [end for end in bounds[7:0:-1] if end - start < len(text)]
        end = next((end for end in runs if _looked_up(text[start:end].strip())), bounds[0])
        said += _in_korean(text[start:end])
        start, bounds = end, bounds[bounds.index(end) + 1 :]
    return said or text


@cache
def _looked_up(text: str) -> str | None:
    exact, patterns = _catalogue()
    if text in exact:
        return exact[text]
    for longest, pattern, korean in patterns:
        if longest in text and (found := pattern.fullmatch(text)):
            values = found.groupdict()
            for name, value in values.items():  # of "batch is 0" the name stays
                values[name] = value if value.isidentifier() and text.startswith(f"{value} is ") else _in_korean(value)
            if not any(_ENGLISH.fullmatch(value) for value in values.values()):
                return _FIELD.sub(partial(_with_particle, values), korean)
    return None


def _with_particle(values: dict[str, str], field: re.Match) -> str:
    """A value; with {0}[이/가] 이 after a final consonant, 가 after a vowel, and of [으로/로] 로 after ㄹ too."""
    value = values[f"_{field[1]}"]
    read = value.rstrip(" )\"'`")
    final = (ord(read[-1]) - ord("가")) % 28 if "가" <= read[-1:] <= "힣" else _CLOSED.search(read)
    is_open = not final or (field[3] == "로" and (final == 8 or re.search(r"[178lL]$|le$", read)))
    return value + (field[3 if is_open else 2] or "")


@cache
def _catalogue() -> tuple[dict[str, str], list[tuple[str, re.Pattern, str]]]:
    """Texts without values, and patterns of those with values; the one with most fixed words stands first."""
    import polib  # what speaks English never needs it

    packed = CATALOGUE.with_suffix(".po.bz2")  # so it is in the wheel for Colab
    content = bz2.decompress(packed.read_bytes()) if packed.exists() else CATALOGUE.read_bytes()
    texts = {entry.msgid: entry.msgstr for entry in polib.pofile(content.decode()) if entry.translated()}
    with_values = sorted(filter(_FIELD.search, texts), key=lambda text: -len(_FIELD.sub("", text)))
    return texts, [_pattern(text, texts[text]) for text in with_values]


def _pattern(english: str, korean: str) -> tuple[str, re.Pattern, str]:
    """The longest fixed part, the pattern of a text with values, its Korean."""
    first, *rest = re.split(r"\{(\d+)\}", english)
    names, fixed = rest[::2], [first, *rest[1::2]]
    pattern, value = re.escape(first), _LONG_VALUE if sum(map(len, fixed)) > LONG else _VALUE
    for name, after in zip(names, fixed[1:], strict=True):
        if not after and name != names[-1]:  # beside another: it is there, and ends where a word does
            pattern += f"(?P<_{name}>{value[:-2]}+?)" + r"(?!(?<=\w)\w)"
        else:
            pattern += f"(?P<_{name}>{value})" + re.escape(after)
    return max(fixed, key=len), re.compile(pattern), korean


def speak() -> None:
    """Let the command line speak: what is printed from here on is told in the language that is asked for."""
    if language() != "en":
        for stream in (sys.stdout, sys.stderr):
            stream.write = lambda text, write=stream.write: write(told(text))


def speak_errors() -> None:
    """Let errors of a notebook's cells end in the language that is asked for, below their English traceback."""

    def handler(shell, kind, error, traceback, tb_offset: int | None = None) -> None:
        error.args = tuple(told(arg) if isinstance(arg, str) else arg for arg in error.args)
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)

    ipython = sys.modules.get("IPython")
    if ipython and (shell := ipython.get_ipython()) and language() != "en":
        shell.set_custom_exc((Exception,), handler)
