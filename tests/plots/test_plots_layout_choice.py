"""Pictures of choosing: every branch of the flow chart has its box, and no text lies on another."""

import pytest
from pictures import look

from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.minimal.choose import ladder
from course_lib.plan import Job, work_out
from course_lib.plots import layout_choice as plots

JOB = Job(preset("llama-3.1-8b"), Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400")), 16, 4096, 2**20)
OPTIONS = {
    "1 dp": work_out(JOB, Layout.parse("dp=16,zero_stage=1,micro_batches=16")),
    "2 tp": work_out(JOB, Layout.parse("dp=2,tp=8,sequence_parallel=true,zero_stage=1,micro_batches=128")),
    "3 pp": work_out(JOB, Layout.parse("dp=4,pp=4,zero_stage=1,micro_batches=64")),
}
PICTURES = {
    "losses": lambda: plots.show_losses({"one": [3.0, 2.0, 1.5], "other": [3.0, 2.5, 2.0]}, "Two rules"),
    "ladder": lambda: plots.show_ladder("node"),
    "options": lambda: plots.show_options(OPTIONS, "Memory and MFU"),
    "waiting": lambda: plots.show_waiting(OPTIONS, "A step"),
}


def box_of(step, recomputed):
    if recomputed:
        return "recompute"
    if "nodes" in step:
        return "nodes"
    return "dp" if "on 1 GPU" in step else "node"


def test_every_step_of_the_ladder_has_a_box_and_every_box_a_step():
    boxes = {box_of(step, choices["recompute"] == "full") for step, choices in ladder(JOB)}
    assert boxes == {rung.name for rung in plots.RUNGS}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_no_text_lies_on_another(name, monkeypatch):
    look(PICTURES[name], monkeypatch, max_bytes=60_000)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_a_bar_is_as_long_as_its_step(name, monkeypatch):
    """Launches and updates are work; nothing that a step is spent on is left out."""
    measured = Cluster(gpu("h100"), link("nvlink4"), link("efa-measured"))
    job = Job(preset(name), measured, 256, 4096, 2**20)
    layouts = ("dp=64,tp=4,sequence_parallel=true,zero_stage=1,micro_batches=4", "dp=64,pp=4,micro_batches=4")
    options = {text: work_out(job, Layout.parse(text)) for text in layouts}
    drawn = []
    monkeypatch.setattr(plots, "draw_boxes", lambda axes, boxes, **style: drawn.extend(boxes))
    plots.show_waiting(options, "A step")
    for row, option in enumerate(options.values()):
        seconds = sum(width for _, bottom, width, _ in drawn if bottom == row - 0.33)
        assert seconds == pytest.approx(option.step_s, rel=1e-9)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="marked is 'roof'; choose from dp, node, nodes, recompute"):
        plots.show_ladder("roof")
    with pytest.raises(ValueError, match="losses is empty"):
        plots.show_losses({}, "nothing")
    for show in (plots.show_options, plots.show_waiting):
        with pytest.raises(ValueError, match="options is empty"):
            show({}, "nothing")
