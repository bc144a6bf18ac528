"""Tracker and formulas beside the CUDA allocator's own figures."""

import gc

import pytest
import torch

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.measure import MemoryTracker, cuda_memory
from course_lib.measure.cuda import fragment, rounded_bytes
from course_lib.memory.budget import budgets
from course_lib.model import build
from course_lib.run import Run
from course_lib.training import loss_of, make_optimizer, train_step

pytestmark = pytest.mark.gpu

LLAMA = ModelConfig("gpu llama", 8, 1024, num_heads=16, num_kv_heads=4, d_ff=3584, vocab_size=8192, max_seq_len=8192)
MIB = 2**20


@pytest.fixture(autouse=True)
def clean_gpu():
    """Each test starts with nothing of the one before in the allocator."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measured_step(config, batch_size, seq_len, recipe="bf16-master", attention="fused", recompute="none"):
    """One warm step, then one watched: the tracker, and the allocator's peak without what lay there from before
    (libraries' work spaces)."""
    dtype = torch.float32 if recipe in ("fp32", "autocast") else torch.bfloat16
    model = build(config, dtype=dtype, device="cuda", attention=attention, recompute=recompute)
    optimizer = make_optimizer(model, recipe)
    x_BS = torch.randint(0, config.vocab_size, (batch_size, seq_len), device="cuda")
    train_step(model, optimizer, x_BS, x_BS, precision=recipe)
    for parameter in model.parameters():
        parameter.grad = None
    del x_BS
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with MemoryTracker(model, optimizer) as tracker:
        foreign = torch.cuda.memory_allocated() - tracker.total_bytes
        x_BS = torch.randint(0, config.vocab_size, (batch_size, seq_len), device="cuda")
        y_BS = x_BS.roll(-1, 1)
        train_step(model, optimizer, x_BS, y_BS, precision=recipe)
    return tracker, torch.cuda.max_memory_allocated() - foreign


@pytest.mark.parametrize("recipe", ["bf16-master", "autocast"])
def test_the_tracker_s_peak_is_the_allocator_s_within_5_percent(recipe, record):
    tracker, allocator_peak = measured_step(LLAMA, 4, 1024, recipe)
    error_percent = 100 * (tracker.peak_bytes / allocator_peak - 1)
    record(recipe=recipe, tracker_peak_bytes=tracker.peak_bytes, allocator_peak_bytes=allocator_peak,
           error_percent=round(error_percent, 3), peak_by_kind=tracker.peak_by_kind)  # fmt: skip
    assert abs(error_percent) < 5


@pytest.mark.parametrize(
    ("recipe", "attention", "recompute"),
    [
        ("bf16-master", "fused", "none"),
        ("bf16-master", "standard", "none"),
        ("bf16-master", "standard", "selective"),
        ("bf16-master", "fused", "full"),
        ("autocast", "fused", "none"),
        ("autocast", "standard", "none"),
    ],
)
def test_formulas_agree_with_tensors_alive_on_the_gpu(recipe, attention, recompute, record):
    tracker, _ = measured_step(LLAMA, 2, 1024, recipe, attention, recompute)
    layout = Layout(micro_batch=2, recompute=recompute)
    predicted = budgets(Run(LLAMA, layout, 1024, recipe, attention))[0].by_kind
    measured = {kind: max(column) for kind, column in tracker.timeline.bytes_by_kind.items()}
    record(recipe=recipe, attention=attention, recompute=recompute, predicted=predicted, measured=measured)
    for kind in ("parameters", "gradients", "optimizer"):
        assert measured[kind] == predicted[kind], kind
    assert predicted["activations"] == pytest.approx(measured["activations"], rel=0.03)


def kept_bytes(attention, recompute, seq_len, config=LLAMA) -> int:
    """What the allocator holds between forward and backward beyond the model."""
    model = build(config, dtype=torch.bfloat16, device="cuda", attention=attention, recompute=recompute)
    x_BS = torch.randint(0, config.vocab_size, (1, seq_len), device="cuda")
    loss_of(model, x_BS, x_BS).backward()  # warm: libraries' work spaces
    for parameter in model.parameters():
        parameter.grad = None
    before = torch.cuda.memory_allocated()
    loss = loss_of(model, x_BS, x_BS)
    kept = torch.cuda.memory_allocated() - before
    del loss
    return kept


def test_fused_attention_is_linear_in_the_sequence_and_explicit_attention_quadratic(record):
    lengths = (1024, 2048, 4096)
    fused = [kept_bytes("fused", "none", s) for s in lengths]
    standard = [kept_bytes("standard", "none", s) for s in lengths]
    record(seq_len=lengths, fused_bytes=fused, standard_bytes=standard)
    assert [fused[1] / fused[0], fused[2] / fused[1]] == pytest.approx([2, 2], rel=0.03)
    assert standard[2] / standard[1] > 3
    scores = [e - f for e, f in zip(standard, fused, strict=True)]
    assert scores[2] / scores[1] == pytest.approx(4, rel=0.15)


def test_full_recomputation_keeps_a_small_part_of_the_activations(record):
    kept = {r: kept_bytes("fused", r, 4096) for r in ("none", "selective", "full")}
    record(kept_bytes=kept)
    assert kept["full"] < 0.25 * kept["none"]
    assert kept["none"] >= kept["selective"]


def test_the_cuda_context_is_measured(record):
    torch.ones(1, device="cuda").sum().item()
    now = cuda_memory()
    record(outside_allocator_bytes=now.outside_allocator_bytes, reserved_bytes=now.reserved_bytes,
           device_total_bytes=now.device_total_bytes, device_used_bytes=now.device_used_bytes)  # fmt: skip
    assert now.allocated_bytes <= now.reserved_bytes <= now.device_used_bytes <= now.device_total_bytes
    assert now.outside_allocator_bytes > 50 * MIB


def test_the_allocator_rounds_up_to_512_bytes(record):
    steps = {}
    for nbytes in (1, 512, 513, 1000, 100_000):
        before = torch.cuda.memory_allocated()
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        steps[nbytes] = torch.cuda.memory_allocated() - before
        del tensor
    record(allocated_for=steps)
    assert steps == {nbytes: rounded_bytes(nbytes) for nbytes in steps}


def test_fragmentation_leaves_free_memory_that_a_larger_tensor_cannot_use(record):
    holes, after = fragment(piece_bytes=16 * MIB, pieces=32)
    reserved = {"reserved_before": holes.reserved_bytes, "reserved_after": after.reserved_bytes}
    record(cached_bytes=holes.cached_bytes, **reserved)
    assert holes.cached_bytes >= 16 * 16 * MIB  # a half is free, in free blocks of 16 MiB
    assert after.reserved_bytes >= holes.reserved_bytes + 32 * MIB  # yet 32 MiB had to be fetched from the device
