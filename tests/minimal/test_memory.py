"""The smallest tracker: a slice keeps its storage; its formulas are the package's."""

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from course_lib.compare.one_gpu import SMALL, peak_of_trace
from course_lib.config import preset
from course_lib.memory.activations import block_terms
from course_lib.minimal import memory
from course_lib.minimal.memory import Tracker
from course_lib.tensors import count_parameters

SHAPES = [
    SMALL,
    replace(SMALL, num_layers=1, num_kv_heads=1, d_ff=96),
    replace(SMALL, num_layers=3, d_model=64, head_dim=24, vocab_size=500),
]


def test_a_trace_without_memory_is_refused():
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        torch.ones(3)
    with pytest.raises(ValueError, match="profile_memory=True"):
        peak_of_trace(trace)


def test_a_slice_keeps_its_whole_storage_alive():
    with Tracker() as tracker:
        first = torch.zeros(100)[:1]
        assert (tracker.now_bytes, first.nbytes) == (400, 4)


@pytest.mark.parametrize("config", [*SHAPES, preset("llama-3.1-8b"), preset("llama-3.1-70b")])
def test_the_formulas_are_those_of_the_ledger(config):
    assert memory.llama_parameters(config) == count_parameters(config)
    for itemsize, recipe in ((4, "fp32"), (2, "bf16-master")):
        ours, ledger = memory.block_saved_bytes(config, itemsize), block_terms(config, 64, "fused", recipe)
        assert sum(ours.values()) == sum(ledger.values())
