"""Seconds and memory of a step of models of 1 and 3 billion parameters on one GPU, beside what `estimate` says."""

import pytest
import torch

from course_lib.config import preset
from course_lib.estimate import estimate
from course_lib.estimate.memory import NO_TENSORS
from course_lib.labs.measure import measure_layout
from course_lib.labs.sheet import FRAMEWORK, RECIPE, Nodes
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.run import Run

pytestmark = pytest.mark.gpu

SEQ_LEN, ROUNDS = 4096, 5
RUNS = {
    "1B": ("llama-3.2-1b", Layout(micro_batch=2)),
    "1B, recomputed": ("llama-3.2-1b", Layout(micro_batch=4, recompute="full")),
    "3B": ("playbook-3b", Layout(micro_batch=1)),
    "3B, recomputed": ("playbook-3b", Layout(micro_batch=2, recompute="full")),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_model_s_step_and_peak_lie_where_the_estimate_says(name, record):
    model, layout = RUNS[name]
    run = Run(preset(model), layout, SEQ_LEN, RECIPE)
    told = estimate(run, Nodes(nodes=1, gpus_per_node=1).cluster(torch.cuda.get_device_name()), FRAMEWORK)
    if not told.fits:
        pytest.skip(f"estimated to need {told.memory_in_words}")
    seen = launch(measure_layout, 1, run.config, layout, SEQ_LEN, ROUNDS, backend="nccl", timeout=80, quiet=True)[0]
    no_tensors = told.bytes_by_kind.get(NO_TENSORS, 0.0)
    peaks = (seen["peak_bytes"] / 1e9, (told.memory_bytes - no_tensors) / 1e9)
    speeds = (seen["tokens_per_s_per_gpu"], told.tokens_per_s_per_gpu)
    measured, predicted = (
        {"peak, GB": peak, "tokens/s": speed, "step, s": step_s}
        for peak, speed, step_s in zip(peaks, speeds, (seen["step_s"], told.step_s), strict=True)
    )
    record(model=model, layout=str(layout), measured=measured, predicted=predicted)
    (few, most), (slow, fast) = told.memory_range, told.speed_range
    assert few <= seen["peak_bytes"] + no_tensors <= most
    assert slow <= seen["tokens_per_s_per_gpu"] <= fast
