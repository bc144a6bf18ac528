"""The graders of chapter 10 accept right answers of other forms, and one says what is wrong with wrong ones."""

import math
import sys
from fractions import Fraction
from itertools import product

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from harness import sampled

from course_lib.checks import ch10
from course_lib.checks.core import CheckFailed
from course_lib.layout import Layout
from course_lib.layout.mesh import Mesh
from course_lib.minimal.choose import choose
from course_lib.plan import work_out

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path
SEEDS = (0, 1)


def layout_with(job, tp=1, micro_batch=1, **choices):
    dp = job.num_gpus // tp
    sizes = {"dp": dp, "tp": tp, "micro_batch": micro_batch, "micro_batches": job.sequences // dp // micro_batch}
    return Layout(**sizes, sequence_parallel=tp > 1, regather=tp > 1, **choices)


def by_the_chart(job):
    return choose(job).option.layout


def by_trying(job):
    """The fastest of a small grid that fits."""
    options = []
    for tp, micro_batch, zero_stage in product((1, 2, 4), (1, 2), (1, 3)):
        if job.sequences // (job.num_gpus // tp) % micro_batch == 0:
            options.append(work_out(job, layout_with(job, tp, micro_batch, zero_stage=zero_stage)))
    return min((option for option in options if option.fits), key=lambda option: option.step_s).layout


def by_tokens_per_gpu(job):
    """ZeRO-3 with the largest tp that leaves 2,000 tokens to a GPU, or no tp where a copy is small."""
    tp = 2 if job.config.d_model > 4096 else 1
    return layout_with(job, tp, zero_stage=3)


# ------------------------------------------------------------------------------------ 1. groups
def groups_by_strides(rank, sizes, ep):
    """Each axis steps by the product of the sizes behind it."""
    stride, strides = 1, {}
    for axis in reversed(sizes):
        strides[axis], stride = stride, stride * sizes[axis]
    first = {axis: rank - rank // strides[axis] % sizes[axis] * strides[axis] for axis in sizes}
    corner = first["dp"] + first["cp"] - rank
    data = sorted(
        corner + i * strides["dp"] + j * strides["cp"] for i in range(sizes["dp"]) for j in range(sizes["cp"])
    )
    runs = [data[i : i + ep] for i in range(0, len(data), ep)]
    mine = next(run for run in runs if rank in run)
    return {
        "tp": [first["tp"] + i * strides["tp"] for i in range(sizes["tp"])],
        "data": data,
        "ep": mine,
        "expert_dp": [run[mine.index(rank)] for run in runs],
    }


def groups_by_tensor(rank, sizes, ep):
    """Ranks as a tensor of one dimension an axis; a group is a slice of it."""
    names = list(sizes)
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    here = (ranks == rank).nonzero()[0].tolist()

    def along(*axes):
        places = [slice(None) if name in axes else at for name, at in zip(names, here, strict=True)]
        return ranks[tuple(places)].flatten().tolist()

    data = along("dp", "cp")
    table = torch.tensor(data).view(-1, ep)
    row, column = (table == rank).nonzero()[0].tolist()
    return {"tp": along("tp"), "data": data, "ep": table[row].tolist(), "expert_dp": table[:, column].tolist()}


def groups_by_mesh(rank, sizes, ep):
    """The course's own mesh, as tuples."""
    members = Mesh(**sizes, order=tuple(sizes)).members(rank, ep)
    return {axis: tuple(members[axis]) for axis in ("tp", "data", "ep", "expert_dp")}


# ------------------------------------------------------------------------------------ 2. whose gradient
def summed_by_coordinates(kind, rank, layout):
    """All ranks of the world whose coordinates say that they have a part."""
    mesh, here = layout.mesh, layout.mesh.coordinates(rank)
    fixed = {"pp"} if kind == "norms" and layout.sequence_parallel else {"pp", "tp"}
    same = [
        other
        for other in range(layout.world_size)
        if all(mesh.coordinates(other)[axis] == here[axis] for axis in fixed)
    ]
    return same[same.index(rank) % layout.ep :: layout.ep] if kind == "experts" else same


def summed_by_table(kind, rank, layout):
    """A set for each kind."""
    mesh = layout.mesh
    data = set(mesh.data_ranks(rank))
    on_tp = set().union(*(mesh.data_ranks(other) for other in mesh.ranks_along("tp", rank)))
    return {
        "matrices": data,
        "norms": on_tp if layout.sequence_parallel else data,
        "experts": set(mesh.members(rank, layout.ep)["expert_dp"]),
    }[kind]


def summed_by_ring_of_groups(kind, rank, layout):
    """Ranks reached from this one, group after group."""
    axes = ["expert_dp"] if kind == "experts" else ["dp", "cp"]
    axes += ["tp"] if kind == "norms" and layout.sequence_parallel else []
    reached = [rank]
    for axis in axes:
        reached = [other for one in reached for other in layout.mesh.members(one, layout.ep)[axis]]
    return tuple(reached)


# ------------------------------------------------------------------------------------ 3. a pipeline or ZeRO-3
def sent_by_loops(p, micro_batches, tokens, d_model, numel, itemsize):
    """Message after message."""
    pipeline = zero3 = 0
    for micro_batch in range(micro_batches):
        pipeline += tokens * d_model * itemsize  # onward
        pipeline += tokens * d_model * itemsize  # and back
        if micro_batch % p == 0:  # one of p is mine
            for _ in ("gather", "gather again", "reduce"):
                zero3 += (p - 1) * (numel // p) * itemsize
    return pipeline, zero3


def sent_by_proportion(p, micro_batches, tokens, d_model, numel, itemsize):
    """As a list, of exact fractions."""
    share = Fraction(p - 1, p)
    per_rank = Fraction(micro_batches, p)
    return [2 * itemsize * d_model * tokens * micro_batches, int(3 * per_rank * share * numel * itemsize)]


def sent_by_rings(p, micro_batches, tokens, d_model, numel, itemsize):
    """A gather and a reduce-scatter by ring each send p - 1 pieces."""
    piece, boundary = numel // p * itemsize, tokens * d_model * itemsize
    steps_of_rings = 3 * (p - 1)
    return micro_batches * boundary * 2, micro_batches // p * steps_of_rings * piece


# ------------------------------------------------------------------------------------ 4. the smallest cut
def cut_by_search(numel, gpus, per_node, limit):
    """All cuts that fit, and of these the least, with the largest tp."""
    powers = [2**i for i in range(gpus.bit_length()) if 2**i <= gpus]
    fitting = [
        (tp * pp, -tp, pp, gpus // (tp * pp))
        for tp in powers
        for pp in powers
        if tp <= per_node and tp * pp <= gpus and numel * (4 + 12 * tp * pp / gpus) / (tp * pp) <= limit
    ]
    if not fitting:
        return None
    _, negative_tp, pp, dp = min(fitting)
    return -negative_tp, pp, dp


def cut_by_growing(numel, gpus, per_node, limit):
    """Twice the cut until it fits: tp while the node has room, then pp."""
    tp = pp = 1
    while True:
        dp = gpus // (tp * pp)
        held = 4 * numel / (tp * pp) + 12 * numel / gpus
        if held <= limit:
            return [tp, pp, dp]
        if dp == 1:
            return None
        if tp < per_node:
            tp *= 2
        else:
            pp *= 2


def cut_by_solving(numel, gpus, per_node, limit):
    """4 bytes over the cut must fit beside the optimizer's share, which no cut changes."""
    left = limit - 12 * numel / gpus
    if left <= 0 or 4 * numel / left > gpus:
        return None
    cut = 1 << max(0, math.ceil(math.log2(4 * numel / left)))
    tp = min(cut, per_node)
    return tp, cut // tp, gpus // cut


# ------------------------------------------------------------------------------------ 5. sums
def sums_by_torch(of_kind, groups, layout):
    """torch's all-reduce, over tp first."""
    for kind, grads in of_kind.items():
        for grad in grads:
            if kind == "norms" and layout.sequence_parallel:
                dist.all_reduce(grad, group=groups.tp)
            dist.all_reduce(grad, group=groups.expert_dp if kind == "experts" else groups.data)


def sums_in_one_flat(of_kind, groups, layout):
    """All gradients of a kind side by side."""
    over = {"matrices": [groups.data], "norms": [groups.data], "experts": [groups.expert_dp]}
    if layout.sequence_parallel:
        over["norms"].append(groups.tp)
    for kind, grads in of_kind.items():
        flat = torch.cat([grad.reshape(-1) for grad in grads]) if grads else torch.empty(0)
        for group in over[kind]:
            dist.all_reduce(flat, group=group)
        for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(piece.view_as(grad))


def sums_by_gathering(of_kind, groups, layout):
    """Everybody's gradients are gathered and added up here."""

    def add_up(grad, group):
        everyone = [torch.empty_like(grad) for _ in range(group.size())]
        dist.all_gather(everyone, grad, group=group)
        grad.copy_(torch.stack(everyone).sum(0))

    for kind, grads in of_kind.items():
        for grad in grads:
            add_up(grad, {"experts": groups.expert_dp}.get(kind, groups.data))
            if layout.sequence_parallel and kind not in ("matrices", "experts"):
                add_up(grad, groups.tp)


# ------------------------------------------------------------------------------------ 6. a length
def norm_by_torch(held, layout, world):
    """Squares weighted by one over the number of copies, in one all-reduce of torch."""
    data, expert_dp = layout.dp * layout.cp, layout.dp * layout.cp // layout.ep
    weight = {"matrices": 1 / data, "norms": 1 / data / layout.tp, "experts": 1 / expert_dp}
    total = torch.stack([weight[kind] * grad.pow(2).sum() for kind, grad in held.items()]).sum()
    dist.all_reduce(total, group=world)
    return total**0.5


def norm_by_kind(held, layout, world):
    """A sum of squares for each kind, divided by the copies once all are summed."""
    sums = torch.stack([held[kind].flatten().dot(held[kind].flatten()) for kind in sorted(held)])
    dist.all_reduce(sums, group=world)
    copies = {"experts": layout.expert_dp, "norms": layout.tp * layout.data_size, "matrices": layout.data_size}
    return (sums / torch.tensor([copies[kind] for kind in sorted(held)], dtype=sums.dtype)).sum().sqrt()


def norm_as_one_element(held, layout, world):
    """One element of shape (1,)."""
    return norm_by_kind(held, layout, world).reshape(1)


def norm_of_scaled(held, layout, world):
    """Gradients divided by the root of their copies, laid end to end; the lengths of all ranks are gathered."""
    copies = {"matrices": layout.data_size, "norms": layout.data_size * layout.tp, "experts": layout.expert_dp}
    mine = torch.linalg.vector_norm(torch.cat([grad.flatten() / copies[kind] ** 0.5 for kind, grad in held.items()]))
    everyone = [torch.empty_like(mine) for _ in range(world.size())]
    dist.all_gather(everyone, mine, group=world)
    return torch.linalg.vector_norm(torch.stack(everyone))


RIGHT = {
    "check_groups": [groups_by_strides, groups_by_tensor, groups_by_mesh],
    "check_summed_over": [summed_by_coordinates, summed_by_table, summed_by_ring_of_groups],
    "check_pp_and_zero3": [sent_by_loops, sent_by_proportion, sent_by_rings],
    "check_smallest_cut": [cut_by_search, cut_by_growing, cut_by_solving],
    "check_combined_sums": [sums_by_torch, sums_in_one_flat, sums_by_gathering],
    "check_norm": [norm_by_torch, norm_by_kind, norm_of_scaled, norm_as_one_element],
    "check_choice": [by_the_chart, by_trying, by_tokens_per_gpu],
}
ON_RANKS = ("check_combined_sums", "check_norm")


def answers_of(names) -> list:
    return [pytest.param(check, one, id=f"{check}-{one.__name__}") for check in names for one in RIGHT[check]]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "answer"), answers_of(check for check in RIGHT if check not in ON_RANKS))
@pytest.mark.parametrize("seed", sampled([*SEEDS], 1))
def test_right_answers_pass(check, answer, seed):
    getattr(ch10, check)(answer, seed=seed)


@pytest.mark.launches
@pytest.mark.exhaustive
@pytest.mark.parametrize(("check", "answer"), answers_of(ON_RANKS))
def test_right_answers_on_ranks_pass(check, answer):
    getattr(ch10, check)(answer, seed=1)


WRONG = {
    "return a Layout; it is 'dp=8'": lambda job: "dp=8",
    "pp x dp x cp x tp is": lambda job: Layout(dp=job.num_gpus * 2, micro_batches=1),
    "the job's global batch": lambda job: Layout(dp=job.num_gpus, zero_stage=3),
    "does not fit by": lambda job: layout_with(job, zero_stage=1),
    "recomputation": lambda job: layout_with(job, zero_stage=3, recompute="full"),
    "its kernels are short": lambda job: layout_with(job, 8, zero_stage=1),
    "more tokens per GPU in a micro-batch hide ZeRO-3": lambda job: (
        layout_with(job, 8, zero_stage=3) if job.config.num_layers == 80 else by_the_chart(job)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("said", WRONG)
def test_wrong_answers_are_named(said):
    with pytest.raises(CheckFailed, match=said):
        ch10.check_choice(WRONG[said], seed=0)
