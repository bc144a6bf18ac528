"""Graders of chapter 10, exercises 5 and 6: gradients of a combination fixed, and their norm, on real ranks."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from course_lib import comm
from course_lib.checks.core import expect_close, fail, fresh_seed, grader, numbers, run_ranks
from course_lib.config import ModelConfig, preset
from course_lib.layout import Layout
from course_lib.model import build as build_whole
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d, sums
from course_lib.training import loss_of

WORLD = 4
MOE = preset("toy-moe")
SMALL = replace(MOE, name="small-moe", num_layers=1, d_model=16, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=32)
SMALL = replace(SMALL, moe=replace(MOE.moe, num_experts=4, d_expert=8, balancing="none"))
KINDS = ("matrices", "norms", "experts")
ATOL = 1e-8
LAYOUTS = ("dp=2,tp=2,sequence_parallel=true", "dp=2,tp=2", "dp=4,ep=2", "dp=2,cp=2,ep=2")
DIVIDED = "{} times too short; each rank's loss is a share of the mean already, nothing is divided"


# ------------------------------------------------------------------------------------ 5. a combination, fixed
@grader
def check_combined_sums(answer, rng):
    """Gradients of a small mixture of experts under four layouts of four ranks equal those of one process."""
    seed = fresh_seed(rng)
    results = run_ranks(_gradients_by_layout, WORLD, answer, seed)
    for index, text in enumerate(LAYOUTS):
        layout = Layout.parse(text)
        want = _one_process(SMALL, layout, seed)
        found = [of_layouts[index] for of_layouts in results]
        mistakes = None if _all_close(found, want) else run_ranks(_gradients_by_mistake, WORLD, text, seed)
        for rank, of_rank in enumerate(found):
            for name, grad in sorted(want.items(), key=lambda item: _kind_of(item[0], layout)):
                kind = _kind_of(name, layout)
                believed = _believed(kind, layout) if mistakes else {}
                wrong = {said: mistakes[rank][rule][name] for rule, said in believed.items()}
                wrong |= {DIVIDED.format(by): grad / by for by in (2, 4)}
                where = f"{text}, rank {rank}: the gradient of {name} ({kind})"
                expect_close(of_rank[name], grad, where, wrong, atol=ATOL)


def _all_close(found: list[dict[str, Tensor]], want: dict[str, Tensor]) -> bool:
    return all(torch.allclose(of_rank[name], want[name], rtol=1e-6, atol=ATOL) for of_rank in found for name in want)


def _believed(kind: str, layout: Layout) -> dict[str, str]:
    said = {}
    if kind == "norms" and layout.sequence_parallel:
        said |= {"norms not over tp": "under SP each rank of tp ran its own tokens alone through it; they are missing"}
    if kind == "norms" and not layout.sequence_parallel:
        said |= {"norms always over tp": "tp times too long: without SP every rank of tp has the whole gradient"}
    if kind == "experts" and layout.ep > 1:
        said |= {
            "experts over data": "summed with the gradients of other experts: those that share the layer with me",
            "experts over ep": "the ranks of ep brought their tokens already, and have other experts",
        }
    if kind == "experts":
        said |= {"experts not summed": "the ranks of expert_dp ran other tokens through the same experts; add theirs"}
    if kind != "norms" and layout.sequence_parallel:
        said |= {"all over tp": "cut over tp: the other ranks of tp have another part, whose gradient is another"}
    if kind == "matrices" and layout.cp > 1:
        said |= {"over dp alone": "the tokens of the other ranks of cp are missing"}
    return said


def _kind_of(name: str, layout: Layout) -> str:
    if ".experts." in name:
        return "experts"
    return "norms" if layout.tp > 1 and ("norm" in name or "router" in name) else "matrices"


OF_EXPERTS = {  # mistakes about experts alone
    "experts over data": lambda groups: [groups.data],
    "experts over ep": lambda groups: [groups.ep],
    "experts not summed": lambda groups: [],
}


def _by_rule(rule: str) -> Callable:
    """The sums of the package, with one mistake."""

    def sum_all(of_kind: dict[str, list[Tensor]], groups, layout: Layout) -> None:
        for kind, grads in of_kind.items():
            over = [groups.data]
            if kind == "experts":
                over = OF_EXPERTS.get(rule, lambda groups: [groups.expert_dp])(groups)
            elif rule == "over dp alone":
                over = [groups.dp]
            over_tp = layout.sequence_parallel or rule == "norms always over tp"
            if rule == "all over tp" or (kind == "norms" and over_tp and rule != "norms not over tp"):
                over.append(groups.tp)
            for grad in grads:
                for group in over:
                    comm.all_reduce_(grad, group)

    return sum_all


def _gradients_by_layout(answer: Callable, seed: int) -> list[dict[str, Tensor]]:
    """On this rank: of each layout the whole gradients, summed by the answer."""
    return [_gradients(layout, seed, {"answer": answer})["answer"] for layout in map(Layout.parse, LAYOUTS)]


def _gradients_by_mistake(text: str, seed: int) -> dict[str, dict[str, Tensor]]:
    """On this rank: the whole gradients of one layout, summed with each mistake."""
    layout = Layout.parse(text)
    return _gradients(layout, seed, {rule: _by_rule(rule) for kind in KINDS for rule in _believed(kind, layout)})


def _gradients(layout: Layout, seed: int, rules: dict[str, Callable]) -> dict[str, dict[str, Tensor]]:
    """One backward pass; each rule sums a copy of what it left."""
    with patch.object(five_d, "shard_over_data", lambda *args: None):
        engine = five_d.build(SMALL, layout, seed=seed % 1000, dtype=torch.float64)
    engine.run(_data(SMALL, layout, engine.groups.coordinates["dp"], seed))  # and nothing is summed
    params = [param for _, param in sums.owned(engine)]
    parts, found = [param.grad for param in params], {}
    for name, rule in rules.items():
        for param, part in zip(params, parts, strict=True):
            param.grad = part.clone()
        _apply(rule, engine)
        found[name] = engines.full_gradients(engine)
    return found


def _apply(rule: Callable, engine) -> None:
    of_kind: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for kind, param in sums.owned(engine):
        of_kind[kind].append(param.grad)
    rule(of_kind, engine.groups, engine.layout)


def _data(config: ModelConfig, layout: Layout, dp_rank: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(seed % 10_000 + dp_rank))
    return [(tokens[:, :-1], tokens[:, 1:])] * layout.micro_batches


def _one_process(config: ModelConfig, layout: Layout, seed: int) -> dict[str, Tensor]:
    model = build_whole(config, seed % 1000, dtype=torch.float64)
    parts = zip(*(_data(config, layout, dp_rank, seed)[0] for dp_rank in range(layout.dp)), strict=True)
    loss_of(model, *(torch.cat(part) for part in parts)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


# ------------------------------------------------------------------------------------ 6. each number once
@grader
def check_norm(answer, rng):
    """The norm of the gradient, from what four ranks of a layout hold."""
    without_sp = rng.choice(["cp=2,tp=2", "dp=2,tp=2"])
    texts = ["dp=2,tp=2,sequence_parallel=true", without_sp, rng.choice(["dp=4,ep=4", "dp=4,ep=2"]), "dp=2,cp=2,ep=2"]
    seed, size = fresh_seed(rng), rng.randrange(3, 8)
    results = run_ranks(_norms_on_this_rank, WORLD, answer, texts, seed, size)
    for index, text in enumerate(texts):
        layout = Layout.parse(text)
        held = [_held(rank, layout, seed, size) for rank in range(WORLD)]
        want, believed = _norm(held, layout, _copies), _believed_of_norm(held, layout)
        for rank, of_layouts in enumerate(results):
            got = of_layouts[index]
            if not isinstance(got, Tensor) or got.numel() != 1:
                shape = f" of shape {tuple(got.shape)}" if isinstance(got, Tensor) else ""
                fail(f"{text}: return a tensor of one element, as torch's sum and sqrt give; it is {got!r}{shape}")
            mine = _norm(held[rank : rank + 1], layout, _copies)
            wrong = believed | {"of this rank's part alone; the other parts are on other ranks": mine}
            expect_close(got.reshape(()), want, f"{text}, rank {rank}: the norm", wrong)


def _believed_of_norm(held: list[dict[str, Tensor]], layout: Layout) -> dict[str, Tensor]:
    """What each mistake gives. The layout with SP comes first: who is right there and not without has read it of SP."""
    without_tp = "norms are on the ranks of tp as well, and counted there again"
    if layout.tp > 1 and not layout.sequence_parallel:
        without_tp = (
            "norms and routers are whole on every rank of tp, whether or not the residual stream is cut; "
            "sequence parallelism only says over whom their gradient is summed"
        )
    by_copies = {
        "what several ranks hold is counted as often": lambda kind, layout: 1,
        without_tp: lambda kind, layout: layout.data_size if kind == "norms" else _copies(kind, layout),
        "an expert is on expert_dp ranks, not on all of data": lambda kind, layout: (
            layout.data_size if kind == "experts" else _copies(kind, layout)
        ),
        "ep says over how many ranks the experts are spread; the same ones are on expert_dp": lambda kind, layout: (
            layout.ep if kind == "experts" else _copies(kind, layout)
        ),
        "experts are cut over tp, as matrices are: ranks of tp hold other parts": lambda kind, layout: (
            layout.expert_dp * layout.tp if kind == "experts" else _copies(kind, layout)
        ),
        "not all that a rank holds is on every rank: each kind has its own number of copies": lambda kind, layout: (
            layout.world_size
        ),
        "ranks of cp have the same parameters too: data is dp times cp": lambda kind, layout: (
            _copies(kind, layout) if kind == "experts" else _copies(kind, layout) // layout.cp
        ),
    }
    parts = [[(g.square().sum(), _copies(kind, layout)) for kind, g in one.items()] for one in held]
    return {said: _norm(held, layout, copies) for said, copies in by_copies.items()} | {
        "norms of ranks do not add up; their squares do": sum(sum(s / n for s, n in one).sqrt() for one in parts),
        "each number is divided by its copies, and squared after that; divide the squares": sum(
            s / n**2 for one in parts for s, n in one
        ).sqrt(),
        "the square of the norm": _norm(held, layout, _copies) ** 2,
    }


def _copies(kind: str, layout: Layout) -> int:
    return {"norms": layout.data_size * layout.tp, "experts": layout.expert_dp}.get(kind, layout.data_size)


def _norm(held: list[dict[str, Tensor]], layout: Layout, copies: Callable) -> Tensor:
    return sum(grad.square().sum() / copies(kind, layout) for one in held for kind, grad in one.items()).sqrt()


def _held(rank: int, layout: Layout, seed: int, size: int) -> dict[str, Tensor]:
    """Gradients after all sums: ranks that hold the same parameter have the same numbers."""
    here, ep_rank = layout.mesh.coordinates(rank), layout.members(rank)["ep"].index(rank)
    owner = {"matrices": 10 + here["tp"], "norms": 20, "experts": 30 + 10 * here["tp"] + ep_rank}
    draw = {kind: torch.Generator().manual_seed(seed + number) for kind, number in owner.items()}
    return {kind: numbers(generator, size, 3) for kind, generator in draw.items()}


def _norms_on_this_rank(answer: Callable, texts: list[str], seed: int, size: int) -> list[Tensor]:
    layouts, rank, world = (
        [Layout.parse(text) for text in texts],
        torch.distributed.get_rank(),
        torch.distributed.group.WORLD,
    )
    return [answer(_held(rank, layout, seed, size), layout, world) for layout in layouts]
