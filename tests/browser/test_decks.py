"""Decks of slides in Chromium at 1280 x 720: nothing runs over, keys turn them, nothing is asked elsewhere."""

import pytest

from course_lib.authoring import ROOT

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
pytestmark = pytest.mark.browser

TARGET = "slides"
# Of each slide: its heading, by how far its words run over, the height of its picture.
MEASURED = """() => [...document.querySelectorAll('.slides section')].map((slide) => {
  slide.style.display = 'block';
  slide.hidden = false;
  const page = slide.firstElementChild, picture = slide.querySelector('img');
  const over = Math.max(page.scrollHeight - 720, page.scrollWidth - 1280);
  const found = [page.firstElementChild.textContent, over, picture ? picture.clientHeight : 720];
  slide.style.display = '';
  return found;
})"""


def test_no_slide_runs_over_its_formulas_are_set_keys_turn_it_and_nothing_is_asked_elsewhere(page, address, asked):
    page.set_viewport_size({"width": 1280, "height": 720})
    for path in sorted((ROOT / "build" / TARGET).glob("*.html")):
        page.goto(f"{address}{path.name}")
        page.wait_for_selector("body[data-ready]", state="attached")
        for heading, over, height in page.evaluate(MEASURED):
            assert over <= 0 and height > 250, (path.name, heading, over, height)
        assert page.eval_on_selector_all(".katex-error", "all => all.length") == 0, path.name
    page.goto(f"{address}05.html")
    page.wait_for_selector("body[data-ready]", state="attached")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/05.html#/1")
    assert page.inner_text("section.present h2") == "After this lesson you can"
    assert {url[: len(address)] for url in asked if url.startswith("http")} == {address}
