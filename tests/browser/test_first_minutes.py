"""What a newcomer does first: `make lab` as the README has it, one cell alone, and ten notebooks opened and stored."""

import os
import re
import signal
import subprocess
import time

import pytest
from browser.test_jupyterlab import ERROR_OUTPUT, put_notebook, screenshot

from course_lib import authoring
from course_lib.authoring import ROOT

pytestmark = pytest.mark.browser

OPEN = ".jp-NotebookPanel:not(.lm-mod-hidden)"
# A notebook, the cell that its text sends the reader to, and what appears below it.
ALONE = [
    ("index", "speak", ".jp-OutputArea-output pre"),
    ("index", "demo", ".jp-OutputArea-output pre"),
    ("01_single_gpu_memory_in_depth", "widget", ".jupyter-widgets"),
    ("08_pipeline_parallel", "puzzle", ".jupyter-widgets"),
]


@pytest.mark.parametrize(("name", "cell", "shown"), ALONE, ids=[f"{name}_{cell}" for name, cell, _ in ALONE])
def test_the_cell_that_the_text_names_runs_alone_in_a_fresh_kernel(lab, page, name, cell, shown):
    notebook = put_notebook(lab, authoring.read(ROOT / "notebooks" / f"{name}.ipynb"))
    place = [one["id"] for one in notebook.cells].index(cell)
    page.goto(lab.page_of("chapter.ipynb"))
    page.wait_for_selector(f"{OPEN} .jp-CodeCell")
    page.wait_for_selector("text=/ipykernel. . Idle/")
    page.wait_for_timeout(3000)
    here = page.locator(f"{OPEN} .jp-Notebook .jp-Cell").nth(place)
    here.scroll_into_view_if_needed()
    here.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    here.locator(f"{shown}, {ERROR_OUTPUT}").first.wait_for(timeout=150_000)
    page.wait_for_function(
        "prompt => /\\[\\d+\\]/.test(prompt.textContent)",
        arg=here.locator(".jp-InputPrompt").element_handle(),
        timeout=150_000,
    )
    assert here.locator(ERROR_OUTPUT).all_inner_texts() == []
    assert here.locator(".jp-InputPrompt").inner_text() == "[1]:", "another cell ran before"
    screenshot(page, f"alone_{name}_{cell}")


@pytest.fixture
def made_lab():
    """The address that `make lab` prints, in this clone."""
    command = ["make", "lab", "LAB_FLAGS=--no-browser"]
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("make lab uses .venv, which is not here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "MAKE"))}
    server = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said, deadline = "", time.monotonic() + 180
    try:
        while not (found := re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/(\S+)\?token=([0-9a-f]+)", said)):
            line = server.stdout.readline()
            assert line and time.monotonic() < deadline, f"make lab printed no address:\n{said}"
            said += line
        yield found.groups()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.communicate(timeout=60)


def git_status() -> str:
    return subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_ten_notebooks_opened_and_stored_in_make_lab_leave_the_clone_as_it_was(made_lab, page):
    address, first, token = made_lab
    before = git_status()
    assert first == "notebooks/index.ipynb"
    opened = authoring.notebook_paths("notebooks")[:10]
    for path in opened:
        page.goto(f"{address}/lab/tree/notebooks/{path.name}?token={token}")
        page.wait_for_selector(f'.lm-TabBar-tab.lm-mod-current:has-text("{path.stem}")')
        page.wait_for_selector(f"{OPEN} .jp-CodeCell")
        page.wait_for_selector("text=/ipykernel. . Idle/")
        page.click('.lm-MenuBar-itemLabel:text-is("File")')
        page.click('.lm-Menu-item[data-command="docmanager:save"]')
        page.wait_for_timeout(1500)
    mine = ROOT / "runs" / "course" / "notebooks"
    stored = [path.name for path in opened if (mine / path.name).read_bytes() != path.read_bytes()]
    assert len(stored) >= 5, "JupyterLab stored next to nothing: this test sees nothing"
    assert git_status() == before
