"""Table of chapter 13, exercise 6: a broken program, whose masked places count as logits of 0."""

from course_lib.checks import Cost, Exercise, but, fresh_seed
from course_lib.kernels.language import jit, tl
from course_lib.kernels.traffic import KernelTraffic, new


@jit
def losses_of_rows(x_ptr, target_ptr, loss_ptr, n, BLOCK: tl.constexpr):
    """The cross-entropy of each row of logits; a row is read once."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + i, mask=i < n, other=0.0)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - top), 0)
    right = tl.load(x_ptr + row * n + tl.load(target_ptr + row))
    tl.store(loss_ptr + row, top + tl.log(total) - right)


class FusedLoss:
    """The losses of rows of logits by one kernel, which never stores a softmax."""

    kernel = losses_of_rows

    def __call__(self, logits_RN, targets_R):
        """Return the loss of each row."""
        rows, n = logits_RN.shape
        losses_R = new((rows,))
        block = 1 << (n - 1).bit_length()  # a tile's length is a power of two
        self.kernel[(rows,)](logits_RN, targets_R, losses_R, n, block)
        return losses_R


def _with(total_of, other=-float("inf"), reads=1):
    """The program with another sum: total_of(x, its largest, n, BLOCK)."""

    @jit
    def kernel(x_ptr, target_ptr, loss_ptr, n, BLOCK: tl.constexpr):
        row, i = tl.program_id(0), tl.arange(0, BLOCK)
        for _ in range(reads):
            x = tl.load(x_ptr + row * n + i, mask=i < n, other=other)
        right = tl.load(x_ptr + row * n + tl.load(target_ptr + row))
        top, total = total_of(x, tl.max(x, 0), n, BLOCK)
        tl.store(loss_ptr + row, top + tl.log(total) - right)

    return but(FusedLoss, kernel=kernel)


def _sum(x, top, n, BLOCK):
    return top, tl.exp(x - top).sum()


def _watch(answer, seed):
    """Beside rows of a power of two: other rows, rows of negative logits, and large ones; and the bytes."""
    seen, moved = {}, KernelTraffic()
    cases = {"rows of a power of two": (64, 0.0, 1.0), "other rows": (40, 0.0, 1.0)}
    cases |= {"rows of negative logits": (100, -30.0, 1.0), "rows of large logits": (100, 200.0, 50.0)}
    for name, (n, shift, scale) in cases.items():
        x = new((3, n), seed=seed).mul_(scale).add_(shift)
        with moved:
            seen[name] = answer()(x, x.argmin(1)).clone()
    return seen | {"bytes": Cost(moved.bytes)}


WRONG = {
    "rows that fill their tile are right; the places that are masked still count in the others": FusedLoss,
    "the masked places do not count alike: each adds exp(0 - top), which depends on the row": _with(
        lambda x, top, n, BLOCK: (top, tl.exp(x - top).sum() * n / BLOCK), other=0.0
    ),
    "small logits are right, large ones overflow: subtract the largest": _with(
        lambda x, top, n, BLOCK: (0.0, tl.exp(x).sum())
    ),
    "losses are right, but each row is read twice": _with(_sum, reads=2),
}
check_fused_loss = Exercise(
    _with(_sum),
    lambda rng: [(fresh_seed(rng),)],
    WRONG,
    _watch,
    right=_with(lambda x, top, n, BLOCK: (top, tl.where(tl.arange(0, BLOCK) < n, tl.exp(x - top), 0.0).sum()), -1e9),
)
