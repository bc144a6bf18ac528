"""The loss in chunks in the engine: a simulated rank's peak is the sum's, and lower than with all logits at once."""

from dataclasses import replace

import pytest

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.run import Run
from course_lib.simulate import simulate_rank

WIDE = ModelConfig("wide", 2, 128, num_heads=4, num_kv_heads=2, d_ff=384, vocab_size=8192, max_seq_len=256)


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("dp=1", "bf16-master-fp32-grads"),
        ("dp=4,zero_stage=3", "fp32"),
        ("cp=2", "bf16-master"),
        ("pp=2,micro_batches=4", "bf16-master"),
        ("pp=2,micro_batches=4,schedule=zb_h1", "fp32"),
        ("tp=2", "fp32"),
        ("tp=2,sequence_parallel=true", "bf16-master"),
        ("tp=4,sequence_parallel=true,regather=true", "bf16-master-fp32-grads"),
        ("tp=2,pp=2,micro_batches=4,schedule=zb_h1", "fp32"),
        ("dp=2,tp=2,zero_stage=3", "bf16-master"),
        ("pp=2,micro_batches=4,schedule=afab", "fp32"),  # every micro-batch in flight keeps the head's gradient
    ],
)
def test_the_peak_of_a_simulated_rank_is_the_sum(text, recipe):
    layout = Layout.parse(text)
    whole = Run(WIDE, layout, 256, recipe, device="cpu")
    last, peaks = layout.world_size - 1, {}
    for run in (whole, replace(whole, loss_chunks=4)):
        peaks[run.loss_chunks] = simulate_rank(run, last).peak_bytes
        predicted = budgets(run)[layout.mesh.coordinates(last)["pp"]].peak_bytes
        assert predicted == pytest.approx(peaks[run.loss_chunks], rel=0.05)
    assert peaks[4] <= peaks[1]
