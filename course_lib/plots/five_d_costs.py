"""What a layout costs, in pictures: memory along the pipeline, bytes by axis, seconds by part."""

from collections.abc import Iterable, Mapping

from course_lib.hardware import GPU
from course_lib.panels.svg import bars
from course_lib.plots.concepts import show_charts
from course_lib.plots.memory import gpu_limits, kinds_of
from course_lib.units import show_bytes, show_seconds
from course_lib.validate import checked


@checked
def show_pipeline_memory(of_ranks: Iterable, gpus: Mapping[str, float] | Iterable[GPU], title: str) -> None:
    """Show the memory of each rank of a pipeline by kind, against GPUs (of `hardware.GPUS`, or `{name: bytes}`).

    of_ranks   budgets of `memory.budget.budgets`, or {kind: bytes} of each rank
    """
    rows = {f"pp {place}": kinds_of(rank) for place, rank in enumerate(of_ranks)}
    show_charts(title, bars(title, rows, marks=gpu_limits(gpus)))


@checked
def show_costs(sent_bytes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
    """Show bytes by axis, of `traffic.sent` or a meter, and seconds by part, of `StepTime.parts`."""
    total, whole_s = sum(sent_bytes.values()), sum(seconds.values())
    if not total or not whole_s:
        raise ValueError("nothing is sent, or no part of a step takes time; give what a layout costs")
    most = max(sent_bytes, key=sent_bytes.get)
    said = f"{show_bytes(total)} sent by one rank in a step, {sent_bytes[most] / total:.0%} over {most}"
    share = f"{show_seconds(whole_s)} modelled, {seconds.get('compute', 0.0) / whole_s:.0%} computing"
    show_charts("What a layout costs", bars(said, {"sent": sent_bytes}), bars(share, {"step": seconds}, "seconds"))
