"""What chapters time on GPUs, as far as no GPU is needed: the lines they say without, the model, the overlap."""

import pytest

from course_lib.compare import gpu_timings
from course_lib.compare.gpu_timings import CHAPTERS, COLLECTIVES, modelled, on_gpus, overlap
from course_lib.hardware import link
from course_lib.span import Span
from course_lib.timing import collective_s

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_without_gpus_a_chapter_says_within_the_columns_what_it_would_time(chapter, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    said = on_gpus(chapter)
    assert said.startswith("Here no GPUs; with ") and max(map(len, said.split("\n"))) <= 88


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_stands_beside_the_model_of_its_gpu(name):
    said = modelled(name, 8, H100)
    seconds = collective_s(name.replace("-", "_"), gpu_timings.PAYLOAD_BYTES, 8, link("nvlink4"))
    assert said.startswith("modelled over NVLink 4") and f"{seconds * 1e3:.2f} ms" in said
    assert "no numbers for GeForce 256" in modelled(name, 8, "GeForce 256")


def test_bus_bandwidth_is_of_what_a_ring_would_send():
    assert gpu_timings.in_words("all-reduce", 4, 0.001) == "1.00 ms, bus bandwidth 403 GB/s"  # 1.5 x 268.4 MB
    assert gpu_timings.in_words("all-gather", 4, 0.001) == "1.00 ms, bus bandwidth 201 GB/s"


def test_communication_is_hidden_where_the_gpu_computes_as_well():
    def spans(lane, *times):
        return [Span(0, lane, "kernel", start, stop) for start, stop in times]

    compute = spans("compute", (0.0, 0.004), (0.003, 0.005))
    assert overlap([*compute, *spans("communication", (0.001, 0.002), (0.0015, 0.003), (0.004, 0.008))]) == (
        "communication 6.0 ms, 50% of it hidden by computation"
    )
    assert overlap(compute) == "nothing is communicated"
