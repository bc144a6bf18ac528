"""The map of the course names the chapters as the notebooks do, and no box or text lies on another."""

import re

import matplotlib.pyplot as plt
import pytest
from pictures import overlapping_texts

from course_lib.authoring import ROOT, read
from course_lib.authoring.links import chapters_of, second_reading
from course_lib.plots.course_map import COURSE, course_figure, course_map, write_pictures
from course_lib.plots.style import describe

NAMES = chapters_of(ROOT / "notebooks")  # where a chapter has several lessons, its second reading has its title
CHAPTERS = {ROOT / "notebooks" / (name if name[2] == "_" else second_reading(name, ROOT)) for name in NAMES}
TITLES = {int(path.stem[:2]): read(path).cells[0].source for path in CHAPTERS}


def test_the_map_has_every_chapter_by_the_name_that_it_has():
    assert [chapter.number for chapter in COURSE] == sorted(TITLES)
    for chapter in COURSE:
        heading = TITLES[chapter.number].split("\n")[0]
        assert heading.startswith(f"# {chapter.number} · {' '.join(chapter.name.split())}"), heading


@pytest.mark.parametrize("chapter", COURSE[1:], ids=lambda chapter: chapter.number)
def test_what_a_chapter_needs_is_what_its_title_says(chapter):
    said = TITLES[chapter.number].split("**You need")[1].split("\n\n")[0]
    said = re.sub(r"\([^)]*\)", "", said)
    spans = [range(int(first), int(last)) for first, last in re.findall(r"\[(\d+)\] to \[(\d+)\]", said)]
    assert set(chapter.needs) <= {int(number) for number in re.findall(r"\d+", said)}.union(*spans)


def test_no_arrow_says_what_two_others_say_and_all_go_forward():
    places, arrows = course_map()
    assert (0, 10) not in arrows and (9, 10) in arrows and (4, 5) in arrows
    assert all(places[start][0] < places[end][0] for start, end in arrows)
    assert len(set(places.values())) == len(COURSE)


def test_the_map_can_be_read_and_says_what_it_shows():
    figure = course_figure()
    assert overlapping_texts(figure) == []
    assert describe(figure) == "Picture: Each chapter builds on those that point to it."
    plt.close(figure)


@pytest.mark.slow
def test_the_readmes_pictures_are_written_as_they_were_before(tmp_path):
    paths = list(write_pictures(tmp_path))
    first = [path.read_bytes() for path in paths]
    again = [path.read_bytes() for path in write_pictures(tmp_path)]
    assert first == again and all(data.startswith((b"<?xml", b"<svg")) for data in first)
    for path in paths:
        assert (ROOT / "docs" / path.name).exists()
