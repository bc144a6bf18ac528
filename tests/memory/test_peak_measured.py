"""The peak of one process against what is measured while it trains: families, precisions, optimizers, attention."""

from dataclasses import replace
from itertools import product

import pytest
from harness import sampled

from course_lib.compare.profile import profile_step
from course_lib.config import ModelConfig

BASE = ModelConfig("measured", 2, 128, num_heads=4, num_kv_heads=4, d_ff=512, vocab_size=2048, max_seq_len=256)
FAMILIES = {
    "llama": replace(BASE, num_kv_heads=2, d_ff=384),
    "head norms": replace(BASE, num_kv_heads=2, d_ff=384, qk_norm=True),
    "gpt": replace(BASE, family="gpt", tied=True),
    "encoder": replace(BASE, family="xlmr", tied=True, vocab_size=7840),
}
PRECISIONS = ("fp32", "autocast", "bf16-master", "bf16-master-fp32-grads", "bf16")
OPTIMIZERS = {True: ("adamw",), False: ("adamw", "sgd-momentum", "sgd")}  # with a master copy, without
GRID = [
    (family, recipe, optimizer, attention)
    for family, recipe, attention in product(FAMILIES, PRECISIONS, ("fused", "standard"))
    for optimizer in OPTIMIZERS["master" in recipe]
]
NEAR = 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("family", "recipe", "optimizer", "attention"), sampled(GRID, 12))
def test_the_peak_of_one_process_is_predicted_to_two_percent(family, recipe, optimizer, attention):
    found = profile_step(FAMILIES[family], 2, 256, recipe, optimizer, attention)
    for kind in ("parameters", "gradients", "optimizer"):
        assert found.row(kind).predicted_bytes == found.row(kind).measured_bytes, kind
    assert found.row("peak").predicted_bytes == pytest.approx(found.row("peak").measured_bytes, rel=NEAR)
