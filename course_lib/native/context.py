"""Context parallelism as PyTorch ships it: a zigzag ring of key/value blocks. Read beside parallel/ring.py, context.py.

Two ways in, both still experimental in PyTorch:

    on a GPU    the public `context_parallel`: inside it, sequences are cut in place into this rank's part, and
                `scaled_dot_product_attention` is the ring
    on a CPU    that has no rule for the CPU's flash kernel. But its ring is a template that takes any kernel that gives
                the log-sum-exp, and the CPU's does: `_templated_ring_attention`, a private name

Gradients of keys and values travel all the way home: with them goes what the home rank adds itself. From scratch they
travel cp - 1 steps.

Bytes    a layer, k and v of 2 B K s H elements together: cp - 1 times that forward; backward cp - 1 times again, and cp
         times in the dtype in which gradients are summed
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _RotateMethod,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.comm.conjugate import Group, check_group
from course_lib.layout.sequence_sharding import check_context
from course_lib.parallel.engine import MicroBatches, ModelEngine, cross_entropy, share_of
from course_lib.parallel.positions import positions
from course_lib.parallel.tensor import sum_gradients

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # those that give the log-sum-exp


class ContextParallel(ModelEngine):
    """The whole model on every rank, which takes its part of each sequence; attention is PyTorch's ring."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__(module)
        self.cp_group = self.loss_group = group

    def run(self, micro_batches: MicroBatches) -> Tensor:
        """Forward and backward of each micro-batch, both inside of the cut: on a GPU backward is a ring too."""
        for x_BS, _ in micro_batches:  # before anything is sent
            check_context(x_BS.shape[1], self.cp_group.size(), "zigzag")
        num_tokens, losses = self.count_tokens(micro_batches), []
        for x_BS, y_BS in micro_batches:
            cut = _cut_by_pytorch if x_BS.is_cuda else _cut_by_hand
            with cut(self, x_BS, y_BS) as (x_Bs, y_Bs, positions_s):
                share = share_of(cross_entropy(self(x_Bs, positions_s), y_Bs), num_tokens)
                share.backward()
            losses.append(share.detach())
        return torch.stack(losses).sum()

    def finish(self) -> None:
        sum_gradients(self.parameters(), self.cp_group)


def build(model: nn.Module, group: Group) -> ContextParallel:
    """Sets each block's attention core, in place; every rank must bring the same weights.
    Bytes    none
    Raises   ValueError for a model that PyTorch's ring does not know
    """
    check_group(group, "build")
    config = model.config
    if config.family not in ("llama", "gpt") or config.dropout > 0 or config.moe is not None or config.mla is not None:
        raise ValueError(f"PyTorch's ring takes llama and gpt without dropout, experts, mla; {config.name} is another")
    engine = ContextParallel(model, group)
    for block in model.blocks:
        block.attention.core = _on_a_gpu if model.embed.weight.is_cuda else _ring_core(engine)
    return engine


def _ring_core(engine: ContextParallel):
    """The core of one block: causal attention of my tokens to those of all ranks. Dropout was refused."""

    def core(q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, causal: bool = True, dropout: float = 0.0) -> Tensor:
        with _ring_options(q_BNsH.dtype):
            return _RingAttention.apply(q_BNsH, k_BKsH, v_BKsH, engine.cp_group)

    return core


class _RingAttention(torch.autograd.Function):
    """What PyTorch registers for the kernels of GPUs, for the one of a CPU."""

    @staticmethod
    def forward(ctx, q_BNsH, k_BKsH, v_BKsH, group):
        out_BNsH, lse_BNs = _templated_ring_attention(group, 2, _FLASH, q_BNsH, k_BKsH, v_BKsH, is_causal=True)
        ctx.save_for_backward(q_BNsH, k_BKsH, v_BKsH, out_BNsH, lse_BNs)
        ctx.group = group
        return out_BNsH

    @staticmethod
    def backward(ctx, grad_BNsH):
        q_BNsH, k_BKsH, v_BKsH, out_BNsH, lse_BNs = ctx.saved_tensors
        with _ring_options(q_BNsH.dtype):
            grads = _templated_ring_attention_backward(
                ctx.group, 2, _FLASH_BACKWARD, grad_BNsH, "grad_out", q_BNsH, k_BKsH, v_BKsH, out_BNsH, lse_BNs,
                is_causal=True, dropout_p=0.0,
            )  # fmt: skip
        return *grads, None


@contextmanager
def _ring_options(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """PyTorch's options are global: zigzag and a ring inside, as before outside."""
    before = dict(vars(_cp_options))
    _cp_options.enable_load_balance, _cp_options.rotate_method = True, _RotateMethod.ALL_TO_ALL
    _cp_options.convert_to_f32 = dtype != torch.float64
    try:
        yield
    finally:
        vars(_cp_options).update(before)


def _on_a_gpu(q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, causal: bool = True, dropout: float = 0.0) -> Tensor:
    """Inside `context_parallel` this function of PyTorch is the ring."""
    group_size = q_BNsH.shape[1] // k_BKsH.shape[1]
    if group_size > 1:
        k_BKsH, v_BKsH = (heads.repeat_interleave(group_size, dim=1) for heads in (k_BKsH, v_BKsH))
    return F.scaled_dot_product_attention(q_BNsH, k_BKsH, v_BKsH, is_causal=True)


@contextmanager
def _cut_by_pytorch(engine: ContextParallel, x_BS: Tensor, y_BS: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """This rank's inputs, targets and positions. Backward must run inside as well: it is a ring too."""
    buffers = [x_BS.clone(), y_BS.clone(), torch.arange(x_BS.shape[1], device=x_BS.device)]
    mesh = DeviceMesh.from_group(engine.cp_group, x_BS.device.type, mesh_dim_names=("cp",))
    with (
        _ring_options(),
        sdpa_kernel(_GPU_KERNELS),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=set(buffers)),
    ):
        yield tuple(buffers)


@contextmanager
def _cut_by_hand(engine: ContextParallel, x_BS: Tensor, y_BS: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    mine_s = positions("zigzag", x_BS.shape[1], engine.cp_group.size(), engine.cp_group.rank())
    yield x_BS[:, mine_s], y_BS[:, mine_s], mine_s
