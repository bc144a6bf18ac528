"""Graders of chapter 04, exercises 1 to 3: bytes held, bytes sent, clipping on shards."""

import math
from functools import partial

import torch

from course_lib.checks import Each, Exercise, Stops, numbers, on_ranks
from course_lib.comm import all_gather, all_reduce

# ------------------------------------------------------------------------------------ 1. bytes held
ORDER = ("optimizer", "gradients", "parameters")


def _held(num_params, stage, dp_size, order=ORDER, optimizer_bytes=12, shard=math.ceil, whole=math.ceil, cut=int):
    """The reference, and with an argument one of the mistakes. cut: how many kinds are sharded at a stage."""
    piece, padded = shard(num_params / dp_size), whole(num_params / dp_size) * dp_size if stage else num_params
    sizes = {"parameters": 2, "gradients": 2, "optimizer": optimizer_bytes}
    return tuple(round(size * (piece if kind in order[: cut(stage)] else padded)) for kind, size in sizes.items())


def _models(rng):
    return [(10**7 * dp + rng.randrange(1, dp), stage, dp) for dp in (3, 4, 7, 8, 64) for stage in range(4)]


def _of_stage(answer, num_params, stage, dp_size):
    got = answer(num_params, stage, dp_size)
    whole = isinstance(got, tuple) and len(got) == 3 and all(isinstance(size, int) for size in got)
    return {"three whole numbers": whole, f"stage {stage}: (parameters, gradients, optimizer)": got}


_WRONG_HELD = {
    "parameters are cut last, after gradients and optimizer states": {
        "order": ("parameters", "optimizer", "gradients")
    },
    "optimizer states are cut first; gradients follow in stage 2": {"order": ("gradients", "optimizer", "parameters")},
    "the FP32 master copy belongs to the optimizer: 4 + 4 + 4 bytes, not 8": {"optimizer_bytes": 8},
    "round the shard up: ranks pad to equal pieces": {"shard": math.floor},
    "every kind was divided; a stage cuts only what the stages up to it cut": {"cut": lambda stage: 3 * (stage > 0)},
    "nothing was sharded; stage 1 shards the optimizer states, stage 2 the gradients too, stage 3 all": [
        {"cut": lambda stage: 0, "whole": lambda length: length},
        {"cut": lambda stage: 0},
    ],
    "from stage 1 on what stays whole is padded too": {"whole": lambda length: length},
    "return three whole numbers": Stops(lambda *case: tuple(float(size) for size in _held(*case))),
}
_SAYS_HELD = {"three whole numbers": "return three whole numbers: parameters, gradients, optimizer"}
check_held_bytes = Exercise(_held, _models, _WRONG_HELD, _of_stage, _SAYS_HELD)


# ------------------------------------------------------------------------------------ 2. bytes sent
def _sent(num_params, stage, dp_size, micro_batches, grad_bytes=4, own=1, **of_stage):
    """The reference, and with an argument one of the mistakes. stage_1=(gathers, scatters), each of m micro-batches."""
    trips = {0: lambda m: (0, 2), 1: lambda m: (1, 1), 2: lambda m: (1, m), 3: lambda m: (2 * m, m)}[stage]
    gathers, scatters = of_stage.get(f"stage_{stage}", trips)(micro_batches)
    return (2 * gathers + grad_bytes * scatters) * (num_params // dp_size) * (dp_size - own)


def _steps(rng):
    runs = [(dp, m, rng.randrange(10**6, 10**9)) for dp in (2, 4, 8, 64) for m in (1, rng.randrange(3, 9))]
    return [(shard * dp, stage, dp, m) for dp, m, shard in runs for stage in range(4)]


WRONG_SENT = {
    "this is the all-reduce form; only a reduce-scatter is needed": {"stage_1": lambda m: (1, 2)},
    "stage 1 reduces once a step, after the last micro-batch": {"stage_1": lambda m: (1, m)},
    "each micro-batch reduces: nobody keeps whole gradients to add to": {"stage_2": lambda m: (1, 1)},
    "parameters are gathered twice: for forward, and again for backward": {"stage_3": lambda m: (m, m)},
    "every micro-batch gathers and reduces": {"stage_3": lambda m: (2, 1)},
    "gradients travel in 4 bytes": {"grad_bytes": 2},
    "a ring sends (dp - 1) / dp of it: a rank keeps its own piece": {"own": 0},
}
check_sent_bytes = Exercise(
    _sent,
    _steps,
    WRONG_SENT,
    lambda answer, num_params, stage, *rest: {f"stage {stage}: bytes sent": answer(num_params, stage, *rest)},
)


# ------------------------------------------------------------------------------------ 3. clipping on shards
def _clipped(grad_p, max_norm, group, norm=lambda squares, group: all_reduce(squares, group).sqrt(), most=1.0):
    """The reference, and with an argument one of the mistakes. most: the largest factor."""
    return grad_p * min(most, max_norm / norm(grad_p.square().sum(), group).item())


def _with_torch(grad_p, max_norm, group):
    norm = all_gather(grad_p.square().sum().view(1), group).sum().sqrt()
    return grad_p.clone().mul_(torch.minimum(max_norm / (norm + 1e-7), torch.ones_like(norm)))


def _limits(rng):
    """Below the norm of every shard, and above that of the whole gradient."""
    cases = []
    for size in (2, rng.choice([3, 4])):
        shards = [numbers(rng, 50) * (1 + rank) for rank in range(size)]
        low, high = 0.2 * min(shard.norm().item() for shard in shards), 10 * torch.cat(shards).norm().item()
        cases += [(size, Each(shards), low), (size, Each(shards), high)]
    return cases


WRONG_CLIP = {
    "scaled by the norm of its own shard; ranks scale differently": {"norm": lambda squares, group: squares.sqrt()},
    "the shards' norms were added; add their squares, then take the root": {
        "norm": lambda squares, group: all_reduce(squares.sqrt(), group)
    },
    "the mean of the squares was taken; the whole gradient has the sum of them": {
        "norm": lambda squares, group: all_reduce(squares, group, op="mean").sqrt()
    },
    "a gradient below the limit was made longer; the factor is at most 1": {"most": math.inf},
    "it was not clipped": lambda grad_p, max_norm, group: grad_p.clone(),
    "the root is missing: this is the sum of squares": {"norm": all_reduce},
    "a single number is enough": Stops({"norm": lambda total, group: all_reduce(total.repeat(50), group)[0].sqrt()}),
}
_SAYS_CLIP = {"bytes sent": "an all-reduce of a single number is enough"}
check_clip_shards = Exercise(
    _clipped, _limits, WRONG_CLIP, partial(on_ranks, slack=64), _SAYS_CLIP, right=_with_torch, ranks=True
)
