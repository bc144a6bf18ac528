"""Whole chapters on the GPUs of this machine, and what each of them times there."""

import pytest
import torch

from course_lib.cli import main
from course_lib.compare.gpu_timings import CHAPTERS, on_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_runs_with_its_ranks_on_gpus(chapter):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"ranks of a chapter need a GPU each, at least two; here are {torch.cuda.device_count()}")
    assert main(["run", chapter, "--timeout", "600"]) == 0


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_times_what_it_models(chapter, record):
    least = min(2, CHAPTERS[chapter].most)
    if torch.cuda.device_count() < least:
        pytest.skip(f"chapter {chapter} times {least} GPUs; here are {torch.cuda.device_count()}")
    said = on_gpus(chapter)
    record(chapter=chapter, said=said)
    assert " ms" in said
