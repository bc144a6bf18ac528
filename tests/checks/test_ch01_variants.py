"""The graders of chapter 01 accept right answers that are arranged otherwise, three of each."""

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from harness import sampled
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from course_lib.checks import ch01
from course_lib.flops import flops_per_token, step_flops
from course_lib.memory.budget import budget
from course_lib.timing import mfu


# ------------------------------------------------------------------------------------ MFU
def mfu_of_the_package(config, seq_len, tokens_per_s, num_gpus, peak_flops_per_s):
    return mfu(flops_per_token(config, seq_len) * tokens_per_s, 1.0, num_gpus, peak_flops_per_s)


def mfu_of_one_sequence(config, seq_len, tokens_per_s, num_gpus, peak_flops_per_s):
    seconds = seq_len / tokens_per_s
    return step_flops(config, seq_len, seq_len) / (seconds * num_gpus * peak_flops_per_s)


def mfu_from_shapes(config, seq_len, tokens_per_s, num_gpus, peak_flops_per_s):
    D, H = config.d_model, config.head_dim
    block = 2 * D * H * (config.num_heads + config.num_kv_heads) + 3 * D * config.d_ff
    forward = 2 * (config.num_layers * block + config.vocab_size * D)
    forward += config.num_layers * 2 * 2 * config.num_heads * H * seq_len
    return tokens_per_s / (num_gpus * peak_flops_per_s / (3 * forward))


# ------------------------------------------------------------------------------------ states
def states_in_a_loop(model, recipe):
    parameters = gradients = optimizer = 0
    for param in model.parameters():
        parameters += param.numel() * recipe.param_bytes
        if param.requires_grad:
            gradients += param.numel() * recipe.grad_bytes
            optimizer += param.numel() * (recipe.master_bytes + recipe.moment_bytes)
    return parameters, gradients, optimizer


def states_as_a_list(model, recipe):
    return list(states_in_a_loop(model, recipe))


def states_by_difference(model, recipe):
    everything = sum(p.numel() for p in model.parameters())
    trained = everything - sum(p.numel() for p in model.parameters() if not p.requires_grad)
    per_trained = recipe.bytes_per_param - recipe.param_bytes
    gradients = trained * recipe.grad_bytes
    return everything * recipe.param_bytes, gradients, trained * per_trained - gradients


# ------------------------------------------------------------------------------------ what an MLP saves
def mlp_by_cases(kind, tokens, d_model, d_ff, itemsize):
    if kind == "relu":
        return tokens * itemsize * (d_model + d_ff)
    return tokens * itemsize * (d_model + (4 if kind == "swiglu" else 2) * d_ff)


def mlp_by_operator(kind, tokens, d_model, d_ff, itemsize):
    first, down = d_model, d_ff
    middle = {"relu": 0, "gelu": d_ff, "swiglu": d_ff + 2 * d_ff}[kind]
    return itemsize * sum((first, middle, down)) * tokens


def mlp_by_powers(kind, tokens, d_model, d_ff, itemsize):
    wide = 2 ** ["relu", "gelu", "swiglu"].index(kind)
    return tokens * d_model * itemsize + wide * tokens * d_ff * itemsize


# ------------------------------------------------------------------------------------ SwiGLU
class WithSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            inputs = gate.detach().requires_grad_(), up.detach().requires_grad_()
            product = F.silu(inputs[0]) * inputs[1]
        return torch.autograd.grad(product, inputs, grad)


class InOrderOfUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(up, gate)
        return gate.sigmoid().mul(gate).mul(up)

    @staticmethod
    def backward(ctx, grad):
        up, gate = ctx.saved_tensors
        silu, sigmoid = F.silu(gate), gate.sigmoid()
        return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


def swiglu_recomputed(gate, up):
    return WithSilu.apply(gate, up)


def swiglu_by_formula(gate, up):
    return InOrderOfUp.apply(gate, up)


def swiglu_checkpointed(gate, up):
    return torch.utils.checkpoint.checkpoint(lambda g, u: F.silu(g) * u, gate, up, use_reentrant=True)


# ------------------------------------------------------------------------------------ the largest micro-batch
def total(config, batch_size, seq_len, recipe):
    return budget(config, batch_size, seq_len, recipe).total_bytes


def largest_by_counting(config, seq_len, recipe, memory_bytes):
    return next(size for size in range(10_000) if total(config, size + 1, seq_len, recipe) > memory_bytes)


def largest_by_doubling(config, seq_len, recipe, memory_bytes):
    if total(config, 1, seq_len, recipe) > memory_bytes:
        return 0
    low, high = 1, 2
    while total(config, high, seq_len, recipe) <= memory_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = total(config, middle, seq_len, recipe) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low


def largest_by_parts(config, seq_len, recipe, memory_bytes):
    size = 0
    while True:
        one_more = budget(config, size + 1, seq_len, recipe)
        if one_more.peak_bytes + sum(one_more.overheads.values()) > memory_bytes:
            return size
        size += 1


# ------------------------------------------------------------------------------------ first fit
def first_fit_of_gaps(events, capacity):
    placed = {}
    for index, (kind, name, *size) in enumerate(events):
        if kind == "free":
            placed.pop(name)
            continue
        edges = [(0, 0), *sorted(placed.values()), (capacity, capacity)]
        gaps = [(left, right - left) for (_, left), (right, _) in itertools.pairwise(edges)]
        start = next((start for start, length in gaps if length >= size[0]), None)
        if start is None:
            return [index, sum(length for _, length in gaps)]
        placed[name] = (start, start + size[0])
    return None


def first_fit_of_free_blocks(events, capacity):
    free, placed = {0: capacity}, {}
    for index, (kind, name, *size) in enumerate(events):
        if kind == "free":
            start, length = placed.pop(name)
            length += free.pop(start + length, 0)
            before = next((at for at, size in free.items() if at + size == start), None)
            if before is None:
                free[start] = length
            else:
                free[before] += length
            continue
        start = min((at for at, length in free.items() if length >= size[0]), default=None)
        if start is None:
            return index, sum(free.values())
        length = free.pop(start)
        placed[name] = start, size[0]
        if length > size[0]:
            free[start + size[0]] = length - size[0]
    return None


def first_fit_recursively(events, capacity):
    def place(tensors, size, start=0):
        if not tensors:
            return start if capacity - start >= size else None
        (left, right), *rest = tensors
        return start if left - start >= size else place(rest, size, right)

    placed = {}
    for index, event in enumerate(events):
        if event[0] == "free":
            del placed[event[1]]
        elif (start := place(sorted(placed.values()), event[2])) is None:
            return index, capacity - sum(right - left for left, right in placed.values())
        else:
            placed[event[1]] = start, start + event[2]
    return None


# ------------------------------------------------------------------------------------ a tracker
class WithFinalizers(TorchDispatchMode):
    """weakref.finalize in place of weakref.ref."""

    def __init__(self, tensors):
        super().__init__()
        self.known, self.now_bytes, self.peak_bytes = set(), 0, 0
        tree_map_only(torch.Tensor, self.note, tensors)

    def note(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
            self.now_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def forget(self, address, nbytes):
        self.known.remove(address)
        self.now_bytes -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.note, out)
        return out


class LooksWhenAsked(TorchDispatchMode):
    """Looks for what has died after each operator, and when it is asked."""

    def __init__(self, tensors):
        super().__init__()
        self.sizes, self.peak_bytes = {}, 0
        self.take(tensors)

    def take(self, tensors):
        tree_map_only(torch.Tensor, self.note, tensors)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def note(self, tensor):
        storage = tensor.untyped_storage()
        self.sizes[StorageWeakRef(storage)] = storage.nbytes()  # equal for one storage

    @property
    def now_bytes(self):
        self.sizes = {ref: nbytes for ref, nbytes in self.sizes.items() if not ref.expired()}
        return sum(self.sizes.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.take(out)
        return out


class AroundAMode:
    """Not a mode itself; it keeps the storages' sizes in a WeakKeyDictionary."""

    def __init__(self, tensors):
        self.storages, self.peak_bytes = weakref.WeakValueDictionary(), 0
        tracker = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                tracker.take(out)
                return out

        self.mode = Mode()
        self.take(tensors)

    def take(self, tensors):
        tree_map_only(torch.Tensor, self.note, tensors)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def note(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage

    @property
    def now_bytes(self):
        return sum(storage.nbytes() for storage in list(self.storages.values()))

    def __enter__(self):
        self.mode.__enter__()
        return self

    def __exit__(self, *error):
        self.mode.__exit__(*error)


RIGHT = {
    "check_mfu": (mfu_of_the_package, mfu_of_one_sequence, mfu_from_shapes),
    "check_state_bytes": (states_in_a_loop, states_as_a_list, states_by_difference),
    "check_mlp_kept_bytes": (mlp_by_cases, mlp_by_operator, mlp_by_powers),
    "check_swiglu": (swiglu_recomputed, swiglu_by_formula, swiglu_checkpointed),
    "check_largest_micro_batch": (largest_by_counting, largest_by_doubling, largest_by_parts),
    "check_first_failure": (first_fit_of_gaps, first_fit_of_free_blocks, first_fit_recursively),
    "check_tracker": (WithFinalizers, LooksWhenAsked, AroundAMode),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "answer"), sampled([(check, answer) for check, answers in RIGHT.items() for answer in answers], 7)
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    getattr(ch01, check)(answer)
    assert f"{check}: passed" in capsys.readouterr().out
