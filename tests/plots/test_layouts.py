"""Pictures of experts, pipelines and layouts: what they draw adds up, and is what the lessons compute."""

import pytest

from course_lib.cluster.failures import Failures, best_interval_s, goodput
from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plan import Job, work_out
from course_lib.plots import choosing, experts
from course_lib.units import show_seconds

# ---------------------------------------------------------------- experts


def test_the_share_of_peak_is_that_of_memory_until_the_ridge():
    h100 = gpu("h100")
    few, many = (experts.grouped_share_of_peak(rows, 7168, 2048, h100) for rows in (1, 4096))
    assert few == pytest.approx(h100.memory_bytes_per_s / h100.bf16_flops, rel=0.01) and many == 1


# ---------------------------------------------------------------- choosing


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
