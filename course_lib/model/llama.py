"""Llama, as small as it can be written and still equal to the real one. It knows nothing of ranks.

Every matrix is a plain `nn.Linear` with its own name, so that parallelism can be applied from outside:

    model.embed                                     V x D
    model.blocks[i].attention_norm, .mlp_norm       D
    model.blocks[i].attention.q .k .v .o            D -> N H, D -> K H, D -> K H, N H -> D; latent: see latent.py
    model.blocks[i].attention.q_norm .k_norm        H, the same for all heads; with config.qk_norm
    model.blocks[i].mlp.gate .up .down              D -> F, D -> F, F -> D; with experts (config.moe) see moe.py
    model.norm, model.head                          D, D -> V

Head counts are read from the tensors, not from the config, so a layer given a part of the heads works unchanged.
Two fields of a layer are functions that parallelism may replace by functions of the same signature:

    attention.core                       softmax(q k^T) v, see attention.py
    attention.project, mlp.project       (x_BSD, layers) -> the products that share an input

What one block keeps for the backward pass, in elements a token (without recomputation, fused attention):

    attention_norm   D (its input) + 1 (1/rms, float32)          mlp_norm   the same
    q, k, v          D (their shared input)                      gate, up   D (their shared input)
    q_norm, k_norm   (N + K) H (inputs) + N + K (1/rms, float32), with config.qk_norm
    core             N H + 2 K H (q, k, v) + N (float32)         silu       F (its input)
    o                N H (its input, the core's output)          product    2 F (silu's output and up)
                                                                 down       F (its input)

and once in a model: the final norm (D + 1), the head's input (D), the two RoPE tables (2 S H elements, not per row).
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib.config import ModelConfig
from course_lib.devices import rank_device
from course_lib.model.attention import CORES, check_choices, project, rotate
from course_lib.model.gpt import GPT, Encoder, run_blocks
from course_lib.model.latent import LatentAttention
from course_lib.model.moe import MoE
from course_lib.validate import Seed, checked


class _RMSNorm(torch.autograd.Function):
    """y = w x / rms(x), keeping only x and 1/rms for backward, as fused kernels do.

    Written op by op, autograd would keep x in float32 and the normalised x as well.
    """

    @staticmethod
    def forward(ctx, x_BSD, weight_D, eps):
        x32_BSD = x_BSD.to(torch.promote_types(x_BSD.dtype, torch.float32))
        inverse_rms_BS1 = torch.rsqrt(x32_BSD.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_BSD, weight_D, inverse_rms_BS1)
        return weight_D * (x32_BSD * inverse_rms_BS1).to(x_BSD.dtype)

    @staticmethod
    def backward(ctx, grad_BSD):
        x_BSD, weight_D, inverse_rms_BS1 = ctx.saved_tensors
        x_hat_BSD = x_BSD.to(inverse_rms_BS1.dtype) * inverse_rms_BS1
        grad_weight_D = (grad_BSD * x_hat_BSD).sum(tuple(range(grad_BSD.dim() - 1))).to(weight_D.dtype)
        grad_x_hat_BSD = grad_BSD * weight_D.to(x_hat_BSD.dtype)
        along_x_BS1 = (grad_x_hat_BSD * x_hat_BSD).mean(-1, keepdim=True)
        grad_x_BSD = inverse_rms_BS1 * (grad_x_hat_BSD - x_hat_BSD * along_x_BS1)
        return grad_x_BSD.to(x_BSD.dtype), grad_weight_D, None


class RMSNorm(nn.Module):
    """Divides each token by its root mean square, in float32 at least, then scales each feature.
    Source   Zhang and Sennrich 2019 (arXiv:1910.07467)
    """

    def __init__(self, d_model: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return _RMSNorm.apply(x_BSD, self.weight, self.eps)


def rope_frequencies(config: ModelConfig, device=None) -> Tensor:
    """Angle per position of each of the H/2 pairs: theta^(-2i/H); `rope_scaling` slows the slow ones further."""
    exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float32, device=device) / config.rope_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is None:
        return frequencies
    scaling = config.rope_scaling
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # full turns within the original length
    share_kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share_kept = share_kept.clamp(0.0, 1.0)  # 1: fast pair, untouched; 0: slow pair, fully slowed
    return (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies


@checked
def rope_tables(config: ModelConfig, positions_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, computed in float32.
    Shapes   positions_S -> cos_SH, sin_SH
    Source   Su et al. 2021 (arXiv:2104.09864)
    """
    frequencies = rope_frequencies(config, positions_S.device)
    angles_SH = torch.outer(positions_S.float(), frequencies).repeat(1, 2)
    return angles_SH.cos().to(dtype), angles_SH.sin().to(dtype)


class Attention(nn.Module):
    """Causal attention with RoPE; K key/value heads serve N query heads (GQA).

    With config.qk_norm each head's query and key pass through an RMSNorm before RoPE, one weight for all heads: a rank
    with some of the heads then has a part of this weight's gradient.
    Source   Henry et al. 2020 (arXiv:2010.04245); Qwen3 (arXiv:2505.09388), section 2
    """

    def __init__(self, config: ModelConfig, attention: str, recompute: str):
        super().__init__()
        D, H = config.d_model, config.head_dim
        self.q = nn.Linear(D, config.num_heads * H, bias=False)
        self.k = nn.Linear(D, config.num_kv_heads * H, bias=False)
        self.v = nn.Linear(D, config.num_kv_heads * H, bias=False)
        self.o = nn.Linear(config.num_heads * H, D, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(H, config.norm_eps), RMSNorm(H, config.norm_eps)
        self.head_dim, self.qk_norm = H, config.qk_norm
        self.core, self.project = CORES[attention], project
        self.recompute_core = recompute == "selective"

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        q_BNSH, k_BKSH, v_BKSH = (
            heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for heads in self.project(x_BSD, (self.q, self.k, self.v))  # no name keeps them
        )
        if self.qk_norm:
            q_BNSH, k_BKSH = self.q_norm(q_BNSH), self.k_norm(k_BKSH)
        q_BNSH, k_BKSH = rotate(q_BNSH, cos_SH, sin_SH), rotate(k_BKSH, cos_SH, sin_SH)
        if self.recompute_core:
            out_BNSH = checkpoint(self.core, q_BNSH, k_BKSH, v_BKSH, use_reentrant=False)
        else:
            out_BNSH = self.core(q_BNSH, k_BKSH, v_BKSH)
        return self.o(out_BNSH.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source Shazeer 2020 (arXiv:2002.05202)"""

    def __init__(self, config: ModelConfig, width: int | None = None):
        super().__init__()
        width = width or config.d_ff
        self.gate = nn.Linear(config.d_model, width, bias=False)
        self.up = nn.Linear(config.d_model, width, bias=False)
        self.down = nn.Linear(width, config.d_model, bias=False)
        self.project = project

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = self.project(x_BSD, (self.gate, self.up))
        return self.down(F.silu(gate_BSF) * up_BSF)


class Block(nn.Module):
    """Attention and MLP (or a mixture of experts), each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, attention: str, recompute: str, experts: bool = False):
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        if config.mla:
            self.attention = LatentAttention(config, attention, recompute, partial(RMSNorm, eps=config.norm_eps))
        else:
            self.attention = Attention(config, attention, recompute)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MoE(config.d_model, config.moe, lambda width: MLP(config, width)) if experts else MLP(config)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SH, sin_SH)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Llama(nn.Module):
    """Tokens in, logits out. `build` makes one with the usual initial weights; the bare constructor leaves PyTorch's.
    attention   "fused" | "standard" (course_lib/model/attention.py)
    recompute   "none" | "selective" (the attention core runs again in backward) | "full" (each block does)
    layers      which blocks are made; in place of the others stands nothing, for whoever has a part of the model
    Shapes      tokens_BS -> logits_BSV; `positions_S` where the tokens are not 0, 1, 2, ...
    Source      Llama Team 2024 (arXiv:2407.21783)
    """

    def __init__(
        self, config: ModelConfig, attention: str = "fused", recompute: str = "none", layers: set[int] | None = None
    ):
        super().__init__()
        check_choices(attention, recompute)
        self.config, self.recompute = config, recompute
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(
            Block(config, attention, recompute, experts=config.has_experts(index))
            if layers is None or index in layers
            else nn.Identity()
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Makes the head use the embedding's weights again, where the config says so (`to_empty` takes them apart)."""
        if self.config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BS: Tensor, positions_S: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(tokens_BS, positions_S))

    def hidden(self, tokens_BS: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """Return what the head multiplies, x_BSD: the last block's output behind the final norm."""
        x_BSD = self.embed(tokens_BS)
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        cos_SH, sin_SH = rope_tables(self.config, positions_S, x_BSD.dtype)
        return self.norm(run_blocks(self.blocks, x_BSD, self.recompute, cos_SH, sin_SH))


CLASSES = {"llama": Llama, "gpt": GPT, "xlmr": Encoder}


@checked
def build(
    config: ModelConfig,
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    attention: str = "fused",
    recompute: str = "none",
) -> nn.Module:
    """Return the model of that config. Its weights depend on the seed alone: not on the device, on dtype by rounding.
    device   None: `rank_device()`. On "meta" the model has shapes and no elements, whatever its size
    """
    device = torch.device(device or rank_device())
    with torch.device("meta"):
        model = CLASSES[config.family](config, attention, recompute).to(dtype)
    model = model.to_empty(device=device)
    model.tie()
    if device.type != "meta":
        _init_weights(model, seed)
    return model


@torch.no_grad()
def _init_weights(model: nn.Module, seed: Seed) -> None:
    """Matrices from a normal distribution of deviation 0.02, norms one, biases zero.

    In the gpt family the two layers that write into the residual get 0.02 / sqrt(2 num_layers).
    Source   Radford et al. 2019 (GPT-2), section 2.3; transformers' LlamaPreTrainedModel
    """
    for count in model.buffers():  # of experts' loads and steps
        count.zero_()
    for parameter, numbers in zip(model.parameters(), initial_weights(model, seed), strict=True):
        parameter.copy_(numbers)


def initial_weights(model: nn.Module, seed: Seed) -> Iterator[Tensor]:
    """What `_init_weights` gives each parameter in turn, in float32. The model may be on the meta device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            yield torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0, device="cpu")
            continue
        writes_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
        deviation = 0.02
        if model.config.family == "gpt" and writes_residual:
            deviation /= math.sqrt(2 * model.config.num_layers)
        yield torch.randn(parameter.shape, generator=generator, device="cpu") * deviation
