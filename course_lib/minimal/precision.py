"""Training in 16 bits in its smallest form: FP32 master weights, loss scaling, stochastic rounding.

A trainer has `backward(loss)`, which leaves gradients, and `update()`, which makes the step. The engine in
training/precision.py adds clipping, accumulation in FP32 and checkpoints.

Source   Micikevicius et al. 2018 (arXiv:1710.03740); stochastic rounding: Gupta et al. 2015 (arXiv:1502.02551)
"""

import torch
from torch import nn


class OneDtype:
    """Parameters, gradients and the update all have the dtype of the model."""

    def __init__(self, model, make_optimizer):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.params)

    def backward(self, loss):
        """Leave the gradient of every parameter."""
        loss.backward()

    def update(self):
        """Make one step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class MasterWeights(OneDtype):
    """Forward and backward use 16-bit parameters; the optimizer updates FP32 copies."""

    def __init__(self, model, make_optimizer):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = make_optimizer(self.masters)

    def update(self):
        """Update the FP32 master weights, then round them into the model."""
        self.move_gradients()
        self.step_and_round()

    def move_gradients(self):
        """Convert each gradient to FP32 and give it to the master weight."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad, param.grad = param.grad.float(), None

    def step_and_round(self):
        """Update in FP32, then give each parameter the 16-bit number nearest to it."""
        super().update()
        for param, master in zip(self.params, self.masters, strict=True):
            param.data.copy_(self.rounded(master.detach()))

    def rounded(self, master):
        """Leave the rounding to `copy_`, which takes the nearest number."""
        return master


class LossScaling(MasterWeights):
    """FP16: the loss is multiplied by a scale, and the gradients are divided by it."""

    def __init__(self, model, make_optimizer, scale=2.0**16, growth_interval=2000):
        super().__init__(model, make_optimizer)
        self.scale, self.growth_interval, self.good_steps = scale, growth_interval, 0

    def backward(self, loss):
        """Leave gradients that are `scale` times too large."""
        (loss * self.scale).backward()

    def update(self):
        """Divide the gradients and make the step; skip it if a gradient overflowed."""
        self.move_gradients()
        if all(master.grad.isfinite().all() for master in self.masters):
            for master in self.masters:
                master.grad /= self.scale
            self.step_and_round()
            self.good_steps += 1
        else:
            self.optimizer.zero_grad()
            self.scale, self.good_steps = self.scale / 2, 0
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0


def stochastic_round(x):
    """Round FP32 to bf16, up or down at random: the nearer number is more probable."""
    bits = x.view(torch.int32)  # bf16 is the upper half of these 32 bits
    noise = torch.randint_like(bits, 1 << 16)  # as long as the lower half
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


class StochasticRounding(MasterWeights):
    """Between steps there is no FP32 copy: it is made, updated, and rounded at random."""

    def update(self):
        """Make FP32 copies of the 16-bit parameters, update them, round, drop them."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.data = param.detach().float()
        super().update()
        for master in self.masters:
            master.data = master.new_empty(0)

    def rounded(self, master):
        """Choose one of the two 16-bit neighbours at random."""
        return stochastic_round(master)
