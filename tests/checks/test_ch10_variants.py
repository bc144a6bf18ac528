"""The grader of a chosen layout accepts right answers of other forms, and says what is wrong with wrong ones."""

from itertools import product

import pytest

from course_lib.checks.ch10 import check_choice
from course_lib.checks.core import CheckFailed
from course_lib.layout import Layout
from course_lib.minimal.choose import choose
from course_lib.plan import work_out

SEEDS = (0, 1)


def layout_with(job, tp=1, micro_batch=1, **choices):
    dp = job.num_gpus // tp
    sizes = {"dp": dp, "tp": tp, "micro_batch": micro_batch, "micro_batches": job.sequences // dp // micro_batch}
    return Layout(**sizes, sequence_parallel=tp > 1, regather=tp > 1, **choices)


def by_the_chart(job):
    return choose(job).option.layout


def by_trying(job):
    """The fastest of a small grid that fits."""
    options = []
    for tp, micro_batch, zero_stage in product((1, 2, 4), (1, 2), (1, 3)):
        if job.sequences // (job.num_gpus // tp) % micro_batch == 0:
            options.append(work_out(job, layout_with(job, tp, micro_batch, zero_stage=zero_stage)))
    return min((option for option in options if option.fits), key=lambda option: option.step_s).layout


def by_tokens_per_gpu(job):
    """ZeRO-3 with the largest tp that leaves 2,000 tokens to a GPU, or no tp where a copy is small."""
    tp = 2 if job.config.d_model > 4096 else 1
    return layout_with(job, tp, zero_stage=3)


@pytest.mark.parametrize("answer", [by_the_chart, by_trying, by_tokens_per_gpu])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.slow
def test_right_answers_pass(answer, seed):
    check_choice(answer, seed=seed)


WRONG = {
    "return a Layout; it is 'dp=8'": lambda job: "dp=8",
    "pp x dp x cp x tp is": lambda job: Layout(dp=job.num_gpus * 2, micro_batches=1),
    "the job's global batch": lambda job: Layout(dp=job.num_gpus, zero_stage=3),
    "does not fit by": lambda job: layout_with(job, zero_stage=1),
    "recomputation": lambda job: layout_with(job, zero_stage=3, recompute="full"),
    "tp waits in every layer": lambda job: layout_with(job, 8, zero_stage=1),
    "more tokens per GPU in a micro-batch hide ZeRO-3": lambda job: (
        layout_with(job, 8, zero_stage=3) if job.config.num_layers == 80 else by_the_chart(job)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("said", WRONG)
def test_wrong_answers_are_named(said):
    with pytest.raises(CheckFailed, match=said):
        check_choice(WRONG[said], seed=0)
