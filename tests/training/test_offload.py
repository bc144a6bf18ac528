"""Activation offload: same gradients, exact bytes, and the memory is really free."""

import weakref

import pytest
import torch
from kept_bytes import kept_bytes

from course_lib.config import preset
from course_lib.model import build
from course_lib.training import offload_activations

TOY = preset("toy")


def x_BS():
    return torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_the_same_to_the_bit(dtype):
    plain, offloaded = build(TOY, dtype=dtype, attention="standard"), build(TOY, dtype=dtype, attention="standard")
    plain(x_BS()).float().square().mean().backward()
    with offload_activations(offloaded, min_bytes=1) as record:
        offloaded(x_BS()).float().square().mean().backward()
    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert record.returned_bytes >= record.moved_bytes > 0


def test_moved_bytes_are_the_bytes_that_autograd_keeps():
    model = build(TOY)
    expected = kept_bytes(model, lambda: model(x_BS()))
    with offload_activations(model, min_bytes=1) as record:
        model(x_BS())
    assert record.moved_bytes == expected


def test_what_was_moved_is_free_between_forward_and_backward():
    model, alive = build(TOY), []
    handle = model.blocks[1].mlp.gate.register_forward_hook(
        lambda module, inputs, out: alive.append(weakref.ref(out.untyped_storage()))
    )
    kept = model(x_BS())
    assert alive[0]() is not None  # silu keeps gate's output for backward
    with offload_activations(model) as record:
        out = model(x_BS())
        assert alive[1]() is None
        out.sum().backward()
    handle.remove()
    assert record.tensors > 0 and kept is not None


def test_parameters_and_small_tensors_stay():
    model = build(TOY)
    with offload_activations(model, min_bytes=10**9) as record:
        model(x_BS()).sum().backward()
    assert record.moved_bytes == record.tensors == 0


@pytest.mark.gpu
def test_on_a_gpu_the_bytes_move_to_host_memory():
    def step(offload):
        model = build(preset("mini"), device="cuda")
        tokens_BS = x_BS().cuda().repeat(8, 1)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with offload_activations(model, min_bytes=4096 if offload else 10**12) as record:
            out = model(tokens_BS)
            held = torch.cuda.memory_allocated() - start
            out.square().mean().backward()
        return held, record, [parameter.grad for parameter in model.parameters()]

    held, _, expected = step(offload=False)
    held_less, record, found = step(offload=True)
    assert held_less < held / 2
    assert record.moved_bytes > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
