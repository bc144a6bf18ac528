"""Graders of chapter 10, exercises 1 to 4: groups, whose gradient, a pipeline or ZeRO-3, the smallest cut that fits."""

from functools import partial

from course_lib.checks.core import CheckFailed, expect_equal, fail, grader
from course_lib.layout import Layout
from course_lib.layout.mesh import AXES, Mesh

GB = 10**9


# ------------------------------------------------------------------------------------ 1. who is in which group
@grader
def check_groups(answer, rng):
    """Groups along tp, data, ep and expert_dp, for sizes in any order of the axes."""
    for case in range(4):
        sizes, ep = _sizes_that_tell(case, rng)
        mesh = Mesh(**sizes, order=tuple(sizes))
        rank = _rank_that_tells(mesh, ep, rng)
        got = answer(rank, dict(sizes), ep)
        if not isinstance(got, dict):
            fail(f"return a dict, of 'tp', 'data', 'ep' and 'expert_dp'; it is {got!r}")
        right, believed = mesh.members(rank, ep), _believed_of_groups(mesh, rank, ep)
        for axis in ("tp", "data", "ep", "expert_dp"):
            given = got.get(axis)
            where = f"rank {rank} of {sizes} (outermost first), ep {ep}: {axis}"
            expect_equal(list(given) if given is not None else None, right[axis], where, believed[axis])


def _sizes_that_tell(case: int, rng) -> tuple[dict[str, int], int]:
    """(sizes, ep). First cp outside dp and not the usual order, then dp outside; ep is not always data's inner axis."""
    order = ["cp", "pp", "dp", "tp"] if case == 0 else rng.sample(AXES, 4)
    if case == 1 and order.index("cp") < order.index("dp"):
        order.reverse()
    inner, outer, ep = rng.choice([(4, 2, 2), (2, 4, 4), (3, 2, 2), (2, 3, 3)])
    last, first = sorted(("dp", "cp"), key=order.index, reverse=True)
    sizes = {"pp": 2 if case == 0 else rng.choice([1, 2, 3]), "tp": rng.choice([2, 3]), last: inner, first: outer}
    return {axis: sizes[axis] for axis in order}, ep


def _rank_that_tells(mesh: Mesh, ep: int, rng) -> int:
    """A rank whose run of ep has another number than its place in the run, and than the rank's place among the runs."""
    places = {rank: mesh.data_ranks(rank).index(rank) for rank in range(1, mesh.world_size)}
    num_runs = mesh.sizes["dp"] * mesh.sizes["cp"] // ep
    return rng.choice([rank for rank, n in places.items() if n % ep and n // ep not in (n % ep, n % num_runs)])


def _believed_of_groups(mesh: Mesh, rank: int, ep: int) -> dict[str, dict[str, list[int]]]:
    right, data, sizes = mesh.members(rank, ep), mesh.data_ranks(rank), mesh.sizes
    backwards = Mesh(**sizes, order=tuple(reversed(mesh.order))).members(rank, ep)
    by_default = Mesh(**sizes).members(rank, ep)
    here = mesh.coordinates(rank)
    same_tp = [other for other in range(mesh.world_size) if mesh.coordinates(other)["tp"] == here["tp"]]
    run, inner = data.index(rank) // ep, min(("dp", "cp"), key=lambda axis: mesh.strides[axis])
    each = len(data) // ep
    first = data.index(rank) // each * each
    strided = "ranks with equal gaps between them; ep takes neighbours of data, one after the other"
    usual = "the axes lie in the order of `sizes`, and not always as pp, dp, cp, tp"
    return {
        "tp": {
            "the first axis is the outermost, the last changes fastest": backwards["tp"],
            usual: by_default["tp"],
        },
        "data": {
            "ranks that differ in dp alone; those that differ in cp have the same parameters too": right["dp"],
            "the right ranks, but in rank order they are others: sort them": _data_in_other_order(mesh, rank),
            "those that differ in pp have other layers, and nothing of mine to sum": same_tp,
            usual: by_default["data"],
        },
        "ep": {
            "ep takes neighbours of data, one after the other; these are apart, as expert_dp is": right["expert_dp"],
            "neighbours in the world; ep is carved out of data": list(range(rank - rank % ep, rank - rank % ep + ep)),
            f"these lie along {inner}; ep neighbours of data can be fewer or more": mesh.ranks_along(inner, rank),
            "every so many ranks of data, not the run of neighbours that I am in": data[run :: len(data) // ep],
            strided: data[data.index(rank) % each :: each],
        },
        "expert_dp": {
            "these share the experts among them; expert_dp has the same ones": right["ep"],
            "counted from the number of my run; my place in the run says which experts I have": data[run::ep],
            "neighbours in data, as if ep had gaps; neighbours have different experts": data[first : first + each],
        },
    }


def _data_in_other_order(mesh: Mesh, rank: int) -> list[int]:
    """The ranks of data, with the wrong one of dp and cp outside."""
    outer, inner = sorted(("dp", "cp"), key=lambda axis: mesh.strides[axis])
    return [other for first in mesh.ranks_along(outer, rank) for other in mesh.ranks_along(inner, first)]


# ------------------------------------------------------------------------------------ 2. whose gradient
@grader
def check_summed_over(answer, rng):
    """All ranks whose parts make up the gradient of a parameter that a rank holds, by kind, with and without SP."""
    for sequence_parallel in (True, False):
        layout = Layout(dp=4, cp=2, tp=rng.choice([2, 4]), pp=2, ep=4, sequence_parallel=sequence_parallel)
        rank = rng.randrange(layout.world_size)
        members = layout.mesh.members(rank, layout.ep)
        everyone = [other for one in members["tp"] for other in layout.mesh.members(one, layout.ep)["data"]]
        right = {
            "matrices": members["data"],
            "norms": everyone if sequence_parallel else members["data"],
            "experts": members["expert_dp"],
        }
        tp_of_experts = [other for one in members["tp"] for other in layout.mesh.members(one, layout.ep)["expert_dp"]]
        believed = {
            "matrices": {
                "dp alone: ranks of cp have the same parameters and saw other tokens": members["dp"],
                "every rank of the stage: those of other tp ranks hold another part of the matrix": sorted(everyone),
            },
            "norms": _believed_of_norms(members, everyone, sequence_parallel),
            "experts": {
                "most ranks of data hold other experts": members["data"],
                "these brought their tokens already; the same experts are elsewhere": members["ep"],
                "experts are cut over tp, as matrices are: other ranks of tp hold another part": tp_of_experts,
            },
        }
        for kind in ("matrices", "norms", "experts"):
            given = answer(kind, rank, layout)
            where = f"{layout}, rank {rank}: {kind}"
            wrong = {text: sorted(ranks) for text, ranks in believed[kind].items()}
            wrong["this rank's own part counts too"] = sorted({*right[kind]} - {rank})
            wrong["ranks of other stages have other layers, and no part of this one"] = [*range(layout.world_size)]
            expect_equal(sorted(given) if given is not None else None, sorted(right[kind]), where, wrong)


def _believed_of_norms(members: dict[str, list[int]], everyone: list[int], sequence_parallel: bool) -> dict:
    either = sorted({*members["data"], *members["tp"]})
    believed = {"tp alone: the other ranks of data saw other sequences": members["tp"]}
    if sequence_parallel:
        return believed | {
            "with sequence parallelism each rank of tp saw only its own tokens": members["data"],
            "data times tp, not data and tp joined: those that differ from me in both have a part too": either,
        }
    return believed | {
        "without sequence parallelism each rank of tp has the whole gradient already": everyone,
        "tp is for sequence parallelism alone: without it, ranks of tp ran all tokens through the norm": either,
    }


# ------------------------------------------------------------------------------------ 3. a pipeline or ZeRO-3
@grader
def check_pp_and_zero3(answer, rng):
    """Bytes that one rank sends in a step, by either way to take parameters off it."""
    for case in range(3):
        p, itemsize = rng.choice([6, 8, 16]), rng.choice([2, 4]) if case else 4
        each = rng.choice([2, 5, 6, 7, 8])  # with other p and each, two mistakes would give one number
        micro_batches, tokens = p * each, 128 * rng.randrange(1, 40)
        d_model, numel = 64 * rng.randrange(4, 60), p * 1000 * rng.randrange(100, 999)
        pp, unit = 2 * micro_batches * tokens * d_model * itemsize, numel * (p - 1) // p * itemsize
        of_pp = {
            "PP sends gradients back as well": pp // 2,
            "PP: every micro-batch passes every rank, not 1 / p of them": pp // p,
            "PP: what is received is counted as well; sent are activations onward and gradients back": 2 * pp,
            "PP: a rank in the middle sends both ways always; the ends do not": pp * (p - 1) // p,
            "PP: these are numbers; each has itemsize bytes": pp // itemsize,
        }
        of_zero3 = {
            "ZeRO-3: a rank works on its own micro-batches, 1 / p of all": micro_batches * 3 * unit,
            "ZeRO-3 gathers twice, forward and backward, and reduces once": each * 2 * unit,
            "ZeRO-3: a rank's own piece is not sent to itself": each * 3 * numel * itemsize,
            "ZeRO-3 gathers anew for each micro-batch": 3 * unit,
            "ZeRO-3 reduces gradients after each micro-batch: it keeps no whole ones": (2 * each + 1) * unit,
            "ZeRO-3: gradients take one trip, a reduce-scatter; an all-reduce would be two": each * 4 * unit,
            "ZeRO-3: these are numbers; each has itemsize bytes": each * 3 * unit // itemsize,
        }
        given = answer(p, micro_batches, tokens, d_model, numel, itemsize)
        if not isinstance(given, list | tuple) or len(given) != 2:
            fail(f"return a pair, of PP and of ZeRO-3; it is {given!r}")
        where = f"p {p}, M {micro_batches}, {tokens} tokens, D {d_model}, {numel:,} parameters of {itemsize} bytes"
        _expect_halves(given, [("PP", pp, of_pp), ("ZeRO-3", each * 3 * unit, of_zero3)], where)


def _expect_halves(given, halves: list[tuple[str, int, dict[str, int]]], where: str) -> None:
    """Each of the two numbers by itself; if both are wrong, one message says both."""
    said = []
    for number, (half, right, believed) in zip(given, halves, strict=True):
        try:
            expect_equal(number, right, f"what {half} sends", believed)
        except CheckFailed as failure:
            said.append(str(failure))
    if said:
        fail(f"{where}:\n" + "\n".join(said))


# ------------------------------------------------------------------------------------ 4. the smallest cut that fits
@grader
def check_smallest_cut(answer, rng):
    """The least tp x pp whose states fit under ZeRO-1, tp first."""
    for case in range(6):
        gpus, per_node = 8 * 2 ** rng.randrange(2, 6), rng.choice([4, 8])
        numel = rng.randrange(5, 120) * GB
        limit = _limit_that_tells(numel, gpus, per_node, case, rng)
        cut = partial(smallest_cut, numel, gpus, per_node, limit)
        right = cut()
        believed = {
            "with ZeRO-1 the optimizer's 12 bytes are divided by dp as well": cut(sharded=0),
            "tp must stay inside a node": smallest_cut(numel, gpus, gpus, limit),
            "it fits, but a smaller cut fits too: more of the GPUs can be dp": (per_node, gpus // per_node, 1),
            "of equal cuts the one with the larger tp, as far as a node goes": cut(pp_first=True),
            "with ZeRO-1 parameters and gradients, 4 bytes, are whole on each rank of dp": cut(sharded=16),
            "dp is what tp and pp leave: the more they cut, the less there is to shard over": cut(dp_is_all=True),
        }
        given = answer(numel, gpus, per_node, limit)
        given = tuple(given) if isinstance(given, list | tuple) else given
        where = f"{numel / GB:.0f} billion parameters, {gpus} GPUs in nodes of {per_node}, {limit / GB:.1f} GB each"
        if given is None and right is None:
            continue
        if given is None:
            fail(f"{where}: {right} fits, and your function says that nothing does")
        if isinstance(given, tuple) and len(given) == 3 and given[0] * given[1] * given[2] != gpus:
            fail(f"{where}: it is {given}, whose product is not {gpus}: dp is what tp and pp together leave")
        believed = {text: value for text, value in believed.items() if value}
        if right is None:
            believed = {text: cut for text, cut in believed.items() if cut[2] > 1}
            believed["nothing fits, whatever is cut"] = given
        expect_equal(given, right, f"{where}: (tp, pp, dp)", believed)


def smallest_cut(numel, gpus, per_node, limit, sharded=12, pp_first=False, dp_is_all=False):
    """(tp, pp, dp), powers of two; None if nothing fits. The options make the mistakes that the grader looks for.

    sharded   how many of the 16 bytes dp shares
    """
    cut = 1
    while cut <= gpus:
        tps = [2**n for n in range(20) if 2**n <= min(cut, per_node)]
        for tp in tps if pp_first else reversed(tps):
            dp = gpus // cut
            over = gpus if dp_is_all else dp
            if (16 - sharded + sharded / over) * numel / cut <= limit:
                return tp, cut // tp, dp
        cut *= 2
    return None


def _limit_that_tells(numel, gpus, per_node, case, rng) -> int:
    """A GPU's memory for which another mistake shows in each case."""
    if case == 0:  # without ZeRO-1 a larger cut would be needed; a cut of 2, which tp and pp could both make
        return int((4 + 12 / (gpus // 2)) * numel / 2 * 1.02)
    if case == 1:  # more than a node
        cut = 2 * per_node
        return int((4 + 12 / (gpus // cut)) * numel / cut * 1.02)
    if case == 2:  # sharded over all GPUs it would fit, over dp nothing does
        cut = gpus // 2
        return int((4 + 12 / gpus) * numel / cut * 1.05)
    return int(numel * rng.uniform(0.3, 18))
