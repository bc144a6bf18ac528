"""Graders of chapter 06, exercises 3 to 5: gather_in and its backward pass, the forgotten sum, half a block."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checks import Cost, Exercise, Stops, fresh_seed, numbers, ranks_and_seeds
from course_lib.checks.watch import crossed, function
from course_lib.comm import all_gather, all_reduce, gather_in, join, reduce_scatter, scatter_sum, split, sum_out
from course_lib.measure.meter import ByteMeter


# ------------------------------------------------------------------------------------ 3. gather_in
def _padded(x, S, group):
    """As many tokens as the fullest rank has, or in all."""
    each = -(-S // group.size())
    return F.pad(x, (0, 0, 0, (each if x.shape[1] <= each else each * group.size()) - x.shape[1]))


def _together(x_BsD, group, S):
    return gather_in(x_BsD, group, 1, S)


def _sum_of_mine(grad_BSD, group, S):
    return scatter_sum(grad_BSD, group, 1)


def _reshaped(x_BsD, group, S):
    flat = all_gather(_padded(x_BsD, S, group), group).flatten()
    return flat[: len(x_BsD) * S * x_BsD.shape[2]].view(len(x_BsD), S, -1)


def _cut_and_reshaped(grad_BSD, group, S):
    shape = split(grad_BSD, group, 1).shape
    rows = reduce_scatter(_padded(grad_BSD, S, group).reshape(group.size(), -1), group)
    return rows.flatten()[: shape.numel()].view(shape)


def _tokens(rng):
    """Equal shards, and a token less on the last rank."""
    for size in (2, rng.choice([3, 4])):
        B, most, D = rng.choice([(2, 3, 5), (3, 2, 4), (4, 6, 3)])
        yield from [(size, B, most * size - short, D, fresh_seed(rng)) for short in (0, 1)]


def _cross(answer, B, S, D, seed):
    group, rank = dist.group.WORLD, dist.get_rank()
    x_BsD = split(numbers(seed, B, S, D), group, 1)
    return crossed(lambda x_BsD: answer.apply(x_BsD, group, S), x_BsD, numbers(seed + 100 + rank, B, S, D))


_HALF = "half an all-reduce; a whole one sums tokens that are not yours"
WRONG_GATHER = {
    "the pieces were put together along the batch; tokens are dimension 1": function(
        lambda x_BsD, group, S: all_gather(_padded(x_BsD, S, group), group), _sum_of_mine
    ),
    "the pieces came one below the other, along the batch, and were reshaped: that mixes sequences and tokens; "
    "transpose before the gather and after it": function(_reshaped, _sum_of_mine),
    "only my columns' part of the gradient: each token met every rank's columns, so sum": function(
        _together, lambda grad, group, S: split(grad, group, 1)
    ),
    "averaged over the ranks; the ranks' parts must be summed": function(
        _together, lambda grad, group, S: _sum_of_mine(grad, group, S) / group.size()
    ),
    "these are the first rank's tokens": function(
        _together, lambda grad, group, S: all_reduce(grad, group)[:, : split(grad, group, 1).shape[1]].contiguous()
    ),
    "backward cut the sum along the batch and reshaped it: that mixes sequences and tokens; transpose": function(
        _together, _cut_and_reshaped
    ),
    "no gradient arrived at x_BsD; backward must return it first, and None for group and S": function(
        _together, lambda grad, group, S: None
    ),
    _HALF: Stops(function(_together, lambda grad, group, S: split(all_reduce(grad, group), group, 1))),
}
SAYS_GATHER = {"bytes sent forward": _HALF, "bytes sent backward": _HALF}
check_gather_in = Exercise(function(_together, _sum_of_mine), _tokens, WRONG_GATHER, _cross, SAYS_GATHER, ranks=True)


# ------------------------------------------------------------------------------------ 4. the forgotten sum
CUT = (
    "attention.q.weight", "attention.q.bias", "attention.o.weight", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight",
)  # fmt: skip
WHOLE = {
    "norms": ("attention_norm.weight", "attention_norm.bias", "mlp_norm.weight"),
    "biases behind a sum": ("attention.o.bias", "mlp.down.bias"),
}


def _sum(gradients, cut, group, names=lambda name, cut: name not in cut, op="sum"):
    mine = [grad for name, grad in gradients.items() if names(name, cut)]
    flat_P = all_reduce(torch.cat([grad.flatten() for grad in mine]), group, op=op)
    for grad, summed in zip(mine, flat_P.split([grad.numel() for grad in mine]), strict=True):
        grad.copy_(summed.view_as(grad))


def _one_by_one(gradients, cut, group, in_place=True):
    for name in sorted(gradients.keys() - cut):
        summed = all_reduce(gradients[name], group)
        gradients[name] = gradients[name].copy_(summed) if in_place else summed


def _summed(answer, seed):
    names, of_rank = sorted([*CUT, *WHOLE["norms"], *WHOLE["biases behind a sum"]]), seed + 50 * dist.get_rank()
    shapes = [(4 + seed % 5, 3) if name in CUT and "weight" in name else (4 + seed % 5,) for name in names]
    gradients = {name: numbers(of_rank + i, *shapes[i]) for i, name in enumerate(names)}
    left = dict(gradients)  # the very tensors: the answer works in place
    with ByteMeter() as meter:
        answer(gradients, set(CUT), dist.group.WORLD)
    kinds = WHOLE | {"tensors that are cut": CUT}
    seen = {f"gradients of {kind}": {name: left[name] for name in of} for kind, of in kinds.items()}
    return seen | {"collectives called": Cost(sum(meter.calls.values()))}


WRONG_SUM = {
    "this rank's part is left as it was; if you made a new tensor, write into the old one (`copy_`)": partial(
        _one_by_one, in_place=False
    ),
    "left out, though it is added behind the sum, to my tokens alone: not norms only": {
        "names": lambda name, cut: "norm" in name
    },
    "averaged; the parts of a sum must be summed": {"op": "mean"},
    "summed, but every rank has another part of this tensor": {"names": lambda name, cut: True},
    "put them into one flat tensor and send one all-reduce": _one_by_one,
}
_SAYS_SUM = {"collectives called": "put them into one flat tensor and send one all-reduce"}
check_sum_of_my_tokens = Exercise(_sum, ranks_and_seeds, WRONG_SUM, _summed, _SAYS_SUM, ranks=True)


# ------------------------------------------------------------------------------------ 5. half a block
_STEPS = {
    "enter": lambda x_BsD, norm, group: gather_in(norm(x_BsD), group, 1),
    "inside": lambda x_BsD, bias_D, group: 0,  # what is added before the sum
    "leave": scatter_sum,
    "after": lambda x_BsD, bias_D, group: x_BsD + bias_D,
}


def _half(x_BsD, norm, up_fD, down_Df, bias_D, group, **mistake):
    """The reference, and with another step one of the mistakes."""
    step = _STEPS | mistake
    y_BSD_partial = F.linear(F.gelu(F.linear(step["enter"](x_BsD, norm, group), up_fD)), down_Df)
    y_BSD_partial = y_BSD_partial + step["inside"](x_BsD, bias_D, group)
    return step["after"](x_BsD, bias_D, group) + step["leave"](y_BSD_partial, group, 1)


def _sizes(rng):
    return [
        (size, rng.randrange(2, 4), rng.randrange(2, 5) * size, rng.randrange(5, 9), fresh_seed(rng))
        for size in (2, rng.choice([3, 4]))
    ]


def _blocks(answer, B, S, D, seed):
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = {"x": (B, S, D), "up": (4 * size, D), "down": (D, 4 * size), "bias": (D,)}
    whole = {name: numbers(seed + at, *shape) for at, (name, shape) in enumerate(shapes.items())}
    cut = {"x": 1, "up": 0, "down": 1}
    mine = {name: whole[name].chunk(size, dim)[rank].clone().requires_grad_() for name, dim in cut.items()}
    norm, normed = nn.RMSNorm(D, eps=1e-5, dtype=torch.float64), []
    norm.weight = nn.Parameter(numbers(seed + 10, D))
    norm.register_forward_hook(lambda module, inputs, output: normed.append(output.shape[1]))
    with ByteMeter() as meter:
        out = answer(mine["x"], norm, mine["up"], mine["down"], whole["bias"].requires_grad_(), dist.group.WORLD)
        if isinstance(out, Tensor) and out.requires_grad:
            (out * numbers(seed + 77, D)).sum().backward()  # the same for every token
    seen = {"the result": out.detach() if isinstance(out, Tensor) else out, "tokens that the norm saw": normed}
    seen |= {f"the gradient of {name}": x.grad for name, x in mine.items()}
    return seen | {"bytes sent forward and backward": Cost(meter.sent_bytes)}


_CONJUGATES = (
    "the result is right, the gradient is not; what goes into columns needs gather_in, whose backward sums, and what "
    "leaves a row scatter_sum"
)
_WRONG_BLOCK = {
    "the bias is in it once for every rank; add it after the sum": {
        "inside": lambda x_BsD, bias_D, group: bias_D,
        "after": lambda x_BsD, bias_D, group: x_BsD,
    },
    "the residual is in it once for every rank; add it after the sum": {
        "inside": lambda x_BsD, bias_D, group: gather_in(x_BsD, group, 1),
        "after": lambda x_BsD, bias_D, group: bias_D,
    },
    "the residual is missing": {"after": lambda x_BsD, bias_D, group: bias_D},
    "the bias is missing": {"after": lambda x_BsD, bias_D, group: x_BsD},
    "this is the whole sequence; a rank returns its own tokens": {
        "leave": lambda y_BSD, group, dim: sum_out(y_BSD, group),
        "after": lambda x_BsD, bias_D, group: gather_in(x_BsD, group, 1) + bias_D,
    },
    "my tokens are enough; normalise before the gather": {
        "enter": lambda x_BsD, norm, group: norm(gather_in(x_BsD, group, 1))
    },
    _CONJUGATES: {"enter": lambda x_BsD, norm, group: join(norm(x_BsD), group, 1)},
    "a gather and a reduce-scatter each way": Stops(
        {"leave": lambda y_BSD, group, dim: split(sum_out(y_BSD, group), group, dim)}
    ),
}
_SAYS_BLOCK = {f"the gradient of {name}": _CONJUGATES for name in ("x", "up", "down")} | {
    "bytes sent forward and backward": "a gather and a reduce-scatter each way"
}
check_mlp_block = Exercise(_half, _sizes, _WRONG_BLOCK, _blocks, _SAYS_BLOCK, ranks=True)
