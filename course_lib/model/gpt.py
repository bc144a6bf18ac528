"""GPT-2 and GPT-3 (and, from the same blocks, the XLM-R encoder): what the well-known memory formulas were derived for.

Names are those of `course_lib.model`, but `model.blocks[i].mlp` has only `up` (D -> 4 D) and `down`, every layer has a
bias, and positions are learned (`model.positions`).

Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) count what one such block keeps for backward in 16 bits:
s b h (34 + 5 a s / h) bytes, with s = S, b = B, h = D, a = N. With `attention="standard"` and dropout above 0 this
block keeps these, term by term:

    attention   11 s b h      2 shared input of q, k, v · 4 q and k · 2 v · 2 input of o · 1 dropout mask (one byte)
                5 a s^2 b     2 softmax output · 1 dropout mask · 2 dropout output
    mlp         19 s b h      2 input of up · 8 input of GELU · 8 input of down · 1 dropout mask
    norms        4 s b h      2 the input of each

Outside the blocks: the embedding's dropout mask (s b h), the final norm's and the head's input (2 s b h each), logits.
What differs here: each LayerNorm also keeps mean and 1/deviation, two numbers a token, which the paper leaves out. And
with dropout 0 nothing of dropout is kept: s b h (32 + 2 a s / h).
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib.config import ModelConfig
from course_lib.model.attention import CORES, check_choices, drop, project


class Dropout(nn.Module):
    """Dropout in training, whose mask costs one byte an element."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.probability if self.training else 0.0)


class Attention(nn.Module):
    """Multi-head attention with biases, causal for GPT and in both directions for the encoder."""

    def __init__(self, config: ModelConfig, attention: str, recompute: str):
        super().__init__()
        D, NH = config.d_model, config.num_heads * config.head_dim
        self.q, self.k, self.v = nn.Linear(D, NH), nn.Linear(D, NH), nn.Linear(D, NH)
        self.o = nn.Linear(NH, D)
        self.head_dim, self.dropout, self.causal = config.head_dim, config.dropout, config.family == "gpt"
        self.core, self.project = CORES[attention], project
        self.recompute_core = recompute == "selective"

    def forward(self, x_BSD: Tensor) -> Tensor:
        q_BNSH, k_BNSH, v_BNSH = (
            heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for heads in self.project(x_BSD, (self.q, self.k, self.v))  # no name keeps them
        )
        dropout = self.dropout if self.training else 0.0
        if self.recompute_core:
            out_BNSH = checkpoint(self.core, q_BNSH, k_BNSH, v_BNSH, self.causal, dropout, use_reentrant=False)
        else:
            out_BNSH = self.core(q_BNSH, k_BNSH, v_BNSH, self.causal, dropout)
        return self.o(out_BNSH.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(gelu(up(x))); GPT-2 uses GELU's tanh form, XLM-R the exact one."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)
        self.project = project
        self.approximate = "tanh" if config.family == "gpt" else "none"

    def forward(self, x_BSD: Tensor) -> Tensor:
        (up_BSF,) = self.project(x_BSD, (self.up,))
        return self.down(F.gelu(up_BSF, approximate=self.approximate))


class Block(nn.Module):
    """Attention and MLP, each behind a norm, with dropout, beside a residual."""

    def __init__(self, config: ModelConfig, attention: str, recompute: str):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, attention, recompute)
        self.mlp_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD)))
        return x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))


class GPT(nn.Module):
    """Tokens in, logits out; constructor, recomputation and names as `course_lib.model.Llama`.
    Shapes   tokens_BS -> logits_BSV
    Source   Radford et al. 2019 (GPT-2); Brown et al. 2020 (arXiv:2005.14165)
    """

    def __init__(
        self, config: ModelConfig, attention: str = "fused", recompute: str = "none", layers: set[int] | None = None
    ):
        super().__init__()
        check_choices(attention, recompute)
        self.config, self.recompute = config, recompute
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_seq_len, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, attention, recompute) if layers is None or index in layers else nn.Identity()
            for index in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.d_model, config.norm_eps)
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
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.dropout(self.embed(tokens_BS) + self.positions(positions_S))
        return self.norm(run_blocks(self.blocks, x_BSD, self.recompute))


class Encoder(nn.Module):
    """The XLM-R encoder, tokens in, hidden states out: no pooler and no language-model head, as papers count it.

    Built as XLM-R XL and XXL are, with the norm before each part and one at the end. Base and large put each norm after
    the residual and one behind the embedding: as many parameters, other numbers.
    Shapes   tokens_BS -> x_BSD
    Source   Goyal et al. 2021 (arXiv:2105.00572); transformers' XLMRobertaXLModel
    """

    FIRST_POSITION = 2  # rows 0 and 1 of the position table belong to padding, as fairseq laid it out

    def __init__(self, config: ModelConfig, attention: str = "fused", recompute: str = "none"):
        super().__init__()
        check_choices(attention, recompute)
        self.config, self.recompute = config, recompute
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_seq_len + self.FIRST_POSITION, config.d_model)
        self.token_type = nn.Embedding(1, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attention, recompute) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model, config.norm_eps)

    def tie(self) -> None:
        """Nothing to tie: there is no head."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) + self.FIRST_POSITION
        x_BSD = self.embed(tokens_BS) + self.positions(positions_S) + self.token_type.weight[0]
        return self.norm(run_blocks(self.blocks, self.dropout(x_BSD), self.recompute))


def run_blocks(blocks: Iterable[nn.Module], x_BSD: Tensor, recompute: str, *tables: Tensor) -> Tensor:
    """One block after the other. Recompute "full" keeps only each block's input, and backward runs the block again."""
    for block in blocks:
        if recompute == "full":
            x_BSD = checkpoint(block, x_BSD, *tables, use_reentrant=False)
        else:
            x_BSD = block(x_BSD, *tables)
    return x_BSD
