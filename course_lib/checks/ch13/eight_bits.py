"""Graders of chapter 13b: a code for a number, blocks for three products, sums over ranks in 8 bits."""

from functools import partial

import torch

from course_lib import comm
from course_lib.checks import Each, Exercise, Stops, fresh_generator, numbers, on_ranks, several
from course_lib.float_formats import FloatFormat
from course_lib.minimal.eight_bits import E4M3, number_of, quantized, rounded


# ------------------------------------------------------------------------------------ a code for a number
def code_of(x, exponent_bits, mantissa_bits, size_of=number_of, key=lambda distance, code: (abs(distance), code % 2)):
    """The nearest code, of two the even one; with an argument one of the mistakes."""
    fmt = FloatFormat("", exponent_bits, mantissa_bits, "none")
    codes = range(2 ** (exponent_bits + mantissa_bits))
    return min(codes, key=lambda code: key(x - size_of(code, fmt), code))


def _no_subnormals(code, fmt):
    fraction, exponent = code % 2**fmt.mantissa_bits / 2**fmt.mantissa_bits, code >> fmt.mantissa_bits
    return (1 + fraction) * 2.0 ** (exponent - fmt.bias)


def _sizes(rng):
    """Exact numbers, ties, numbers in between, subnormal, and too large; in formats of 4 to 8 bits."""
    for bits in ((2, 1), (3, 2), (4, 3), (5, 2)):
        fmt = FloatFormat("", *bits, "none")
        exact = [number_of(code, fmt) for code in range(2 ** sum(bits))]
        places = [0, 1, 2, *rng.sample(range(len(exact) - 1), 3)]
        for share in (0, 0.5, rng.uniform(0.1, 0.45), rng.uniform(0.55, 0.9)):
            yield from [(exact[i] + share * (exact[i + 1] - exact[i]), *bits) for i in places]
        yield 3 * exact[-1], *bits


check_code = Exercise(
    code_of,
    _sizes,
    {
        "the nearest number below was taken; round to the nearest": {
            "key": lambda distance, code: (abs(distance) if distance >= 0 else float("inf"), 0)
        },
        "a number in the middle of two goes to the even code, so that errors cancel": [
            {"key": lambda distance, code: (abs(distance), -code)},
            {"key": lambda distance, code: (abs(distance), code)},
        ],
        "exponent 0 has no leading 1: its numbers are subnormal": {"size_of": _no_subnormals},
        "the bias is 2 ** (exponent_bits - 1) - 1": {"size_of": lambda code, fmt: number_of(code, fmt) / 2},
        "subnormal numbers have the power of two of exponent 1, 2 ** (1 - bias)": {
            "size_of": lambda code, fmt: number_of(code, fmt) / (2 if code < 2**fmt.mantissa_bits else 1)
        },
    },
)


# ------------------------------------------------------------------------------------ blocks for three products
def products(x, w, grad_y, block, grad_x=None, grad_w=None):
    """The reference, and with an argument a mistake: the two matrices of that product, made with the rounding r."""

    def r(t):
        return quantized(t.contiguous(), E4M3, 1, block)

    of_x = grad_x(x, w, grad_y, r) if grad_x else (r(grad_y), r(w.T))
    of_w = grad_w(x, w, grad_y, r) if grad_w else (r(grad_y.T), r(x.T))
    return tuple(a @ b.T for a, b in ((r(x), r(w)), of_x, of_w))


def _matrices(rng):
    """Sizes that blocks divide in all directions; sizes of rows and columns differ, so that blocks matter."""
    generator, cases = fresh_generator(rng), []
    for T, D, F, block in ((8, 16, 24, 8), (16, 8, 8, 4)):
        x, w, grad_y = (numbers(generator, *shape) for shape in ((T, D), (F, D), (T, F)))
        for t in (x, w, grad_y):
            t *= 4.0 ** torch.arange(t.shape[0])[:, None] * 8.0 ** (torch.arange(t.shape[1]) % 3)
        cases.append((x, w, 1e-6 * grad_y, block))
    return cases


check_three_products = Exercise(
    products,
    _matrices,
    {
        "grad_x sums over the outputs, which are rows of w: round w.T": {"grad_x": lambda x, w, g, r: (r(g), r(w).T)},
        "grad_w sums over tokens, which are rows of x and of grad_y: round x.T and grad_y.T": [
            {"grad_w": lambda x, w, g, r: (r(g).T, r(x).T)},
            {"grad_w": lambda x, w, g, r: (r(g.T), r(x).T)},
            {"grad_w": lambda x, w, g, r: (r(g).T, r(x.T))},
        ],
        "one of the two matrices was not rounded: tensor cores multiply FP8 by FP8": [
            {"grad_x": lambda x, w, g, r: (r(g), w.T)},
            {"grad_x": lambda x, w, g, r: (g, r(w.T))},
            {"grad_w": lambda x, w, g, r: (g.T, r(x.T))},
            {"grad_w": lambda x, w, g, r: (r(g.T), x.T)},
        ],
        "three tensors are asked for": Stops(lambda *case: products(*case)[0]),
    },
    several("three tensors are asked for: y, grad_x and grad_w", "y", "grad_x", "grad_w"),
)


# ------------------------------------------------------------------------------------ sums over ranks
def reduce_scatter_8(grad_P, group, scale=None, total=None, most=None):
    """The reference, and with an argument one of the mistakes."""
    most = most or (lambda largest: comm.all_reduce(largest, group, op="max"))
    own = most(grad_P.abs().max()).clamp(min=1e-30) / E4M3.largest
    codes = (grad_P / own).to(torch.float8_e4m3fn).view(torch.uint8)
    parts = comm.all_to_all(codes, group).view(torch.float8_e4m3fn).float().view(group.size(), -1)
    return (total or (lambda parts: parts.sum(0)))(parts) * own


def _gradients(rng):
    """Ranks whose gradients have different sizes; their sum in FP8 would saturate."""
    return [
        (size, Each([(numbers(rng, 256 * size) * 2.0**-rank).float() for rank in range(size)]))
        for size in (2, rng.choice([3, 4]))
    ]


check_reduce_scatter_8 = Exercise(
    reduce_scatter_8,
    _gradients,
    {
        "every rank read all pieces by its own scale; the scale must be the same on all ranks": {
            "most": lambda largest: largest
        },
        "largest elements were added over the ranks; their maximum is enough, and finer": lambda grad_P, group: (
            reduce_scatter_8(grad_P, group, most=lambda largest: comm.all_reduce(largest, group))
        ),
        "the sum was rounded to FP8: sums are taken in FP32": {"total": lambda parts: rounded(parts.sum(0), E4M3)},
        "the sum over ranks is asked for, not the mean": {"total": lambda parts: parts.mean(0)},
        "gradients were not rounded: they travel in one byte each": comm.reduce_scatter,
        "one byte per element": Stops(lambda *given: (comm.all_gather(*given), reduce_scatter_8(*given))[1]),
    },
    partial(on_ranks, slack=64),
    {"bytes sent": "one byte per element, and a scale: each rank needs only its piece of each gradient"},
    ranks=True,
)
