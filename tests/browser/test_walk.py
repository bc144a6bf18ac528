"""A walk through the stored notebooks as `make lab` shows them: narrow and wide pages, light and dark."""

import shutil

import pytest
from browser.test_jupyterlab import ERROR_OUTPUT, screenshot

from course_lib.authoring import ROOT

pytestmark = pytest.mark.browser

NOTEBOOKS = ("index", "00_ranks_and_collectives", "08_pipeline_parallel")
WIDTHS = (1280, 1000)
# What is wider than its place, so that it has a bar to scroll it sideways; a pixel is for rounding.
SCROLLED = """(boxes) => boxes.filter(box => box.scrollWidth > box.clientWidth + 1)
    .map(box => `${box.scrollWidth} > ${box.clientWidth}: ${box.innerText.slice(0, 80)}`)"""
# The four corners of a picture, each as [red, green, blue, alpha]; at the edges a vector picture has parts of pixels.
CORNERS = """async image => {
    await image.decode();
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    const [right, bottom] = [canvas.width - 4, canvas.height - 4];
    return [[3, 3], [right, 3], [3, bottom], [right, bottom]]
        .map(([x, y]) => Array.from(context.getImageData(x, y, 1, 1).data));
}"""
OPEN = ".jp-NotebookPanel:not(.lm-mod-hidden)"  # the tab in front; those opened before it stay
WHITE, DARK = [255, 255, 255], [24, 24, 24]  # panels.svg's two grounds; every other picture has the first


def stands_on(image, theme: str) -> bool:
    """Whether a picture has a ground of its own in all corners, so that its ink can be read on any page."""
    corners = image.evaluate(CORNERS)
    is_vector = image.get_attribute("src").startswith("data:image/svg")
    grounds = [WHITE, DARK] if is_vector and "Dark" in theme else [WHITE]
    return any(all(corner == [*ground, 255] for corner in corners) for ground in grounds)


def open_notebook(page, lab, name: str) -> None:
    """Open a stored notebook and wait for its cells and pictures."""
    page.goto(lab.page_of(f"notebooks/{name}.ipynb"))
    page.wait_for_selector(f'.lm-TabBar-tab.lm-mod-current:has-text("{name}")')
    page.wait_for_selector(f"{OPEN} .jp-CodeCell")
    page.wait_for_selector("text=/ipykernel. . Idle/")
    page.wait_for_timeout(1000)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_nothing_is_scrolled_sideways_pictures_have_a_ground_and_no_cell_shows_an_error(lab, page, theme):
    lab.set_theme(theme)
    for folder in ("notebooks", "exercises", "solutions"):
        shutil.copytree(ROOT / folder, lab.folder / folder)
    for name in NOTEBOOKS:
        page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        open_notebook(page, lab, name)
        assert page.evaluate("document.body.dataset.jpThemeName") == theme
        assert page.locator(ERROR_OUTPUT).count() == 0
        images = page.locator(f"{OPEN} .jp-OutputArea-output img, {OPEN} .jp-MarkdownOutput img")
        assert images.count() >= 1
        for image in images.all():
            assert stands_on(image, theme), (name, image.get_attribute("alt"))
        in_prose = page.locator(f"{OPEN} .jp-MarkdownOutput img")  # beside those of outputs JupyterLab writes no words
        assert all(image.get_attribute("alt") for image in in_prose.all())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(500)
            assert page.locator(f"{OPEN} .jp-CodeCell .cm-scroller").evaluate_all(SCROLLED) == [], (name, width)
            assert page.locator(f"{OPEN} .jp-OutputArea-output").evaluate_all(SCROLLED) == [], (name, width)
            screenshot(page, f"{name}_{width}_{theme.split()[1].lower()}")
