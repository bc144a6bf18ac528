"""Context parallelism in bytes: hand values, the playbook's bars, claims by their ids."""

import pytest

from course_lib.config import preset
from course_lib.hardware import GPUS
from course_lib.layout import Layout
from course_lib.memory.budget import budgets, fits, largest_that_fits
from course_lib.run import Run
from course_lib.tensors import for_length
from course_lib.traffic.context import kv_block_bytes

LLAMA_8B = preset("llama-3.1-8b")
EIGHT = {"tp": 8, "sequence_parallel": True}


def rank(config, seq_len, **layout):
    """The budget of one rank."""
    return budgets(Run(config, Layout(**layout), seq_len))[0]


def test_activations_and_logits_are_divided_states_are_not():
    whole, quarter = (rank(LLAMA_8B, 65_536, cp=cp, **EIGHT) for cp in (1, 4))
    assert whole.activations == pytest.approx(4 * quarter.activations, rel=1e-3)
    assert whole.logits == 4 * quarter.logits and whole.states_bytes == quarter.states_bytes
    as_many_do = rank(LLAMA_8B, 65_536, cp=4, zero_stage=1, **EIGHT)
    assert as_many_do.optimizer == pytest.approx(quarter.optimizer / 4, rel=1e-6)
    shorter = rank(LLAMA_8B, 16_384, **EIGHT)  # as if it had a shorter sequence
    assert quarter.activations == pytest.approx(shorter.activations, rel=1e-3)


def test_keys_of_grouped_queries_are_a_quarter_of_a_block():
    tokens, itemsize = 2048, 2
    assert kv_block_bytes(LLAMA_8B, 1, 4 * tokens, 4) == 2 * tokens * 8 * 128 * itemsize
    assert kv_block_bytes(LLAMA_8B, 1, 4 * tokens, 4, tp=8) == 2 * tokens * 1 * 128 * itemsize


def test_ulysses_keeps_attention_s_output_twice_as_heads_and_as_tokens():
    ring, ulysses, again = (
        rank(LLAMA_8B, 65_536, cp=4, cp_method=method, recompute=recompute)
        for method, recompute in (("ring", "none"), ("ulysses", "none"), ("ulysses", "selective"))
    )
    twice = 32 * 16_384 * 4096 * 2  # a layer, token and element
    assert ulysses.activations - ring.activations == pytest.approx(twice, rel=0.05)
    assert again.activations < ring.activations + twice / 10


def test_8b_from_16k_to_1m_tokens_on_80_gb():
    """tp 8 with sequence parallelism and ZeRO-1 over the cp ranks: cp ranks hold cp times the tokens."""

    def budget_of(cp):
        def of_length(seq_len):
            return rank(for_length(LLAMA_8B, seq_len), seq_len, cp=cp, zero_stage=1, **EIGHT)

        return of_length

    for thousands, needed in {16: 1, 64: 2, 128: 4, 256: 8, 512: 16, 1024: 32}.items():
        assert fits(budget_of(needed)(1024 * thousands), "h100")
        assert needed == 1 or not fits(budget_of(needed // 2)(1024 * thousands), "h100")
    longest = [largest_that_fits(budget_of(cp), "h100", 1024 * cp) for cp in (1, 4, 16)]
    assert longest[0] < 64 * 1024 and 4 * longest[0] < longest[1] and 4 * longest[1] < longest[2] < 1024 * 1024
    assert largest_that_fits(lambda s: rank(LLAMA_8B, s), GPUS["h100"], 1024) == 0  # the states alone do not fit
