"""One line each for a part of a model that ranks compute together: is it right, what does it send, what does it keep.

Every function runs a learner's program on real ranks in float64, beside one process with the same numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib import comm
from course_lib.devices import rank_device
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.validate import Size, checked

TOKENS, D_MODEL, D_FF, VOCAB = 32, 64, 256, 256  # of all comparisons here
_EQUAL = 1e-12


@dataclass(frozen=True)
class PartRun:
    """What a part of a model did on one rank: its error relative to one process, bytes sent, collectives called.

    kept   elements per token of the largest tensor that autograd saved for backward
    """

    error: float
    sent_bytes: int
    calls: dict[str, int]
    kept: int = 0

    @property
    def is_right(self) -> bool:
        return self.error < _EQUAL


@checked
def compare_mlp(program: Callable, world_size: Size = 4) -> PartRun:
    """Compare program(x_TD, a_DF, b_FD, group) on ranks with gelu(x a) b on one process."""
    return _worst(launch(_mlp, world_size, program))


@checked
def mlp_gradient_errors(program: Callable, enter: Callable, leave: Callable, world_size: Size = 4) -> dict[str, float]:
    """Compare two MLPs with residuals on ranks with one process: relative errors of the loss and of each gradient.

    program(x_TD, weights, enter, leave, group) gets [(a_Df, b_fD), (a_Df, b_fD)], cut by columns and by rows, and
    returns z_TD; the loss is the mean square of z_TD. Of each error the largest over the ranks is returned.
    """
    of_ranks = launch(_mlp_gradients, world_size, program, enter, leave)
    return worst_of_ranks(of_ranks)


@checked
def show_mlp_gradients(program: Callable, enter: Callable, leave: Callable, world_size: Size = 4) -> dict[str, float]:
    """Print which of mlp_gradient_errors are nothing, and the others in percent; return all of them."""
    errors = mlp_gradient_errors(program, enter, leave, world_size)
    print({name: "right" if error < _EQUAL else f"{error:.0%}" for name, error in errors.items()})
    return errors


@checked
def compare_vocab_loss(loss_function: Callable, world_size: Size = 4) -> PartRun:
    """Compare loss_function(logits_BSv, y_BS, group), and the gradient of its sum, with cross-entropy of all logits."""
    return _worst(launch(_vocab_loss, world_size, loss_function))


def worst_of_ranks(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return of each name the largest number among the ranks, in the order of rank 0."""
    return {name: max(errors[name] for errors in of_ranks) for name in of_ranks[0]}


def gather_parts(model: nn.Module, full_shapes: dict[str, torch.Size], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return every parameter in full: one that is shorter than its full shape along a dimension is gathered there."""
    full = {}
    for name, param in model.named_parameters():
        dim = _cut_dim(param.shape, full_shapes[name])
        full[name] = param.detach() if dim is None else comm.join(param.detach(), group, dim)
    return full


def my_part(full: Tensor, shape: torch.Size) -> Tensor:
    """Return this rank's part of a tensor: cut along the dimension in which the shapes differ, or all of it."""
    dim = _cut_dim(shape, full.shape)
    return full if dim is None else _my_piece(full, dim)


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return the same normal numbers on every rank, in float64, on the rank's device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(rank_device())


def _worst(runs) -> PartRun:
    return max(runs, key=lambda run: run.error)


def _cut_dim(shape: torch.Size, full_shape: torch.Size) -> int | None:
    """The dimension along which a part is shorter than the full tensor, if there is one."""
    pairs = enumerate(zip(shape, full_shape, strict=True))
    return next((dim for dim, (size, full_size) in pairs if size != full_size), None)


def _relative(got: Tensor | None, want: Tensor) -> float:
    return 1.0 if got is None else ((got - want).norm() / want.norm()).item()


def _my_piece(x: Tensor, dim: int) -> Tensor:
    return comm.my_piece(x, dist.get_rank(), dist.get_world_size(), dim).contiguous()


def _mlp(program: Callable) -> PartRun:
    x_TD = random_numbers(TOKENS, D_MODEL)
    a_DF, b_FD = random_numbers(D_MODEL, D_FF, seed=1) / 8, random_numbers(D_FF, D_MODEL, seed=2) / 16
    with ByteMeter() as meter:
        z_TD = program(x_TD.clone(), a_DF.clone(), b_FD.clone(), dist.group.WORLD)
    if not isinstance(z_TD, Tensor) or z_TD.shape != x_TD.shape:
        shape = tuple(z_TD.shape) if isinstance(z_TD, Tensor) else type(z_TD).__name__
        raise ValueError(f"the program returned {shape}; return z_TD, a tensor of shape {tuple(x_TD.shape)}")
    return PartRun(_relative(z_TD, F.gelu(x_TD @ a_DF) @ b_FD), meter.sent_bytes, meter.calls)


def _mlp_gradients(program: Callable, enter: Callable, leave: Callable) -> dict[str, float]:
    shapes = ((D_MODEL, D_FF), (D_FF, D_MODEL)) * 2
    full = [random_numbers(TOKENS, D_MODEL, seed=9)]
    full += [random_numbers(*shape, seed=seed) / 8 for seed, shape in enumerate(shapes)]
    dims = [None, 1, 0, 1, 0]  # x is not cut, a by columns, b by rows
    parts = [x if dim is None else _my_piece(x, dim) for x, dim in zip(full, dims, strict=True)]
    full, parts = ([x.clone().requires_grad_() for x in tensors] for tensors in (full, parts))
    want = _loss_of_two_mlps(full)
    want.backward()
    weights = [tuple(parts[1:3]), tuple(parts[3:5])]
    loss = program(parts[0], weights, enter, leave, dist.group.WORLD).square().mean()
    loss.backward()
    errors = {"loss": _relative(loss.detach(), want.detach())}
    for name, got, right in zip(("x", "A1", "B1", "A2", "B2"), parts, full, strict=True):
        errors[name] = _relative(got.grad, my_part(right.grad, got.shape))
    return errors


def _loss_of_two_mlps(tensors: list[Tensor]) -> Tensor:
    z_TD, a1_DF, b1_FD, a2_DF, b2_FD = tensors
    for a_DF, b_FD in ((a1_DF, b1_FD), (a2_DF, b2_FD)):
        z_TD = z_TD + F.gelu(z_TD @ a_DF) @ b_FD
    return z_TD.square().mean()


def _vocab_loss(loss_function: Callable) -> PartRun:
    logits_BSV = (1000 * random_numbers(1, TOKENS, VOCAB)).requires_grad_()  # so large that exp alone overflows
    y_BS = random_numbers(1, TOKENS, VOCAB, seed=1).argmax(-1)
    want_BS = F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten(), reduction="none").view_as(y_BS)
    want_BS.sum().backward()
    logits_BSv, kept = _my_piece(logits_BSV.detach(), 2).requires_grad_(), [0]

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() // TOKENS)
        return tensor

    with ByteMeter() as meter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_BS = loss_function(logits_BSv, y_BS, dist.group.WORLD)
        loss_BS.sum().backward()
    errors = _relative(loss_BS.detach(), want_BS.detach()), _relative(logits_BSv.grad, _my_piece(logits_BSV.grad, 2))
    return PartRun(max(error if error == error else 1.0 for error in errors), meter.sent_bytes, meter.calls, max(kept))
