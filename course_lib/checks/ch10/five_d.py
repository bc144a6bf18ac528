"""Graders of chapter 10, exercises 1 to 4: groups, whose gradient, a pipeline or ZeRO-3, the smallest cut that fits."""

from course_lib.checks import Exercise, named, several
from course_lib.layout import Layout
from course_lib.layout.mesh import AXES, Mesh

GB = 10**9


# ------------------------------------------------------------------------------------ 1. who is in which group
def groups(rank, sizes, ep, order=tuple, data="data", of_ep="ep", expert_dp="expert_dp"):
    """Its groups by axis. A mistake orders axes otherwise, names a group, or makes one of mesh, rank, ep, data."""
    mesh = Mesh(**sizes, order=tuple(order(sizes)))
    right = mesh.members(rank, ep)
    believed = {"data": data, "ep": of_ep, "expert_dp": expert_dp}
    made = {axis: of if isinstance(of, str) else of(mesh, rank, ep, right["data"]) for axis, of in believed.items()}
    return right | {axis: right[ranks] if isinstance(ranks, str) else ranks for axis, ranks in made.items()}


def meshes(rng):
    """First cp outside dp and not the usual order, then dp outside; ep is not always data's inner axis."""
    for case in range(4):
        order = ["cp", "pp", "dp", "tp"] if case == 0 else rng.sample(AXES, 4)
        if case == 1 and order.index("cp") < order.index("dp"):
            order.reverse()
        inner, outer, ep = rng.choice([(4, 2, 2), (2, 4, 4), (3, 2, 2), (2, 3, 3)])
        first, last = sorted(("dp", "cp"), key=order.index)
        sizes = {"pp": 2 if case == 0 else rng.choice([1, 2, 3]), "tp": rng.choice([2, 3]), last: inner, first: outer}
        sizes = {axis: sizes[axis] for axis in order}
        yield _rank_that_tells(Mesh(**sizes, order=tuple(order)), ep, rng), sizes, ep


def _rank_that_tells(mesh, ep, rng):
    """A rank whose run of ep has another number than its place in the run, and than the rank's place among the runs."""
    places = {rank: mesh.ranks_along(("dp", "cp"), rank).index(rank) for rank in range(1, mesh.world_size)}
    num_runs = mesh.sizes["dp"] * mesh.sizes["cp"] // ep
    return rng.choice([rank for rank, n in places.items() if n % ep and n // ep not in (n % ep, n % num_runs)])


def _same_tp(mesh, rank, ep, data):
    here = mesh.coordinates(rank)["tp"]
    return [other for other in range(mesh.world_size) if mesh.coordinates(other)["tp"] == here]


def _always(outer, inner):
    """The ranks of data, in this order of dp and cp."""
    return lambda mesh, rank, ep, data: [
        other for first in mesh.ranks_along(outer, rank) for other in mesh.ranks_along(inner, first)
    ]


def _without_gaps(mesh, rank, ep, data):
    each = len(data) // ep
    first = data.index(rank) // each * each
    return data[first : first + each]


_WRONG_GROUPS = {
    "the first axis is the outermost, the last changes fastest": {"order": reversed},
    "the axes lie in the order of `sizes`, and not always as pp, dp, cp, tp": {"order": lambda sizes: AXES},
    "ranks that differ in dp alone; those that differ in cp have the same parameters too": {"data": "dp"},
    "the right ranks, but in rank order they are others: sort them": [
        {"data": _always("dp", "cp")},
        {"data": _always("cp", "dp")},
    ],
    "those that differ in pp have other layers, and nothing of mine to sum": {"data": _same_tp},
    "ep takes neighbours of data, one after the other; these are apart, as expert_dp is": {"of_ep": "expert_dp"},
    "neighbours in the world; ep is carved out of data": {
        "of_ep": lambda mesh, rank, ep, data: [*range(rank // ep * ep, rank // ep * ep + ep)]
    },
    "these lie along the inner axis of dp and cp; ep neighbours of data can be fewer or more": {
        "of_ep": lambda mesh, rank, ep, data: min(("dp", "cp"), key=lambda axis: mesh.strides[axis])
    },
    "every so many ranks of data, not the run of neighbours that I am in": {
        "of_ep": lambda mesh, rank, ep, data: data[data.index(rank) // ep :: len(data) // ep]
    },
    "ranks with equal gaps between them; ep takes neighbours of data, one after the other": {
        "of_ep": lambda mesh, rank, ep, data: data[data.index(rank) % (len(data) // ep) :: len(data) // ep]
    },
    "these share the experts among them; expert_dp has the same ones": {"expert_dp": "ep"},
    "counted from the number of my run; my place in the run says which experts I have": {
        "expert_dp": lambda mesh, rank, ep, data: data[data.index(rank) // ep :: ep]
    },
    "neighbours in data, as if ep had gaps; neighbours have different experts": {"expert_dp": _without_gaps},
}
_groups = several("return a dict, of 'tp', 'data', 'ep' and 'expert_dp'", "tp", "data", "ep", "expert_dp")
check_groups = Exercise(groups, meshes, _WRONG_GROUPS, _groups)


# ------------------------------------------------------------------------------------ 2. whose gradient
KINDS = ("matrices", "norms", "experts")


def _summed_over(kind, rank, layout, **mistakes):
    """The ranks that have a part of the gradient. A mistake names another group, for a kind or for a kind with SP."""
    groups = layout.members(rank)
    for axis in ("data", "expert_dp"):
        groups[f"{axis} x tp"] = [one for other in groups["tp"] for one in layout.members(other)[axis]]
    groups["world"], groups["data or tp"] = range(layout.world_size), {*groups["data"], *groups["tp"]}
    norms = "data x tp" if layout.sequence_parallel else "data"
    name = {"matrices": "data", "norms": norms, "experts": "expert_dp"}[kind]
    return groups[mistakes.get(kind + "_with_SP" * layout.sequence_parallel, mistakes.get(kind, name))]


def _watch_kinds(answer, rank, tp):
    seen = {}
    for sequence_parallel in (True, False):
        layout = Layout(dp=4, cp=2, tp=tp, pp=2, ep=4, sequence_parallel=sequence_parallel)
        for kind in KINDS:
            ranks = answer(kind, rank, layout)
            seen[f"{layout}: {kind}"] = None if ranks is None else sorted(ranks)
    return seen


_WRONG_KINDS = {
    "dp alone: ranks of cp have the same parameters and saw other tokens": {"matrices": "dp"},
    "every rank of the stage: those of other tp ranks hold another part of the matrix": {"matrices": "data x tp"},
    "tp alone: the other ranks of data saw other sequences": {"norms": "tp"},
    "with sequence parallelism each rank of tp saw only its own tokens": {"norms": "data"},
    "data times tp, not data and tp joined: those that differ from me in both have a part too": {
        "norms_with_SP": "data or tp"
    },
    "without sequence parallelism each rank of tp has the whole gradient already": {"norms": "data x tp"},
    "tp is for sequence parallelism alone: without it, ranks of tp ran all tokens through the norm": {
        "norms": "data or tp",
        "norms_with_SP": "data x tp",
    },
    "most ranks of data hold other experts": {"experts": "data"},
    "these brought their tokens already; the same experts are elsewhere": {"experts": "ep"},
    "experts are cut over tp, as matrices are: other ranks of tp hold another part": {"experts": "expert_dp x tp"},
    "ranks of other stages have other layers, and no part of this one": dict.fromkeys(KINDS, "world"),
    "this rank's own part counts too": lambda kind, rank, layout: {*_summed_over(kind, rank, layout)} - {rank},
}
check_summed_over = Exercise(
    _summed_over, lambda rng: [(rng.randrange(16 * tp), tp) for tp in rng.choices([2, 4])], _WRONG_KINDS, _watch_kinds
)


# ------------------------------------------------------------------------------------ 3. a pipeline or ZeRO-3
def sent(p, micro_batches, tokens, d_model, numel, itemsize, pp=None, zero3=lambda each, p: (3 * each, p - 1)):
    """(bytes of a pipeline, bytes of ZeRO-3). Mistakes: pp makes another number, zero3 other (trips, pieces of one)."""
    of_pp = 2 * micro_batches * tokens * d_model * itemsize
    trips, pieces = zero3(micro_batches // p, p)
    return pp(of_pp, p) if pp else of_pp, trips * pieces * (numel // p) * itemsize


def steps(rng):
    for case in range(3):
        p, itemsize = rng.choice([6, 8, 16]), rng.choice([2, 4]) if case else 4
        each = rng.choice([2, 5, 6, 7, 8])  # with other p and each, two mistakes would give one number
        tokens, d_model, numel = 128 * rng.randrange(1, 40), 64 * rng.randrange(4, 60), 1000 * rng.randrange(100, 999)
        yield p, p * each, tokens, d_model, p * numel, itemsize


WRONG_SENT = {
    "PP sends gradients back as well": {"pp": lambda pp, p: pp // 2},
    "PP: every micro-batch passes every rank, not 1 / p of them": {"pp": lambda pp, p: pp // p},
    "PP: what arrives is counted too; sent are activations onward and gradients back": {"pp": lambda pp, p: 2 * pp},
    "PP: a rank in the middle sends both ways always; the ends do not": {"pp": lambda pp, p: pp * (p - 1) // p},
    "PP: these are numbers; each has itemsize bytes": lambda *case: (sent(*case[:-1], 1)[0], sent(*case)[1]),
    "ZeRO-3: a rank works on its own micro-batches, 1 / p of all": {"zero3": lambda each, p: (3 * each * p, p - 1)},
    "ZeRO-3 gathers twice, forward and backward, and reduces once": {"zero3": lambda each, p: (2 * each, p - 1)},
    "ZeRO-3: a rank's own piece is not sent to itself": {"zero3": lambda each, p: (3 * each, p)},
    "ZeRO-3 gathers anew for each micro-batch": {"zero3": lambda each, p: (3, p - 1)},
    "ZeRO-3 reduces gradients after each micro-batch: it keeps no whole ones": {
        "zero3": lambda each, p: (2 * each + 1, p - 1)
    },
    "ZeRO-3: gradients take one trip, a reduce-scatter; an all-reduce would be two": {
        "zero3": lambda each, p: (4 * each, p - 1)
    },
    "ZeRO-3: these are numbers; each has itemsize bytes": lambda *case: (sent(*case)[0], sent(*case[:-1], 1)[1]),
}
check_pp_and_zero3 = Exercise(
    sent, steps, WRONG_SENT, several("return a pair, of PP and of ZeRO-3", "what PP sends", "what ZeRO-3 sends")
)


# ------------------------------------------------------------------------------------ 4. the smallest cut that fits
def _smallest_cut(numel, gpus, per_node, limit, sharded=12, pp_first=False, dp_is_all=False, then=lambda cut, *_: cut):
    """(tp, pp, dp), powers of two, or None. Mistakes: bytes sharded of 16, pp first, sharded over all, another end."""
    cut = 1
    while cut <= gpus:
        tp = 1 if pp_first else min(cut, per_node)
        dp = gpus // cut
        if (16 - sharded + sharded / (gpus if dp_is_all else dp)) * numel / cut <= limit:
            return then((tp, cut // tp, dp), gpus, per_node)
        cut *= 2
    return then(None, gpus, per_node)


def clusters(rng):
    """In the first three another mistake shows in each: no sharding, tp beyond a node, sharded over all GPUs."""
    for case in range(6):
        gpus, per_node, numel = 8 * 2 ** rng.randrange(2, 6), rng.choice([4, 8]), rng.randrange(5, 120) * GB
        cut = {0: 2, 1: 2 * per_node, 2: gpus // 2}.get(case, 1)
        limit = (4 + 12 * (1 if case == 2 else cut) / gpus) * numel / cut * (1.05 if case == 2 else 1.02)
        yield numel, gpus, per_node, int(limit if case < 3 else numel * rng.uniform(0.3, 18))


_WRONG_CUT = {
    "with ZeRO-1 the optimizer's 12 bytes are divided by dp as well": {"sharded": 0},
    "tp must stay inside a node": lambda numel, gpus, per_node, limit: _smallest_cut(numel, gpus, gpus, limit),
    "it fits, but a smaller cut fits too: more of the GPUs can be dp": {
        "then": lambda cut, gpus, per_node: cut and (per_node, gpus // per_node, 1)
    },
    "of equal cuts the one with the larger tp, as far as a node goes": {"pp_first": True},
    "with ZeRO-1 parameters and gradients, 4 bytes, are whole on each rank of dp": {"sharded": 16},
    "dp is what tp and pp leave: the more they cut, the less there is to shard over": {"dp_is_all": True},
    "nothing fits, whatever is cut": {"then": lambda cut, gpus, per_node: cut or (per_node, gpus // per_node, 1)},
    "a cut over more than a node fits, and your function says that nothing does": {
        "then": lambda cut, *_: cut if cut and cut[1] == 1 else None
    },
    "its product is not the number of GPUs: dp is what tp and pp together leave": {
        "then": lambda cut, gpus, _: cut and (*cut[:2], gpus // cut[0])
    },
}
check_smallest_cut = Exercise(_smallest_cut, clusters, _WRONG_CUT, named("(tp, pp, dp)", none="that nothing fits"))
