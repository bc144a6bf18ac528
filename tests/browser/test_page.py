"""The page that computes in the browser: numbers as Python's, nothing asked elsewhere, narrow, dark, by keyboard."""

import json
from pathlib import Path

import pytest
from browser.conftest import serious

from course_lib.language import spoken, told
from course_lib.panels import asked as panels

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
pytestmark = pytest.mark.browser

TARGET = "page"
READY_MS = 180_000  # on a busy machine; quiet it is three seconds


def opened(page, address, place=""):
    """The page with its Python started."""
    page.goto(f"{address}#{place}")
    page.wait_for_selector("body[data-ready]", state="attached", timeout=READY_MS)
    return page


def shown(page, name):
    page.wait_for_selector(f"body[data-shown^='{name}:']", state="attached", timeout=READY_MS)
    return page.inner_text(".said")


def another(panel) -> dict[str, str]:
    """One change of a slider or a list, in words."""
    for name, control in panel.controls.items():
        if control.kind in ("list", "slider") and name != "model":
            return {name: next(str(value) for _, value in control.options if value != control.start)}
    return {}


def test_every_panel_says_and_draws_what_python_does_and_nothing_else_is_asked_for(page, address, asked):
    opened(page, address)
    page.wait_for_selector("body[data-warm]", state="attached", timeout=READY_MS)
    took_ms = {}
    for name, listed in panels.PANELS.items():
        words = another(listed.panel)
        query = "&".join(f"{key}={value}" for key, value in words.items())
        page.evaluate("() => delete document.body.dataset.shown")
        page.evaluate("place => { location.hash = place; }", f"{name}?{query}")
        said = shown(page, name)
        expected = listed.panel.answer(**panels.values_of(listed.panel, words))
        assert said == expected.said, name
        drawn = page.eval_on_selector_all(".picture svg text", "texts => texts.map(one => one.textContent)")
        assert all(text in expected.svg.replace("&#x27;", "'").replace("&amp;", "&") for text in drawn), name
        took_ms[name] = float(page.evaluate("document.body.dataset.tookMs"))
    own = [url for url in asked if url.startswith(("http:", "https:"))]
    assert {url[: len(address)] for url in own} == {address} and any("arithmetic.zip" in url for url in own)
    print(took_ms)


def test_the_korean_page_says_what_python_tells_and_leads_to_the_same_state_in_english(page, address):
    opened(page, f"{address}ko/index.html", "zero?dp=64&zero_stage=2")
    panel = panels.PANELS["zero"].panel
    answer = panel.answer(**panels.values_of(panel, {"dp": "64", "zero_stage": "2"}))
    with spoken("ko"):
        expected = told(answer.said)
    assert shown(page, "zero") == expected != answer.said
    page.click("#other")
    page.wait_for_url(f"{address}index.html#zero?dp=64&zero_stage=2")
    page.wait_for_selector("body[data-ready]", state="attached", timeout=READY_MS)
    assert shown(page, "zero") == answer.said


def test_a_slider_moves_by_key_and_a_link_restores_what_it_shows(page, address):
    opened(page, address, "zero?dp=64&zero_stage=2")
    before = shown(page, "zero")
    page.focus("#control-dp")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("before => document.querySelector('.said').textContent !== before", arg=before)
    assert "dp=128" in page.url and "zero_stage=2" in page.url
    after, link = page.inner_text(".said"), page.url
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("body[data-ready]", state="attached", timeout=READY_MS)
    assert shown(page, "zero") == after and page.inner_text("#control-dp + output") == "128"


def test_there_is_a_picture_before_python_has_come_and_without_it(page, address):
    page.route("**/arithmetic.zip.packed", lambda route: route.abort())
    page.goto(f"{address}#zero")
    page.wait_for_function("() => document.querySelector('#state').textContent.includes('did not start')")
    assert page.inner_text(".said") == panels.described("zero")["said"] and page.query_selector(".picture svg")


def test_a_model_is_dropped_on_the_planner_and_its_files_are_taken_away(page, address, tmp_path):
    opened(page, address, "planner?gpus=8&batch=512K&engine=torchtitan")
    config = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 128_256, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "max_position_embeddings": 8192, "rope_theta": 500_000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    page.set_input_files("input[type=file]", tmp_path / "config.json")
    page.wait_for_selector("text=its shape is used in place of the model above")
    page.click("button:text-is('Plan')")
    page.wait_for_selector("body[data-planned]", state="attached", timeout=READY_MS)
    assert "0.62 billion parameters" in page.inner_text("pre")
    with page.expect_download() as download:
        page.click("a:text-is('torchtitan.toml')")
    assert "data_parallel_shard_degree" in Path(download.value.path()).read_text()
    page.select_option("#control-optimizer", index=1)
    page.wait_for_selector("text=press Plan for config.json; the picture is of the model above")
    page.select_option("#control-model", "llama-3.1-70b")
    page.wait_for_selector("text=or drop a config.json of transformers here")
    assert page.input_value("input[type=file]") == ""


def test_a_block_is_placed_on_the_grid_of_the_puzzle_and_the_address_keeps_it(page, address):
    opened(page, address, "puzzle")
    before = shown(page, "puzzle")
    page.click("button[aria-label='rank 0, column 1: free']")
    page.wait_for_function("before => document.querySelector('.said').textContent !== before", arg=before)
    assert page.input_value("textarea").startswith("F0 F1") and "chart=F0+F1" in page.url


def test_a_schedule_is_played_and_claims_are_searched(page, address):
    opened(page, address, "pipeline")
    shown(page, "pipeline")
    hidden = (
        "() => [...document.querySelectorAll('.picture rect')].filter(one => one.style.visibility === 'hidden').length"
    )
    assert page.evaluate(hidden) == 0
    page.fill("#moment", "0")
    assert page.evaluate(hidden) > 60
    page.goto(f"{address}#claims?word=bubble")
    page.wait_for_selector(".claim")
    found = page.eval_on_selector_all(".claim h3", "all => all.map(one => one.textContent)")
    assert 0 < len(found) < 60
    page.click(".claim button")
    page.wait_for_function("() => document.querySelector('.claim span').textContent.length > 10", timeout=READY_MS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_narrow_and_wide_light_and_dark_nothing_runs_over_and_a_checker_finds_nothing_serious(
    page, address, scheme, width
):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    for place in ("planner", "layout", "puzzle", "claims?word=bubble"):
        page.goto("about:blank")
        page.goto(f"{address}#{place}")
        page.wait_for_selector("main h2")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place
        assert serious(page) == {}, place
