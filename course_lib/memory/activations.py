"""What autograd saves for the backward pass, term by term: closed formulas, in bytes of one micro-batch on one rank.

Elements that one block saves of each token (D, F, N, K, H, S as everywhere), on one rank alone:

                                               Llama                      GPT and the encoder
    block input, saved by the first norm       D, 1 statistic             D, 2 statistics
    norm's output, input of q, k and v         D                          D
    q, k, v                                    (N + 2 K) H                3 N H
    QK-norm's inputs                           (N + K) H, N + K statist.  none
    fused core: log-sum-exp, in FP32           N                          N
    standard core: scores after softmax        N S, k and v N H each      N S, with dropout 2 N S and a mask
    core's output, input of o                  N H                        N H
    dropout masks, one byte each               none                       2 D
    residual, saved by the second norm         D, 1 statistic             D, 2 statistics
    norm's output, input of the MLP            D                          D
    MLP                                        4 F: gate, up, silu, down  2 F: before and after GELU

Under tp a rank has a narrower model; under cp fewer tokens; sequence parallelism cuts the rows of D once more, but for
inputs of matrices that are not gathered again. Experts save their rows, latent attention its narrow vectors besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from course_lib.config import ModelConfig, require_dense
from course_lib.engines import ENGINES, EngineFacts
from course_lib.layout import Layout
from course_lib.layout.partition import piece_sizes
from course_lib.memory.ranks import narrow
from course_lib.memory.run import Run
from course_lib.memory.states import Recipe, parameter_shapes, recipe_of

FP32, INT64, MASK = 4, 8, 1  # bytes of a float32, of a token id or a place, of a bool
Terms = dict[str, int]


@dataclass(frozen=True)
class Part:
    """What one rank computes of a micro-batch: `local` is its model, narrower by tp, `rows` are its tokens.

    own_rows   tokens outside attention and MLP, which sequence parallelism cuts once more
    routed     tokens that go to experts from here: all rows, or folded own ones
    entered    tokens of a matrix's saved input: all rows, or own ones that backward gathers again
    """

    config: ModelConfig
    local: ModelConfig
    layout: Layout
    run: Run
    rows: int
    own_rows: int
    load: float
    engine: EngineFacts

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_of(self.run.recipe)

    @property
    def e(self) -> int:
        """Bytes of a number in matrix products."""
        return self.recipe.compute_bytes

    @property
    def r(self) -> int:
        """Bytes of a number of the residual stream: autocast leaves it in the parameters' dtype."""
        return self.recipe.param_bytes if self.layout.tp == 1 else self.e

    @property
    def fp32(self) -> int:
        """Bytes of what is computed in FP32 at least."""
        return max(self.e, FP32)

    @property
    def entered(self) -> int:
        regathers = self.layout.regather or (self.engine.regathers and self.layout.sequence_parallel)
        return self.own_rows if regathers else self.rows

    @property
    def routed(self) -> int:
        return self.own_rows if self.layout.folded else self.rows

    @property
    def d_expert(self) -> int:
        """Width of an expert here: folded it is whole."""
        return (self.config if self.layout.folded else self.local).moe.d_expert

    @property
    def casts(self) -> bool:
        """Whether autocast casts each input and each matrix of a product."""
        return self.e != self.r

    @property
    def input_bytes(self) -> int:
        """Bytes of a number of a product's saved input."""
        return self.engine.fp8_input_bytes if self.run.fp8 else self.e

    @property
    def readers(self) -> tuple[str, ...]:
        """The matrices that read what attention's norm gives."""
        return ("q_down", "kv_down") if self.config.mla else ("q", "k", "v")

    @property
    def in_layers(self) -> bool:
        """Whether any layer trains, and not the head alone."""
        return self.run.lora is None or set(self.run.lora.targets) != {"head"}

    def saves(self, name: str) -> bool:
        """Whether a matrix needs its input again: frozen ones do not, their adapters do."""
        return self.run.lora is None or name.rpartition(".")[2] in self.run.lora.targets

    def norm(self, rows: int, width: int, itemsize: int) -> int:
        """A norm's input, and its statistics of a row."""
        if self.config.family == "llama":
            kept = self.engine.norm_bytes if itemsize == 2 else itemsize
            return rows * width * kept, rows * max(itemsize, FP32)
        return rows * width * itemsize, rows * 2 * itemsize


def part_of(run: Run, tp_rank: int = 0, load: float = 1.0, engine: EngineFacts = ENGINES["course"]) -> Part:
    """What a rank computes, and in which widths."""
    layout, tokens = run.layout, run.seq_len // run.layout.cp
    own = piece_sizes(tokens, layout.tp)[tp_rank] if layout.sequence_parallel else tokens
    local = narrow(run.config, layout.tp, tp_rank)
    return Part(run.config, local, layout, run, layout.micro_batch * tokens, layout.micro_batch * own, load, engine)


# ---- a layer


@lru_cache(maxsize=4096)
def layer_terms(part: Part, layer: int, recompute: str | None = None) -> tuple[Terms, Terms]:
    """What a layer saves by name: (attention with its norm, what follows it with its norm)."""
    operators = part.run.operators and recompute is None
    recompute, run, D = recompute or part.layout.recompute, part.run, part.config.d_model
    below, behind = _reached(part, layer)
    if run.lora is not None and not part.in_layers:
        return {}, {}
    if recompute == "full":
        terms = {"block input": part.own_rows * D * part.r}
        moe = part.local.moe
        if part.config.has_experts(layer):  # the module holds its routing until the next one
            terms["routing"] = part.routed * (moe.num_experts * FP32 + moe.top_k * (INT64 + FP32 + MASK))
        return terms, {}
    if operators:
        return _kept_outputs(part), {}
    masks = part.own_rows * D * MASK if part.config.dropout else 0
    first, second = _attention_terms(part, recompute, below), {}
    if behind:
        second = dict(zip(("residual", "second norm's statistics"), part.norm(part.own_rows, D, part.r), strict=True))
    second |= _expert_terms(part) if part.config.has_experts(layer) else _mlp_terms(part, reached=behind)
    return first | {"dropout masks": masks * behind}, second | {"MLP's dropout mask": masks}


def _reached(part: Part, layer: int) -> tuple[bool, bool]:
    """Whether a gradient is wanted of a layer's input, and behind its attention: below the first adapter none is."""
    if part.run.lora is None or layer > 0:
        return True, True
    return False, any(part.saves(f"attention.{name}") for name in (*part.readers, "q_up", "kv_up", "o"))


def _attention_terms(part: Part, recompute: str, reached: bool) -> Terms:
    D, c, rows, e = part.config.d_model, part.local, part.rows, part.e
    N, K, H, W = c.num_heads, c.num_kv_heads, c.head_dim, c.value_dim
    terms = dict(zip(("block input", "first norm's statistics"), part.norm(part.own_rows, D, part.r), strict=True))
    if not reached:
        terms = {}
    if c.mla:
        terms |= _latent_terms(part)
    else:
        terms |= _inputs(part, "input of q, k, v", [f"attention.{name}" for name in part.readers], D, reached)
        if c.qk_norm and reached:
            terms["QK-norm"] = rows * (N + K) * (H * e + FP32)
    adapted = any(part.saves(f"attention.{name}") for name in (*part.readers, "q_up", "kv_up"))
    terms["core"] = _core_bytes(part, recompute) if reached or adapted else 0
    out = 0 if part.run.attention == "standard" and not part.saves("attention.o") else rows * N * W * part.e
    if part.run.lora is not None and recompute == "selective" and not part.saves("attention.o"):
        out = 0
    terms["input of o"] = out if part.run.attention == "fused" or not part.run.fp8 else out // e * part.input_bytes
    return terms | _cast_matrix(part, ["attention.o"])


def _inputs(part: Part, name: str, matrices: list[str], width: int, reached: bool = True, rows: int = 0) -> Terms:
    """The shared input of several matrices: once, or cast once for each; with their copies in autocast's dtype."""
    readers = sum(part.saves(one) for one in matrices)
    numel = (rows or (part.entered if part.layout.tp > 1 else part.rows)) * width
    terms = {name: numel * part.input_bytes * (readers if part.casts else min(1, readers))}
    return terms | _cast_matrix(part, matrices, reached)


def _cast_matrix(part: Part, matrices: list[str], reached: bool = True) -> Terms:
    """Copies of matrices in autocast's dtype; between adapters' two matrices their narrow vector, and their copies."""
    found = 0
    for name in matrices:
        out, width = _matrix(part.local, name)
        if part.casts and reached:
            found += out * width * part.e
        if part.run.lora is not None and part.saves(name):
            found += part.rows * part.run.lora.rank * part.e
            found += part.run.lora.rank * (out + width * reached) * part.e if part.casts else 0
    return {f"casts and adapters of {matrices[0]}": found} if found else {}


@lru_cache(maxsize=1024)
def _matrix(local: ModelConfig, name: str) -> tuple[int, int]:
    return parameter_shapes(local)[name][0]


def _core_bytes(part: Part, recompute: str) -> int:
    """q, k, v, the output where it is not what o reads, and the log-sum-exp; or the scores, which grow with S."""
    c, rows, e = part.local, part.rows, part.e
    N, K, H, W = c.num_heads, c.num_kv_heads, c.head_dim, c.value_dim
    heads, values = rows * N * H * e, rows * N * W * e
    plain = heads + rows * K * (H + W) * e
    if recompute == "selective":
        wider = part.casts and part.config.family == "llama"  # what RoPE turned is as wide as its tables
        return plain + rows * (N + K) * H * (part.r - e) * wider
    if part.run.attention == "standard":
        softmax = part.recipe.param_bytes if part.run.device == "cuda" else e
        drops, scores = bool(part.config.dropout), rows * N * (part.run.seq_len // part.layout.cp)
        dropped = e * (drops or softmax != e) + MASK * drops
        return 2 * heads + values + scores * (softmax + dropped)
    lse = rows * N * FP32
    if part.layout.cp > 1 and part.layout.cp_method != "ulysses":
        return plain + lse
    fills = W != H  # a flash kernel wants values as long as keys: filled up, and its output is longer than o's input
    core = 4 * rows * N * max(H, W) * e if fills else plain
    return core + lse + (values if part.layout.cp > 1 and not fills else 0)


def _latent_terms(part: Part) -> Terms:
    """Queries, keys and values through narrow vectors (latent.py)."""
    mla, own, e, D = part.local.mla, part.own_rows, part.e, part.config.d_model
    vectors = {"q": mla.q_rank, "kv": mla.kv_rank + mla.rope_dim}
    terms = _inputs(part, "input of latent vectors", [f"attention.{one}_down" for one in vectors], D, rows=own)
    for (one, made), read in zip(vectors.items(), (mla.q_rank, mla.kv_rank), strict=True):
        terms[f"latent {one}"] = own * made * e + own * part.fp32
        terms |= _inputs(part, f"input of {one}_up", [f"attention.{one}_up"], read)
    return terms


def _mlp_terms(part: Part, name: str = "mlp", width: int = 0, of_experts: bool = False, reached: bool = True) -> Terms:
    D, F, e, rows = part.config.d_model, width or part.local.d_ff, part.e, part.rows
    two = part.config.family == "llama"
    readers = [f"{name}.gate", f"{name}.up"] if two else [f"{name}.up"]
    entered = rows if of_experts and part.layout.sequence_parallel and not part.layout.folded else 0
    terms = _inputs(part, f"input of the {'MLP' if name == 'mlp' else name}", readers, D, reached, entered)
    product = rows * F * part.input_bytes * part.saves(f"{name}.down")
    inside = rows * F * e * ((3 if part.engine.swiglu_tensors == 4 else 2) if two else 1)
    if two and part.engine.swiglu_tensors == 2:
        product = 0
    if not reached:  # SiLU saves its input, and a product the factor that the other's gradient needs
        gate, up = (part.saves(f"{name}.{one}") for one in ("gate", "up"))
        inside = rows * F * e * (2 * gate + up if two else up)
    return terms | {"MLP" if name == "mlp" else name: inside + product} | _cast_matrix(part, [f"{name}.down"])


def _expert_terms(part: Part) -> Terms:
    """Router, the rows that come to this rank's experts, what these save, and their weights."""
    moe, rows, e, D, ep = part.local.moe, part.routed, part.e, part.config.d_model, part.layout.ep
    k, sent, came = moe.top_k, rows * moe.top_k, round(rows * moe.top_k * part.load)
    E = moe.num_experts
    router = 0
    if part.run.lora is None:
        router += rows * D * part.fp32  # its input in FP32
    if e < FP32:
        router += E * D * FP32
    scores = rows * E * part.fp32 * (2 if moe.score == "sigmoid" else 1)
    choice = rows * (k * (INT64 + FP32 + MASK) + (k + 1) * FP32 * moe.normalise_weights)
    once = ep > 1 and part.layout.expert_method == "once_per_rank"
    places = sent * INT64 if ep == 1 else 2 * came * INT64 + sent * INT64
    read, given, weighed = (came if ep > 1 else sent), sent, sent * (2 * INT64 + e)
    if once:
        read = given = came
        places, weighed = rows * min(k, ep) * 2 * INT64 + came * INT64, came * (2 * INT64 + e)
    saves = {name: part.saves(f"moe.experts.{name}") for name in ("gate", "up", "down")}
    readers = saves["gate"] + saves["up"]
    tensors = part.engine.swiglu_tensors if part.run.lora is None else 3 + saves["down"]
    found = {
        "router": router + scores + choice,
        "places of rows": places + weighed,
        "rows of experts": read * D * part.input_bytes * (readers if part.casts else min(1, readers)),
        "experts": read * part.d_expert * e * tensors,
        "outputs of experts": given * D * e,
    }
    if part.casts:
        found["casts of experts"] = E // ep * 3 * part.d_expert * D * e
    if part.run.lora is not None:
        found["experts' adapters"] = read * part.run.lora.rank * e * sum(saves.values())
    is_saved_once = not part.layout.folded or part.entered == rows  # folded, shared experts gather what they save
    if e >= FP32 and part.run.lora is None and moe.num_shared_experts and is_saved_once:
        found["router"] -= rows * D * e  # one tensor: the shared experts save it too
    if moe.num_shared_experts:
        found |= _mlp_terms(part, "moe.shared", moe.num_shared_experts * moe.d_expert, of_experts=True)
    return found


def _kept_outputs(part: Part) -> Terms:
    """Recomputation of operators: the block's input, and what q, v, gate and down and the attention core gave."""
    c, e = part.local, part.e
    outputs = (2 * c.num_heads + c.num_kv_heads) * c.head_dim + c.d_ff
    D = part.config.d_model
    return {"block input": part.own_rows * D * part.r, "kept outputs": part.rows * (outputs + D // part.layout.tp) * e}


@lru_cache(maxsize=4096)
def waiting_terms(part: Part, layer: int) -> tuple[int, int]:
    """Bytes of a layer between the two parts of a split backward: each product's input, and its output's gradient.

    Of attention, and of what follows it.
    """
    c, D, rows = part.local, part.config.d_model, part.rows
    N, K, H, W, two = c.num_heads, c.num_kv_heads, c.head_dim, c.value_dim, part.config.family == "llama"
    numel = rows * (N * W + D)  # of o
    if mla := c.mla:
        numel += part.own_rows * (D + mla.q_rank + mla.kv_rank + mla.rope_dim)
        numel += rows * (mla.q_rank + N * H + mla.kv_rank + N * (mla.nope_dim + W))
    else:
        numel += rows * (D + (N + 2 * K) * H)
    inside = rows * (2 * D + (3 if two else 2) * c.d_ff)
    if part.config.has_experts(layer):
        moe = c.moe
        inside = round(part.routed * moe.top_k * part.load) * (2 * D + 3 * part.d_expert)
        inside += rows * (2 * D + 3 * moe.num_shared_experts * moe.d_expert) if moe.num_shared_experts else 0
    return numel * part.e + layer_terms(part, layer)[0].get("routing", 0), inside * part.e


# ---- both ends


def first_terms(part: Part) -> Terms:
    """What the embedding saves: token ids, and dropout's mask; frozen, nothing."""
    if part.run.lora is not None:
        return {}
    D, B = part.config.d_model, part.layout.micro_batch
    terms = {"token ids": part.rows * (INT64 + MASK * (part.layout.tp > 1))}
    if part.config.family != "llama":
        terms["positions"] = part.own_rows // B * INT64
    return terms | ({"embedding's dropout mask": part.own_rows * D * MASK} if part.config.dropout else {})


def last_terms(part: Part) -> tuple[Terms, int]:
    """(what final norm and head save with the targets, log-probabilities or probabilities of the loss)."""
    D, V = part.config.d_model, part.local.vocab_size
    terms = dict(zip(("input of the final norm", "its statistics"), part.norm(part.own_rows, D, part.r), strict=True))
    if part.config.family == "xlmr":
        return terms, 0
    chunks = part.run.loss_chunks
    if not part.in_layers:  # below an adapter of the head alone nothing wants a gradient
        terms = {}
    terms["input of the head"] = (
        0 if not part.saves("head") else (part.entered if part.layout.tp > 1 else part.rows) * D * part.e
    )
    terms["head in autocast's dtype"] = V * D * part.e if part.casts and part.in_layers else 0
    if part.run.lora is not None and part.saves("head"):
        terms |= {"adapter of the head": part.rows * part.run.lora.rank * part.e}
    terms["targets"] = part.rows * (INT64 + MASK * (part.layout.tp > 1))
    return terms, part.rows * V * part.fp32 // chunks


def rope_bytes(part: Part) -> int:
    """RoPE's two tables, which a stage makes for each micro-batch."""
    if part.config.family != "llama" or not part.in_layers:
        return 0
    return 2 * (part.run.seq_len // part.layout.cp) * part.config.rope_dim * part.recipe.param_bytes


# ---- for readers: one block, per token


def block_terms(
    config: ModelConfig, seq_len: int, attention: str = "fused", precision: Recipe | str = "fp32"
) -> dict[str, float]:
    """List what one block saves for each token, in bytes, by name; without recomputation.

    The residual is in the dtype of the parameters. Autocast casts the inputs of each matmul to another one.

    Raises   ValueError if attention or precision is unknown, or the model has experts or latent attention
    """
    require_dense(config, "block_terms")
    run = Run(config, Layout(), min(seq_len, config.max_seq_len), precision, attention, "cpu")
    part = Part(config, config, run.layout, run, 1, 1, 1.0, ENGINES["course"])
    first, second = layer_terms(part, 0)
    terms = {name: size for name, size in (first | second).items() if not name.startswith("casts")}
    terms["dropout masks"] += terms.pop("MLP's dropout mask")
    return terms
