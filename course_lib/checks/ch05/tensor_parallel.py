"""Graders of chapter 05, exercises 1 to 3: heads by rank, the share of communication, a row layer."""

from functools import partial

import torch.nn.functional as F

from course_lib.checks import Each, Exercise, Stops, numbers, on_ranks, several
from course_lib.comm import all_reduce
from course_lib.comm.conjugate import my_piece
from course_lib.layout.partition import check_heads as refuse_uneven

# ------------------------------------------------------------------------------------ 1. heads by rank
SHAPES = [(6, 2, 2), (8, 8, 4), (8, 4, 2), (8, 4, 8), (8, 1, 4), (12, 3, 6), (16, 4, 8), (24, 6, 3), (32, 8, 16)]
IMPOSSIBLE = [(6, 2, 4), (12, 6, 4), (32, 8, 64), (12, 4, 6), (9, 3, 2)]


def _neighbours(N, tp, rank):
    return list(range(rank * N // tp, (rank + 1) * N // tp))


def _that_they_read(queries, N, K, tp, rank):
    return sorted({head * K // N for head in queries})


def _heads(num_heads, num_kv_heads, tp_size, tp_rank, queries=_neighbours, kv=_that_they_read, refuse=refuse_uneven):
    refuse(num_heads, num_kv_heads, tp_size)
    mine = queries(num_heads, tp_size, tp_rank)
    return mine, kv(mine, num_heads, num_kv_heads, tp_size, tp_rank)


def _every_rank(rng):
    factor = rng.choice([1, 2, 3])  # more query heads for each key/value head
    shapes = [(N * factor, K, tp, rank) for N, K, tp in SHAPES for rank in range(tp)]
    return shapes + [(*shape, 0) for shape in IMPOSSIBLE]


_two_lists = several("return two lists, (query heads, key/value heads)", "query heads", "key/value heads")


def _dealt(answer, num_heads, num_kv_heads, tp_size, tp_rank):
    try:
        seen = _two_lists(answer, num_heads, num_kv_heads, tp_size, tp_rank)
    except ValueError:
        if (num_heads, num_kv_heads, tp_size) not in IMPOSSIBLE:
            raise
        return {"raises ValueError": True}
    heads = {what: list(which) if isinstance(which, range | tuple) else which for what, which in seen.items()}
    return heads | {"raises ValueError": False}


WRONG_HEADS = {
    "neighbours together, as an equal cut of the weight": {"queries": lambda N, tp, rank: list(range(rank, N, tp))},
    "every key/value head; a rank needs only those that its own query heads read": {
        "kv": lambda queries, N, K, tp, rank: list(range(K))
    },
    "key/value heads are dealt out in turns; its query heads read neighbours": {
        "kv": lambda queries, N, K, tp, rank: list(range(rank % K, K, tp))
    },
    "no key/value head; with more ranks than heads, tp / K neighbouring ranks hold the same one": {
        "kv": lambda queries, N, K, tp, rank: list(range(rank * K // tp, (rank + 1) * K // tp))
    },
    "tp must divide the query heads, and of K and tp one the other; else raise ValueError": {
        "refuse": lambda *shape: None
    },
    "a rank has those that its query heads read": Stops({"kv": lambda queries, N, K, tp, rank: [rank % K]}),
}
SAYS_HEADS = {"key/value heads": "a rank has those that its query heads read"}
check_heads = Exercise(
    _heads,
    _every_rank,
    WRONG_HEADS,
    _dealt,
    SAYS_HEADS,
    right=lambda *case: [range(heads[0], heads[-1] + 1) for heads in _heads(*case)],
)


# ------------------------------------------------------------------------------------ 2. the share of communication
def _share(num_layers, d_model, num_parameters, tp, sold_bytes_per_s, flops_per_s, **mistake):
    """The reference, and with an argument one of the mistakes. way: the share of the data sheet's number."""
    use = {"trips": 2 * (tp - 1) / tp, "way": 0.5, "flops": 6, "gpus": tp} | mistake
    sent_bytes = 4 * num_layers * use["trips"] * 2 * d_model
    return sent_bytes / (sold_bytes_per_s * use["way"]) / (use["flops"] * num_parameters / use["gpus"] / flops_per_s)


def _models(rng):
    sizes = [(rng.randrange(10, 100), 128 * rng.randrange(8, 130), rng.choice([3, 4, 6, 8])) for _ in range(5)]
    return [(n, d, 12 * n * d**2, tp, rng.uniform(1e11, 9e11), rng.uniform(1e14, 9e14)) for n, d, tp in sizes]


_WRONG_SHARE = {
    "it is half of what is right. Either the data sheet's number was used as it is (it adds both directions, and "
    "one of them bounds a ring), or only forward's two all-reduces a layer were counted": {"way": 1},
    "each all-reduce was taken to send its payload once; it is 2 (tp - 1) / tp of it": {"trips": 1},
    "each all-reduce was taken to send its payload twice; it is 2 (tp - 1) / tp of it": {"trips": 2},
    "each GPU computes only 1 / tp of the FLOPs": {"gpus": 1},
    "a bf16 number has 2 bytes": {"way": 0.25},
    "forward and backward of a token take 6 FLOPs for each parameter, 2 are forward's alone": {"flops": 2},
}
check_share = Exercise(_share, _models, _WRONG_SHARE)


# ------------------------------------------------------------------------------------ 3. a row layer
def _row(x_BSf, w_DF, b_D, group, dim=1, op="sum", bias=lambda b_D, group: b_D):
    """The reference, and with an argument one of the mistakes. bias: what is added after the sum."""
    w_Df = my_piece(w_DF, group.rank(), group.size(), dim)
    y_BSD = F.linear(x_BSf, w_Df if dim == 1 else w_Df.t())
    return (y_BSD if op is None else all_reduce(y_BSD, group, op=op)) + bias(b_D, group)


def _layers(rng):
    cases = []
    for size in (2, rng.choice([3, 4])):
        F_ = D = size * rng.randrange(3, 7)  # square: a cut along the wrong dimension has the right shape
        x_BSF, w_DF, b_D = (numbers(rng, *shape) for shape in ((2, 5, F_), (D, F_), (D,)))
        cases.append((size, Each(my_piece(x_BSF, rank, size, -1).contiguous() for rank in range(size)), w_DF, b_D))
    return cases


_PARTIAL = "this is the rank's own partial sum; the ranks' products must be summed"
_WRONG_ROW = {
    "the bias is in it once a rank; add it once, after the sum": {"bias": lambda b_D, group: b_D * group.size()},
    "the bias is missing": {"bias": lambda b_D, group: 0},
    _PARTIAL: [{"op": None}, {"op": None, "bias": lambda b_D, group: 0}],
    "the partial sums were averaged": {"op": "mean"},
    "the weight was cut along its outputs (dimension 0 of the stored weight); rows are dimension 1": {"dim": 0},
    "one all-reduce of the result sends": Stops(lambda *case: all_reduce(_row(*case), case[-1], op="mean")),
    "arguments changed": Stops(lambda x_BSf, *case: _row(x_BSf, *case) + 0 * x_BSf.add_(1).sum()),
}
_SAYS_ROW = {"bytes sent": "one all-reduce of the result sends no more"}
check_row = Exercise(
    _row,
    _layers,
    _WRONG_ROW,
    partial(on_ranks, slack=64),
    _SAYS_ROW,
    right=lambda x_BSf, w_DF, b_D, group: all_reduce(_row(x_BSf, w_DF, b_D / group.size(), group, op=None), group),
    ranks=True,
)
