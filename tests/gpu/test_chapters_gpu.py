"""Whole chapters on the GPUs of this machine, and what each of them times there."""

import pytest
import torch

from course_lib.cli import main
from course_lib.labs.measure import on_gpus
from course_lib.labs.table import LABS

pytestmark = pytest.mark.gpu
CHAPTERS = [f"{number:02}" for number in range(11)]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_runs_with_its_ranks_on_gpus(chapter):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"ranks of a chapter need a GPU each, at least two; here are {torch.cuda.device_count()}")
    assert main(["run", chapter, "--timeout", "600"]) == 0


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_times_what_it_models(chapter, record):
    least = min(LABS[chapter].ranks)
    if torch.cuda.device_count() < least:
        pytest.skip(f"lab {chapter} has {least} GPUs; here are {torch.cuda.device_count()}")
    said = on_gpus(chapter)
    record(chapter=chapter, said=said)
    assert " ms" in said
