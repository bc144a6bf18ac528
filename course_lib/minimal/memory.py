"""Memory of one GPU: a tracker of storages, what autograd saves, and the formulas that predict both.

Everything is for a Llama in one dtype, with fused attention and one micro-batch. The sums in memory/ add other
families, recipes, recomputation and layouts; measure/tracker.py adds the kind of every storage.

Source   Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for the way of counting
"""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """Count the bytes of all storages alive, and their largest sum."""

    def __init__(self, tensors=()):
        super().__init__()
        self.alive, self.now_bytes, self.peak_bytes = {}, 0, 0
        for tensor in tensors:  # those that exist already
            self.see(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return out

    def see(self, tensor):
        """Add the bytes of a storage that is new."""
        storage = tensor.untyped_storage()
        # _cdata: address of the storage itself; data_ptr() is 0 for every empty one
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self.alive:  # a view shares the storage of another tensor
            return
        self.alive[address] = weakref.ref(storage, lambda _: self.free(address, nbytes))
        self.now_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def free(self, address, nbytes):
        """Subtract the bytes of a storage that is freed."""
        del self.alive[address]
        self.now_bytes -= nbytes


def saved_tensors(module, *inputs):
    """Return a tensor for each storage that autograd saves, without the parameters."""
    known = {param.untyped_storage()._cdata for param in module.parameters()}
    saved = []

    def pack(tensor):
        address = tensor.untyped_storage()._cdata
        if address not in known:
            known.add(address)
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*inputs)
    del output
    return saved


def saved_bytes(module, *inputs):
    """Return the bytes that autograd saves for backward, without the parameters."""
    return sum(t.untyped_storage().nbytes() for t in saved_tensors(module, *inputs))


def llama_parameters(config):
    """Count the parameters of a Llama whose head is a matrix of its own."""
    D, F, V, L = config.d_model, config.d_ff, config.vocab_size, config.num_layers
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    attention = 2 * D * N * H + 2 * D * K * H  # q and o, k and v
    mlp = 3 * D * F  # gate, up, down
    return 2 * V * D + L * (attention + mlp + 2 * D) + D  # norms: 2 per block, 1 last


def block_saved_bytes(config, itemsize):
    """Return what one block saves per token, by the operator that saves it."""
    D, F = config.d_model, config.d_ff
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    statistic = 4  # one FP32 number
    return {
        "norm 1": D * itemsize + statistic,
        "q, k, v": D * itemsize,  # one input for all three
        "attention": (N + 2 * K) * H * itemsize + N * statistic,
        "o": N * H * itemsize,
        "norm 2": D * itemsize + statistic,
        "gate, up": D * itemsize,  # one input for both
        "silu": F * itemsize,
        "product": 2 * F * itemsize,
        "down": F * itemsize,
    }


def model_saved_bytes(config, batch_size, seq_len, itemsize):
    """Return what a Llama saves for backward, without the loss."""
    blocks = config.num_layers * sum(block_saved_bytes(config, itemsize).values())
    ends = 8  # embedding: the id of the token (int64)
    ends += config.d_model * itemsize + 4  # last norm: its input, one FP32 number
    ends += config.d_model * itemsize  # head: its input
    rope_tables = 2 * seq_len * config.head_dim * itemsize
    return batch_size * seq_len * (blocks + ends) + rope_tables
