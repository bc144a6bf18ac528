"""Multi-head latent attention (MLA): queries, and keys with values, pass through one narrow vector of each token.

    x_BSD  q_down  q_norm  q_up      queries of N heads: nope_dim + rope_dim numbers each
           kv_down  kv_norm  kv_up   of each head nope_dim numbers of its key, and value_dim of its value
           kv_down                   rope_dim numbers more, past norm and kv_up: the same in every head's key

Generating text, one keeps of a token what kv_down gives, kv_rank + rope_dim numbers, instead of keys and values of all
heads: in DeepSeek-V3 576 instead of 40,960. In training, here, heads are whole again, and attention is that of N
heads; it costs what it costs with N key/value heads. Position has numbers of its own, past kv_up, because a rotation
between kv_up and the product with a query would keep the two from being merged into one matrix when generating.

Letters beside those of the course: `Q` q_rank, `R` kv_rank, `P` rope_dim, `W` value_dim; H = nope_dim + rope_dim.

What it keeps for the backward pass, in elements a token; the core's own in attention.py, where values are shorter:

    q_norm, kv_norm   Q + 1 float32, R + P + 1 float32 (their inputs; kv_down's output is one tensor)
    q_up, kv_up       Q, R
    core              N H of queries, N H of keys, N W of values; fused: values and outputs as long as keys, N H each
    o                 N W

Tensor parallelism cuts it by heads: q_up and kv_up by columns, o by rows. The narrow matrices and their norms stay
whole on each rank, and so does the part of the key with position, which all heads share: the field `share_key`
brings it to them, and is replaced there.

Left out: YaRN, by which DeepSeek-V3 stretches RoPE from 4,096 to 163,840 tokens.

Source   DeepSeek-V2 (arXiv:2405.04434), section 2.1
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib.config import ModelConfig
from course_lib.model.attention import CORES, rotate
from course_lib.model.moe import alone


class LatentAttention(nn.Module):
    """Causal latent attention. `make_norm(width)` builds a norm; `llama.py` brings its own.
    Shapes   x_BSD, cos_SP, sin_SP -> x_BSD
    """

    def __init__(self, config: ModelConfig, attention: str, recompute: str, make_norm: Callable[[int], nn.Module]):
        super().__init__()
        D, N, mla = config.d_model, config.num_heads, config.mla
        self.mla = mla
        self.q_down = nn.Linear(D, mla.q_rank, bias=False)
        self.q_norm = make_norm(mla.q_rank)
        self.q_up = nn.Linear(mla.q_rank, N * mla.head_dim, bias=False)
        self.kv_down = nn.Linear(D, mla.kv_rank + mla.rope_dim, bias=False)
        self.kv_norm = make_norm(mla.kv_rank)
        self.kv_up = nn.Linear(mla.kv_rank, N * (mla.nope_dim + mla.value_dim), bias=False)
        self.o = nn.Linear(N * mla.value_dim, D, bias=False)
        self.core = CORES[attention]
        self.recompute_core = recompute == "selective"
        self.share_key = alone  # of the key's part with position; tensor parallelism replaces this

    def queries(self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        """Shapes   x_BSD -> q_BSNH"""
        q_BSNH = self.q_up(self.q_norm(self.q_down(x_BSD))).unflatten(-1, (-1, self.mla.head_dim))
        nope, rope = q_BSNH.split([self.mla.nope_dim, self.mla.rope_dim], -1)
        return torch.cat((nope, rotate(halves(rope), cos_SP.unsqueeze(1), sin_SP.unsqueeze(1))), -1)

    def keys_and_values(self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes   x_BSD -> k_BSNH, v_BSNW"""
        mla = self.mla
        latent_BSR, rope_BSP = self.kv_down(x_BSD).split([mla.kv_rank, mla.rope_dim], -1)
        kv_BSN = self.kv_up(self.kv_norm(latent_BSR)).unflatten(-1, (-1, mla.nope_dim + mla.value_dim))
        nope, v_BSNW = kv_BSN.split([mla.nope_dim, mla.value_dim], -1)
        rope_BS1P = rotate(halves(self.share_key(rope_BSP)), cos_SP, sin_SP).unsqueeze(2)
        k_BSNH = torch.cat((nope, rope_BS1P.expand(-1, -1, nope.shape[2], -1)), -1)
        return k_BSNH, v_BSNW.contiguous()  # a view would keep kv_up's whole output

    def forward(self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        apart = self.queries(x_BSD, cos_SP, sin_SP), *self.keys_and_values(x_BSD, cos_SP, sin_SP)
        q_BNSH, k_BNSH, v_BNSW = (heads.transpose(1, 2) for heads in apart)
        if self.recompute_core:
            out_BNSW = checkpoint(self.core, q_BNSH, k_BNSH, v_BNSW, use_reentrant=False)
        else:
            out_BNSW = self.core(q_BNSH, k_BNSH, v_BNSW)
        return self.o(out_BNSW.transpose(1, 2).flatten(2))


def halves(x: Tensor) -> Tensor:
    """Pairs side by side, as DeepSeek's weights give them, to pairs half a head apart, as `rotate` turns them."""
    return x.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)
