"""Chapters in JupyterLab in a headless browser: cells run, controls are moved, pictures and text follow."""

import os
from pathlib import Path

import nbformat
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
ERROR_OUTPUT = '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]'
CUT_OFF = """labels => labels.filter(label => {
    const text = document.createRange();
    text.selectNodeContents(label);
    return text.getBoundingClientRect().width > label.getBoundingClientRect().width;
}).map(label => label.textContent)"""
FITS = """() => [...document.querySelectorAll('.widget-html-content')].every(text => {
    const words = document.createRange();
    words.selectNodeContents(text);
    const right = text.closest('.jp-OutputArea-output').getBoundingClientRect().right;
    return words.getBoundingClientRect().right <= right;
})"""
SHOWN = """pictures => pictures.map(svg => {
    const place = svg.getBoundingClientRect();
    return {words: svg.querySelector('desc').textContent, width: place.width, height: place.height,
            ground: getComputedStyle(svg.querySelector('.ground')).fill,
            ink: getComputedStyle(svg.querySelector('text.ink')).fill};
})"""


def put_notebook(lab, notebook: nbformat.NotebookNode, name: str = "chapter.ipynb") -> nbformat.NotebookNode:
    """Copy a notebook into the server's folder, unfolded and without its outputs: only what runs now can be seen."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.metadata.pop("jupyter", None)  # a folded cell shows no number
    nbformat.write(notebook, lab.folder / name)
    return notebook


def tiny_notebook(*sources: str) -> nbformat.NotebookNode:
    """A notebook of these code cells."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def start_all_cells(page, lab) -> None:
    """Open the notebook and run all cells from the menu."""
    page.goto(lab.page_of("chapter.ipynb"))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.wait_for_selector("text=/ipykernel. . Idle/")  # the status bar; the toolbar says idle before there is a kernel
    page.wait_for_timeout(3000)
    click_run_all(page)


def run_all_cells(page, lab, notebook, limit_s: float) -> None:
    """Open the notebook, run all cells from the menu, wait until each has its number; errors only where announced."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    start_all_cells(page, lab)
    done = """count => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
              .filter(prompt => /^\\[\\d+\\]:$/.test(prompt.textContent)).length >= count"""
    try:
        page.wait_for_function(done, arg=len(code), timeout=limit_s * 1000)
    except playwright.TimeoutError:
        screenshot(page, "unfinished")
        raise AssertionError(f"not all of {len(code)} cells ran in {limit_s:.0f} s: {prompts(page)}") from None
    announced = sum("raises-exception" in cell.metadata.get("tags", ()) for cell in code)
    errors = page.locator(ERROR_OUTPUT).all_inner_texts()
    assert len(errors) == announced, errors


def prompts(page) -> list[str]:
    """What stands before each cell: `[ ]:` not run, `[*]:` running or waiting, `[3]:` done."""
    return page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()


def click_run_all(page, tries: int = 3) -> None:
    """Run all cells from the menu. A kernel that has only begun to connect drops the request: then ask again."""
    for _ in range(tries):
        if page.locator(".jp-Dialog").count():  # on a busy machine it asks which kernel: the one that it proposes
            page.click(".jp-Dialog .jp-mod-accept")
        page.click('.lm-MenuBar-itemLabel:text-is("Run")')
        page.click('[data-command="runmenu:run-all"]')
        for _ in range(50):
            if any("*" in prompt or "1" in prompt for prompt in prompts(page)):
                return
            page.wait_for_timeout(200)
    screenshot(page, "not_started")
    raise AssertionError(f"no cell began to run in {tries} tries: {prompts(page)}")


def pictures(page) -> list[dict]:
    """Every picture of the panels: what it shows in words, its size in pixels, its colours."""
    return page.locator(".jp-OutputArea .widget-html-content svg.course-panel").evaluate_all(SHOWN)


def wait_for_other_pictures(page, before: list[dict], limit_s: float = 20) -> list[dict]:
    """The pictures as soon as they differ from `before`."""
    for _ in range(int(limit_s / 0.1)):
        if (now := pictures(page)) != before:
            return now
        page.wait_for_timeout(100)
    raise AssertionError(f"no picture changed within {limit_s:.0f} s")


def control_row(page, label: str):
    """The control with that label, scrolled into view."""
    row = page.locator(".widget-inline-hbox", has=page.locator(f'.widget-label:text-is("{label}")')).first
    row.scroll_into_view_if_needed()
    return row


def choose(page, label: str, option: str) -> None:
    """Choose from the list with that label."""
    control_row(page, label).locator("select").select_option(label=option)


def move_slider(page, label: str, key: str = "ArrowRight") -> str:
    """Move the slider with that label by one step, as with the keyboard; returns what it then reads."""
    row = control_row(page, label)
    before = row.locator(".widget-readout").inner_text()
    row.locator(".noUi-handle").press(key)
    page.wait_for_timeout(50)
    after = row.locator(".widget-readout").inner_text()
    assert after != before, f"the slider {label!r} did not move from {before}"
    return after


def screenshot(page, name: str) -> None:
    """Keep a picture of the page where COURSE_SCREENSHOTS points to, for people who want to look."""
    if folder := os.environ.get("COURSE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.mark.parametrize(("theme", "ground"), [("Light", "rgb(255, 255, 255)"), ("Dark", "rgb(24, 24, 24)")])
def test_each_panel_follows_its_own_slider_and_measures(lab, page, theme, ground):
    lab.set_theme(f"JupyterLab {theme}")
    sources = [
        "from course_lib.panels.one_gpu import MEMORY; from course_lib.panels.runs import ZERO; "
        "from course_lib.widgets import measure_memory, play",
        "play(MEMORY, measure=measure_memory)",
        "play(ZERO)",
    ]
    run_all_cells(page, lab, put_notebook(lab, tiny_notebook(*sources)), limit_s=90)
    page.locator("svg.course-panel").last.wait_for(state="attached")
    before = pictures(page)
    assert len(before) == 2 and all(one["width"] > 400 and one["height"] <= 650 for one in before)
    assert all(one["ground"] == ground != one["ink"] for one in before)
    screenshot(page, f"panels_{theme}")
    assert move_slider(page, "micro-batch") == "2"
    moved = wait_for_other_pictures(page, before)
    assert len(moved) == 2 and moved[0] != before[0] and moved[1] == before[1]  # replaced, not appended
    assert move_slider(page, "ZeRO stage", "ArrowLeft") == "2"
    staged = wait_for_other_pictures(page, moved)
    assert len(staged) == 2 and staged[0] == moved[0] and staged[1] != moved[1]
    page.locator('button:text-is("Measure")').first.click()
    page.wait_for_selector("text=/Measured in .* predicted/")
    measured = wait_for_other_pictures(page, staged)
    assert [measured[0], measured[-1]] == staged and len(measured) == 3
    screenshot(page, f"measured_{theme}")


WATCHED = """
import time
import torch.distributed as dist
from course_lib.launch import launch, progress, report
from course_lib.plots.live import LiveCurve

def descend():
    for step in progress(range(100), "steps"):
        time.sleep(0.08)
        if dist.get_rank() == 0:
            report("loss", 3.0 / (step + 1))

with LiveCurve("Loss of each step", steps=100) as curve:
    launch(descend, 2, on_report=curve.add)
"""


def test_a_launch_has_a_bar_that_goes_and_a_curve_that_moves_and_stays(lab, page):
    put_notebook(lab, tiny_notebook(WATCHED))
    start_all_cells(page, lab)
    bar, curve = page.locator(".jp-OutputArea div.widget-label"), page.locator(".jp-OutputArea-output img")
    bar.wait_for()
    texts, sources = set(), set()
    while "*" in "".join(prompts(page)):
        texts.update(bar.all_inner_texts())
        if curve.count():
            sources.add(curve.first.get_attribute("src"))
            assert curve.count() == 1  # redrawn in its place
        if len(sources) == 3:
            screenshot(page, "launch_at_work")
        page.wait_for_timeout(100)
    assert len(texts) > 10 and all("steps · " in text and " of 100 · loss " in text for text in texts), texts
    assert len(sources) > 1  # a busy machine redraws less often
    assert bar.count() == 0 and curve.count() == 1 and page.locator(ERROR_OUTPUT).count() == 0
    screenshot(page, "launch_done")


@pytest.mark.parametrize(("stem", "label"), [("01_single_gpu_memory", "micro-batch")])
def test_a_chapter_runs_in_the_browser_and_its_picture_follows_a_slider(lab, page, stem, label):
    notebook = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4)
    run_all_cells(page, lab, put_notebook(lab, notebook), limit_s=150)
    page.locator(f'.widget-label:text-is("{label}")').first.scroll_into_view_if_needed()
    before = pictures(page)
    screenshot(page, f"{stem}_before")
    move_slider(page, label)
    after = wait_for_other_pictures(page, before)
    screenshot(page, f"{stem}_after")
    assert len(after) == len(before) and sum(a != b for a, b in zip(after, before, strict=True)) == 1


def test_the_panel_of_layouts_follows_each_kind_of_control_and_measures(lab, page):
    notebook = nbformat.read(ROOT / "notebooks" / "10_five_d_in_depth.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id in ("setup", "widget")]
    run_all_cells(page, lab, put_notebook(lab, notebook), limit_s=60)
    page.wait_for_selector("text=/32 ranks on 4 nodes.* Predicted: fits/")
    before = wait_for_other_pictures(page, [])
    assert len(before) == 1 and before[0]["width"] > 600
    assert page.locator(".widget-label").evaluate_all(CUT_OFF) == []
    choose(page, "start from", "one laptop (toy), 8 ranks")
    page.wait_for_selector("text=/^dp=2,tp=2,pp=2,ep=2.* 8 ranks on 1 node.* press Measure/")
    toy = wait_for_other_pictures(page, before)
    screenshot(page, "layouts")
    choose(page, "inputs kept", "own tokens (SP), gathered again")
    page.wait_for_selector("text=/^dp=2.*regather=true/")
    gathered = wait_for_other_pictures(page, toy)
    assert len(gathered) == 1
    assert move_slider(page, "dp", "ArrowLeft") == "1"
    folded = wait_for_other_pictures(page, gathered)
    assert move_slider(page, "ep") == "4"
    page.wait_for_selector("text=/^Not possible.* ep .* nearest/")
    assert wait_for_other_pictures(page, folded) == []  # nothing is shown of what cannot be
    assert [move_slider(page, "ep", "ArrowLeft") for _ in range(2)] == ["2", "1"]
    page.wait_for_selector("text=/^tp=2,pp=2,zero/")
    fewer = pictures(page)
    assert len(fewer) == 1 and fewer not in (toy, gathered, folded)
    page.locator('button:text-is("Measure")').click()
    page.wait_for_selector("text=/Measured in .* on 4 ranks.*regather=true.* to the byte, on all 4/")
    measured = wait_for_other_pictures(page, fewer)
    assert measured[0] == fewer[0] and len(measured) == 2
    screenshot(page, "layouts_measured")
    page.set_viewport_size({"width": 800, "height": 1500})
    page.wait_for_function(FITS)  # a layout's name is long, and nothing is cut off at the right
