"""Layouts drawn at random, and five small models to lay: what tests of every formula share."""

from __future__ import annotations

import random
from dataclasses import replace

from course_lib.config import MlaConfig, ModelConfig, MoeConfig
from course_lib.layout import Layout
from course_lib.layout.check import CHOICES

SEQ_LEN = 256
LLAMA = ModelConfig("llama", 8, 128, num_heads=8, num_kv_heads=4, d_ff=384, vocab_size=2048, max_seq_len=512)
MODELS = {
    "llama": LLAMA,
    "head norms": replace(LLAMA, name="head norms", num_kv_heads=2, qk_norm=True),
    "gpt": replace(LLAMA, name="gpt", family="gpt", num_kv_heads=8, d_ff=512, tied=True),
    "experts": replace(
        LLAMA, name="experts", moe=MoeConfig(8, 2, d_expert=192, num_shared_experts=1, first_dense_layers=1)
    ),
    "latent": replace(LLAMA, name="latent", num_kv_heads=8, head_dim=24, mla=MlaConfig(64, 32, 16, 8, 16)),
}
_SIZES = {"dp": (1, 2, 4, 8), "cp": (1, 1, 2, 4), "tp": (1, 1, 2, 4), "pp": (1, 1, 2, 4), "ep": (1, 2, 4)}
_OTHERS = {"v": (1, 2), "dp_replicate": (1, 1, 2), "micro_batch": (1, 2, 4), "micro_batches": (1, 2, 4, 8)}


def random_layouts(config: ModelConfig, count: int, seed: int = 0) -> list[Layout]:
    """Different layouts on which this model can lie, the same ones for the same seed."""
    draw, found = random.Random(f"{config.name} {seed}"), {}
    while len(found) < count:
        choices = {name: draw.choice(values) for name, values in (_SIZES | _OTHERS | CHOICES).items()}
        choices["ep"] = choices["ep"] if config.moe else 1
        choices["sequence_parallel"] = choices["sequence_parallel"] and choices["tp"] > 1
        choices["regather"] = choices["regather"] and choices["sequence_parallel"]
        choices["v"] = choices["v"] if choices["schedule"] == "interleaved" else 1
        try:
            layout = Layout(**choices)
            layout.check_model(config, SEQ_LEN)
        except ValueError:
            continue
        found[layout] = None
    return list(found)
