"""The smallest tracker equals PyTorch's and the course's to the byte, the formulas equal the run; planted bugs fail."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course_lib.compare.profile import profile_steps
from course_lib.config import preset
from course_lib.flops import attention_flops_per_token, flops_per_token, matmul_parameters
from course_lib.measure import MemoryTracker
from course_lib.memory.activations import block_terms
from course_lib.memory.states import count_parameters, state_bytes
from course_lib.minimal import memory, peaks
from course_lib.minimal.memory import Tracker, saved_bytes, saved_tensors
from course_lib.model import build
from course_lib.training import loss_of
from course_lib.training.data import batch, tokens

SMALL = peaks.CONFIG
SHAPES = [
    SMALL,
    replace(SMALL, num_layers=1, num_kv_heads=1, d_ff=96),
    replace(SMALL, num_layers=3, d_model=64, head_dim=24, vocab_size=500),
]


class Trained:
    """A model with its optimizer, which has made one step; `step` makes the next."""

    def __init__(self, config=SMALL, rows=2, seq_len=32, **options):
        self.model = build(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.shape, self.index, self.text_T = (rows, seq_len), 0, tokens(20_000)
        self.step()

    def step(self):
        x_BS, y_BS = batch(self.text_T, self.index, *self.shape)
        loss_of(self.model, x_BS, y_BS).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.index += 1

    def tensors(self):
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*self.model.parameters(), *states]

    def peak(self, tracker=Tracker):
        with tracker(self.tensors()) as tracker:
            self.step()
        return tracker.peak_bytes


# ------------------------------------------------------------------------------------ the tracker
@pytest.mark.slow
@pytest.mark.parametrize("config", [*SHAPES, replace(SMALL, tied=True)])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_the_peak_is_pytorch_s_and_the_course_s_to_the_byte(config, options):
    trained = Trained(config, **options)
    by_torch = peaks.peak_by_torch(trained.step, trained.model, trained.optimizer)
    by_kind = peaks.kinds_at_peak(trained.step, trained.model, trained.optimizer)
    assert trained.peak() == by_torch
    if not config.tied:  # its two gradients are added in place or not: autograd asks who else refers to their storage
        assert sum(by_kind.values()) == by_torch


@pytest.mark.parametrize(("rows", "seq_len", "most"), [(4, 128, 0), (2, 32, 64)], ids=["backward", "update"])
def test_the_profiler_s_trace_has_the_same_peak(rows, seq_len, most):
    """In the update, it also sees a few bytes that operators allocate inside, which no tracker of results can."""
    trained = Trained(SMALL, rows, seq_len)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        trained.step()
    by_trace = sum(t.nbytes for t in trained.tensors()) + peaks.peak_of_trace(trace)
    assert 0 <= by_trace - trained.peak() <= most


def test_a_trace_without_memory_is_refused():
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        torch.ones(3)
    with pytest.raises(ValueError, match="profile_memory=True"):
        peaks.peak_of_trace(trace)


def test_views_and_operators_in_place_add_nothing_and_what_dies_is_subtracted():
    x = torch.zeros(10)
    with Tracker([x]) as tracker:
        x.view(2, 5).t().add_(1)
        y = x + 1
        assert tracker.now_bytes == 80
        del y
        pair = torch.ones(4).split(2)
    assert (tracker.now_bytes, tracker.peak_bytes, len(pair)) == (56, 80, 2)


class CountsViews(Tracker):
    def see(self, tensor):
        self.now_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


class NeverFrees(Tracker):
    def free(self, address, nbytes):
        del self.alive[address]


class CountsElements(Tracker):
    """What a view covers, not the storage that it keeps alive."""

    def see(self, tensor):
        if tensor.untyped_storage()._cdata not in self.alive:
            super().see(tensor)
            self.now_bytes += tensor.nbytes - tensor.untyped_storage().nbytes()


class OneOutput(Tracker):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.see(tree_leaves(out)[0])
        return out


@pytest.mark.parametrize("wrong", [CountsViews, NeverFrees, OneOutput])
def test_a_planted_bug_gives_another_peak(wrong):
    trained = Trained()
    right = trained.peak()
    try:
        found = trained.peak(wrong)
    except (AttributeError, TypeError):  # an operator without an output
        found = None
    assert found != right


def test_a_slice_keeps_its_whole_storage_alive():
    with Tracker() as tracker:
        first = torch.zeros(100)[:1]
        assert (tracker.now_bytes, first.nbytes) == (400, 4)


# ------------------------------------------------------------------------------------ the update
def test_the_update_needs_a_copy_of_all_parameters_with_foreach_three_matrices_without_and_nothing_when_fused():
    copies = {}
    for name, options in {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}.items():
        trained = Trained(rows=1, seq_len=8, **options)
        copies[name] = trained.peak() / (4 * count_parameters(SMALL))
    assert {name: round(value, 2) for name, value in copies.items()} == {"foreach": 5.0, "loop": 4.16, "fused": 4.0}


# ------------------------------------------------------------------------------------ the formulas
@pytest.mark.parametrize("config", [*SHAPES, preset("llama-3.1-8b"), preset("llama-3.1-70b")])
def test_the_formulas_are_those_of_the_ledger(config):
    assert memory.llama_parameters(config) == count_parameters(config)
    for itemsize, recipe in ((4, "fp32"), (2, "bf16-master")):
        ours, ledger = memory.block_saved_bytes(config, itemsize), block_terms(config, 64, "fused", recipe)
        assert sum(ours.values()) == sum(ledger.values())


@pytest.mark.parametrize("config", SHAPES)
@pytest.mark.parametrize(("rows", "seq_len"), [(1, 16), (3, 50)])
def test_what_a_model_saves_is_the_formula_to_the_byte(config, rows, seq_len):
    x_BS = torch.zeros(rows, seq_len, dtype=torch.long)
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = build(config, dtype=dtype)
        assert saved_bytes(model, x_BS) == memory.model_saved_bytes(config, rows, seq_len, itemsize)


@pytest.mark.parametrize("config", SHAPES)
def test_the_peak_at_the_start_of_backward_is_the_formula_to_the_byte(config):
    rows, seq_len = 4, 128
    trained = Trained(config, rows, seq_len)
    states = state_bytes(config, "fp32", step_counters=True)
    assert trained.peak() == peak_formula(config, rows, seq_len, states.parameters + states.optimizer)


def peak_formula(config, rows, seq_len, states):
    """At the start of backward: states but no gradients, what is saved, and in the loss 3 tensors of logits."""
    tokens_in_batch = rows * seq_len
    loss = 3 * 4 * tokens_in_batch * config.vocab_size + 8 * tokens_in_batch + 8  # targets; two scalars
    return states + memory.model_saved_bytes(config, rows, seq_len, 4) + loss


def test_saved_tensors_are_one_for_each_storage_and_no_parameter():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False))
    x_BD = torch.randn(2, 4)
    assert [tuple(tensor.shape) for tensor in saved_tensors(model, x_BD)] == [(2, 4), (2, 8)]
    assert saved_bytes(model, x_BD) == 96


# ------------------------------------------------------------------------------------ FLOPs
@pytest.mark.parametrize("config", SHAPES)
def test_pytorch_s_counter_finds_six_flops_per_weight_and_token_and_attention_beside_them(config):
    rows, seq_len = 2, 48
    x_BS, y_BS = batch(tokens(20_000), 0, rows, seq_len)
    found = {}
    for attention in ("standard", "fused"):
        with FlopCounterMode(display=False) as counter:
            loss_of(build(config, attention=attention), x_BS, y_BS).backward()
        found[attention] = counter.get_total_flops() / (rows * seq_len)
    assert found["standard"] == flops_per_token(config, seq_len)
    assert found["fused"] == 6 * matmul_parameters(config)  # it has no rule for the CPU's fused kernel
    width = config.num_heads * config.head_dim
    assert attention_flops_per_token(config, seq_len) == 4 * config.num_layers * seq_len * width


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_compiled_mlp_saves_one_wide_tensor_less():
    """The compiler's partitioner computes silu again in backward."""
    mlp = build(SMALL).blocks[0].mlp
    x_BSD = torch.randn(2, 16, SMALL.d_model, requires_grad=True)
    D, F = SMALL.d_model, SMALL.d_ff
    compiled = torch.compile(mlp, backend="aot_eager_decomp_partition")
    compiled(x_BSD)
    assert saved_bytes(mlp, x_BSD) == 32 * (D + 4 * F) * 4

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp

        def forward(self, x):
            return compiled(x)

    assert saved_bytes(Compiled(), x_BSD) == 32 * (D + 3 * F) * 4


def test_the_course_s_timeline_has_the_same_peaks():
    timeline = profile_steps(SMALL, steps=2, batch_size=2, seq_len=32)
    assert isinstance(MemoryTracker, type) and timeline.peak_bytes == pytest.approx(Trained().peak(), rel=1e-3)
