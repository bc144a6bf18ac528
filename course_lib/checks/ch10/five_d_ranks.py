"""Graders of chapter 10, exercises 5 and 6: gradients of a combination fixed, and their norm, on real ranks."""

import functools
from dataclasses import replace

import torch
import torch.distributed as dist

from course_lib.checks import Exercise, but, fresh_seed, numbers
from course_lib.comm import all_reduce, all_reduce_
from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.model import build
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d, pipeline, sums
from course_lib.training import loss_of

WORLD = 4
MOE = preset("toy-moe")
SMALL = replace(MOE, name="small-moe", num_layers=1, d_model=16, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=32)
SMALL = replace(SMALL, moe=replace(MOE.moe, num_experts=4, d_expert=8, balancing="none"))
KINDS = ("matrices", "norms", "experts")


# ------------------------------------------------------------------------------------ 5. a combination, fixed
def _sum_by_kind(of_kind, groups, layout, divisor=lambda group: 1, **mistakes):
    """Sums each kind over its groups, "" over none. A mistake names others, or a function of the layout does."""
    norms = "data tp" if layout.sequence_parallel else "data"
    over = {"matrices": "data", "norms": norms, "experts": "expert_dp"} | mistakes
    for kind, grads in of_kind.items():
        for grad in grads:
            for axis in (over[kind](layout) if callable(over[kind]) else over[kind]).split():
                all_reduce_(grad, getattr(groups, axis))
            grad /= divisor(groups.expert_dp if kind == "experts" else groups.data)


def combinations(rng):
    seed = fresh_seed(rng)
    texts = ("dp=2,tp=2,sequence_parallel=true", "dp=2,tp=2", "dp=4,ep=2", "dp=2,cp=2,ep=2")
    return [(WORLD, text, seed) for text in texts]


_Unsummed = but(five_d.CutStageRunner, before_backward=lambda self, stage, is_last: None)


@functools.cache
def _after_backward(text, seed):
    """This rank's engine, its gradients before any sum, and the gradients of one process with the tokens of all."""
    layout, draw = Layout.parse(text), torch.Generator().manual_seed(seed)
    tokens = torch.randint(SMALL.vocab_size, (layout.dp, 9), generator=draw)
    engine = five_d.build(SMALL, layout, seed=seed % 1000, dtype=torch.float64)
    mine = tokens[engine.groups.coordinates["dp"]][None]
    micro_batches = [(mine[:, :-1], mine[:, 1:])] * layout.micro_batches
    pipeline.execute(engine.pipeline, micro_batches, _Unsummed(engine, layout.dp * layout.micro_batches * 8))
    model = build(SMALL, seed % 1000, dtype=torch.float64)
    loss_of(model, tokens[:, :-1], tokens[:, 1:]).backward()
    parts = [(kind, param, param.grad.clone()) for kind, param in sums.owned(engine)]
    return engine, parts, {name: param.grad for name, param in model.named_parameters()}


def _watch_sums(answer, layout, seed):
    """By kind, how far each whole gradient is from that of one process."""
    engine, parts, want = _after_backward(layout, seed)
    of_kind = {kind: [] for kind in KINDS}
    for kind, param, part in parts:
        param.grad = part.clone()
        of_kind[kind].append(param.grad)
    answer(of_kind, engine.groups, engine.layout)
    found, seen = engines.full_gradients(engine), {}
    for name in sorted(want):
        is_norm = engine.layout.tp > 1 and ("norm" in name or "router" in name)
        kind = "experts" if ".experts." in name else "norms" if is_norm else "matrices"
        apart = (found[name] - want[name]).round(decimals=10) + 0.0
        seen.setdefault(f"the gradients of {kind}, less those of one process", {})[name] = apart
    return seen


DIVIDED = "each rank's loss is a share of the mean already, nothing is divided"
WRONG_SUMS = {
    f"as many times too short as its group has ranks; {DIVIDED}": {"divisor": lambda group: group.size()},
    f"{WORLD} times too short; {DIVIDED}": {"divisor": lambda group: WORLD},
    "under SP each rank of tp ran its own tokens alone through it; they are missing": {"norms": "data"},
    "tp times too long: without SP every rank of tp has the whole gradient": {"norms": "data tp"},
    "summed with the gradients of other experts: those that share the layer with me": {"experts": "data"},
    "the ranks of ep brought their tokens already, and have other experts": [
        {"experts": lambda layout: "ep" if layout.ep > 1 else "data"},
        {"experts": "ep"},
    ],
    "the ranks of expert_dp ran other tokens through the same experts; add theirs": {"experts": ""},
    "cut over tp: the other ranks of tp have another part, whose gradient is another": {
        "matrices": lambda layout: "data tp" if layout.sequence_parallel else "data",
        "experts": lambda layout: "expert_dp tp" if layout.sequence_parallel else "expert_dp",
    },
    "the tokens of the other ranks of cp are missing": {"matrices": "dp"},
}
check_combined_sums = Exercise(_sum_by_kind, combinations, WRONG_SUMS, _watch_sums, ranks=True, seconds=30.0)


# ------------------------------------------------------------------------------------ 6. each number once
def norm(held, layout, world, power=2, end=lambda squares, world: all_reduce(squares, world).sqrt(), **mistakes):
    """The square root of all squares, each over its copies. A mistake counts the copies of a kind otherwise."""
    copies = {"matrices": layout.data_size, "norms": layout.data_size * layout.tp, "experts": layout.expert_dp}
    copies |= {kind: mistake(layout) for kind, mistake in mistakes.items()}
    return end(sum(g.square().sum() / copies[kind] ** (power / 2) for kind, g in held.items()), world)


def layouts(rng):
    texts = [rng.choice(["cp=2,tp=2", "dp=2,tp=2"]), "dp=4,ep=2", "dp=4,ep=4", "dp=2,cp=2,ep=2"]
    seed, size = fresh_seed(rng), rng.randrange(3, 8)
    return [(WORLD, text, seed, size) for text in ("dp=2,tp=2,sequence_parallel=true", *texts)]


def _watch_norm(answer, layout, seed, size):
    """Ranks that hold the same parameter have the same numbers."""
    layout, rank = Layout.parse(layout), dist.get_rank()
    tp, ep = layout.mesh.coordinates(rank)["tp"], layout.members(rank)["ep"].index(rank)
    owner = {"matrices": 10 + tp, "norms": 20, "experts": 30 + 10 * tp + ep}
    held = {kind: numbers(seed + number, size, 3) for kind, number in owner.items()}
    return {"the norm": answer(held, layout, dist.group.WORLD)}


_WRONG_NORM = {
    "what several ranks hold is counted as often": dict.fromkeys(KINDS, lambda layout: 1),
    "norms and routers are whole on every rank of tp, whether or not the residual stream is cut; sequence "
    "parallelism only says over whom their gradient is summed": {
        "norms": lambda layout: layout.data_size * (layout.tp if layout.sequence_parallel else 1)
    },
    "norms are on the ranks of tp as well, and counted there again": {"norms": lambda layout: layout.data_size},
    "an expert is on expert_dp ranks, not all of data": {"experts": lambda layout: layout.data_size},
    "ep says over how many ranks the experts are spread; the same ones are on expert_dp": {
        "experts": lambda layout: layout.ep
    },
    "experts are cut over tp, as matrices are: ranks of tp hold other parts": {
        "experts": lambda layout: layout.expert_dp * layout.tp
    },
    "not all that a rank holds is on every rank: each kind has its own number of copies": dict.fromkeys(
        KINDS, lambda layout: layout.world_size
    ),
    "ranks of cp have the same parameters too: data is dp times cp": {
        "matrices": lambda layout: layout.dp,
        "norms": lambda layout: layout.dp * layout.tp,
    },
    "ranks' norms do not add up; their squares do": {"end": lambda squares, world: all_reduce(squares.sqrt(), world)},
    "each number is divided by its copies, and squared after that; divide the squares": {"power": 4},
    "the square of the norm": {"end": all_reduce},
    "of this rank's part alone; the other parts are on other ranks": {"end": lambda squares, world: squares.sqrt()},
}
_SAYS_NORM = {"the norm": "return a tensor of one element, as torch's sum and sqrt give"}
check_norm = Exercise(norm, layouts, _WRONG_NORM, _watch_norm, _SAYS_NORM, ranks=True)
