"""The one page: its numbers are the package's, it holds them all on the page, and the stored one is today's."""

from matplotlib.backends.backend_agg import FigureCanvasAgg

from course_lib.authoring import ROOT
from course_lib.config import preset
from course_lib.flops import flops_per_token
from course_lib.plots.cheat_sheet import draw, sheet, write


def found(title: str) -> dict[str, str]:
    return next(dict(lines) for name, lines in sheet().items() if name.startswith(title))


def test_formulas_on_the_sheet_are_what_the_package_computes():
    config = preset("llama-3.1-8b")
    attention = 12 * config.num_layers * 8192 * config.d_model
    by_hand = 6 * (8_030_261_248 - config.vocab_size * config.d_model) + attention
    assert abs(flops_per_token(config, 8192) / by_hand - 1) < 1e-4
    assert found("Work of a step")["llama-3.1-8b"].startswith(f"{by_hand / 1e9:.1f} GFLOP")
    assert found("States")["ZeRO-3: + parameters"] == f"{16 / 64:.3g} bytes on 64 ranks; llama-3.1-8b: 2.01 GB"
    assert "21.9%" in found("Bubbles of a pipeline")["1F1B, all-forward-all-backward"]
    assert found("Collectives")["all-reduce"].endswith("1.75 on 8")


def test_every_line_lies_on_the_page_and_over_no_other():
    figure = draw()
    renderer, page = FigureCanvasAgg(figure).get_renderer(), figure.bbox
    boxes = [text.get_window_extent(renderer) for text in figure.texts]
    assert all(box.x0 >= 0 and box.x1 <= page.x1 and box.y0 >= 0 and box.y1 <= page.y1 for box in boxes)
    assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at])


def test_the_stored_sheet_is_todays(tmp_path):
    write(tmp_path)
    stored = (ROOT / "docs" / "cheat_sheet.svg").read_text(encoding="utf-8")
    lines = {line for line in stored.splitlines() if "<text" in line}
    assert lines == {line for line in (tmp_path / "cheat_sheet.svg").read_text().splitlines() if "<text" in line}
