"""The planner's explorer: what it computes, what cannot be, and the file that it writes."""

import pytest

from course_lib.layout import Layout
from course_lib.plan import search
from course_lib.plan.measured import measured_job
from course_lib.widgets.plan import PlanChoice, explore_plan, plan_explorer, plan_png, plan_text, save_layout


def test_the_view_is_what_the_search_says():
    found, said = explore_plan(PlanChoice()), search(measured_job("8B", 64))
    assert [one.layout for one in found.ranked] == [one.layout for one in said.ranked]
    assert str(said.best.layout) in plan_text(found) and "modelled" in plan_text(found)
    assert plan_png(found).startswith(b"\x89PNG")


def test_a_model_that_does_not_fit_is_an_error_in_words():
    with pytest.raises(ValueError, match="no layout of 80B on 8 GPUs fits"):
        explore_plan(PlanChoice(model="80B", num_gpus=8))


def test_a_slower_network_gives_no_faster_layout():
    fast, slow = (explore_plan(PlanChoice(between=name)).ranked for name in ("efa", "ethernet-100g"))
    assert slow[0].step_s > fast[0].step_s


def test_export_writes_the_best_layout(tmp_path, monkeypatch):
    found = explore_plan(PlanChoice())
    assert str(found.best.layout) in save_layout(found, str(tmp_path / "one.txt"))
    monkeypatch.chdir(tmp_path)
    panel = plan_explorer()
    button = next(child for child in panel.children if getattr(child, "description", "") == "Export")
    button.click()
    written = (tmp_path / "layout.txt").read_text().strip()
    assert written == str(found.best.layout) and isinstance(found.best.layout, Layout)
