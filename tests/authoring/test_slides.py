"""Decks of slides: of every lesson, with its pictures, what it tells to do, its prose as notes; from its own folder."""

import re
from html import unescape

import pytest
from test_conclusions import CONCLUSIONS

from course_lib.authoring import ROOT, read
from course_lib.authoring.links import chapters_of
from course_lib.authoring.slides import FROM_NPM, MOST_LETTERS, pictures, sentences, shortened, write_slides

LESSONS = chapters_of(ROOT / "notebooks")


@pytest.fixture(scope="module")
def npm(tmp_path_factory):
    """What npm would bring, empty."""
    folder = tmp_path_factory.mktemp("npm")
    for name in FROM_NPM:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


@pytest.fixture(scope="module")
def slides(npm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "slides"
    write_slides(folder, npm)
    return folder


def sections(slides, lesson):
    """The slides of a lesson, and their notes, as HTML."""
    found = re.findall(r"(?s)<section.*?</section>", (slides / f"{lesson.split('_')[0]}.html").read_text())
    return [section.split('<aside class="notes">') for section in found]


def plain(text):
    return " ".join(unescape(re.sub(r"<[^>]*>", "", text)).split())


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_deck_has_the_title_the_sections_the_pictures_and_the_exercises_of_its_lesson(slides, lesson):
    nb, shown = read(ROOT / "notebooks" / lesson), sections(slides, lesson)
    headings = [plain(re.search(r"<h[12]>(.*?)</h", slide, re.DOTALL)[1]) for slide, _ in shown]
    assert f"# {headings[0]}" == nb.cells[0].source.split("\n")[0]
    assert headings[-1].startswith("Exercises of chapter") and "minutes" in shown[-1][0]
    assert any(heading.endswith("Recap") for heading in headings) and len(shown) >= 12
    named = [name for slide, _ in shown for name in re.findall(r'<img src="([^"]*)"', slide)]
    assert named and all((slides / name).is_file() for name in named)
    assert len(named) <= sum(len(pictures(cell)) for cell in nb.cells)
    assert any(name.endswith(".svg") for name in named)
    words = " ".join(plain(notes) for _, notes in shown)
    assert len(words.split()) > 800, "the prose is in the notes"


@pytest.mark.parametrize(
    "conclusion", [(stem, says) for stem, _, says in CONCLUSIONS if says.startswith("*So ")], ids=str
)
def test_what_a_lesson_tells_to_do_is_on_a_slide(slides, conclusion):
    stem, says = conclusion
    said = plain(says.strip("*").replace("$tp$", "$tp$"))
    assert any(said in plain(slide) for slide, _ in sections(slides, f"{stem}.ipynb"))


def test_nothing_is_asked_of_another_server_and_every_file_is_in_the_folder(slides):
    for page in slides.glob("*.html"):
        text = page.read_text()
        assert re.findall(r'(?:src|href)="(?:https?:)?//', text) == []
        for name in re.findall(r'(?:src|href)="([^":#]+)"', text):
            assert (slides / name).exists(), (page.name, name)
    assert {link for link in re.findall(r'href="(\w+\.html)"', (slides / "index.html").read_text())} == {
        f"{lesson.split('_')[0]}.html" for lesson in LESSONS
    }


def test_a_slide_is_short_and_keeps_what_tells_to_do():
    says = sentences("First is seen. " + "Long. " * 100 + "It ends so: *So measure.* And goes on.")
    assert says[-2:] == ["It ends so: *So measure.*", "And goes on."]
    kept = shortened(says, MOST_LETTERS)
    assert kept[0] == "First is seen." and "It ends so: *So measure.*" in kept and "And goes on." not in kept
    assert shortened(["These are two:", "One."], 100) == ["One."]


def test_a_folder_that_holds_something_else_is_left_alone_and_a_missing_file_is_named(npm, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than slides; give an empty folder"):
        write_slides(tmp_path, npm)
    with pytest.raises(ValueError, match=r"lacks reveal.js/dist/reset.css, .*; give the folder of npm's packages"):
        write_slides(tmp_path / "slides", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
