"""In which dtype a number is kept, and how AdamW works when the parameters are too coarse to add small updates to.

Bytes per parameter of each precision (the names are those of `run.RECIPES`):

    name                      parameter  gradient  master  moments   sum
    fp32                          4          4        -       8       16
    autocast                      4          4        -       8       16    only activations and matmuls are bf16
    bf16                          2          2        -       4        8    small updates are swallowed
    bf16-master                   2          2        4       8       16
    bf16-master-fp32-grads        2          4        4       8       18    as Megatron-Core keeps them
    bf16-master-both-grads        2        2 + 4      4       8       20    a bf16 gradient beside its FP32 sum
    fp16-master-fp32-grads        2          4        4       8       18    with loss scaling
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from course_lib.validate import Checked, Positive, checked, one_of


@dataclass(frozen=True)
class Precision(Checked):
    """What is kept in which dtype. `fp32_grads`: "no", "only" (the low-precision one is dropped at once) or "both"."""

    param_dtype: torch.dtype = torch.bfloat16
    master: bool = True
    fp32_grads: Literal["no", "only", "both"] = "no"
    autocast: bool = False
    loss_scaling: bool = False


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(torch.float32, master=False),
    "autocast": Precision(torch.float32, master=False, autocast=True),
    "bf16": Precision(master=False),
    "bf16-master": Precision(),
    "bf16-master-fp32-grads": Precision(fp32_grads="only"),
    "bf16-master-both-grads": Precision(fp32_grads="both"),
    "fp16-master-fp32-grads": Precision(torch.float16, fp32_grads="only", loss_scaling=True),
}


@checked
def precision_named(name: str) -> Precision:
    one_of("precision", name, tuple(PRECISIONS))
    return PRECISIONS[name]


ENGINE_RECIPES = ("fp32", "bf16-master", "bf16-master-fp32-grads")


def engine_dtypes(recipe: str) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtypes of a recipe in an engine of parallel/: of parameters, and of gradients where it is another.
    Raises   ValueError for recipes that no engine takes
    """
    if recipe not in ENGINE_RECIPES:
        raise ValueError(f"recipe is {recipe!r}, which no engine takes; choose from {', '.join(ENGINE_RECIPES)}")
    precision = PRECISIONS[recipe]
    return precision.param_dtype, torch.float32 if precision.fp32_grads == "only" else None


def autocast_for(precision: Precision, device: torch.device) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16) if precision.autocast else nullcontext()


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on an FP32 copy of each 16-bit parameter (the master). The parameter itself is the copy, rounded.

    A wider parameter is its own master. Whole parameters and shards of them are alike to it: it treats each number by
    itself, and sends nothing. The arithmetic is that of `torch.optim.AdamW`. A parameter's `main_grad` is used where
    there is one (see `accumulate_in_fp32`).
    Bytes    state per 16-bit parameter: 4 master + 4 exp_avg + 4 exp_avg_sq; per FP32 parameter 8
    Source   Micikevicius et al. 2018 (arXiv:1710.03740); Loshchilov and Hutter 2019 (arXiv:1711.05101)
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is not None:
                    self._update(parameter, gradient, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict) -> None:
        state, dtype = self.state[parameter], torch.promote_types(parameter.dtype, torch.float32)
        if not state:
            if parameter.dtype != dtype:
                state["master"] = parameter.to(dtype)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        master = state.get("master", parameter)
        adamw_(master, gradient.to(dtype), state["exp_avg"], state["exp_avg_sq"], group)
        if master is not parameter:
            parameter.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        zero_gradients(parameter for group in self.param_groups for parameter in group["params"])

    def load_state_dict(self, state_dict: dict) -> None:
        """As usual, but master weights and moments stay FP32: torch would cast them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, tensors in saved.items():
            parameter = order[index]
            self.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in tensors.items()}


def adamw_(master_p: Tensor, grad_p: Tensor, exp_avg_p: Tensor, exp_avg_sq_p: Tensor, options: dict) -> None:
    """One AdamW update in place, of any piece of the numbers: each is treated by itself."""
    (beta1, beta2), count = options["betas"], options["step"]
    exp_avg_p.lerp_(grad_p, 1 - beta1)
    exp_avg_sq_p.mul_(beta2).addcmul_(grad_p, grad_p, value=1 - beta2)
    denominator_p = exp_avg_sq_p.sqrt().div_(math.sqrt(1 - beta2**count)).add_(options["eps"])
    master_p.mul_(1 - options["lr"] * options["weight_decay"])
    master_p.addcdiv_(exp_avg_p, denominator_p, value=-options["lr"] / (1 - beta1**count))


@checked
def accumulate_in_fp32(parameters: Iterable[nn.Parameter], keep_low: bool = False) -> list:
    """Gives each parameter an FP32 `main_grad`, into which every backward pass adds. Returns the hooks' handles.

    The gradient that autograd makes is dropped at once, or with `keep_low` kept (zeroed, so that it starts afresh).
    Bytes    4 per parameter, and with keep_low the low-precision gradient as well
    """

    def add_to_main(parameter: Tensor) -> None:
        parameter.main_grad.add_(parameter.grad)
        if keep_low:
            parameter.grad.zero_()
        else:
            parameter.grad = None

    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trainable:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return [parameter.register_post_accumulate_grad_hook(add_to_main) for parameter in trainable]


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """The gradient that counts: the FP32 one where it exists."""
    return getattr(parameter, "main_grad", parameter.grad)


def set_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Puts the gradient where optimizers look: `.grad`, which must have the parameter's dtype, or else `.main_grad`."""
    if gradient is not None and gradient.dtype != parameter.dtype:
        parameter.main_grad = gradient
        return
    parameter.grad = gradient
    if hasattr(parameter, "main_grad"):
        del parameter.main_grad


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Forgets the gradients: frees ordinary ones, zeroes FP32 buffers, which stay."""
    for parameter in parameters:
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
        else:
            parameter.grad = None


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Length of all gradients taken as one vector, added up in FP32 at least."""
    gradients = [gradient for parameter in parameters if (gradient := gradient_of(parameter)) is not None]
    if not gradients:
        raise ValueError("no parameter has a gradient; call backward() before asking for their norm")
    norms = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)).norm() for gradient in gradients]
    return torch.stack(norms).norm()


@checked
@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Positive | Tensor) -> None:
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None:
            gradient.mul_(factor)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Shortens all gradients together to the length max_norm where they are longer. Returns the length they had.
    Source   Pascanu et al. 2013 (arXiv:1211.5063); the same as `torch.nn.utils.clip_grad_norm_`
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    scale_gradients(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@dataclass
class LossScaler:
    """Keeps fp16 gradients out of underflow: multiplies the loss by `scale`, divides the FP32 gradients by it.

    On overflow the step is left out and the scale halved; after `growth_interval` good steps in a row it is doubled.
    Source   Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2; torch.amp.GradScaler
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0
    skipped_steps: int = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divides the gradients by the scale. Returns whether all of them are finite, so that the step may be taken."""
        parameters = list(parameters)
        finite = bool(torch.isfinite(gradient_norm(parameters)))
        if finite:
            scale_gradients(parameters, 1.0 / self.scale)
        return finite

    def update(self, finite: bool) -> None:
        """Chooses the scale of the next step."""
        if not finite:
            self.scale, self.good_steps, self.skipped_steps = self.scale / 2, 0, self.skipped_steps + 1
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0
