"""Table of chapter 13b's broken program: the scale of a saved input is that of the last input that came."""

from itertools import permutations

import torch
from torch.utils._pytree import tree_leaves

from course_lib.checks import Cost, Exercise, but, fresh_seed, numbers


class EightBitLayer:
    """A linear layer that saves its input for backward in 8 bits."""

    def __init__(self, weight):
        self.weight = weight

    def save(self, x):
        """Return what backward needs of x."""
        self.scale = x.abs().max() / 448
        return (x / self.scale).to(torch.float8_e4m3fn)

    def read(self, saved):
        """Return x again, rounded."""
        return saved.to(self.weight.dtype) * self.scale

    def __call__(self, x):
        """Multiply by the weight."""
        return EightBitProduct.apply(x, self.weight, self)


class EightBitProduct(torch.autograd.Function):
    """x W^T for a layer that says how x is saved."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        """Multiply; let the layer save x."""
        ctx.layer, ctx.saved = layer, layer.save(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad_y):
        """Return both gradients."""
        grad_x = grad_y @ ctx.layer.weight
        return grad_x, grad_y.T @ ctx.layer.read(ctx.saved), None


class _WithItsScale(EightBitLayer):
    def save(self, x):
        scale = x.abs().max() / 448
        return (x / scale).to(torch.float8_e4m3fn), scale

    def read(self, saved):
        x8, scale = saved
        return x8.to(self.weight.dtype) * scale


class _ByIdentity(EightBitLayer):
    """Right too: scales by the tensor that they belong to."""

    def save(self, x):
        x8 = super().save(x)
        x8.scale = self.scale
        return x8

    def read(self, saved):
        return saved.to(self.weight.dtype) * saved.scale


class _InOrder(EightBitLayer):
    """With a list of scales, taken from one end."""

    place = 0

    def save(self, x):
        x8 = super().save(x)
        self.scales = [*getattr(self, "scales", []), self.scale]
        return x8

    def read(self, saved):
        return saved.to(self.weight.dtype) * self.scales.pop(self.place)


class _OneScaleForAll(EightBitLayer):
    def save(self, x):
        if not hasattr(self, "scale"):
            self.scale = x.abs().max() / 448
        return (x / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _is_right(layer, xs, order) -> bool:
    """Whether each micro-batch's gradient of the weight is within rounding, all being in flight at once."""
    outs = [layer(x) for x in xs]
    grads = {i: torch.autograd.grad(outs[i].sum(), layer.weight)[0] for i in order}
    right = [torch.ones_like(out).T @ x for out, x in zip(outs, xs, strict=True)]
    return all(bool((grads[i] - right[i]).norm() < 0.1 * right[i].norm()) for i in order)


def _watch(answer, rows, seed):
    """Watch gradients of the weight, for every order in which three micro-batches go back."""
    w, xs = numbers(seed, 8, 16).requires_grad_(), [numbers(seed + i, rows, 16) * 30.0**i for i in range(3)]
    one = answer(w)
    seen = {"right one after the other": all([_is_right(one, [x], (0,)) for x in xs])}
    for order in permutations(range(3)):
        seen[f"right with three in flight, going back as {order}"] = _is_right(answer(w), xs, order)
    saved = [t for t in tree_leaves(answer(w).save(xs[0])) if isinstance(t, torch.Tensor)]
    return seen | {"bytes saved": Cost(sum(t.nbytes for t in saved), 64)}


WRONG = {
    "right one after the other, off with three micro-batches in flight: gradients are too long or short": EightBitLayer,
    "right if micro-batches go back in one order, and off in the other orders": [_InOrder, but(_InOrder, place=-1)],
    "right for the first micro-batch; later ones do not fit into its scale": _OneScaleForAll,
    "gradients are right, but more than one byte per element is saved": but(
        EightBitLayer, save=lambda self, x: x, read=lambda self, saved: saved
    ),
}
check_eight_bit_layer = Exercise(
    _WithItsScale, lambda rng: [(rng.randrange(6, 12), fresh_seed(rng))], WRONG, _watch, right=_ByIdentity
)
