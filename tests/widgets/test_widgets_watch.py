"""The dashboard of a run: drawn from its logs, once or again and again, during the run and after it."""

import asyncio

import pytest
import run_logs

from course_lib.widgets import watch


def children(panel) -> tuple:
    controls, image, text = panel.children
    follow, refresh = controls.children
    return follow, refresh, text, image


@pytest.mark.slow
def test_refresh_draws_what_has_come_since(tmp_path):
    run_logs.write(tmp_path, 0, run_logs.steps(0, 3))
    _, refresh, text, image = children(watch(tmp_path))
    before = bytes(image.value)
    assert before.startswith(b"\x89PNG") and "4.8000" in text.value
    run_logs.write(tmp_path, 0, [run_logs.line(0, 3, loss=1.5)])
    refresh.click()
    assert "1.5000" in text.value and bytes(image.value) != before


@pytest.mark.slow
def test_it_is_renewed_until_the_run_has_ended_or_stop(tmp_path):
    async def run_beside() -> list[str]:
        run_logs.write(tmp_path, 0, run_logs.steps(0, 1))
        follow, _, text, _ = children(watch(tmp_path, every_s=0.01))
        follow.value = True
        seen = [follow.description]
        for step in (1, 2):
            run_logs.write(tmp_path, 0, [run_logs.line(0, step, loss=step + 0.25)])
            while f"{step}.2500" not in text.value:
                await asyncio.sleep(0.01)
        follow.value = False
        seen.append(follow.description)
        follow.value = True
        run_logs.write(tmp_path, 0, [{"event": "end"}])
        while follow.value:
            await asyncio.sleep(0.01)
        return [*seen, follow.description]

    assert asyncio.run(asyncio.wait_for(run_beside(), 60)) == ["Stop", "Watch", "Watch"]


def test_before_the_first_step_and_without_logs_it_says_why_and_goes_on(tmp_path):
    _, refresh, text, image = children(watch(tmp_path))
    assert "Not possible" in text.value and "log/rank0.jsonl" in text.value and image.layout.display == "none"
    run_logs.write(tmp_path, 0, [{"event": "start"}])
    refresh.click()
    assert "no step yet" in text.value
    run_logs.write(tmp_path, 0, run_logs.steps(0, 1))
    refresh.click()
    assert image.layout.display is None and "Not possible" not in text.value
