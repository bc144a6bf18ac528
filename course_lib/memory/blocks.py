"""One stage of a model on one rank, forward, on the ledger: the order of operators in llama.py, gpt.py and parallel/.

`StageProgram.forward` returns what the stage gives and where its backward starts. Which operators there are depends on
the layout: whole or cut over tp, tokens cut over tp (sequence parallelism), attention over cp, experts over ep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.layout.partition import piece_sizes
from course_lib.layout.sequence_sharding import tile
from course_lib.memory import operators as op
from course_lib.memory.ledger import Ledger, Node, Tensor, Weight


@dataclass(frozen=True)
class Part:
    """What a rank has of a stage: `local` is the model that it runs, narrower by tp and with its own experts."""

    local: ModelConfig
    layout: Layout
    seq_len: int
    itemsize: int
    layers: range
    is_first: bool
    is_last: bool
    tp_rank: int = 0
    attention: str = "fused"
    residual_itemsize: int | None = None  # where autocast leaves it wider than what matrices multiply
    softmax_itemsize: int | None = None
    load: float = 1.0  # rows that reach this rank's experts, over a fair share

    @property
    def tokens(self) -> int:
        """Of one sequence, on this rank."""
        return self.seq_len // self.layout.cp

    @property
    def rows(self) -> int:
        return self.layout.micro_batch * self.tokens

    @property
    def own_rows(self) -> int:
        """Outside attention and MLP, where sequence parallelism cuts the tokens once more."""
        if not self.layout.sequence_parallel:
            return self.rows
        return self.layout.micro_batch * piece_sizes(self.tokens, self.layout.tp)[self.tp_rank]


class StageProgram:
    """The operators of one stage's forward pass, in their order."""

    def __init__(self, L: Ledger, part: Part, weight: Callable[[str], Weight], keeper):
        self.L, self.part, self.weight, self.keeper = L, part, weight, keeper
        self.config, self.layout = part.local, part.layout
        self.casts: dict[str, Tensor] = {}  # autocast's copies of matrices
        self.targets: Tensor | None = None
        self.routings: dict[str, Tensor] = {}  # what modules hold of the last forward pass
        self.wide = part.residual_itemsize or part.itemsize
        layout = part.layout
        self.residual = op.Residual(
            layout.micro_batch, part.rows, part.own_rows, layout.sequence_parallel, layout.regather
        )
        self.inside = op.Residual(
            layout.micro_batch, part.rows, part.rows, False, False
        )  # of an expert: nothing is sent

    def forward(self, x: Tensor | None) -> tuple[Tensor | None, Node]:
        """(what goes to the next stage, where backward starts)."""
        L, part, config = self.L, self.part, self.config
        rope = config.family == "llama"
        tables = L.make(2 * part.tokens * config.rope_dim, self.wide) if rope else None
        if part.is_first:
            x = self.embed()
        self.casts.clear()
        for layer in part.layers:
            self.keeper.before_unit(f"blocks.{layer}", x)
            if self.layout.recompute == "full":
                x = L.run_checkpoint(lambda x, layer=layer, tables=tables: self.checkpointed(layer, x, tables), x)
            else:
                x = self.block(layer, x, tables)
        if not part.is_last:
            self.casts.clear()
            self.keeper.after_forward(x.node)
            return x.view(), x.node
        self.keeper.before_unit("end", x)
        if config.family == "xlmr":
            return None, self.norm("norm", x).node
        logits = self.head(self.norm("norm", x))
        self.casts.clear()
        self.keeper.after_forward(logits.node)
        return None, self.loss(logits).node

    def checkpointed(self, layer: int, x: Tensor, tables: Tensor | None) -> Tensor:
        """A block; when it runs again, it casts its weights for itself."""
        kept = self.casts
        if self.L.runs_again:
            self.casts = {}
        try:
            return self.block(layer, x, tables)
        finally:
            self.casts = kept

    # --- both ends

    def embed(self) -> Tensor:
        L, part, config = self.L, self.part, self.config
        self.keeper.before_unit("embed", None)
        if self.layout.tp > 1:
            x = op.embed_mine(L, self.weight("embed"), part.rows, part.rows * config.d_model, part.itemsize)
            x = self.residual.leave(L, x)
        else:
            x = op.embedding(L, self.weight("embed"), L.make(part.rows, 8), part.rows * config.d_model, self.wide)
        if config.family != "llama":
            own = part.own_rows // self.layout.micro_batch
            places = op.embedding(L, self.weight("positions"), L.make(own, 8), own * config.d_model, self.wide)
            x = self.drop(op.residual(L, x, places))
        return x

    def drop(self, x: Tensor) -> Tensor:
        return op.dropout(self.L, x) if self.config.dropout else x

    def head(self, x: Tensor) -> Tensor:
        (logits,) = self.columns(x, ["head"], biased=False)
        return logits

    def loss(self, logits: Tensor) -> Tensor:
        L, rows = self.L, self.part.rows
        if self.layout.tp > 1:
            return op.vocab_cross_entropy(L, logits, rows)
        self.targets = L.make(rows, 8, "activations")  # there until the micro-batch is done
        return op.cross_entropy(L, logits, self.targets, rows)

    # --- a block

    def norm(self, name: str, x: Tensor, own_rows: bool = True) -> Tensor:
        rows = self.part.own_rows if own_rows else self.part.rows
        if self.config.family == "llama":
            return op.rms_norm(self.L, x, self.weight(name), rows)
        return op.layer_norm(self.L, x, self.weight(name), self.weight(f"{name}.bias"), rows)

    def block(self, layer: int, x: Tensor, tables: Tensor | None) -> Tensor:
        block = f"blocks.{layer}"
        x = op.residual(self.L, x, self.drop(self.attention(block, self.norm(f"{block}.attention.norm", x), tables)))
        experts = self.config.moe is not None and layer >= self.first_moe_layer
        inside = self.experts if experts else self.mlp
        return op.residual(self.L, x, self.drop(inside(block, self.norm(f"{block}.mlp.norm", x))))

    @property
    def first_moe_layer(self) -> int:
        return self.config.moe.first_dense_layers

    def attention(self, block: str, x: Tensor, tables: Tensor | None) -> Tensor:
        make = self.latent_heads if self.config.mla else self.heads
        q, k, v = make(f"{block}.attention", x, tables)  # a module's call holds its input to the end
        out = self.L.run_checkpoint(self.core, q, k, v) if self.layout.recompute == "selective" else self.core(q, k, v)
        del q, k, v
        if self.fills_up and self.layout.cp == 1:
            out = op.pick(self.L, out, self.heads_numel(self.config.value_dim), 0, "values' part of the output")
        return self.row(out, f"{block}.attention.o")

    def heads(self, name: str, x: Tensor, tables: Tensor | None) -> list[Tensor]:
        q, k, v = self.columns(x, [f"{name}.{part}" for part in "qkv"])
        if self.config.qk_norm:
            rows, config = self.part.rows, self.config
            q, k = (
                op.rms_norm(self.L, x, self.weight(f"{name}.{part}_norm"), rows * heads, self.wide)
                for x, part, heads in ((q, "q", config.num_heads), (k, "k", config.num_kv_heads))
            )
        if tables is not None:
            q, k = op.rotate(self.L, q, tables), op.rotate(self.L, k, tables)
        return q, k, v

    def latent_heads(self, name: str, x: Tensor, tables: Tensor) -> list[Tensor]:
        """Queries, keys and values through narrow vectors (latent.py)."""
        L, mla, rows, N = self.L, self.config.mla, self.part.rows, self.config.num_heads
        own = self.part.own_rows  # latent vectors are narrow: each rank makes those of its own tokens

        def down(part: str) -> Tensor:
            return self.linear(x, f"{name}.{part}", None, own)

        latent = op.rms_norm(L, down("q_down"), self.weight(f"{name}.q_norm"), own)
        parts = [rows * N * mla.nope_dim, rows * N * mla.rope_dim]
        nope, rope = op.split(L, *self.columns(latent, [f"{name}.q_up"]), parts, "queries")
        q = op.join(L, [nope, op.rotate(L, op.copy(L, rope, "pairs"), tables)], "queries")
        del latent, nope, rope
        latent, rope = op.split(L, down("kv_down"), [own * mla.kv_rank, own * mla.rope_dim], "latent")
        normal = op.rms_norm(L, latent, self.weight(f"{name}.kv_norm"), own)
        parts = [rows * N * mla.nope_dim, rows * N * mla.value_dim]
        nope, v = op.split(L, *self.columns(normal, [f"{name}.kv_up"]), parts, "keys and values")
        if self.layout.tp > 1:
            rope = op.gather_in(L, rope, self.residual) if self.layout.sequence_parallel else op.copy_in(L, rope)
        turned = op.rotate(L, op.copy(L, rope, "pairs"), tables)
        k = op.join(L, [nope, op.repeated(L, turned, N)], "keys")
        return [q, k, op.copy(L, v, "values")]

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        L, layout, config = self.L, self.layout, self.config
        rows = self.part.rows * config.num_heads
        q, k, v = (op.cast(L, x, self.part.itemsize) for x in (q, k, v))
        if self.part.attention == "standard":
            softmax = self.part.softmax_itemsize or self.part.itemsize
            return op.standard_core(L, q, k, v, rows * self.part.tokens, softmax, bool(config.dropout))
        if layout.cp == 1:
            return op.fused_core(L, *self.filled_up(q, k, v), rows)
        if layout.cp_method == "ulysses":
            orders = layout.cp_sharding != "contiguous"
            q, k, v = op.tokens_for_heads(L, [q, k, v], orders, layout.micro_batch)
            out = op.fused_core(L, *self.filled_up(q, k, v), rows)
            if self.fills_up:
                out = op.part_of(L, out, self.heads_numel(config.value_dim))
            return op.heads_for_tokens(L, out, orders, layout.micro_batch)
        return op.ring_core(L, q, k, v, op.Heads(rows), op.Exchange(layout.cp_method, self.tiles()))

    @property
    def fills_up(self) -> bool:
        """Whether values and keys differ in length, so that a flash kernel wants the shorter filled up."""
        return self.config.value_dim != self.config.head_dim

    def heads_numel(self, width: int) -> int:
        return self.part.rows * self.config.num_heads * width

    def filled_up(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Queries, keys and values, the shorter of them as long as the longer."""
        if not self.fills_up:
            return [q, k, v]
        width = self.heads_numel(max(self.config.value_dim, self.config.head_dim))
        return [x if x.numel == width else op.pick(self.L, x, width, 0, "filled up") for x in (q, k, v)]

    def tiles(self) -> list[tuple[float, float]]:
        """Of every rank's keys, mine first: the shares of queries and keys that meet."""
        tokens, cp = self.part.tokens, self.layout.cp
        shares = []
        for step in range(cp):
            part = tile(self.layout.cp_sharding, tokens, cp - 1, (cp - 1 - step) % cp)
            met = () if part is None else (part.queries, part.keys)
            shares.append(tuple((one.stop - one.start) / tokens for one in met) or (0, 0))
        return shares

    def mlp(self, block: str, x: Tensor) -> Tensor:
        return self.residual_mlp(f"{block}.mlp", x, self.residual)

    def residual_mlp(self, name: str, x: Tensor, residual: op.Residual) -> Tensor:
        L, two = self.L, self.config.family == "llama"
        names = [f"{name}.{part}" for part in (("gate", "up") if two else ("up",))]
        made = self.columns(x, names, residual=residual)
        inner = op.product(L, op.pointwise(L, made[0], "SiLU"), made[1], "SiLU x up") if two else None
        inner = inner or op.pointwise(L, made[0], "GELU")
        return self.row(inner, f"{name}.down", residual)  # a module's call holds what it has named to the end

    # --- experts (moe.py, parallel/dispatch.py, parallel/expert_tensor.py)

    def experts(self, block: str, x: Tensor) -> Tensor:
        L, moe, sharded = self.L, self.config.moe, self.layout.sequence_parallel
        piece = x  # a module's call holds its input to the end
        if sharded:
            x = op.gather_in(L, piece, self.residual)
        weights = op.route(L, x, self.weight(f"{block}.moe.router"), moe, self.part.rows)
        if self.layout.recompute == "full" and not L.runs_again:  # the module holds its routing until the next one
            per_token = moe.num_experts * 4 + moe.top_k * (8 + 4 + 1)
            self.routings[block] = L.make(self.part.rows * per_token, 1, "activations")
        cut = self.layout.tp > 1 and not sharded
        y = self.run_experts(block, op.copy_in(L, x) if cut else x, op.copy_in(L, weights) if cut else weights)
        if cut:
            y = self.residual.leave(L, y)
        if moe.num_shared_experts:
            inside = self.inside if sharded else self.residual
            y = op.residual(L, y, self.residual_mlp(f"{block}.moe.shared", x, inside))
        return self.residual.leave(L, y) if sharded else y

    def run_experts(self, block: str, x: Tensor, weights: Tensor) -> Tensor:
        """Rows to the experts, here or on other ranks, and back."""
        L, D, tokens, k = self.L, self.config.d_model, self.part.rows, self.config.moe.top_k
        numel, sent, received = x.numel, tokens * k, round(tokens * k * self.part.load)
        if self.layout.ep == 1:
            rows = op.pick(L, x, sent * D, sent, "dispatch")
            y = self.apply_experts(block, rows, sent)
            return op.weigh_and_add(L, y, weights, numel, sent)
        if self.layout.expert_method == "once_per_rank":
            return self.run_once(block, x, weights)
        rows = op.pick(L, x, sent * D, sent, "dispatch")
        came = op.exchange_rows(L, rows, received * D, "rows to experts")
        ordered = op.copy(L, came, "by expert", 8 * received)
        y = self.apply_experts(block, ordered, received)
        del ordered
        back = op.exchange_rows(L, op.copy(L, y, "by source", 8 * received), sent * D, "rows back")
        return op.weigh_and_add(L, back, weights, numel, sent)

    def run_once(self, block: str, x: Tensor, weights: Tensor) -> Tensor:
        """A token goes to each rank once, however many of its experts are there."""
        L, D, tokens, moe, ep = self.L, self.config.d_model, self.part.rows, self.config.moe, self.layout.ep
        k, numel = moe.top_k, x.numel
        copies, rows_here = tokens * min(k, ep), round(tokens * k * self.part.load)
        arrived = round(tokens * min(k, ep) * self.part.load)
        places = L.make(copies, 16)  # of copies: to which rank, of which token
        # experts and places of choices, the ranks of a token, experts of copies here and as they arrive
        numbers = [L.make(2 * tokens * k, 4), L.make(tokens, ep + 1), L.make(copies * k, 1 + 4), L.make(arrived * k, 4)]
        chosen = op.pick(L, x, copies * D, 0, "dispatch", places)
        of_copies = op.pick(L, weights, copies * k, 0, "weights of copies", places)
        came = op.exchange_rows(L, chosen, arrived * D, "rows to experts")
        del chosen
        of_copies = op.exchange_rows(L, of_copies, arrived * k, "weights to experts")
        numbers += [L.make(arrived * k, 1 + 8), L.make(arrived * moe.num_experts // ep, x.itemsize)]
        rows = op.pick(L, came, rows_here * D, rows_here, "dispatch on the rank")
        y = self.apply_experts(block, rows, rows_here)
        part = op.weigh_and_add(L, y, of_copies, arrived * D, rows_here)
        del rows, y, numbers[-2:]
        back = op.exchange_rows(L, part, copies * D, "rows back")
        zeros = L.make(numel, x.itemsize)
        total = op.pick(L, back, numel, 0, "sum of copies", places)
        del zeros
        return total

    def apply_experts(self, block: str, rows: Tensor, count: int) -> Tensor:
        L, mine = self.L, self.config.moe.num_experts // self.layout.ep
        share, width = -(-count // mine), self.config.d_model
        sizes = [max(0, min(share, count - index * share)) for index in range(mine)]
        made = []
        for index, part in enumerate(op.split(L, rows, [size * width for size in sizes], "rows of experts")):
            made.append(self.expert(f"{block}.moe.experts", part, sizes[index], f".{index}"))
        return op.join(L, made, "experts' outputs")

    def expert(self, name: str, x: Tensor, rows: int, suffix: str) -> Tensor:
        L = self.L
        residual = op.Residual(1, rows, rows, False, False)
        gate, up = self.columns(x, [f"{name}.gate{suffix}", f"{name}.up{suffix}"], rows=rows, residual=residual)
        inner = op.product(L, op.pointwise(L, gate, "SiLU"), up, "SiLU x up")
        return self.linear(inner, f"{name}.down{suffix}", None, rows)

    # --- matrices

    def bias(self, name: str) -> Weight | None:
        return self.weight(f"{name}.bias") if self.config.family != "llama" else None

    def linear(self, x: Tensor, name: str, bias: Weight | None, rows: int) -> Tensor:
        """One whole matrix: as it is, in autocast's dtype, or frozen with an adapter beside it."""
        L, weight = self.L, self.weight(name)
        if self.wide != self.part.itemsize:
            narrow = op.cast(L, x, self.part.itemsize)
            y = op.linear_of_cast(L, narrow, self.cast_matrix(weight), bias, rows, name)
            del narrow
        else:
            y = op.linear(L, x, weight, bias, rows)
        if (adapter := self.adapter(name)) is not None:
            y = op.low_rank(L, x, y, *adapter, rows)
        return y

    def cast_matrix(self, weight: Weight) -> Tensor:
        """The matrix in autocast's dtype, which autocast keeps for later uses where the matrix is trained."""
        if weight.frozen:
            return op.cast_weight(self.L, weight, self.part.itemsize)
        if weight.name not in self.casts:
            self.casts[weight.name] = op.cast_weight(self.L, weight, self.part.itemsize)
        return self.casts[weight.name]

    def adapter(self, name: str) -> tuple[Weight, Weight] | None:
        """LoRA's two thin matrices beside this one."""
        try:
            return self.weight(f"{name}.lora_a"), self.weight(f"{name}.lora_b")
        except KeyError:
            return None

    def columns(
        self,
        x: Tensor,
        names: list[str],
        biased: bool = True,
        rows: int | None = None,
        residual: op.Residual | None = None,
    ) -> list[Tensor]:
        """Products of one input: a matrix each, or cut over tp in one node."""
        rows = self.part.rows if rows is None else rows
        biases = [self.bias(name) if biased else None for name in names]
        if self.layout.tp == 1:
            return [self.linear(x, name, bias, rows) for name, bias in zip(names, biases, strict=True)]
        weights = [self.weight(name) for name in names]
        return op.columns(self.L, x, weights, [bias for bias in biases if bias], rows, residual or self.residual)

    def row(self, x: Tensor, name: str, residual: op.Residual | None = None) -> Tensor:
        L, rows, residual = self.L, self.part.rows, residual or self.residual
        if self.layout.tp == 1:
            return self.linear(x, name, self.bias(name), rows)
        y = op.linear(L, x, self.weight(name), None, rows)
        if residual is not self.inside:
            y = residual.leave(L, y)
        return op.biased(L, y, self.bias(name)) if self.bias(name) else y
