"""The language that the package speaks to people: English, or Korean where the catalogue has the words.

`COURSE_LANG=ko`, or a notebook of the Korean edition, asks for Korean. The code is written in English throughout;
what leaves it for people (a command's lines, an error, a picture's words, a grader's message) goes through `told`.
`locale/ko.po` has an entry for each text of the package, made by `make korean`: `{0}` in it is a value that the
text is filled with, and `{0}[이/가]` the particle that agrees with how that value is read.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from html import escape, unescape
from pathlib import Path

CATALOGUE = Path(__file__).parent / "locale" / "ko.po"
_FIELD = re.compile(r"\{(\d+)\}(?:\[([가-힣]*)/([가-힣]*)\])?")
_ENDS = (
    re.compile(r"(?<=\n)"),
    re.compile(r"(?<=  )(?=\S)"),  # a table's columns
    re.compile(r"(?<=[.!?]) +"),
    re.compile(r"(?<=[:;]) +"),
    re.compile(r"(?<=,) +"),
)  # of a part
LONG = 50  # letters of a text that is not taken for another one, whatever its values are
_LONG_VALUE = r"(?:(?![.!?] [A-Z]).)*?"  # not beyond a sentence's end
_VALUE = r"(?:(?!  |[.!?:;] )[^\n])*?"  # within a sentence; below a line's end of several lines
_ENGLISH = re.compile(r"[^가-힣]*\b(?:[a-z]{2,}|\d+) (?!ms\b)[a-z]{2,}\b(?![./=])[^가-힣]*")  # words, and no value
_BARE = re.compile(r"\s*\(?(.*?)[:;,.)]*\s*", re.DOTALL)  # "(the result:"
_NAMED = re.compile(
    r"(\s*(?:[a-z]\w*:|ranks? [\d, ]*\d(?=[^\n]*\Z)) )(\S.*)", re.DOTALL
)  # "check_ring: ...", "rank 1 ..."
_SVG_TEXT = re.compile(r"(<(text|tspan|title|desc)\b[^>]*>)([^<]+)(</\2>)")
_CLOSED = re.compile(r"[013678lmnLMNR]$|ng$|p$|le$|out$|put$|et$")  # what is read with a final consonant


@cache
def language() -> str:
    """`ko` where Korean is asked for, else `en`: by COURSE_LANG, else by the notebook that the kernel runs."""
    if asked := os.environ.get("COURSE_LANG"):
        return "ko" if asked.lower().startswith("ko") else "en"
    notebook = Path(os.environ.get("JPY_SESSION_NAME", ""))  # Jupyter's servers name the notebook so
    if notebook.suffix != ".ipynb" or not notebook.is_file():
        return "en"
    try:
        return json.loads(notebook.read_text(encoding="utf-8"))["metadata"].get("course_language", "en")
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OSError,
    ):  # no notebook that can be read: the edition is not known
        return "en"


@contextmanager
def spoken(wanted: str) -> Iterator[None]:
    """Within the `with` the package speaks that language, whatever is asked for outside."""
    before = os.environ.get("COURSE_LANG")
    os.environ["COURSE_LANG"] = wanted
    language.cache_clear()
    try:
        yield
    finally:
        os.environ.pop("COURSE_LANG")
        os.environ |= {} if before is None else {"COURSE_LANG": before}
        language.cache_clear()


def told(text: str) -> str:
    """A text for people in their language; what the catalogue has not stays English, sentence by sentence."""
    return text if language() == "en" else _in_korean(text)


def told_svg(svg: str) -> str:
    """A picture with its words in the reader's language."""
    if language() == "en":
        return svg
    return _SVG_TEXT.sub(lambda m: f"{m[1]}{escape(told(unescape(m[3])), quote=False)}{m[4]}", svg)


def _in_korean(text: str) -> str:
    """The text whole if the catalogue has it so; else its lines, sentences, clauses: of each the longest run it has."""
    if not re.search("[A-Za-z]{2}", text):
        return text
    for part in (text.strip(), _BARE.fullmatch(text)[1]):
        if (whole := _looked_up(part)) is not None:
            return text.replace(part, whole)
    if (named := _NAMED.fullmatch(text)) is not None:
        return "".join(map(_in_korean, named.groups()))
    for end in _ENDS:
        if len(starts := [0, *(match.end() for match in end.finditer(text.rstrip()))]) > 1:
            return _by_parts(text, [*starts, len(text)])
    return text


def _by_parts(text: str, bounds: list[int]) -> str:
    told_parts, first = [], 0
    while first < len(bounds) - 1:
        for last in range(min(len(bounds) - 1, first + 8), first, -1):
            part = text[bounds[first] : bounds[last]]
            if last == first + 1:
                told_parts.append(_in_korean(part))
            elif last - first < len(bounds) - 1 and (whole := _looked_up(part.strip())) is not None:
                told_parts.append(part.replace(part.strip(), whole))
            else:
                continue
            first = last
            break
    return "".join(told_parts)


@cache
def _looked_up(text: str) -> str | None:
    exact, patterns = _catalogue()
    if text in exact:
        return exact[text]
    for longest, pattern, korean in patterns:
        if longest in text and (found := pattern.fullmatch(text)):
            values = {name[1:]: _in_korean(value) if value else "" for name, value in found.groupdict().items()}
            if not any(said == found[f"_{name}"] and _ENGLISH.fullmatch(said) for name, said in values.items()):
                return _filled(korean, values)
    return None


def _filled(korean: str, values: dict[str, str]) -> str:
    def one(field: re.Match) -> str:
        value = values[field[1]]
        return value + ("" if field[2] is None else field[_particle(value, field[3] == "로")])

    return _FIELD.sub(one, korean)


def _particle(value: str, after_l: bool) -> int:
    """2 for the particle after a final consonant, 3 for that after a vowel, and of 으로/로 after ㄹ."""
    value = value.rstrip(" )\"'`")
    if "가" <= value[-1:] <= "힣":
        final = (ord(value[-1]) - ord("가")) % 28
        return 3 if final == 0 or (after_l and final == 8) else 2
    is_l = re.search(r"[178lL]$|le$", value) is not None
    return 2 if _CLOSED.search(value) and not (after_l and is_l) else 3


@cache
def _catalogue() -> tuple[dict[str, str], list[tuple[str, re.Pattern, str]]]:
    """Texts without values, and patterns of those with values; the one with most fixed words stands first."""
    import polib  # what speaks English never needs it

    if CATALOGUE.exists():
        text = CATALOGUE.read_text(encoding="utf-8")
    else:  # the wheel for Colab has it packed
        import bz2

        text = bz2.decompress(CATALOGUE.with_suffix(".po.bz2").read_bytes()).decode()
    entries = [(entry.msgid, entry.msgstr) for entry in polib.pofile(text) if entry.translated()]
    for english, korean in tuple(entries):  # the lines of a text can be told one by one
        if (lines := english.split("\n"))[1:] and len(lines) == korean.count("\n") + 1:
            entries += zip(lines, korean.split("\n"), strict=True)
    entries += [(english[2:], korean.lstrip(".,; ")) for english, korean in entries if english.startswith("; ")]
    entries = [entry for entry in entries if re.search("[A-Za-z]{2}", _FIELD.sub("", entry[0]))]
    exact = {english: korean for english, korean in entries if not _FIELD.search(english)}
    patterns = []
    for english, korean in entries:
        if _FIELD.search(english):
            fixed, names = re.split(r"\{\d+\}", english), re.findall(r"\{(\d+)\}", english)
            value = _LONG_VALUE if sum(map(len, fixed)) > LONG else _VALUE
            values = [r"[\s\S]*?" if part.endswith("\n") else value for part in fixed[:-1]]
            groups = [f"(?P<_{name}>{one})" for name, one in zip(names, values, strict=True)]
            for number, then in enumerate(fixed[1:-1]):
                if not then:  # of two that stand side by side the first is there, and ends where a word ends
                    groups[number] = groups[number].replace("*?)", "+?)") + r"(?!(?<=\w)\w)"
            pattern = re.compile("".join(map("".join, zip(map(re.escape, fixed), [*groups, ""], strict=True))))
            patterns.append((sum(map(len, fixed)), max(fixed, key=len), pattern, korean))
    return exact, [entry[1:] for entry in sorted(patterns, key=lambda entry: -entry[0])]


class _Told:
    """A stream that people read: each line that is written to it is told in their language."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(told(text))
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def speak() -> None:
    """Let the command line speak: what is printed from here on is told in the language that is asked for."""
    if language() != "en":
        sys.stdout, sys.stderr = _Told(sys.stdout), _Told(sys.stderr)


def speak_errors() -> None:
    """Let errors of a notebook's cells end in the language that is asked for, below their English traceback."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or language() == "en":
        return

    def handler(shell, kind, error, traceback, tb_offset: int | None = None) -> None:
        if error.args and isinstance(error.args[0], str):
            error.args = (told(error.args[0]), *error.args[1:])
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)

    shell.set_custom_exc((Exception,), handler)
