"""Pictures of experts, pipelines and layouts: what they draw adds up, and is what the lessons compute."""

from dataclasses import replace

import pytest

from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plan import Job, work_out
from course_lib.plots import choosing, experts
from course_lib.plots import pipeline_concepts as pipelines
from course_lib.schedules import make, simulate
from course_lib.timing.failures import Failures, best_interval_s, goodput
from course_lib.units import show_seconds

# ---------------------------------------------------------------- experts


def test_the_share_of_peak_is_that_of_memory_until_the_ridge():
    h100 = gpu("h100")
    few, many = (experts.grouped_share_of_peak(rows, 7168, 2048, h100) for rows in (1, 4096))
    assert few == pytest.approx(h100.memory_bytes_per_s / h100.bf16_flops, rel=0.01) and many == 1


# ---------------------------------------------------------------- pipelines


def test_each_cut_has_one_message_a_micro_batch_each_way_and_none_comes_before_it_is_sent():
    arrows = pipelines.message_arrows(simulate(make("1f1b", 3, 4)))
    assert sum(arrow.op == "F" and arrow.dst == arrow.src + 1 for arrow in arrows) == 2 * 4
    assert sum(arrow.op == "B" and arrow.dst == arrow.src - 1 for arrow in arrows) == 2 * 4
    assert len(arrows) == 16 and all(arrow.sent_s <= arrow.used_s for arrow in arrows)


def test_what_ranks_did_is_drawn_in_its_order_whatever_its_seconds():
    rows = simulate(make("naive", 2, 1)).rows
    slow = [[replace(span, start_s=span.start_s**3, stop_s=span.stop_s**3) for span in row] for row in rows]
    placed = sorted((span.start_s, span.stop_s) for row in pipelines.in_order(slow) for span in row)
    assert placed == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_stages_cover_the_model_once_with_both_ends(shown):
    pipelines.show_stages_of_model([3, 4, 4, 3], [0, 1, 1, 0])
    texts = [text.get_text() for text in shown[0].axes[0].texts]
    assert sorted(int(text) for text in texts if text.isdigit()) == list(range(14))
    assert (texts.count("embed"), texts.count("head")) == (1, 1)
    assert shown[0].get_suptitle() == "14 layers in 4 stages on 2 ranks: rank 0 has both ends of the model"


def test_points_are_bubbles_and_peaks_in_both_countings(shown):
    names = ("afab", "1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe_v")
    pipelines.show_tradeoff([simulate(make(name, 4, 8)) for name in names])
    points = [(line.get_xdata()[0], round(line.get_ydata()[0], 4)) for line in shown[0].axes[0].lines]
    assert {(4, 0.375), (7, 0.125), (7, 0.0), (4, 0.0625), (4, 0.0), (4.5, 0.0625)} <= set(points)
    assert len(points) == len(names) + 2  # ZB-H2 and ZBV have an open one
    left = [text.get_text() for text in shown[0].axes[0].texts if text.get_ha() == "right"]
    assert left == ["ZBV"]


# ---------------------------------------------------------------- choosing


def test_a_layout_has_a_short_name():
    assert choosing.cut_name(Layout.parse("dp=32,tp=2,zero_stage=1,micro_batch=2")) == "dp32 tp2 z1 mb2"


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_a_bar_is_as_long_as_its_step(name, capsys):
    """Launches and updates are work; nothing that a step is spent on is left out."""
    measured = Cluster(gpu("h100"), link("nvlink4"), link("efa-measured"))
    job = Job(preset(name), measured, 256, 4096, 2**20)
    layouts = ("dp=64,tp=4,sequence_parallel=true,zero_stage=1,micro_batches=4", "dp=64,pp=4,micro_batches=4")
    options = {text: work_out(job, Layout.parse(text)) for text in layouts}
    choosing.show_waiting(options, "A step")
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{text} {show_seconds(option.step_s)}" in said for text, option in options.items())


def test_areas_are_the_shares_and_the_line_stands_at_the_best_interval(shown):
    failures = Failures(mtbf_s=10_000.0, save_s=60.0, restart_s=300.0)
    intervals_s, rows = choosing.share_rows(failures)
    assert rows["training"] == [goodput(failures, interval_s) for interval_s in intervals_s]
    assert all(sum(column) == pytest.approx(1) for column in zip(*rows.values(), strict=True))
    highest_s = intervals_s[rows["training"].index(max(rows["training"]))]
    assert highest_s == pytest.approx(best_interval_s(failures), rel=0.1)
    choosing.show_checkpoint_interval(failures, "t")
    assert shown[0].axes[0].lines[0].get_xdata()[0] == best_interval_s(failures)
