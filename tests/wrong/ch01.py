"""Wrong answers to the exercises of chapter 01, each with what its grader must say about it."""

import math
import weakref

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from course_lib.checks.ch01 import (
    check_first_failure,
    check_largest_micro_batch,
    check_mfu,
    check_mlp_kept_bytes,
    check_state_bytes,
    check_swiglu,
    check_tracker,
)
from course_lib.memory.budget import budget
from course_lib.minimal.memory import Tracker


# ------------------------------------------------------------------------------------ 1. MFU
def share(config, seq_len, tokens_per_s, num_gpus, peak, embeddings=0, attention=12, scale=1.0):
    D, L, width = config.d_model, config.num_layers, config.num_heads * config.head_dim
    weights = L * (2 * D * width + 2 * D * config.num_kv_heads * config.head_dim + 3 * D * config.d_ff)
    weights += (1 + embeddings) * config.vocab_size * D
    flops = 6 * weights + attention * L * width * seq_len
    return scale * flops * tokens_per_s / (num_gpus * peak)


def embedding_counted(*case):
    return share(*case, embeddings=1)


def six_n_alone(*case):
    return share(*case, attention=0)


def attention_forward_only(*case):
    return share(*case, attention=4)


def causal_half(*case):
    return share(*case, attention=6)


def eight_per_weight(*case):
    return share(*case, attention=9, scale=4 / 3)  # 8 a weight, 12 for attention


def four_passes(*case):
    return share(*case, scale=4 / 3)


def forward_only(*case):
    return share(*case, scale=1 / 3)


def one_gpu(config, seq_len, tokens_per_s, num_gpus, peak):
    return share(config, seq_len, tokens_per_s, 1, peak)


def percent(*case):
    return share(*case, scale=100)


def mfu_as_text(*case):
    return f"{share(*case):.1%}"


# ------------------------------------------------------------------------------------ 2. states
def states(model, recipe, resident=None, gradients=None, optimizer=None, master=True):
    everything = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    resident, gradients, optimizer = (
        {"all": everything, None: default}.get(given, given)
        for given, default in ((resident, everything), (gradients, trained), (optimizer, trained))
    )
    state = recipe.moment_bytes + (recipe.master_bytes if master else 0)
    return resident * recipe.param_bytes, gradients * recipe.grad_bytes, optimizer * state


def frozen_ones_train_too(model, recipe):
    return states(model, recipe, gradients="all", optimizer="all")


def frozen_ones_are_gone(model, recipe):
    return states(model, recipe, resident=sum(p.numel() for p in model.parameters() if p.requires_grad))


def no_masters(model, recipe):
    return states(model, recipe, master=False)


def tied_counted_twice(model, recipe):
    return states(model, recipe, resident=sum(t.numel() for t in model.state_dict().values()))


def optimizer_over_all(model, recipe):
    return states(model, recipe, optimizer="all")


def one_sum(model, recipe):
    return sum(states(model, recipe))


# ------------------------------------------------------------------------------------ 3. what an MLP keeps
def mlp(kind, tokens, d_model, d_ff, itemsize, narrow=1, **wide):
    return tokens * (narrow * d_model + ({"relu": 1, "gelu": 2, "swiglu": 4} | wide)[kind] * d_ff) * itemsize


def relu_keeps_its_input(*case):
    return mlp(*case, relu=2)


def three_for_swiglu(*case):
    return mlp(*case, swiglu=3)


def without_its_input(*case):
    return mlp(*case, narrow=0)


def with_its_output(*case):
    return mlp(*case, narrow=2)


def with_its_weights(kind, tokens, d_model, d_ff, itemsize):
    weights = (3 if kind == "swiglu" else 2) * d_model * d_ff * itemsize
    return mlp(kind, tokens, d_model, d_ff, itemsize) + weights


def numbers_not_bytes(kind, tokens, d_model, d_ff, itemsize):
    return mlp(kind, tokens, d_model, d_ff, 1)


def always_four_bytes(kind, tokens, d_model, d_ff, itemsize):
    return mlp(kind, tokens, d_model, d_ff, 4)


# ------------------------------------------------------------------------------------ 4. SwiGLU
def plain_swiglu(gate, up):
    return F.silu(gate) * up


def detached_swiglu(gate, up):
    return F.silu(gate.detach()) * up.detach()


def sigmoid_swiglu(gate, up):
    return torch.sigmoid(gate) * up


def function_with(backward, save=True):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            if save:
                ctx.save_for_backward(gate, up)
            else:
                ctx.kept = gate, up
            return F.silu(gate) * up

        @staticmethod
        def backward(ctx, grad):
            gate, up = ctx.saved_tensors if save else ctx.kept
            return backward(grad, gate, up, gate.sigmoid())

    return lambda gate, up: Wrong.apply(gate, up)


def slope_of(gate, sigmoid):
    return sigmoid * (1 + gate * (1 - sigmoid))


right_backward = lambda grad, g, u, s: (grad * u * slope_of(g, s), grad * g * s)  # noqa: E731
kept_on_ctx = function_with(right_backward, save=False)
swapped = function_with(lambda grad, g, u, s: (grad * g * s, grad * u * slope_of(g, s)))
slope_is_sigmoid = function_with(lambda grad, g, u, s: (grad * u * s, grad * g * s))
without_up = function_with(lambda grad, g, u, s: (grad * slope_of(g, s), grad * g * s))
without_what_came = function_with(lambda grad, g, u, s: (u * slope_of(g, s), g * s))
plain_gate = function_with(lambda grad, g, u, s: (grad * u * slope_of(g, s), grad * g))


# ------------------------------------------------------------------------------------ 5. micro-batch
def largest(config, seq_len, recipe, memory_bytes, needed="total_bytes"):
    size = 0
    while getattr(budget(config, size + 1, seq_len, recipe), needed) <= memory_bytes:
        size += 1
    return size


def everything_grows(config, seq_len, recipe, memory_bytes):
    return memory_bytes // budget(config, 1, seq_len, recipe).total_bytes


def one_too_many(*case):
    return largest(*case) + 1


def one_too_few(*case):
    return max(0, largest(*case) - 1)


def at_least_one(*case):
    return max(1, largest(*case))


def no_overheads(*case):
    return largest(*case, needed="peak_bytes")


def no_states(config, seq_len, recipe, memory_bytes):
    one = budget(config, 1, seq_len, recipe)
    return memory_bytes // (one.peak_bytes - one.between_steps_bytes)


def powers_of_two(*case):
    return 2 ** int(math.log2(largest(*case))) if largest(*case) else 0


# ------------------------------------------------------------------------------------ 6. first fit
def allocator(events, capacity, choose, merge=True):
    free_blocks, placed = [(0, capacity)], {}
    for index, (kind, name, *size) in enumerate(events):
        if kind == "free":
            free_blocks = sorted([*free_blocks, placed.pop(name)])
            joined = []
            for start, length in free_blocks:
                if merge and joined and sum(joined[-1]) == start:
                    joined[-1] = (joined[-1][0], joined[-1][1] + length)
                else:
                    joined.append((start, length))
            free_blocks = joined
            continue
        fitting = [free_block for free_block in free_blocks if free_block[1] >= size[0]]
        if not fitting:
            return index, sum(length for _, length in free_blocks)
        start, length = free_block = choose(fitting)
        free_blocks.remove(free_block)
        placed[name] = (start, size[0])
        if length > size[0]:
            free_blocks.append((start + size[0], length - size[0]))
    return None


def sum_of_free_bytes(events, capacity):
    sizes = {}
    for index, (kind, name, *size) in enumerate(events):
        if kind == "free":
            del sizes[name]
        elif sum(sizes.values()) + size[0] > capacity:
            return index, capacity - sum(sizes.values())
        else:
            sizes[name] = size[0]
    return None


def free_blocks_stay_apart(events, capacity):
    return allocator(events, capacity, min, merge=False)


def best_fit(events, capacity):
    return allocator(
        events, capacity, lambda free_blocks: min(free_blocks, key=lambda free_block: (free_block[1], free_block[0]))
    )


def from_the_top(events, capacity):
    return allocator(events, capacity, max)


def index_alone(events, capacity):
    failure = allocator(events, capacity, min)
    return None if failure is None else failure[0]


# ------------------------------------------------------------------------------------ 7. a tracker
class EveryTensor(Tracker):
    """Counts a view as if it had memory of its own."""

    def see(self, tensor):
        self.now_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


class ViewsOfOperators(Tracker):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata in self.alive:
                    self.now_bytes += leaf.nbytes
                else:
                    self.see(leaf)
        return out


class OnlyTheFirst(Tracker):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out)[:1]:
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out


class WhatIsShown(Tracker):
    """Counts the elements of a slice."""

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            nbytes = min(tensor.nbytes, storage.nbytes())
            self.alive[storage._cdata] = weakref.ref(storage, lambda _, a=storage._cdata, n=nbytes: self.free(a, n))
            self.now_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)


class HoldsThem(Tracker):
    """A strong reference keeps every tensor."""

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = storage
            self.now_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)


class DropsTheReference(Tracker):
    """A weak reference that is not kept never calls."""

    def see(self, tensor):
        super().see(tensor)
        self.alive = dict.fromkeys(self.alive)


class ForgetsThePeak(Tracker):
    def free(self, address, nbytes):
        super().free(address, nbytes)
        self.peak_bytes = self.now_bytes


class OldAddresses(Tracker):
    """Never forgets an address."""

    def free(self, address, nbytes):
        self.now_bytes -= nbytes


class Megabytes(Tracker):
    def __enter__(self):
        self.now_bytes /= 1e6
        return super().__enter__()


WRONG = {
    "my_mfu": {
        "check": check_mfu,
        "answers": [
            (embedding_counted, "the embedding is a table"),
            (six_n_alone, "attention is missing"),
            (attention_forward_only, "4 in forward, 8 in backward"),
            (causal_half, "attention is halved for the causal mask"),
            (eight_per_weight, "8 FLOPs per weight count recomputation"),
            (four_passes, "MFU counts three passes and not four"),
            (forward_only, "these are the FLOPs of forward"),
            (one_gpu, "this is the peak of one GPU"),
            (percent, "return a share, not percent"),
            (mfu_as_text, "return one number"),
        ],
    },
    "my_state_bytes": {
        "check": check_state_bytes,
        "answers": [
            (frozen_ones_train_too, "a frozen parameter has no gradient and no optimizer state"),
            (frozen_ones_are_gone, "a frozen parameter is still there"),
            (no_masters, "lacks the FP32 master parameters"),
            (tied_counted_twice, "the tied matrix is counted twice"),
            (optimizer_over_all, "and no optimizer state either"),
            (one_sum, "return three numbers"),
        ],
    },
    "my_mlp_kept_bytes": {
        "check": check_mlp_kept_bytes,
        "answers": [
            (relu_keeps_its_input, "relu needs no input"),
            (three_for_swiglu, "SwiGLU keeps four wide tensors"),
            (without_its_input, "the MLP's own input is missing"),
            (with_its_output, "the MLP's output is counted"),
            (with_its_weights, "the weights are counted"),
            (numbers_not_bytes, "these are numbers, not bytes"),
            (always_four_bytes, "every number is counted with 4 bytes"),
        ],
    },
    "my_swiglu": {
        "check": check_swiglu,
        "answers": [
            (plain_swiglu, "gate and up are enough"),
            (detached_swiglu, "the product has no gradient"),
            (sigmoid_swiglu, "this is sigmoid(gate) * up"),
            (kept_on_ctx, "not ctx itself"),
            (swapped, "in the order of forward's inputs"),
            (slope_is_sigmoid, "the slope of silu is not sigmoid"),
            (without_up, "the factor up is missing"),
            (without_what_came, "what came from behind"),
            (plain_gate, "this is the plain gate"),
        ],
    },
    "my_largest_micro_batch": {
        "check": check_largest_micro_batch,
        "answers": [
            (everything_grows, "as if everything grew with the batch"),
            (one_too_many, "one too many"),
            (one_too_few, "one sequence too few"),
            (at_least_one, "at least 1 is returned"),
            (no_overheads, "are left out"),
            (no_states, "the states lie there too"),
            (powers_of_two, "only powers of two"),
        ],
    },
    "my_first_failure": {
        "check": check_first_failure,
        "answers": [
            (sum_of_free_bytes, "no fragmentation is seen this way"),
            (free_blocks_stay_apart, "neighbouring free blocks do not join"),
            (best_fit, "this is best fit"),
            (from_the_top, "takes the highest address"),
            (index_alone, "the number of the event and the free bytes"),
        ],
    },
    "MyTracker": {
        "check": check_tracker,
        "answers": [
            (EveryTensor, "a storage that is given counts once"),
            (ViewsOfOperators, "a view and the result of an operator in place"),
            (OnlyTheFirst, "an operator may return several tensors"),
            (WhatIsShown, "a slice keeps its whole storage alive"),
            (HoldsThem, "a storage must not be held"),
            (DropsTheReference, "a freed storage must be subtracted"),
            (ForgetsThePeak, "the peak stays when memory is freed"),
            (OldAddresses, "forget an address when it is freed"),
            (Megabytes, "it must be a whole number of bytes"),
        ],
    },
}
