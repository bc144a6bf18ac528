"""The site: every link leads somewhere, nothing is asked elsewhere; narrow, wide, light, dark, searched, walked."""

import runpy
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browser.conftest import serious

from course_lib.authoring import ROOT, notebook_paths
from course_lib.authoring.links import chapters_of

pytestmark = pytest.mark.browser

TARGET, BUILT = "site", ROOT / "build" / "site"
LOOKED_AT = (
    "notebooks/index", "notebooks/04_zero", "exercises/08_pipeline_parallel", "docs/CLAIMS", "docs/site/api",
    "ko/notebooks/04_zero", "ko/docs/CLAIMS",
)  # fmt: skip


class Addresses(HTMLParser):
    """The addresses that a page links to or loads, and the names by which a place in it is found."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.switches: set[str] = set()  # to the other language
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            self.switches |= {given["href"]} if "hreflang" in given else set()
        if "src" in given or tag == "link":
            self.loads.append(given.get("src") or given.get("href"))
        self.names |= {given[key] for key in ("id", "name") if key in given}


@pytest.fixture(scope="module")
def site(address):
    """The built site: its pages by path, read."""
    paths = [path for path in BUILT.rglob("*.html") if "page" not in path.relative_to(BUILT).parts]
    return {path.relative_to(BUILT).as_posix(): Addresses(path.read_text(encoding="utf-8")) for path in paths}


def test_pages_are_those_of_the_folder_and_an_address_brings_its_buttons(tmp_path, monkeypatch):
    pytest.importorskip("sphinx", reason="needs Sphinx: make site installs it")
    conf = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "site" / "conf.py")))
    for name in ("notebooks/04_zero", "notebooks/04_zero_in_depth", "notebooks/index", "exercises/04_zero"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.ipynb").touch()
    told = {heading: names for heading, names in conf.pages(tmp_path).items() if names}
    assert told == {
        "Lessons": ["notebooks/04_zero.ipynb"],
        "In depth": ["notebooks/04_zero_in_depth.ipynb"],
        "Exercises": ["exercises/04_zero.ipynb"],
    }
    (tmp_path / "ko" / "notebooks").mkdir(parents=True)
    assert conf.switch(tmp_path, "notebooks/04_zero") == ""
    for name in ("notebooks/04_zero", "notebooks/index"):
        (tmp_path / f"ko/{name}.ipynb").touch()
    assert conf.other(tmp_path, "notebooks/04_zero") == "../ko/notebooks/04_zero.html"
    assert conf.other(tmp_path, "exercises/04_zero") == "../ko/notebooks/index.html"
    assert "http" not in conf.opened_by("notebooks/04_zero.ipynb") or conf.ADDRESS
    monkeypatch.setitem(conf.opened_by.__globals__, "ADDRESS", "https://github.com/owner/name")
    line = conf.opened_by("notebooks/04_zero.ipynb")
    assert "(https://colab.research.google.com/github/owner/name/blob/main/notebooks/04_zero.ipynb)" in line
    assert "[Kaggle](https://www.kaggle.com/" in line and "download" in line


def test_every_lesson_and_exercise_has_a_page_and_no_solution_has(site):
    for path in notebook_paths("notebooks", "exercises"):
        assert path.relative_to(ROOT).with_suffix(".html").as_posix() in site
        assert f"ko/{path.relative_to(ROOT).with_suffix('.html').as_posix()}" in site
    assert not any("solution" in path.as_posix() for path in BUILT.rglob("*") if "page" not in path.parts)


def test_every_link_inside_leads_to_a_file_and_its_place_in_it_and_nothing_is_loaded_from_elsewhere(site):
    lost = []
    for page, found in site.items():
        for link in found.links + found.loads:
            url = urlsplit(urljoin(f"http://site/{page}", link))
            if url.scheme in ("data", "mailto") or (url.netloc != "site" and link in found.links):
                continue
            path = unquote(url.path).lstrip("/")
            place = unquote(url.fragment)
            is_there = url.netloc == "site" and (BUILT / path).is_file()
            if not is_there or (place and path in site and place not in site[path].names):
                lost.append((page, link))
    assert lost == [] and len(site) > 120


def test_answers_are_folded_and_predictions_do_not_show_what_was_measured(page, address):
    page.goto(f"{address}notebooks/04_zero.html")
    answer = page.locator("details:has-text('the comparison fails') p").first
    output = page.locator("details.hide .cell_output, details.hide pre").first
    assert not answer.is_visible() and not output.is_visible()
    page.locator("summary:has-text('delete the loop with')").click()
    assert answer.is_visible()


def test_previous_and_next_walk_through_the_lessons_in_order(page, address):
    page.goto(address)
    page.wait_for_url("**/notebooks/index.html")
    walked = []
    for _ in range(4):
        page.click("a.next-page")
        page.wait_for_load_state()
        walked.append(page.url.split("/")[-1].removesuffix(".html"))
    assert walked == [name.removesuffix(".ipynb") for name in chapters_of(ROOT / "notebooks")][:4]
    page.click("a.prev-page")
    page.wait_for_load_state()
    assert page.url.endswith(f"{walked[-2]}.html")


def test_every_page_leads_to_the_other_language_which_leads_back_to_the_same_heading(page, address, site):
    for name, found in site.items():
        if "genindex" not in name and name not in ("index.html", "ko/index.html"):
            (to,) = found.switches
            there = urlsplit(urljoin(f"http://site/{name}", to)).path.lstrip("/")
            assert there.startswith("ko/") != name.startswith("ko/"), name
            same = name.removeprefix("ko/") if name.startswith("ko/") else f"ko/{name}"
            assert there == (same if same in site else there) and there in site
    page.goto(f"{address}ko/notebooks/04_zero.html")
    assert page.inner_text(".sidebar-tree .caption >> nth=0") == "레슨" and "다음" in page.inner_text(".next-page")
    is_there = "() => Math.abs(document.querySelectorAll('article h2')[2].getBoundingClientRect().top) < 200"
    page.evaluate("document.querySelectorAll('article h2')[2].scrollIntoView()")
    page.wait_for_function(is_there)  # it scrolls smoothly
    page.click(".sidebar-drawer a[hreflang=en]")
    page.wait_for_url("**/notebooks/04_zero.html#at-*")
    assert "/ko/" not in page.url
    page.wait_for_function(is_there)


def test_search_in_korean_finds_a_word_whatever_its_particle(page, address):
    found = []
    for word in ("배치", "배치를"):
        page.goto(f"{address}ko/search.html?q={word}")
        page.wait_for_function("() => document.querySelector('#search-results h2')?.innerText == '검색 결과'")  # all
        found.append(page.locator("#search-results li").count())
    assert found[0] > 10 and abs(found[0] - found[1]) <= 2


def test_search_finds_reduce_scatter_and_asks_nobody(page, address, asked):
    page.goto(f"{address}search.html?q=reduce-scatter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function("() => /found|matching/.test(document.querySelector('#search-results').textContent)")
    hits = page.eval_on_selector_all("#search-results li a", "all => all.map(one => one.href)")
    assert any("00_ranks_and_collectives" in hit for hit in hits) and len(hits) > 5
    assert all(url.startswith(address) for url in asked)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_narrow_and_wide_light_and_dark(page, address, asked, scheme, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    for name in LOOKED_AT:
        page.goto(f"{address}{name}.html")
        page.wait_for_function("() => !window.MathJax || !document.querySelector('.math:not(:has(mjx-container))')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert serious(page) == {}, name
    assert all(url.startswith((address, "data:")) for url in asked)
