"""A deck of slides for each lesson, from its stored outputs: headings, pictures, what they show; the prose as notes.

    python -m course_lib.authoring.slides build/slides --npm build/npm/node_modules

A slide is a section of the lesson with a picture and what the text below says was seen (*What you saw*, *So ...*). A
section without either is its first sentence. The words of the lesson stand in the speaker's notes (key s). Pages need
nothing but their folder; any web server can serve it.
"""

import base64
import html
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.authoring.form import ROOT, read
from course_lib.authoring.links import NAVIGATION, chapters_of, exercises_of
from course_lib.web.page import make_anew, require, run

FROM_NPM = (
    "reveal.js/dist/reset.css", "reveal.js/dist/reveal.css",
    "reveal.js/dist/reveal.js", "reveal.js/dist/plugin/notes.js",
    "katex/dist/katex.min.css", "katex/dist/katex.min.js", "katex/dist/contrib/auto-render.min.js", "katex/dist/fonts",
)  # fmt: skip
LEFT_OUT = ("Play with it", "Break it", "True or false?", "Names", "Your sheet")  # done by hand, not shown
MOST_LETTERS, MOST_ALONE = 330, 600  # of sentences beside a picture; without one
SEEN, TELLS = "**What you saw.**", "*So "
_FILES = Path(__file__).parents[1] / "templates"
_SENTENCE = re.compile(r"(?:(?<=[.?])|(?<=[.?]\*))\s+(?=[A-Z*$`(])")


@dataclass
class Slide:
    """A heading, at most one picture (its file's name and words for it), sentences in Markdown, and the prose."""

    heading: str
    picture: tuple[str, str] | None = None
    says: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph."""
    return [one for one in _SENTENCE.split(" ".join(text.split())) if one]


def concluding(text: str) -> list[str]:
    """The sentences of a text that say what was seen (*What you saw*), and those that tell what to do (*So ...*)."""
    found = []
    for paragraph in text.split("\n\n"):
        seen = paragraph.startswith(SEEN)
        found += [one for one in sentences(paragraph.removeprefix(SEEN)) if seen or TELLS in one]
    return found


def shortened(says: list[str], most_letters: int) -> list[str]:
    """The first sentences within a number of letters; what tells to do always, what ends in a colon never."""
    told = [one for one in says if TELLS in one]
    letters, found = sum(map(len, told)), []
    for one in says:
        letters += len(one) if one not in told else 0
        if one in told or (letters <= most_letters and not one.endswith(":")):
            found.append(one)
    return found


def pictures(cell) -> list[tuple[str, bytes, str]]:
    """The stored pictures of a cell: suffix, content, words for who does not see them."""
    found = []
    for data in (output.get("data", {}) for output in cell.get("outputs", ())):
        if svg := data.get("image/svg+xml"):
            title = re.search(r"<title>(.*?)</title>", svg, re.DOTALL)
            found.append(("svg", svg.encode(), html.unescape(title[1]) if title else ""))
        elif png := data.get("image/png"):
            found.append(("png", base64.b64decode(png), ""))
    return found


def deck(nb, number: str, folder: Path) -> list[Slide]:
    """The slides of a lesson; its pictures are written into the folder."""
    slides, shown = [], 0
    for cell in nb.cells:
        if cell.cell_type == "markdown" and cell["id"] not in NAVIGATION:
            for part in filter(None, re.split(r"(?m)^(?=##? )", cell.source)):
                if heading := re.match(r"##? (.*)\n?", part):
                    slides.append(Slide(heading[1]))
                    part = part[heading.end() :]
                slides[-1].notes.append(part.strip())
                slides[-1].says += concluding(part)
        for suffix, content, words in pictures(cell):
            shown += 1
            name = f"{number}_{shown:02d}.{suffix}"
            (folder / name).write_bytes(content)
            if slides[-1].picture:
                slides.append(Slide(slides[-1].heading))
            slides[-1].picture = (name, words or slides[-1].heading)
    kept = [one for one in slides[1:] if not one.heading.endswith(LEFT_OUT)]
    for one in kept:
        paragraphs = [text for note in one.notes for text in note.split("\n\n") if text]
        if one.heading.endswith("Recap"):
            one.says = paragraphs[:1]
            continue
        one.says = shortened(one.says, MOST_LETTERS if one.picture else MOST_ALONE)
        if not one.says and paragraphs:
            one.says = sentences(paragraphs[0])[:2] if paragraphs[0][0] not in "-|$" else []
    about, _, goals = "\n\n".join(slides[0].notes).partition("After this lesson you can")
    goals = [line for line in goals.split("\n\n") if line.startswith("- ")][:1]
    return [Slide(slides[0].heading, None, [about.strip()]), Slide("After this lesson you can", None, goals), *kept]


def exercises_slide(name: str) -> Slide:
    """The exercises of a lesson's chapter, with minutes and difficulty."""
    cells = read(ROOT / "exercises" / exercises_of(name, ROOT)).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    found = re.findall(r"^## Exercise (\d+ · .*)\n+\*(.*?)\.?\*", text, re.MULTILINE)
    return Slide(f"Exercises of chapter {name[:2]}", None, ["\n".join(f"- {title} ({asks})" for title, asks in found)])


def as_html(slide: Slide, level: int = 2) -> str:
    """One slide of reveal.js."""
    from nbconvert.filters.markdown_mistune import markdown2html_mistune as to_html

    unlinked = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text) for text in (*slide.says, "\n\n".join(slide.notes))]
    *says, notes = unlinked
    joined = " ".join(says) if slide.picture else "\n\n".join(says)
    picture = f'<img src="{slide.picture[0]}" alt="{html.escape(slide.picture[1])}">' if slide.picture else ""
    kind = ' class="long"' if len(joined) > 450 else ""
    heading = re.sub(r"</?p>", "", to_html(slide.heading)).strip()
    return (
        f'<section{kind}><div class="page"><h{level}>{heading}</h{level}>\n{picture}{to_html(joined)}</div>'
        f'<aside class="notes">{to_html(notes)}</aside></section>'
    )


def write_slides(folder: Path, npm: Path) -> list[Path]:
    """Write a deck a lesson, and a list, into a folder made anew; raises ValueError as `require` and `make_anew`."""
    require(npm, FROM_NPM, "packages reveal.js and katex")
    make_anew(folder, "slides.js", "slides")
    for name in FROM_NPM:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (npm / name).is_dir() else shutil.copy)(npm / name, folder / name)
    for name in ("slides.css", "slides.js"):
        shutil.copy(_FILES / name, folder / name)
    page, decks, links = (_FILES / "slides.html").read_text(encoding="utf-8"), [], []
    for name in chapters_of(ROOT / "notebooks"):
        number = Path(name).stem.split("_")[0]
        slides = [*deck(read(ROOT / "notebooks" / name), number, folder), exercises_slide(name)]
        body = "\n".join([as_html(slides[0], 1), *map(as_html, slides[1:])])
        decks.append(folder / f"{number}.html")
        decks[-1].write_text(page.format(title=html.escape(slides[0].heading), slides=body), encoding="utf-8")
        links.append(f'<p class="long"><a href="{number}.html">{html.escape(slides[0].heading)}</a></p>')
    body = f'<section><div class="page list"><h1>Slides</h1>{"".join(links)}</div></section>'
    (folder / "index.html").write_text(page.format(title="Slides", slides=body), encoding="utf-8")
    return decks


if __name__ == "__main__":
    run(write_slides, "--npm", __doc__)
