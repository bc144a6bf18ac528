"""What autograd saves for the backward pass, tensor by tensor: bytes of one micro-batch on one rank.

Each term is tokens x numbers of a token x bytes of a number, in the letters of everywhere. Under tp a rank has a
narrower model; under cp fewer tokens; sequence parallelism cuts the tokens of D once more, but for inputs of matrices
that are not gathered again. One block of an undivided Llama saves of each token

    attention   D and a statistic; D; q, k, v: (N + 2 K) H; log-sum-exp: N; output: N H    standard: scores, N S
    MLP         D and a statistic; D; gate, up, silu and their product: 4 F

GPT's norms have two statistics, its MLP 2 F, its dropout a byte for each of 2 D numbers.

Below are the papers' counts: 2-byte numbers, a GPT block with dropout and an MLP of width 4 h (s sequence, b
micro-batch, h hidden size, a heads).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from course_lib.config import ModelConfig, Recompute, require_dense
from course_lib.engines import ENGINES, EngineFacts
from course_lib.layout import Layout
from course_lib.layout.partition import piece_sizes
from course_lib.run import Recipe, Run, recipe_of
from course_lib.tensors import block_shapes, narrow
from course_lib.validate import Size, checked

FP32, INT64, MASK = 4, 8, 1  # bytes of a float32, of a token id or a place, of a bool
CHOICE = INT64 + FP32 + MASK  # of a token's choice of an expert: its place, its weight, whether it has room
Terms = dict[str, int]


class Part:
    """What one rank computes of a micro-batch: `local` is its model, narrower by tp, `rows` are its tokens.

    own_rows   tokens outside attention and MLP, which sequence parallelism cuts once more; `stream` bytes of them
    entered    tokens of a matrix's saved input: all rows, or own ones that backward gathers again
    routed     tokens that go to experts from here: all rows, or folded own ones; `came` rows come to its experts
    e, r       bytes of a number in matrix products, and of the residual stream: autocast leaves it as parameters are
    fp32       bytes of what is computed in FP32 at least; `softmax` of scores, on a GPU not autocast
    in_layers  whether any layer trains, and not the head alone; `is_away`: activations wait off the device
    split      whether gradients of weights may wait for a backward's second part
    head_in_forward   whether forward makes the head's gradients chunk by chunk, in place of its input and logits
    """

    def __init__(self, run: Run, tp_rank: int = 0, load: float = 1.0, engine: EngineFacts = ENGINES["course"]):
        layout, recipe, config = run.layout, recipe_of(run.recipe), run.config
        self.run, self.engine, self.local = run, engine, narrow(config, layout.tp, tp_rank)
        tokens = run.seq_len // layout.cp
        own = piece_sizes(tokens, layout.tp)[tp_rank] if layout.sequence_parallel else tokens
        self.rows, self.own_rows = layout.micro_batch * tokens, layout.micro_batch * own
        regathers = layout.regather or (engine.regathers and layout.sequence_parallel)
        self.entered = self.own_rows if regathers else self.rows
        self.routed = self.own_rows if layout.folded else self.rows
        moe = (config if layout.folded else self.local).moe  # folded they are whole
        self.came = round(self.routed * moe.top_k * (load if layout.ep > 1 else 1)) if moe else 0
        self.d_expert = moe.d_expert if moe else 0
        self.e = recipe.compute_bytes
        self.r = recipe.param_bytes if layout.tp == 1 else self.e
        self.fp32 = max(self.e, FP32)
        self.softmax = recipe.param_bytes if run.device == "cuda" else self.e
        self.stream = self.own_rows * config.d_model * self.r
        self.in_layers = run.lora is None or set(run.lora.targets) != {"head"}
        self.is_away = run.offload.activations != "device"
        self.split = layout.splits_backward
        self.head_in_forward = run.loss_chunks > 1 and engine.chunks_make_gradients

    def saves(self, *matrices: str) -> int:
        """Bytes a number of the input that these read: none if all are frozen, under autocast once for each."""
        lora, size = self.run.lora, self.engine.fp8_input_bytes if self.run.fp8 else self.e
        readers = len(matrices) if lora is None else sum(name in lora.targets for name in matrices)
        return size * (readers if self.e != self.r else min(1, readers))

    def norm(self, what: str, whose: str) -> Terms:
        """A norm's input, and its statistics of a row."""
        is_llama = self.local.family == "llama"
        size = self.engine.norm_bytes if is_llama and self.r == 2 else self.r
        statistics = max(self.r, FP32) if is_llama else 2 * self.r
        return {what: self.own_rows * self.local.d_model * size, f"{whose} statistics": self.own_rows * statistics}


part_of = lru_cache(maxsize=2048)(Part)  # equal runs share one, and what is cached of it


@lru_cache(maxsize=4096)
def layer_terms(part: Part, has_experts: bool, recompute: str | None = None) -> tuple[Terms, Terms]:
    """What a layer saves by name: (attention with its norm, what follows it with its norm)."""
    c, run, rows, D = part.local, part.run, part.rows, part.local.d_model
    how, stream = recompute or run.layout.recompute, {"block input": part.stream}
    if not part.in_layers:
        return {}, {}
    if how == "full":  # a router's module holds its routing until the next one
        routing = {"routing": part.routed * (c.moe.num_experts * FP32 + c.moe.top_k * CHOICE)} if has_experts else {}
        return stream | routing, {}
    if run.operators and recompute is None:  # what q, v, o, gate, down and the core gave
        outputs = (2 * c.num_heads + c.num_kv_heads) * c.head_dim + c.d_ff + D // run.layout.tp
        return stream | {"kept outputs": rows * outputs * part.e}, {}
    masks = part.own_rows * D * MASK if c.dropout else 0
    first = part.norm("block input", "first norm's") | _attention_terms(part, how) | {"dropout masks": masks}
    second = part.norm("residual", "second norm's") | {"MLP's dropout mask": masks}
    second |= _expert_terms(part) if has_experts else _mlp_terms(part, c.d_ff, "input of the MLP", "MLP")
    for half, sizes in zip((first, second), of_matrices(part, has_experts), strict=True):
        half |= {"casts and adapters": sizes[0]} if sizes[0] else {}
    return first, second


def _attention_terms(part: Part, recompute: str) -> Terms:
    """What attention saves: inputs of its matrices, what its core reads, and the log-sum-exp or the scores."""
    c, run, layout, rows, own, e = part.local, part.run, part.run.layout, part.rows, part.own_rows, part.e
    D, N, K, H, W, mla = c.d_model, c.num_heads, c.num_kv_heads, c.head_dim, c.value_dim, c.mla
    terms = {"input of q, k, v": part.entered * D * part.saves("q", "k", "v")}
    if mla:  # through narrow vectors (latent.py)
        terms = {
            "input of latent vectors": own * D * part.saves("q_down", "kv_down"),
            "latent vectors": own * ((mla.q_rank + mla.kv_rank + mla.rope_dim) * e + 2 * part.fp32),
            "input of q_up": part.entered * mla.q_rank * part.saves("q_up"),
            "input of kv_up": part.entered * mla.kv_rank * part.saves("kv_up"),
        }
    if c.qk_norm:
        terms["QK-norm"] = rows * (N + K) * (H * e + FP32)
    inputs, values, gathers = N * H + K * (H + W), N * W, layout.cp > 1 and layout.cp_method != "ulysses"
    of_core = run.attention == "fused" and (recompute != "selective" or run.lora is None)  # its kernel saves its output
    if recompute == "selective":  # what RoPE turned is as wide as its tables
        core = inputs * e + (N + K) * H * (part.r - e) * (c.family == "llama")
    elif run.attention == "standard":
        dropped = e * (c.dropout > 0 or part.softmax != e) + MASK * (c.dropout > 0)
        core = (2 * N * H + values) * e + N * run.seq_len * (part.softmax + dropped)
    elif H != W and not gathers:  # a flash kernel wants values as long as keys
        core = 4 * N * max(H, W) * e + N * FP32
    else:
        core = (inputs + values * (layout.cp > 1 and not gathers)) * e + N * FP32
    return terms | {"core": rows * core, "input of o": rows * values * (e if of_core else part.saves("o"))}


def _mlp_terms(part: Part, width: int, entered: str, inside: str) -> Terms:
    size = part.entered * part.local.d_model * part.saves(*("gate", "up")[part.local.family != "llama" :])
    return {entered: size, inside: part.rows * width * _inside_bytes(part)}


def _inside_bytes(part: Part) -> int:
    """Bytes that an MLP saves of each number between its matrices: gate, up, SiLU, or what GELU reads; the product."""
    tensors = part.engine.swiglu_tensors if part.local.family == "llama" else 0
    return {4: 3, 3: 2, 2: 2, 0: 1}[tensors] * part.e + part.saves("down") * (tensors != 2)


def _expert_terms(part: Part) -> Terms:
    """Router, the rows that come to this rank's experts, what these save, and their weights."""
    moe, rows, came, e, D = part.local.moe, part.routed, part.came, part.e, part.local.d_model
    k, E, sent, is_whole = moe.top_k, moe.num_experts, rows * moe.top_k, part.run.lora is None
    choice = k * CHOICE + (k + 1) * FP32 * moe.normalise_weights + E * part.fp32 * (2 if moe.score == "sigmoid" else 1)
    places = sent if part.run.layout.ep == 1 else 2 * came + sent
    found = {
        "router": rows * (choice + D * part.fp32 * is_whole) + E * D * FP32 * (e < FP32),  # in FP32
        "places of rows": places * INT64 + sent * (2 * INT64 + e),
        "rows of experts": came * D * part.saves("gate", "up"),
        "experts": came * part.d_expert * _inside_bytes(part),
        "outputs of experts": sent * D * e,
    }
    if moe.num_shared_experts:
        found |= _mlp_terms(part, moe.num_shared_experts * moe.d_expert, "input of shared experts", "shared experts")
        if e >= FP32 and is_whole:  # one tensor: the router saves it too
            found["input of shared experts"] = 0
    return found


@lru_cache(maxsize=4096)
def of_matrices(part: Part, has_experts: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of attention's matrices, and of those behind it, (bytes of casts and adapters, bytes that wait).

    Autocast's copies are saved, and what adapters have between their two matrices. Between a backward's two parts each
    input waits, and each output's gradient.
    """
    saved, waiting, lora = [0, 0], [0, 0], part.run.lora
    shared = ("k", "v", "kv_down") + ("up",) * (part.local.family == "llama")  # they read what one before them reads
    for name, (shape, copies) in block_shapes(part.local, has_experts).items():
        half, matrix = not name.startswith("attention"), name.rpartition(".")[2]
        if len(shape) == 2 and matrix != "router":
            (out, width), copies = shape, 1
            rows = part.own_rows if matrix in ("q_down", "kv_down") else part.rows
            if name.startswith("moe.experts"):
                rows, copies = part.came, part.local.moe.num_experts // part.run.layout.ep
                out, width = (out, part.d_expert) if matrix == "down" else (part.d_expert, width)
            saved[half] += (part.e != part.r) * copies * prod(shape) * part.e
            saved[half] += rows * lora.rank * part.e if lora is not None and matrix in lora.targets else 0
            waiting[half] += rows * (out + width * (matrix not in shared)) * part.e
    return tuple(zip(saved, waiting, strict=True))


def start_bytes(part: Part, stage: int) -> int:
    """Bytes that a stage saves in front of its layers: RoPE's tables; the first one token ids, and frozen nothing."""
    c, rows, micro_batch = part.local, part.rows, part.run.layout.micro_batch
    is_llama, ids = c.family == "llama", INT64 + MASK * (part.run.layout.tp > 1)
    tables = 2 * rows // micro_batch * c.rope_dim * recipe_of(part.run.recipe).param_bytes * is_llama * part.in_layers
    if stage > 0 or part.run.lora is not None:
        return tables
    positions = part.own_rows // micro_batch * INT64 * (not is_llama)
    return tables + rows * ids + positions + part.own_rows * c.d_model * MASK * (c.dropout > 0)


def end_bytes(part: Part) -> tuple[int, int, int, int]:
    """(what final norm and head save, what waits for the head's gradient, targets, log-probabilities of the loss).

    Where forward makes the head's gradients: that of its input in place of the input, and that of its weight.
    """
    D, V, rows, e, tp = part.local.d_model, part.local.vocab_size, part.rows, part.e, part.run.layout.tp
    saved = sum(part.norm("input of the final norm", "its").values()) if part.in_layers else 0
    if part.local.family == "xlmr":
        return saved, 0, 0, 0
    trains, targets = part.run.lora is None or "head" in part.run.lora.targets, rows * (INT64 + MASK * (tp > 1))
    saved += part.entered * D * e * trains + V * D * e * (part.e != part.r and part.in_layers) + targets * (tp > 1)
    logits = V * D * part.fp32 if part.head_in_forward else rows * V * part.fp32 // part.run.loss_chunks
    waits = rows * (D + V) * e * (part.split and not part.head_in_forward)
    return saved, waits, targets * (tp == 1), logits  # without tp the micro-batch has targets until it is done


def block_terms(
    config: ModelConfig, seq_len: int, attention: str = "fused", precision: Recipe | str = "fp32"
) -> dict[str, float]:
    """List what one block saves for each token, in bytes, by name; without recomputation.

    The residual is in the dtype of the parameters. Autocast casts the inputs of each matmul to another one.

    Raises   ValueError if attention or precision is unknown, or the model has experts or latent attention
    """
    require_dense(config, "block_terms")
    part = part_of(Run(config, Layout(), min(seq_len, config.max_seq_len), precision, attention, "cpu"))
    first, second = layer_terms(part, has_experts=False)
    terms = {name: size // part.rows for name, size in (first | second).items() if not name.startswith("casts")}
    terms["dropout masks"] += terms.pop("MLP's dropout mask")
    return terms


# ---- as the papers count

KORTHIKANTI_TERMS = {  # bytes a token and hidden feature (the score terms: a token and score), Korthikanti section 4.1
    "input of q, k, v": 2, "q and k": 4, "v": 2, "input of o": 2, "attention dropout mask": 1, "input of up": 2,
    "input of GELU": 8, "input of down": 8, "MLP dropout mask": 1, "inputs of both LayerNorms": 4,
}  # fmt: skip
KORTHIKANTI_SCORE_TERMS = {"softmax output": 2, "softmax dropout mask": 1, "softmax dropout output": 2}


@checked
def korthikanti_layer_bytes(
    config: ModelConfig,
    batch_size: Size,
    seq_len: Size,
    recompute: Recompute = "none",
    tp: Size = 1,
    sequence_parallel: bool = False,
) -> float:
    """Predict the activation bytes of one layer: s b h (34 + 5 a s / h), and its parallel and recomputed forms.

    recompute   "selective" drops 5 a s / h, as FlashAttention does; "full" leaves the layer's input, 2 s b h for any tp
    Bytes       tp divides 24 of the 34 and the scores; sequence parallelism the remaining 10 (LayerNorms, dropout)
    Source      Korthikanti et al. 2022 (arXiv:2205.05198), table 2
    """
    require_dense(config, "korthikanti_layer_bytes")
    sbh = seq_len * batch_size * config.d_model
    if recompute == "full":
        return 2 * sbh
    scores = 0 if recompute == "selective" else 5 * config.num_heads * seq_len / config.d_model
    replicated = 10 / tp if sequence_parallel else 10
    return sbh * (replicated + 24 / tp + scores / tp)


@checked
def korthikanti_bytes(
    config: ModelConfig, batch_size: Size, seq_len: Size, recompute: Recompute = "none", working_set: bool = False
) -> float:
    """Predict the activation bytes of all layers and the embedding's dropout mask (s b h), as the playbook draws them.

    working_set   adds, for full recomputation, the one layer that is recomputed at a time
    Source        Korthikanti et al. 2022, section 4.3; Ultra-Scale Playbook, "Memory for activations"
    """
    layers = config.num_layers * korthikanti_layer_bytes(config, batch_size, seq_len, recompute)
    again = korthikanti_layer_bytes(config, batch_size, seq_len) if working_set and recompute == "full" else 0
    return layers + seq_len * batch_size * config.d_model + again


@checked
def selective_flops_share(config: ModelConfig, seq_len: Size) -> float:
    """Predict the extra compute of selective recomputation as the paper does: (1 + s / 3 h) / (1 + s / 6 h) - 1.

    Source   Korthikanti et al. 2022 (arXiv:2205.05198), appendix A; a forward of the core alone is a third of that
    """
    scores = seq_len / (6 * config.d_model)
    return scores / (1 + scores)
