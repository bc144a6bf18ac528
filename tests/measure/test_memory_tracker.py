"""The tracker sees every byte, says what it is, and leaves nothing behind."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from course_lib.compare.one_gpu import peak_of_trace
from course_lib.config import ModelConfig
from course_lib.measure import MemoryTracker
from course_lib.measure.storages import local_tensors, returns_fresh_storage
from course_lib.measure.tracker import KINDS
from course_lib.model import build
from course_lib.training import loss_of, make_optimizer, train_step

TINY = ModelConfig("tiny", 2, 64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=256, max_seq_len=128)


def mlp(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))


def bytes_of(tensors) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def trained(model, optimizer, steps: int = 2, micro_batches: int = 1) -> MemoryTracker:
    with MemoryTracker(model, optimizer) as tracker:
        for _ in range(steps):
            x_BS = torch.randint(0, 256, (4, 32))
            train_step(model, optimizer, x_BS, x_BS.clone(), micro_batches)
    return tracker


def test_every_kind_is_right_on_a_plain_model_step_by_step():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    weights = bytes_of(model.parameters())
    with MemoryTracker(model, optimizer) as tracker:
        assert tracker.current_by_kind() == dict.fromkeys(KINDS, 0) | {"parameters": weights}
        x = torch.randn(8, 32)
        loss = model(x).sum()
        # kept: x, ReLU's output (its input is dropped, sum keeps nothing), and the loss itself
        assert tracker.current("activations") == 4 * (8 * 32 + 8 * 64 + 1)
        loss.backward()
        assert tracker.current("gradients") == weights
        assert tracker.current("optimizer") == 0
        optimizer.step()
        # two moments, a step counter for each of four tensors
        assert tracker.current("optimizer") == 2 * weights + 4 * 4
        optimizer.zero_grad()
        assert tracker.current("gradients") == 0
        del x, loss
        assert tracker.current("activations") == tracker.current("temporary") == 0
    timeline = tracker.timeline
    assert max(timeline.bytes_by_kind["temporary"]) > 0  # gradients of activations, the optimizer's work space
    assert timeline.peak_bytes == tracker.peak_bytes == sum(tracker.peak_by_kind.values())
    assert [name for _, name in timeline.marks] == ["forward", "backward", "optimizer", "end of step"]


def test_forward_values_that_backward_does_not_need_are_temporary():
    model = mlp()
    with MemoryTracker(model) as tracker:
        hidden = torch.randn(1000)
        for _ in range(3):
            hidden = hidden + 1  # each sum frees the one before
        loss = model(torch.randn(8, 32)).sum()
        del hidden
        loss.backward()
    assert max(tracker.timeline.bytes_by_kind["temporary"]) >= 2 * 4000
    assert max(tracker.timeline.bytes_by_kind["activations"]) < 4000


def test_first_optimizer_states_are_optimizer_from_their_birth_on():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = trained_plain(model, optimizer)
    states = tracker.timeline.bytes_by_kind["optimizer"]
    start = next(t for t, name in tracker.timeline.marks if name == "optimizer")
    stop = next(t for t, name in tracker.timeline.marks if name == "end of step")
    inside = tracker.timeline.between(start, stop).bytes_by_kind["optimizer"]
    assert states[0] == 0 and inside[-1] == max(states) == 2 * bytes_of(model.parameters()) + 16
    assert any(0 < now < max(states) for now in inside)  # they grow parameter by parameter, not all at once at the end


def trained_plain(model, optimizer) -> MemoryTracker:
    with MemoryTracker(model, optimizer) as tracker:
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
    return tracker


def test_gradients_persist_between_the_micro_batches_of_a_step():
    model = build(TINY)
    tracker = trained(model, make_optimizer(model), steps=1, micro_batches=2)
    marks = [t for t, name in tracker.timeline.marks if name == "forward"]
    assert len(marks) == 2
    second = tracker.timeline.between(marks[1], marks[1] + 1e9)
    assert second.bytes_by_kind["gradients"][0] == bytes_of(model.parameters())


def test_recomputed_tensors_count_as_activations_and_not_as_temporary():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(mlp() for _ in range(4))

        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    with MemoryTracker(Deep()) as tracker:
        loss = tracker.model(torch.randn(128, 32)).sum()
        kept = tracker.current("activations")
        loss.backward()
    inputs, relu = 128 * 32 * 4, 128 * 64 * 4
    assert kept == 5 * inputs - inputs + 4  # four inputs; the last output is gone; and the loss
    assert max(tracker.timeline.bytes_by_kind["activations"]) == 4 * inputs + relu + 8  # loss and its gradient


class _OwnGradient(torch.autograd.Function):
    """x; in backward a gradient in memory of its own, which a list may hold."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        own = torch.ones(grad.shape)
        if ctx.held is not None:
            ctx.held.append(own)
        return own, None


@pytest.mark.parametrize("first, second, tensors", [(False, False, 2), (False, True, 2), (True, False, 3)])
def test_gradients_that_meet_are_added_in_place_as_they_are_where_nobody_watches(first, second, tensors):
    """Under a mode autograd always adds into a third tensor; without one only if the first has another holder."""
    held = []
    numel, model = 10_000, mlp()
    x = torch.zeros(numel, requires_grad=True)
    with MemoryTracker(model) as tracker:
        later = _OwnGradient.apply(x, held if second else None)
        loss = _OwnGradient.apply(x, held if first else None).sum() + later.sum()  # backward: the newer one first
        del later
        tracker.reset()
        before = tracker.total_bytes
        loss.backward()
        assert tensors <= (tracker.peak_bytes - before) / (4 * numel) < tensors + 0.1
        left = 1 + len(held)  # x's gradient, which is the sum
        assert left <= (tracker.total_bytes - before) / (4 * numel) < left + 0.1
        x.grad = None
        assert tracker.total_bytes < before + (left - 0.9) * 4 * numel


@pytest.mark.parametrize("is_view", [False, True])
def test_a_gradient_that_is_a_view_is_not_added_in_place_since_its_base_holds_the_storage(is_view):
    """A tied head's gradient is a transposed view, the embedding's is not: the sum is a third tensor of that size."""
    weight = nn.Parameter(torch.zeros(100, 100))
    model = nn.ParameterList([weight])

    def train():
        x = torch.ones(1, 100)
        loss = _OwnGradient.apply(weight, None).sum()
        loss = loss + ((x @ weight.t()) if is_view else _OwnGradient.apply(weight, None)).sum()  # its gradient is first
        loss.backward()

    with MemoryTracker(model) as tracker:
        train()
    weight.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        train()
    tensors = 4 if is_view else 3
    assert tensors <= tracker.peak_bytes / weight.nbytes < tensors + 0.2
    assert tracker.peak_bytes == weight.nbytes + peak_of_trace(trace)


def test_a_recomputation_written_by_hand_counts_what_its_first_unrecorded_function_saves():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.clone())  # made where nothing is recorded
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return Square.apply(x) @ weight

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
                out = Square.apply(x) @ weight
            torch.autograd.backward(out, grad)
            return x.grad, weight.grad

    model = nn.Linear(8, 8, bias=False)
    with MemoryTracker(model) as tracker:
        x = torch.ones(16, 8, requires_grad=True)
        Again.apply(x * 1, model.weight).sum().backward()
    size = 16 * 8 * 4  # the input, and made again: its clone, the square, the output; and the loss with its gradient
    assert max(tracker.timeline.bytes_by_kind["activations"]) in range(5 * size, 5 * size + 9)


def test_views_of_tensors_from_before_are_not_counted():
    model, data = mlp(), torch.randn(100_000, 32)
    with MemoryTracker(model) as tracker:
        x = data[:8]
        model(x).sum().backward()
        data.add_(1.0)
    assert tracker.peak_bytes < data.numel()


def test_alive_bytes_equal_the_cpu_allocator_to_the_byte():
    """The allocator's own record: allocations minus releases, by torch.profiler, at three points of a step."""
    model = build(TINY)
    optimizer = make_optimizer(model)
    marks: list[int] = []
    gc.collect()  # what an earlier test left in a cycle would be released in the record
    watched = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with watched as profiler, MemoryTracker(model, optimizer) as tracker:
        start = tracker.total_bytes
        x_BS = torch.randint(0, 256, (4, 64))
        for action in ("forward", "backward", "optimizer"):
            if action == "forward":
                loss = loss_of(model, x_BS, x_BS)
            elif action == "backward":
                loss.backward()
            else:
                optimizer.step()
            marks.append(tracker.total_bytes - start)
            torch.empty(0)  # keeps the points apart in the record
            with torch.profiler.record_function(f"point {len(marks)}"):
                pass
    assert marks == allocator_bytes_at_points(profiler, 3)
    assert marks[0] > 100_000


def allocator_bytes_at_points(profiler, count: int) -> list[int]:
    events = profiler.profiler.kineto_results.events()
    points = {e.name(): e.start_ns() for e in events if e.name().startswith("point ")}
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return [sum(n for at, n in memory if at <= points[f"point {i + 1}"]) for i in range(count)]


def test_nothing_stays_behind_even_after_an_exception():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    before = dict(vars(torch.UntypedStorage))  # resize_ is inherited, unless PyTorch's own MemTracker ran here before
    with pytest.raises(RuntimeError, match="broken"), MemoryTracker(model, optimizer):
        raise RuntimeError("broken")
    assert dict(vars(torch.UntypedStorage)) == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_record_ends_with_the_block_and_the_tracker_holds_no_tensor():
    model = mlp()
    with MemoryTracker(model) as tracker:
        x = torch.randn(1000, 32)
        model(x).sum().backward()
    events = len(tracker.timeline.times_s)
    total = tracker.total_bytes
    nbytes = x.untyped_storage().nbytes()
    del x
    gc.collect()
    assert tracker.total_bytes == total - nbytes  # really freed, and noticed
    torch.randn(10)
    assert len(tracker.timeline.times_s) == events


def test_fsdp2_shards_parameters_gradients_and_states_and_gathers_whole_layers():
    """One rank of a pretended world of four, in this process: DTensors are counted by their local shard."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        layer_bytes = 64 * 64 * 4
        with MemoryTracker(model, optimizer) as tracker:
            for _ in range(2):
                model(torch.randn(8, 64)).sum().backward()
                optimizer.step()
                assert tracker.current("gradients") == layer_bytes  # four layers, a quarter of each
                optimizer.zero_grad()
        largest = {kind: max(column) for kind, column in tracker.timeline.bytes_by_kind.items()}
        assert largest["parameters"] == largest["gradients"] == largest["optimizer"] == layer_bytes
        assert layer_bytes <= largest["gathered"] <= 3 * layer_bytes  # the layer at work and the ones fetched ahead
        assert tracker.current("gathered") == 0
    finally:
        dist.destroy_process_group()


def test_reset_forgets_the_past_but_not_what_is_alive():
    with MemoryTracker(mlp()) as tracker:
        kept = torch.empty(1000)
        torch.empty(1_000_000)
        tracker.reset()
        assert tracker.peak_bytes == tracker.total_bytes < 1_000_000
        more = torch.empty(10)
        assert tracker.timeline.total_bytes[-1] == tracker.total_bytes
        del kept, more


def test_bad_arguments_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match="no parameters"):
        MemoryTracker(nn.ReLU())
    with pytest.raises(ValueError, match=r"required: a torch.optim.Optimizer"):
        MemoryTracker(mlp(), optimizer="adam")
    tracker = MemoryTracker(mlp())
    for wrong in (tracker.current, lambda kind: tracker.claim(torch.empty(1), kind)):
        with pytest.raises(ValueError, match="choose from parameters, gradients"):
            wrong("weights")


def test_operators_are_sorted_into_views_and_makers_by_their_schema():
    aten = torch.ops.aten
    assert returns_fresh_storage(aten.mm.default) and returns_fresh_storage(aten.lift_fresh.default)
    assert not returns_fresh_storage(aten.view.default) and not returns_fresh_storage(aten.add_.Tensor)
    assert local_tensors(torch.empty(2))[0].shape == (2,)
    assert F.relu(torch.ones(1)) == 1
