"""Wrong answers to the exercises of chapter 10, each with what its grader must say about it."""

import math

import torch

from course_lib.checks.ch10 import (
    check_choice,
    check_combined_sums,
    check_groups,
    check_norm,
    check_pp_and_zero3,
    check_smallest_cut,
    check_summed_over,
)
from course_lib.checks.ch10.five_d import smallest_cut
from course_lib.comm import all_reduce, all_reduce_
from course_lib.layout import Layout, Mesh
from course_lib.minimal.choose import choose


# ------------------------------------------------------------------------------------ 1. who is in which group
def _groups(rank, sizes, ep):
    mesh = Mesh(**sizes, order=tuple(sizes))
    return mesh, {axis: mesh.members(rank, ep)[axis] for axis in ("tp", "data", "ep", "expert_dp")}


def outermost_changes_fastest(rank, sizes, ep):
    return Mesh(**sizes, order=tuple(reversed(sizes))).members(rank, ep)


def data_is_dp(rank, sizes, ep):
    mesh, right = _groups(rank, sizes, ep)
    return right | {"data": mesh.ranks_along("dp", rank)}


def ep_with_gaps(rank, sizes, ep):
    _, right = _groups(rank, sizes, ep)
    return right | {"ep": right["expert_dp"], "expert_dp": right["ep"]}


def expert_dp_is_ep(rank, sizes, ep):
    _, right = _groups(rank, sizes, ep)
    return right | {"expert_dp": right["ep"]}


def ep_of_the_world(rank, sizes, ep):
    _, right = _groups(rank, sizes, ep)
    return right | {"ep": [other for other in range(math.prod(sizes.values())) if other // ep == rank // ep]}


def ep_along_the_inner_axis(rank, sizes, ep):
    mesh, right = _groups(rank, sizes, ep)
    return right | {"ep": mesh.ranks_along([axis for axis in sizes if axis in ("dp", "cp")][1], rank)}


def ep_strided(rank, sizes, ep):
    _, right = _groups(rank, sizes, ep)
    data = right["data"]
    each = len(data) // ep
    place = data.index(rank)
    run = place - place % each
    return right | {"ep": data[place % each :: each], "expert_dp": data[run : run + each]}


def ep_dealt_out(rank, sizes, ep):
    _, right = _groups(rank, sizes, ep)
    data = right["data"]
    return right | {"ep": data[data.index(rank) // ep :: len(data) // ep]}


def dp_always_outside_cp(rank, sizes, ep):
    mesh, right = _groups(rank, sizes, ep)
    return right | {"data": [other for dp in mesh.ranks_along("dp", rank) for other in mesh.ranks_along("cp", dp)]}


def order_as_usual(rank, sizes, ep):
    return Mesh(**sizes).members(rank, ep)


def data_over_pp(rank, sizes, ep):
    mesh, right = _groups(rank, sizes, ep)
    tp = mesh.coordinates(rank)["tp"]
    return right | {"data": [other for other in range(mesh.world_size) if mesh.coordinates(other)["tp"] == tp]}


def expert_dp_by_run(rank, sizes, ep):
    _, right = _groups(rank, sizes, ep)
    return right | {"expert_dp": right["data"][right["data"].index(rank) // ep :: ep]}


# ------------------------------------------------------------------------------------ 2. whose gradient
def _summed(kind, rank, layout):
    members = layout.mesh.members(rank, layout.ep)
    everyone = [one for other in members["tp"] for one in layout.mesh.members(other, layout.ep)["data"]]
    norms = everyone if layout.sequence_parallel else members["data"]
    return {"matrices": members["data"], "norms": norms, "experts": members["expert_dp"]}[kind], members, everyone


def dp_alone(kind, rank, layout):
    right, members, _ = _summed(kind, rank, layout)
    return members["dp"] if kind == "matrices" else right


def norms_over_data(kind, rank, layout):
    right, members, _ = _summed(kind, rank, layout)
    return members["data"] if kind == "norms" else right


def norms_always_over_tp(kind, rank, layout):
    right, _, everyone = _summed(kind, rank, layout)
    return everyone if kind == "norms" else right


def norms_over_data_or_tp(kind, rank, layout):
    right, members, _ = _summed(kind, rank, layout)
    return {*members["data"], *members["tp"]} if kind == "norms" and layout.sequence_parallel else right


def norms_over_tp_as_well_without_sp(kind, rank, layout):
    right, members, _ = _summed(kind, rank, layout)
    return {*members["data"], *members["tp"]} if kind == "norms" and not layout.sequence_parallel else right


def norms_over_tp_alone(kind, rank, layout):
    right, members, _ = _summed(kind, rank, layout)
    return members["tp"] if kind == "norms" else right


def experts_over_data(kind, rank, layout):
    right, members, _ = _summed(kind, rank, layout)
    return members["data"] if kind == "experts" else right


def experts_over_ep(kind, rank, layout):
    right, members, _ = _summed(kind, rank, layout)
    return members["ep"] if kind == "experts" else right


def matrices_over_tp(kind, rank, layout):
    right, _, everyone = _summed(kind, rank, layout)
    return everyone if kind == "matrices" else right


def experts_over_tp(kind, rank, layout):
    right, members, _ = _summed(kind, rank, layout)
    if kind != "experts" or not layout.sequence_parallel:
        return right
    return [one for other in members["tp"] for one in layout.mesh.members(other, layout.ep)["expert_dp"]]


def norms_over_the_world(kind, rank, layout):
    right, _, _ = _summed(kind, rank, layout)
    return range(layout.world_size) if kind == "norms" and layout.sequence_parallel else right


def all_but_me(kind, rank, layout):
    right, _, _ = _summed(kind, rank, layout)
    return [other for other in right if other != rank]


# ------------------------------------------------------------------------------------ 3. a pipeline or ZeRO-3
def _pipeline(micro_batches, tokens, d_model, itemsize):
    return 2 * micro_batches * tokens * d_model * itemsize


def _zero3(p, micro_batches, numel, itemsize, trips=3):
    return micro_batches * trips * (p - 1) * numel // p * itemsize


def forward_alone(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, itemsize) // 2, _zero3(p, micro_batches // p, numel, itemsize)


def a_share_of_the_micro_batches(p, micro_batches, tokens, d_model, numel, itemsize):
    pipeline = _pipeline(micro_batches // p, tokens, d_model, itemsize)
    return pipeline, _zero3(p, micro_batches // p, numel, itemsize)


def both_halves_wrong(p, micro_batches, tokens, d_model, numel, itemsize):
    pipeline = _pipeline(micro_batches, tokens, d_model, itemsize) // 2
    return pipeline, _zero3(p, micro_batches // p, numel, itemsize, 1)


def one_number(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, itemsize)


def all_micro_batches(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, itemsize), _zero3(p, micro_batches, numel, itemsize)


def two_trips(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, itemsize), _zero3(p, micro_batches // p, numel, itemsize, 2)


def gathered_once(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, itemsize), _zero3(p, 1, numel, itemsize)


def own_piece_sent(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, itemsize), micro_batches // p * 3 * numel * itemsize


def reduced_once(p, micro_batches, tokens, d_model, numel, itemsize):
    zero3 = _zero3(p, micro_batches // p, numel, itemsize, 2) + _zero3(p, 1, numel, itemsize, 1)
    return _pipeline(micro_batches, tokens, d_model, itemsize), zero3


def all_reduced(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, itemsize), _zero3(p, micro_batches // p, numel, itemsize, 4)


def received_as_well(p, micro_batches, tokens, d_model, numel, itemsize):
    return 2 * _pipeline(micro_batches, tokens, d_model, itemsize), _zero3(p, micro_batches // p, numel, itemsize)


def mean_over_the_pipeline(p, micro_batches, tokens, d_model, numel, itemsize):
    pipeline = _pipeline(micro_batches, tokens, d_model, itemsize) * (p - 1) // p
    return pipeline, _zero3(p, micro_batches // p, numel, itemsize)


def numbers_of_pp(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, 1), _zero3(p, micro_batches // p, numel, itemsize)


def numbers_of_zero3(p, micro_batches, tokens, d_model, numel, itemsize):
    return _pipeline(micro_batches, tokens, d_model, itemsize), _zero3(p, micro_batches // p, numel, 1)


# ------------------------------------------------------------------------------------ 4. the smallest cut that fits
def without_zero(numel, gpus, per_node, limit):
    return smallest_cut(numel, gpus, per_node, limit, sharded=0)


def tp_over_nodes(numel, gpus, per_node, limit):
    return smallest_cut(numel, gpus, gpus, limit)


def everything_sharded(numel, gpus, per_node, limit):
    return smallest_cut(numel, gpus, per_node, limit, sharded=16)


def pp_first(numel, gpus, per_node, limit):
    return smallest_cut(numel, gpus, per_node, limit, pp_first=True)


def sharded_over_all(numel, gpus, per_node, limit):
    return smallest_cut(numel, gpus, per_node, limit, dp_is_all=True)


def always_fits(numel, gpus, per_node, limit):
    return smallest_cut(numel, gpus, per_node, limit) or (per_node, gpus // per_node, 1)


def one_node_alone(numel, gpus, per_node, limit):
    found = smallest_cut(numel, gpus, per_node, limit)
    return found if found and found[1] == 1 else None


def dp_without_pp(numel, gpus, per_node, limit):
    found = smallest_cut(numel, gpus, per_node, limit)
    return found and (found[0], found[1], gpus // found[0])


def largest_cut(numel, gpus, per_node, limit):
    return smallest_cut(numel, gpus, per_node, limit) and (per_node, gpus // per_node, 1)


# ------------------------------------------------------------------------------------ 5. a combination, fixed
def _sums(of_kind, groups, norms=(), experts="expert_dp", data="data", average=False):
    for kind, grads in of_kind.items():
        group = getattr(groups, experts if kind == "experts" else data)
        for grad in grads:
            all_reduce_(grad, group)
            if kind == "norms" and norms:
                all_reduce_(grad, groups.tp)
            if average:
                grad /= group.size()


def averaged(of_kind, groups, layout):
    _sums(of_kind, groups, layout.sequence_parallel, average=True)


def norms_forgotten(of_kind, groups, layout):
    _sums(of_kind, groups)


def norms_summed_always(of_kind, groups, layout):
    _sums(of_kind, groups, layout.tp > 1)


def experts_with_the_rest(of_kind, groups, layout):
    _sums(of_kind, groups, layout.sequence_parallel, experts="data")


def cp_forgotten(of_kind, groups, layout):
    _sums(of_kind, groups, layout.sequence_parallel, data="dp")


def averaged_over_the_world(of_kind, groups, layout):
    _sums(of_kind, groups, layout.sequence_parallel)
    for grad in (grad for grads in of_kind.values() for grad in grads):
        grad /= layout.world_size


def all_over_tp(of_kind, groups, layout):
    _sums(of_kind, groups)
    for grad in (grad for grads in of_kind.values() for grad in grads if layout.sequence_parallel):
        all_reduce_(grad, groups.tp)


def experts_with_their_run(of_kind, groups, layout):
    _sums(of_kind, groups, layout.sequence_parallel, experts="ep" if layout.ep > 1 else "data")


def experts_alone(of_kind, groups, layout):
    _sums(of_kind | {"experts": []}, groups, layout.sequence_parallel)


# ------------------------------------------------------------------------------------ 6. each number once
def _norm(held, world, copies):
    return all_reduce(sum(grad.square().sum() / copies[kind] for kind, grad in held.items()), world).sqrt()


def counted_often(held, layout, world):
    return _norm(held, world, {"matrices": 1, "norms": 1, "experts": 1})


def one_for_each_kind(held, layout, world):
    return all_reduce(torch.stack([grad.square().sum() for grad in held.values()]), world).sqrt()


def norms_twice(held, layout, world):
    return _norm(held, world, {"matrices": layout.data_size, "norms": layout.data_size, "experts": layout.expert_dp})


def experts_as_the_rest(held, layout, world):
    copies = {"matrices": layout.data_size, "norms": layout.data_size * layout.tp, "experts": layout.data_size}
    return _norm(held, world, copies)


def _right(layout):
    return {"matrices": layout.data_size, "norms": layout.data_size * layout.tp, "experts": layout.expert_dp}


def norms_added(held, layout, world):
    copies = _right(layout)
    return all_reduce(sum(grad.square().sum() / copies[kind] for kind, grad in held.items()).sqrt(), world)


def no_root(held, layout, world):
    return _norm(held, world, _right(layout)) ** 2


def not_summed(held, layout, world):
    copies = _right(layout)
    return math.fsum((grad.square().sum() / copies[kind]).item() for kind, grad in held.items()) ** 0.5 * all_reduce(
        held["norms"].new_ones(()), world
    ).new_ones(())


def norms_over_tp_under_sp_alone(held, layout, world):
    copies = _right(layout)
    return _norm(held, world, copies if layout.sequence_parallel else copies | {"norms": layout.data_size})


def experts_by_ep(held, layout, world):
    return _norm(held, world, _right(layout) | {"experts": layout.ep})


def experts_on_tp(held, layout, world):
    return _norm(held, world, _right(layout) | {"experts": layout.expert_dp * layout.tp})


def copies_of_dp_alone(held, layout, world):
    return _norm(held, world, _right(layout) | {"matrices": layout.dp, "norms": layout.dp * layout.tp})


def everything_on_every_rank(held, layout, world):
    return _norm(held, world, dict.fromkeys(held, layout.world_size))


def numbers_divided(held, layout, world):
    return _norm(held, world, {kind: copies**2 for kind, copies in _right(layout).items()})


# ------------------------------------------------------------------------------------ 7. a layout for a job
def _layout(job, tp=1, **choices):
    dp = job.num_gpus // tp
    sizes = {"dp": dp, "tp": tp, "micro_batches": job.sequences // dp}
    return Layout(**sizes, sequence_parallel=tp > 1, regather=tp > 1, **choices)


def a_text(job):
    return "dp=8"


def twice_the_gpus(job):
    return Layout(dp=2 * job.num_gpus)


def one_micro_batch(job):
    return Layout(dp=job.num_gpus, zero_stage=3)


def whole_copies(job):
    return _layout(job, zero_stage=1)


def always_recomputed(job):
    return _layout(job, zero_stage=3, recompute="full")


def a_node_of_tp(job):
    return _layout(job, 8, zero_stage=1)


def stops_where_it_fits(job):
    return _layout(job, 8, zero_stage=3) if job.config.num_layers == 80 else choose(job).option.layout


WRONG = {
    "my_groups": {
        "check": check_groups,
        "answers": [
            (outermost_changes_fastest, "the last changes fastest"),
            (data_is_dp, "those that differ in cp have the same parameters"),
            (ep_with_gaps, "these are apart"),
            (expert_dp_is_ep, "these share the experts among them"),
            (ep_of_the_world, "neighbours in the world"),
            (ep_along_the_inner_axis, "can be fewer or more"),
            (ep_strided, "ranks with equal gaps"),
            (ep_dealt_out, "every so many ranks of data"),
            (dp_always_outside_cp, "sort them"),
            (order_as_usual, "the axes lie in the order of `sizes`"),
            (data_over_pp, "differ in pp"),
            (expert_dp_by_run, "the number of my run"),
        ],
    },
    "my_summed_over": {
        "check": check_summed_over,
        "answers": [
            (dp_alone, "saw other tokens"),
            (norms_over_data, "saw only its own tokens"),
            (norms_always_over_tp, "has the whole gradient already"),
            (norms_over_data_or_tp, "differ from me in both"),
            (norms_over_tp_as_well_without_sp, "ran all tokens through the norm"),
            (norms_over_tp_alone, "tp alone"),
            (experts_over_data, "hold other experts"),
            (experts_over_ep, "brought their tokens already"),
            (matrices_over_tp, "another part of the matrix"),
            (experts_over_tp, "experts are cut over tp"),
            (norms_over_the_world, "ranks of other stages"),
            (all_but_me, "own part counts too"),
        ],
    },
    "my_pp_and_zero3": {
        "check": check_pp_and_zero3,
        "answers": [
            (forward_alone, "PP sends gradients back as well\n(to repeat"),
            (a_share_of_the_micro_batches, "passes every rank"),
            (both_halves_wrong, "PP sends gradients back as well\nwhat ZeRO-3 sends"),
            (one_number, "return a pair"),
            (all_micro_batches, "works on its own micro-batches"),
            (two_trips, "gathers twice"),
            (gathered_once, "gathers anew"),
            (own_piece_sent, "own piece"),
            (reduced_once, "reduces gradients after each micro-batch"),
            (all_reduced, "an all-reduce would be two"),
            (received_as_well, "what is received"),
            (mean_over_the_pipeline, "the ends do not"),
            (numbers_of_pp, "PP: these are numbers"),
            (numbers_of_zero3, "ZeRO-3: these are numbers"),
        ],
    },
    "my_smallest_cut": {
        "check": check_smallest_cut,
        "answers": [
            (without_zero, "12 bytes are divided by dp"),
            (tp_over_nodes, "inside a node"),
            (everything_sharded, "whole on each rank of dp"),
            (pp_first, "of equal cuts"),
            (sharded_over_all, "the less there is to shard over"),
            (always_fits, "nothing fits, whatever is cut"),
            (one_node_alone, "your function says that nothing does"),
            (dp_without_pp, "what tp and pp together leave"),
            (largest_cut, "a smaller cut fits too"),
        ],
    },
    "my_sums": {
        "check": check_combined_sums,
        "answers": [
            (averaged, "2 times too short; each rank's loss"),
            (averaged_over_the_world, "4 times too short; each rank's loss"),
            (norms_forgotten, "its own tokens alone"),
            (norms_summed_always, "tp times too long"),
            (experts_with_the_rest, "gradients of other experts"),
            (cp_forgotten, "ranks of cp are missing"),
            (all_over_tp, "whose gradient is another"),
            (experts_with_their_run, "the ranks of ep brought"),
            (experts_alone, "ran other tokens through the same experts"),
        ],
    },
    "my_norm": {
        "check": check_norm,
        "answers": [
            (counted_often, "counted as often"),
            (one_for_each_kind, "return a tensor of one element"),
            (norms_twice, "on the ranks of tp as well"),
            (experts_as_the_rest, "on expert_dp ranks"),
            (norms_added, "their squares do"),
            (no_root, "the square of the norm"),
            (not_summed, "of this rank's part alone"),
            (norms_over_tp_under_sp_alone, "whether or not the residual stream is cut"),
            (experts_by_ep, "ep says over how many"),
            (experts_on_tp, "ranks of tp hold other parts"),
            (copies_of_dp_alone, "data is dp times cp"),
            (everything_on_every_rank, "its own number of copies"),
            (numbers_divided, "divide the squares"),
        ],
    },
    "my_choice": {
        "check": check_choice,
        "answers": [
            (a_text, "return a Layout"),
            (twice_the_gpus, "ep and SP need no ranks"),
            (one_micro_batch, "the job's global batch"),
            (whole_copies, "does not fit by"),
            (always_recomputed, "it computes more"),
            (a_node_of_tp, "its kernels are short"),
            (stops_where_it_fits, "more tokens per GPU"),
        ],
    },
}
