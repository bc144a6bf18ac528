"""One line each for a layer of experts: is it right, what does it send, whose load is it, what does it learn.

`layer` is a class as in moe.py, layer(router, experts, k), or as in experts.py with a `group` behind k. All functions
on ranks bring the same layer and other tokens to each rank, and compare with all experts on one process, in float64.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.config import ModelConfig, preset
from course_lib.devices import rank_device
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal.compare import SEQ_LEN, SEQUENCES, adamw, micro_batches_of_rank, one_process, sgd
from course_lib.minimal.moe import MoE
from course_lib.model import build, with_moe
from course_lib.training import TrainConfig, loss_of
from course_lib.training.data import batch, tokens
from course_lib.training.loop import make_optimizer
from course_lib.training.moe_training import MoeRun, held_out_loss
from course_lib.validate import Positive, Seed, Size, checked

MOE_CONFIG = with_moe(replace(preset("toy-moe"), num_layers=2), balancing="none")
TOKENS = 64  # of each rank


@dataclass(frozen=True)
class ExpertsRun:
    """What a layer of experts did on all ranks.

    error           the largest difference of an output from one process
    rows_sent       forward: rows of D elements that a rank sends per token of its own, mean over the ranks
    sent_bytes      of each rank, forward and backward; forward alone where there is no backward
    expert_Tk       of each rank: what its tokens chose
    """

    error: float
    rows_sent: float
    sent_bytes: list[int]
    expert_Tk: list[Tensor]

    @property
    def rows(self) -> list[list[int]]:
        """rows[i][j]: assignments of rank i's tokens to experts of rank j."""
        ranks = len(self.expert_Tk)
        each = MOE_CONFIG.moe.num_experts // ranks
        return [(chosen // each).flatten().bincount(minlength=ranks).tolist() for chosen in self.expert_Tk]


def layer_parts(
    config: ModelConfig = MOE_CONFIG, dtype: torch.dtype = torch.float64
) -> tuple[nn.Linear, nn.ModuleList, int]:
    """Return a router, experts and k, the same on every rank; the router has preferences, as a trained one has."""
    layer = build(config, dtype=dtype).blocks[0].mlp
    router = _linear(layer.router.weight)
    generator = torch.Generator("cpu").manual_seed(2)
    preferences_ED = torch.randn(*router.weight.shape, generator=generator, dtype=torch.float64, device="cpu") / 4
    router.weight.data.copy_(preferences_ED)
    return router, layer.experts, config.moe.top_k


@checked
def tokens_of_rank(rank: Seed, num_tokens: Size = TOKENS) -> Tensor:
    """Return a rank's tokens: normal numbers, in float64."""
    generator = torch.Generator("cpu").manual_seed(100 + rank)
    shape = (num_tokens, MOE_CONFIG.d_model)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(rank_device())


@checked
def compare_experts(layer: Callable, world_size: Size = 4, favourites: Sequence = ()) -> ExpertsRun:
    """Run a layer of experts on ranks, forward only, beside all experts on one process.

    favourites  numbers of experts that every token prefers
    """
    return _run(layer, world_size, favourites, backward=False)


@checked
def sent_by_experts(layer: Callable, world_size: Size = 4, favourites: Sequence = ()) -> ExpertsRun:
    """Do the same as compare_experts, forward and backward."""
    return _run(layer, world_size, favourites, backward=True)


@checked
def experts_gradient_errors(layer: Callable, world_size: Size = 4) -> dict[str, float]:
    """Return the relative error of the gradients of tokens, router and experts against one process; 1 where none came.

    The loss is the sum of squares of all ranks' outputs; the router's gradients are summed over ranks here.
    """
    of_ranks = list(launch(_gradient_errors, world_size, layer))
    return {name: max(errors[name] for errors in of_ranks) for name in of_ranks[0]}


@checked
def gradient_lengths(trainer: type, world_size: Size = 4) -> dict[str, tuple[float, float]]:
    """Return the length of a step's gradient over that of one process, and their cosine: of experts, router, the rest.

    `trainer` is a class as ExpertParallel. Right is (1, 1).
    Raises   ValueError if a parameter has no gradient
    """
    return launch(_gradient_lengths, world_size, trainer)[0]


@checked
def train_on_ranks(trainer: type, steps: Size = 20, world_size: Size = 4) -> list[float]:
    """Train with AdamW; return the loss of rank 0's tokens at each step."""
    return launch(_train_here, world_size, trainer, steps)[0]


def gather_experts(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name: of experts each rank's own, of the rest this rank's."""
    full = {}
    for name, tensor in tensors.items():
        before, is_expert, after = name.partition(".experts.")
        if not is_expert:
            full[name] = tensor.detach()
            continue
        number, matrix = after.split(".", 1)
        each = MOE_CONFIG.moe.num_experts // group.size()
        for rank, part in enumerate(comm.all_gather(tensor.detach()[None], group)):
            full[f"{before}.experts.{rank * each + int(number) % each}.{matrix}"] = part
    return full


def put_experts(model: nn.Module, layer: Callable) -> nn.Module:
    """Put layer(router, experts, k) in the place of each mixture of experts of a Llama; parameters keep their names."""
    for block in model.blocks:
        block.mlp = layer(_linear(block.mlp.router.weight), block.mlp.experts, model.config.moe.top_k)
    return model


@checked
def train_experts(
    layer: Callable = MoE, balance: Callable | None = None, coefficient: Positive = 0.01, steps: Size = 100
) -> MoeRun:
    """Train a small Llama with such layers on real text; count how many assignments fell on each expert.

    balance     a function of (logits_TE, expert_Tk), added to the loss of each layer, times the coefficient
    """
    model, text_T, counts, losses = put_experts(build(MOE_CONFIG), layer), tokens(), [], []
    optimizer, start_s = make_optimizer(model), time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(text_T, step, 8, 64))
        layers = [block.mlp for block in model.blocks]
        if balance is not None:
            loss = loss + coefficient * sum(balance(one.logits_TE, one.expert_Tk) for one in layers)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        counts.append(torch.stack([_load(one.expert_Tk) for one in layers]))
    load = torch.stack(counts).float()
    held_out = held_out_loss(model, 8, TrainConfig(batch_size=8, seq_len=64))
    return MoeRun("experts", losses, held_out, load, torch.zeros_like(load), time.perf_counter() - start_s)


def _load(expert_Tk: Tensor) -> Tensor:
    return expert_Tk.flatten().bincount(minlength=MOE_CONFIG.moe.num_experts)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=weight.device)
    linear.weight = nn.Parameter(weight.detach().clone())
    return linear


def _pulled(router: nn.Linear, favourites: Sequence[int]) -> nn.Linear:
    """A router that adds much to the logits of some experts: by a bias."""
    pulls = [100.0 if expert in favourites else 0.0 for expert in range(router.out_features)]
    bias_E = torch.tensor(pulls, dtype=router.weight.dtype, device=router.weight.device)
    router.bias = nn.Parameter(bias_E, requires_grad=False)
    return router


def _run(layer: Callable, world_size: int, favourites: Sequence[int], backward: bool) -> ExpertsRun:
    ranks = list(launch(_run_here, world_size, layer, list(favourites), backward))
    errors, rows, sent, chosen = (list(one) for one in zip(*ranks, strict=True))
    return ExpertsRun(max(errors), sum(rows) / len(rows), sent, chosen)


def _run_here(layer: Callable, favourites: list[int], backward: bool) -> tuple[float, float, int, Tensor]:
    x_TD = tokens_of_rank(dist.get_rank())
    (router, experts, k), (router_too, experts_too, _) = layer_parts(), layer_parts()
    whole = MoE(_pulled(router, favourites), experts, k)
    mine = layer(_pulled(router_too, favourites), experts_too, k, group=dist.group.WORLD)
    with torch.no_grad(), ByteMeter() as meter:
        y_TD = mine(x_TD)
    forward_bytes, row_bytes = meter.sent_bytes, x_TD.shape[1] * x_TD.element_size()
    if not isinstance(y_TD, Tensor) or y_TD.shape != x_TD.shape:
        got = tuple(y_TD.shape) if isinstance(y_TD, Tensor) else type(y_TD).__name__
        raise ValueError(f"the layer returned {got}; return y_TD, a tensor of shape {tuple(x_TD.shape)}")
    error = (y_TD.detach() - whole(x_TD).detach()).abs().nan_to_num(nan=math.inf).max().item()
    sent = forward_bytes
    if backward:
        x_TD = x_TD.clone().requires_grad_()
        with ByteMeter() as meter:
            mine(x_TD).square().sum().backward()
        sent = meter.sent_bytes
    return error, forward_bytes / (len(x_TD) * row_bytes), sent, whole.expert_Tk


def _gradient_errors(layer: Callable) -> dict[str, float]:
    group, size = dist.group.WORLD, dist.get_world_size()
    whole, mine = MoE(*layer_parts()), layer(*layer_parts(), group=group)
    x_all = torch.cat([tokens_of_rank(rank) for rank in range(size)]).requires_grad_()
    x_TD = tokens_of_rank(group.rank()).requires_grad_()
    whole(x_all).square().sum().backward()
    mine(x_TD).square().sum().backward()
    router = mine.router.weight.grad
    if router is not None:
        dist.all_reduce(router, group=group)
    want_x = x_all.grad.chunk(size)[group.rank()]
    errors = {"tokens": _relative(x_TD.grad, want_x), "router": _relative(router, whole.router.weight.grad)}
    wanted = dict(whole.experts.named_parameters())
    pairs = [(param.grad, wanted[name].grad) for name, param in mine.experts.named_parameters()]
    return errors | {"experts": max(_relative(got, want) for got, want in pairs)}


def _gradient_lengths(trainer: type) -> dict[str, tuple[float, float]]:
    made = trainer(build(MOE_CONFIG, dtype=torch.float64), sgd, dist.group.WORLD)
    made.backward(micro_batches_of_rank(0, 1))
    grads = {name: param.grad for name, param in made.model.named_parameters()}
    if missing := [name for name, grad in grads.items() if grad is None]:
        raise ValueError(f"{len(missing)} parameters have no gradient, first {missing[0]}; give each one in backward()")
    got, found = gather_experts(grads, dist.group.WORLD), {}
    for name, grad in one_process(MOE_CONFIG, [batch(tokens(100_000), 0, SEQUENCES, SEQ_LEN)]).items():
        kind = "experts" if ".experts." in name else "router" if "router" in name else "the rest"
        found.setdefault(kind, []).append((got[name].flatten(), grad.flatten()))
    return {kind: _length_and_cosine(*map(torch.cat, zip(*pairs, strict=True))) for kind, pairs in found.items()}


def _length_and_cosine(got: Tensor, want: Tensor) -> tuple[float, float]:
    return (got.norm() / want.norm()).item(), (got @ want / got.norm() / want.norm()).item()


def _train_here(trainer: type, steps: int) -> list[float]:
    made, losses = trainer(build(MOE_CONFIG), adamw, dist.group.WORLD), []
    for step in range(steps):
        parts = micro_batches_of_rank(step, 1)
        with torch.no_grad():
            losses.append(loss_of(made.model, *parts[0]).item())
        made.backward(parts)
        made.update()
    return losses


def _relative(got: Tensor | None, want: Tensor) -> float:
    return 1.0 if got is None else ((got - want).norm() / want.norm()).nan_to_num(nan=math.inf).item()
