"""What each operator of the course's models makes, saves and frees: the rows of the ledger.

Every function mirrors one operator of the forward pass: it makes the operator's outputs, says what autograd saves, and
its inner `backward` makes what the operator's own backward makes, in that order. A closure holds sizes alone, never a
tensor, for a tensor that it held would not be freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.config import MoeConfig
from course_lib.memory.ledger import Ledger, Tensor, Weight

FP32 = 4


def output(L: Ledger, numel: int, itemsize: int, name: str, inputs: Sequence, saved: list[Tensor], backward) -> Tensor:
    """One output and the node that made it."""
    node = L.node(name, inputs, saved, backward)
    y = L.make(numel, itemsize)
    y.node = node
    return y


def linear(L: Ledger, x: Tensor, weight: Weight, bias: Weight | None, rows: int) -> Tensor:
    """y = x w + b. Saves x; in a backward of two parts (weight_gradients.py) x and the gradient wait for the second."""
    wants_x, numel, biases = x.node is not None, x.numel, [bias] if bias else []
    if weight.frozen:  # its gradient, which alone would need x, is not wanted
        y = L.make(rows * (weight.numel * rows // x.numel), x.itemsize)
        y.node = L.node(weight.name, [x], [], lambda saved, grads: [L.make(numel, grads[0].itemsize)])
        return y
    place = L.place_in_queue([weight, *biases])

    def backward(saved, grads):
        e = grads[0].itemsize
        if place is not None:
            L.wait_in(place, [saved[0], grads[0]])
            return [L.make(numel, e) if wants_x else None, *[None] * (1 + len(biases))]
        grad_x, grad_w = L.make(numel, e) if wants_x else None, L.make(weight.numel, e)
        grad_w.storage.borrowed = True  # a transposed view: autograd adds a tied weight's other gradient not in place
        return [grad_x, grad_w, *(L.make(each.numel, e) for each in biases)]

    inputs = [x, weight, *biases]
    return output(L, rows * (weight.numel * rows // x.numel), x.itemsize, weight.name, inputs, [x], backward)


def residual(L: Ledger, x: Tensor, y: Tensor) -> Tensor:
    """x + y. Saves nothing; both gradients are one tensor."""
    return output(L, x.numel, x.itemsize, "residual", [x, y], [], lambda saved, grads: [grads[0], grads[0].view()])


def rms_norm(L: Ledger, x: Tensor, weight: Weight, rows: int, weight_itemsize: int = 0) -> Tensor:
    """RMSNorm, in FP32 inside. Saves x and one statistic of a row. A weight wider than x makes the output as wide."""
    n, e = x.numel, x.itemsize
    wide = max(e, FP32)
    copies = e != wide  # into FP32, and back

    def backward(saved, grads):
        x32 = L.make(n, wide) if copies else None
        x_hat = L.make(n, wide)
        x32 = None
        by_grad = L.make(n, wide)
        grad_w = L.make(weight.numel, e)
        by_grad = None
        grad_x_hat = L.make(n, wide)
        for_mean = L.make(n, wide)
        for_mean = None
        along = L.make(n, wide)
        difference = L.make(n, wide)
        along = None
        grad_x = L.make(n, wide)
        del difference
        if copies:
            narrow = L.make(n, e)
            grad_x = narrow
        del x32, x_hat, by_grad, grad_x_hat, for_mean, along
        return [grad_x, grad_w]

    L.doing = weight.name
    x32 = L.make(n, wide) if copies else None
    squares = L.make(n, wide)
    inverse = L.make(rows, wide)
    squares = None
    normal = L.make(n, wide)
    if copies:
        narrow = L.make(n, e)
        normal = narrow
        del narrow
    y = L.make(n, max(e, weight_itemsize))
    y.node = L.node(weight.name, [x, weight], [x, inverse], backward)
    del x32, squares, normal
    return y


def layer_norm(L: Ledger, x: Tensor, weight: Weight, bias: Weight, rows: int) -> Tensor:
    """LayerNorm. Saves x and two statistics of a row."""
    n, e = x.numel, x.itemsize
    statistics = L.make(2 * rows, e)

    def backward(saved, grads):
        return [L.make(n, e), L.make(weight.numel, e), L.make(bias.numel, e)]

    return output(L, n, e, weight.name, [x, weight, bias], [x, statistics], backward)


def rotate(L: Ledger, x: Tensor, tables: Tensor) -> Tensor:
    """RoPE. Saves the tables alone, in whose dtype the output is if that is the wider."""
    n, e = x.numel, x.itemsize
    wide = max(e, tables.itemsize)

    def backward(saved, grads):
        by_sine, turned, by_cosine = L.make(n, wide), L.make(n // 2, e), L.make(n, wide)
        grads.clear()
        grad_x = L.make(n, e)
        del by_sine, turned, by_cosine
        return [grad_x]

    node = L.node("RoPE", [x], [tables], backward)
    by_cosine, turned = L.make(n, wide), L.make(n // 2, e)
    joined = L.make(n, e)
    turned = None
    by_sine = L.make(n, wide)
    joined = None
    y = L.make(n, wide)
    y.node = node
    del by_cosine, by_sine, turned, joined
    return y


def fused_core(L: Ledger, q: Tensor, k: Tensor, v: Tensor, rows_of_heads: int) -> Tensor:
    """A flash kernel. Saves q, k, v, its output, and one FP32 number for each row of each head."""
    sizes, e = [each.numel for each in (q, k, v)], q.itemsize
    out, lse = L.make(q.numel, e), L.make(rows_of_heads, FP32)
    out.node = L.node(
        "attention core", [q, k, v], [q, k, v, out, lse], lambda saved, grads: [L.make(n, e) for n in sizes]
    )
    return out


def pointwise(L: Ledger, x: Tensor, name: str) -> Tensor:
    """SiLU or GELU. Saves its input."""
    n, e = x.numel, x.itemsize
    return output(L, n, e, name, [x], [x], lambda saved, grads: [L.make(n, e)])


def product(L: Ledger, x: Tensor, y: Tensor, name: str) -> Tensor:
    """x * y, of equal size. Saves of each what the other's gradient needs."""
    n, e, wanted = x.numel, x.itemsize, [one.node is not None for one in (x, y)]
    saved = [one for one, want in zip((y, x), wanted, strict=True) if want]
    return output(
        L, n, e, name, [x, y], saved, lambda saved, grads: [L.make(n, e) if want else None for want in wanted]
    )


def embedding(L: Ledger, weight: Weight, tokens: Tensor, numel: int, itemsize: int) -> Tensor:
    """Rows of a table. Saves the token ids; its gradient is as large as the table."""
    return output(
        L, numel, itemsize, weight.name, [weight], [tokens], lambda saved, grads: [L.make(weight.numel, itemsize)]
    )


def cross_entropy(L: Ledger, logits: Tensor, targets: Tensor, rows: int) -> Tensor:
    """The loss of each token, in FP32. Saves the log-probabilities and the targets."""
    n, e = logits.numel, logits.itemsize
    wide = max(e, FP32)

    def to_fp32_backward(saved, grads):
        return [L.make(n, e)]

    if e != wide:
        logits = output(L, n, wide, "logits in FP32", [logits], [], to_fp32_backward)
    log_p = L.make(n, wide, "logits")
    log_p.node = L.node("log-softmax", [logits], [log_p], lambda saved, grads: [L.make(n, wide)])
    del logits
    nll = output(L, rows, wide, "loss", [log_p], [log_p, targets], lambda saved, grads: [L.make(n, wide)])
    return nll


# --- matrices cut over tp


def columns(
    L: Ledger, x: Tensor, weights: list[Weight], biases: list[Weight], full_rows: int, residual: Residual
) -> list[Tensor]:
    """Products of one input, in one node (parallel/linear.py).

    Saves x, or what the residual stream gathered of it, once.
    """
    regather, e, width = residual.regather, x.itemsize, x.numel // residual.own_rows
    entered = residual.enter(L, x)
    sizes, all_weights = [full_rows * (weight.numel // width) for weight in weights], [*weights, *biases]
    place = L.place_in_queue(all_weights)

    def backward(saved, grads):
        x, grads_of = saved[0], grads
        pieces = residual.start_enter(L, x) if regather else None
        partial = L.make(full_rows * width, e)
        for _ in weights[1:]:
            L.make(full_rows * width, e)
        piece = residual.sum_input_gradient(L, partial)
        x_full = residual.end_enter(L, pieces) if regather else x
        if place is not None:
            L.wait_in(place, [x_full, *grads_of])
            return [piece, *[None] * len(all_weights)]
        made = [L.make(weight.numel, e) for weight in all_weights]
        del grads_of, x_full, pieces, x
        return [piece, *made]

    node_inputs = [x, *all_weights]
    outputs = [L.make(size, e) for size in sizes]
    node = L.node(weights[0].name, node_inputs, [x if regather else entered], backward)
    for index, y in enumerate(outputs):
        y.node, y.output = node, index
    return outputs


class Residual:
    """Activations between blocks on a rank of tp: whole (`sharded` False), or each rank's tokens (True)."""

    def __init__(self, batch: int, rows: int, own_rows: int, sharded: bool, regather: bool):
        self.rows, self.own_rows, self.sharded, self.regather = rows, own_rows, sharded, regather
        self.copies = batch > 1  # tokens of several sequences do not lie together: sent and received with a copy

    def full(self, x: Tensor) -> int:
        return x.numel // self.own_rows * self.rows

    def start_enter(self, L: Ledger, x: Tensor) -> Tensor:
        """All tokens as they come, rank by rank."""
        return L.make(self.full(x), x.itemsize)

    def end_enter(self, L: Ledger, pieces: Tensor) -> Tensor:
        """And in their order."""
        return L.make(pieces.numel, pieces.itemsize) if self.copies else pieces

    def enter(self, L: Ledger, x: Tensor) -> Tensor:
        return self.end_enter(L, self.start_enter(L, x)) if self.sharded else x

    def scatter(self, L: Ledger, x: Tensor) -> Tensor:
        """This rank's tokens of a sum."""
        sent = L.make(x.numel, x.itemsize) if self.copies else None
        piece = L.make(x.numel // self.rows * self.own_rows, x.itemsize)
        del sent
        return piece

    def sum_input_gradient(self, L: Ledger, partial: Tensor) -> Tensor:
        return self.scatter(L, partial) if self.sharded else partial

    def leave(self, L: Ledger, x: Tensor) -> Tensor:
        """The sum of the ranks' parts of a row's output."""
        if self.sharded:
            y = self.scatter(L, x)
            y.node = L.node("reduce-scatter", [x], [], lambda saved, grads: [self.enter(L, grads[0])])
        else:
            y = L.make(x.numel, x.itemsize)
            y.node = L.node("all-reduce", [x], [], lambda saved, grads: [grads[0]])
        return y


def gather_in(L: Ledger, x: Tensor, residual: Residual) -> Tensor:
    """All tokens; backward sums and keeps this rank's."""
    y = residual.enter(L, x)
    y.node = L.node("gather", [x], [], lambda saved, grads: [residual.scatter(L, grads[0])])
    return y


def copy_in(L: Ledger, x: Tensor) -> Tensor:
    """x itself; backward sums the ranks' gradients into a copy."""
    n, e = x.numel, x.itemsize
    return Tensor(x.storage, n, L.node("copy in", [x], [], lambda saved, grads: [L.make(n, e)]))


def embed_mine(L: Ledger, weight: Weight, rows: int, numel: int, e: int) -> Tensor:
    """The rows of this rank's part of the vocabulary, zeros for all others. Saves whose each token is, and where."""
    mine, place = L.make(rows, 1), L.make(rows, 8)
    x = embedding(L, weight, place, numel, e)
    return output(L, numel, e, weight.name, [x], [mine], lambda saved, grads: [L.make(numel, e)])


def vocab_cross_entropy(L: Ledger, logits: Tensor, rows: int) -> Tensor:
    """The loss from logits in pieces. Saves this rank's probabilities."""
    n, e = logits.numel, logits.itemsize
    wide = max(e, FP32)

    def backward(saved, grads):
        grad = L.make(n, wide)
        return [grad if e == wide else L.make(n, e)]

    L.doing = "loss"
    copy = L.make(n, wide) if e != wide else None
    mine, place = L.make(rows, 1), L.make(rows, 8)
    probability = L.make(n, wide, "logits")
    of_rows = [L.make(rows, wide) for _ in range(5)]  # maxima, my target's logit, sums over ranks, a logarithm
    loss = L.make(rows, wide)
    loss.node = L.node("loss", [logits], [probability, mine, place], backward)
    del copy, of_rows
    return loss


# --- attention over cp


def ring_core(L: Ledger, q: Tensor, k: Tensor, v: Tensor, heads: Heads, exchange: Exchange) -> Tensor:
    """Attention over blocks of keys that come from other ranks (parallel/tiles.py). Saves q, k and v, output, sums.

    Where values and keys differ in length, the kernel wants the shorter filled up: one tile's at a time.
    """
    e, wide, kv_numel = q.itemsize, max(q.itemsize, FP32), k.numel + v.numel
    q_numel, k_numel, v_numel, rows = q.numel, k.numel, v.numel, heads.rows
    longest = max(k_numel, v_numel)
    q_long, out_numel = q_numel * longest // k_numel, q_numel * v_numel // k_numel

    def filled_up(queries: float, keys: float, of_queries: list[int], of_keys: list[int]) -> list[Tensor]:
        short = [(q_long, queries) for n in of_queries if n < q_long]
        short += [(longest, keys) for n in of_keys if n < longest]
        return [L.make(round(n * share), e) for n, share in short]

    def backward(saved, grads):
        home, dq, held, dkv, last = exchange.home(L, kv_numel, wide), None, None, None, None
        blocks = exchange.blocks(L, saved[1])
        for block, (queries, keys) in zip(blocks, exchange.tiles, strict=True):
            last = block  # it and its dkv are there until the next take their names, or until all is summed
            if queries == 0:
                home.add(L.make(kv_numel, wide))
                continue
            tensors = filled_up(queries, keys, [out_numel, q_numel, out_numel], [k_numel, v_numel])
            part = [L.make(round(q_long * queries), e), *(L.make(round(longest * keys), e) for _ in "kv")]
            del tensors
            held = part
            if dq is None:
                dq = L.make(q_numel, wide) if wide != e else part[0]
            stacked = L.make(round(kv_numel * keys), e)
            dkv = L.make(stacked.numel, wide) if wide != e else stacked
            del stacked
            if keys < 1:
                padded = L.make(kv_numel, wide)
                dkv = padded
                del padded
            home.add(dkv)
            del part, block
        total = home.total()
        del home, blocks, last, held, dkv
        if wide == e:
            return [dq, L.make(k_numel, e), L.make(v_numel, e)] if total else []
        made = [L.make(n, e) for n in (q_numel, k_numel, v_numel)]
        del dq, total
        return made

    L.doing = "attention core"
    kv = L.make(kv_numel, e)
    out = lse = None
    for block, (queries, keys) in zip(exchange.blocks(L, kv), exchange.tiles, strict=True):
        if queries == 0:
            continue
        tensors = filled_up(queries, keys, [q_numel], [k_numel, v_numel])
        part, part_lse = L.make(round(q_long * queries), e), L.make(round(rows * queries), FP32)
        if out_numel != q_long:
            values = L.make(round(out_numel * queries), e)
            part = values
            del values
        del tensors
        if wide != e:
            widened = L.make(part.numel, wide)
            part = widened
            del widened
        if out is None:
            out, lse = part, part_lse
        else:
            merged = [L.make(part.numel, wide) for _ in range(3)]
            del merged
        del part, part_lse, block
    if wide != e:
        narrow = L.make(out_numel, e)
        out = narrow
        del narrow
    out.node = L.node("attention core", [q, k, v], [q, kv, out, lse], backward)
    return out


class Heads:
    """Rows of all heads: what the log-sum-exp has one number for."""

    def __init__(self, rows: int):
        self.rows = rows


class Exchange:
    """How the blocks of other ranks come, and where their gradients go.

    tiles   of each block, this rank's first: which shares of my queries and of its keys meet
    """

    def __init__(self, method: str, tiles: list[tuple[float, float]]):
        self.method, self.tiles = method, tiles

    def blocks(self, L: Ledger, kv: Tensor):
        size = len(self.tiles)
        if self.method == "all_gather":
            everybody = L.make(kv.numel * size, kv.itemsize)
            for _ in range(size):
                yield everybody
            return
        sent = None  # what the last step sent, there until the next one sends
        for step in range(size):
            came = L.make(kv.numel, kv.itemsize) if step < size - 1 else None
            sent = kv if came is not None else None
            yield kv
            kv = came if came is not None else kv
        del sent

    def home(self, L: Ledger, kv_numel: int, itemsize: int) -> DKVRotation:
        return DKVRotation(L, self.method, len(self.tiles), kv_numel, itemsize)


class DKVRotation:
    """Gradients of other ranks' keys and values: from rank to rank, or side by side."""

    def __init__(self, L: Ledger, method: str, size: int, kv_numel: int, itemsize: int):
        self.L, self.method, self.size, self.kv_numel, self.itemsize = L, method, size, kv_numel, itemsize
        self.own = self.on_the_way = None

    def add(self, dkv: Tensor) -> None:
        if self.method == "all_gather":
            self.own = self.own or self.L.make(self.kv_numel * self.size, self.itemsize)
        elif self.own is None:
            self.own = dkv
        else:
            self.on_the_way = (dkv, self.L.make(self.kv_numel, self.itemsize))

    def total(self) -> Tensor:
        return self.L.make(self.kv_numel, self.itemsize) if self.method == "all_gather" else self.own


def tokens_for_heads(L: Ledger, xs: list[Tensor], orders: bool, batch: int) -> list[Tensor]:
    """Ulysses: all heads of my tokens become my heads of all tokens."""
    sizes, e = [x.numel for x in xs], xs[0].itemsize
    node = L.node(
        "tokens for heads",
        xs,
        [],
        lambda saved, grads: _heads_for_tokens(L, [g.numel for g in grads], e, orders, batch),
    )
    L.doing = "tokens for heads"
    made = _tokens_for_heads(L, sizes, e, orders)
    for index, y in enumerate(made):
        y.node, y.output = node, index
    return made


def heads_for_tokens(L: Ledger, x: Tensor, orders: bool, batch: int) -> Tensor:
    """And back. Attention's next matrix reads tokens, so they are copied into their order."""
    n, e = x.numel, x.itemsize
    node = L.node("heads for tokens", [x], [], lambda saved, grads: _tokens_for_heads(L, [n], e, orders))
    L.doing = "heads for tokens"
    (received,) = _heads_for_tokens(L, [n], e, orders, batch)
    y = L.make(n, e)
    y.node = node
    del received
    return y


def _tokens_for_heads(L: Ledger, sizes: list[int], e: int, orders: bool) -> list[Tensor]:
    received = []
    for n in sizes:
        pieces = L.make(n, e)
        received.append(L.make(n, e))
        del pieces
    made = []
    for n in sizes:
        arranged = L.make(n, e)
        if orders:
            ordered = L.make(n, e)
            arranged = ordered
            del ordered
        made.append(arranged)
        del arranged
    return made


def _heads_for_tokens(L: Ledger, sizes: list[int], e: int, orders: bool, batch: int) -> list[Tensor]:
    received = []
    for n in sizes:
        chosen = L.make(n, e) if orders else None
        pieces = L.make(n, e)
        received.append(L.make(n, e))
        del pieces, chosen
    if batch == 1:
        return received
    return [L.make(n, e) for n in sizes]


# --- copies, and rows of experts


def copy(L: Ledger, x: Tensor, name: str, saved_bytes: int = 0, itemsize: int | None = None) -> Tensor:
    """x in other order, dtype or place; backward makes as many bytes of x. `saved_bytes`: of places that it saves."""
    n, e = x.numel, x.itemsize
    saved = [L.make(saved_bytes, 1)] if saved_bytes else []
    return output(L, n, itemsize or e, name, [x], saved, lambda saved, grads: [L.make(n, e)])


def pick(L: Ledger, x: Tensor, numel: int, num_places: int, name: str, places: Tensor | None = None) -> Tensor:
    """Rows of x by their places. Saves the places; backward adds the rows' gradients into zeros like x."""
    n, e = x.numel, x.itemsize
    places = L.make(num_places, 8) if places is None else places
    return output(L, numel, e, name, [x], [places], lambda saved, grads: [L.make(n, e)])


def part_of(L: Ledger, x: Tensor, numel: int) -> Tensor:
    """A part of x, where it is. Backward puts its gradient among zeros."""
    n, e = x.numel, x.itemsize
    return Tensor(x.storage, numel, L.node("part", [x], [], lambda saved, grads: [L.make(n, e)]))


def exchange_rows(L: Ledger, x: Tensor, numel: int, name: str) -> Tensor:
    """Rows to other ranks: what comes has another size; backward sends gradients home."""
    n, e = x.numel, x.itemsize
    return output(L, numel, e, name, [x], [], lambda saved, grads: [L.make(n, e)])


def join(L: Ledger, xs: list[Tensor], name: str) -> Tensor:
    """Parts one after the other. Backward gives views."""
    sizes, e = [x.numel for x in xs], xs[0].itemsize

    def backward(saved, grads):
        return [Tensor(grads[0].storage, n) for n in sizes]

    return output(L, sum(sizes), e, name, xs, [], backward)


def split(L: Ledger, x: Tensor, sizes: list[int], name: str) -> list[Tensor]:
    """Views of x. Backward puts the parts' gradients side by side."""
    n, e = x.numel, x.itemsize
    node = L.node(name, [x], [], lambda saved, grads: [L.make(n, e)])
    parts = [Tensor(x.storage, size, node, index) for index, size in enumerate(sizes)]
    return parts


def weigh_and_add(L: Ledger, y: Tensor, weights: Tensor, numel: int, rows: int) -> Tensor:
    """Each token's weighted sum of its rows. Saves the rows and their weights."""
    n, e = y.numel, y.itemsize

    def backward(saved, grads):
        grad_y = L.make(n, e)
        L.make(n, e)
        return [grad_y, L.make(rows, e)]

    node = L.node("weights of rows", [y, weights], [y, L.make(rows, e), L.make(rows, 8)], backward)
    weighted = L.make(n, e)
    weighted.node = node
    zeros = L.make(numel, e)
    total = output(L, numel, e, "sum of rows", [weighted], [L.make(rows, 8)], lambda saved, grads: [L.make(n, e)])
    del zeros
    return total


def route(L: Ledger, x: Tensor, weight: Weight, moe: MoeConfig, tokens: int) -> Tensor:
    """The router, in FP32: scores, the choice, and the weights of the choices, which it gives."""
    n, e, experts, k = x.numel, x.itemsize, moe.num_experts, moe.top_k
    wide = max(e, FP32)
    narrow = e != wide
    x32 = copy(L, x, "router's input in FP32", itemsize=wide) if narrow else x

    def backward(saved, grads):
        grad_x = L.make(n, wide)
        if weight.frozen:
            return [grad_x, None]
        grad_w = L.make(weight.numel, wide)
        return [grad_x, L.make(weight.numel, e) if narrow else grad_w]

    weight32 = L.make(weight.numel, wide) if narrow else None
    saved = [*([] if weight.frozen else [x32]), *([weight32] if narrow else [])]
    logits = output(L, tokens * experts, wide, weight.name, [x32, weight], saved, backward)
    shares = 0 if moe.score != "sigmoid" or L.runs_again else tokens * experts
    held = 8 if L.runs_again else 8 + 4 + 1  # ids; of a first run the module holds weights and what fits as well
    scores = output(
        L, tokens * experts, wide, "scores", [logits], [], lambda saved, grads: [L.make(tokens * experts, wide)]
    )
    saved = [scores, L.make(shares, wide)]
    saved.append(L.make(tokens * (k * held + (k + 1) * FP32 * moe.normalise_weights), 1))
    chosen = output(
        L, tokens * k, wide, "choice", [scores], saved, lambda saved, grads: [L.make(tokens * experts, wide)]
    )
    return chosen


def repeated(L: Ledger, x: Tensor, times: int) -> Tensor:
    """The same bytes for every head; backward adds the heads' gradients up."""
    n, e = x.numel, x.itemsize
    return Tensor(x.storage, n * times, L.node("one key for all heads", [x], [], lambda saved, grads: [L.make(n, e)]))


def biased(L: Ledger, x: Tensor, bias: Weight) -> Tensor:
    """x + b, after the sum over ranks."""

    def backward(saved, grads):
        return [grads[0], L.make(bias.numel, grads[0].itemsize)]

    return output(L, x.numel, x.itemsize, bias.name, [x, bias], [], backward)


def low_rank(L: Ledger, x: Tensor, y: Tensor, a: Weight, b: Weight, rows: int) -> Tensor:
    """y + scale x a b: an adapter beside a frozen matrix (lora.py), in the dtype of y."""
    n, e = y.numel, y.itemsize
    if x.itemsize == e:
        through = linear(L, linear(L, x, a, None, rows), b, None, rows)
    else:  # autocast casts x anew, and what transposes the matrices at every use
        through = linear_of_cast(L, cast(L, x, e), cast_weight(L, a, e), None, rows, a.name)
        through = linear_of_cast(L, through, cast_weight(L, b, e), None, rows, b.name)
    scaled = output(L, n, e, "adapter's scale", [through], [], lambda saved, grads: [L.make(n, e)])
    return residual(L, y, scaled)


def cast(L: Ledger, x: Tensor, itemsize: int) -> Tensor:
    """x in another dtype; x itself if it has it."""
    if x.itemsize == itemsize:
        return x
    n, e = x.numel, x.itemsize
    return output(L, n, itemsize, "cast", [x], [], lambda saved, grads: [L.make(n, e)])


def cast_weight(L: Ledger, weight: Weight, itemsize: int) -> Tensor:
    """A matrix in another dtype, as autocast makes it: once for a forward pass, of a frozen one at every use."""
    numel = weight.numel
    node = L.node(weight.name, [weight], [], lambda saved, grads: [L.make(numel, FP32)])
    copied = L.make(numel, itemsize)
    copied.node = node
    return copied


def linear_of_cast(L: Ledger, x: Tensor, weight: Tensor, bias: Weight | None, rows: int, name: str) -> Tensor:
    """y = x w + b with w a tensor. Saves of x and w what the other's gradient needs."""
    n, m, e, biases = x.numel, weight.numel, x.itemsize, [bias] if bias and not bias.frozen else []
    wants_x, wants_w = x.node is not None, weight.node is not None

    def backward(saved, grads):
        grad_x, grad_w = L.make(n, e) if wants_x else None, L.make(m, e) if wants_w else None
        return [grad_x, grad_w, *(L.make(each.numel, FP32) for each in biases)]

    saved = [*([x] if wants_w else []), *([weight] if wants_x else [])]
    return output(L, rows * (m * rows // n), e, name, [x, weight, *biases], saved, backward)


def dropout(L: Ledger, x: Tensor) -> Tensor:
    """Dropout. Saves a mask of one byte an element."""
    n, e = x.numel, x.itemsize
    return output(L, n, e, "dropout", [x], [L.make(n, 1)], lambda saved, grads: [L.make(n, e)])


def standard_core(
    L: Ledger, q: Tensor, k: Tensor, v: Tensor, scores: int, softmax_itemsize: int, drops: bool
) -> Tensor:
    """Standard attention, which materializes the scores. Saves them after the softmax, and q, k and v of every head."""
    n, e, sizes = q.numel, q.itemsize, [x.numel for x in (q, k, v)]
    out_numel = n // k.numel * v.numel

    def backward(saved, grads):
        grad = L.make(scores, e)
        grad_v = L.make(sizes[2], e)
        if drops or softmax_itemsize != e:
            undropped = L.make(scores, softmax_itemsize)
            grad = undropped
            del undropped
        of_scores = L.make(scores, softmax_itemsize)
        grad = L.make(scores, e)
        del of_scores
        grad_q, grad_k = L.make(sizes[0], e), L.make(sizes[1], e)
        del grad
        return [grad_q, grad_k, grad_v]

    L.doing = "attention core"
    q_together, k_full, v_full = L.make(n, e), L.make(n, e), L.make(out_numel, e)  # head by head, for batched products
    raw = L.make(scores, e)
    scaled = L.make(scores, e)
    del raw
    masked = L.make(scores, e)
    del scaled
    weights = L.make(scores, softmax_itemsize)
    saved = [q_together, k_full, v_full, weights]
    if drops or softmax_itemsize != e:
        saved.append(L.make(scores, e))
    if drops:
        saved.append(L.make(scores, 1))
    del masked
    out = L.make(out_numel, e)
    out.node = L.node("attention core", [q, k, v], saved, backward)
    return out
