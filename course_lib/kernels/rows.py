"""Kernels that go over rows or over elements: softmax by four kernels and by one, SwiGLU forward and backward."""

from course_lib.kernels.language import cdiv, jit, tl


@jit
def reduce_row(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MAX: tl.constexpr):
    """y[row] = the largest of x[row], or the sum; rows of n numbers, one program each."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + i, mask=i < n, other=-float("inf") if MAX else 0.0)
    tl.store(y_ptr + row, tl.max(x, 0) if MAX else tl.sum(x, 0))


@jit
def with_row(x_ptr, r_ptr, y_ptr, n, BLOCK: tl.constexpr, DIVIDE: tl.constexpr):
    """y = x / r of its row, or exp(x - r)."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x, r = tl.load(x_ptr + row * n + i, mask=i < n), tl.load(r_ptr + row)
    tl.store(y_ptr + row * n + i, x / r if DIVIDE else tl.exp(x - r), mask=i < n)


@jit
def softmax_fused(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """The softmax of each row: read once, written once; all between stays in registers."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + i, mask=i < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * n + i, e / tl.sum(e, 0), mask=i < n)


@jit
def swiglu_forward(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = silu(gate) * up, n elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(gate_ptr + i, mask=i < n), tl.load(up_ptr + i, mask=i < n)
    tl.store(y_ptr + i, gate * tl.sigmoid(gate) * up, mask=i < n)


@jit
def swiglu_backward(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):
    """Gradients of gate and up; the sigmoid is computed again, so that forward keeps gate and up alone."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i, mask=i < n)
    gate, up = tl.load(gate_ptr + i, mask=i < n), tl.load(up_ptr + i, mask=i < n)
    s = tl.sigmoid(gate)
    tl.store(dup_ptr + i, dy * gate * s, mask=i < n)
    tl.store(dgate_ptr + i, dy * up * s * (1 + gate * (1 - s)), mask=i < n)


def softmax_by_four(x_RN, max_R, e_RN, sum_R, y_RN) -> None:
    """Softmax as an operator at a time has it: largest, exp, sum, quotient; four kernels."""
    rows, n = x_RN.shape
    block = _block_of(n)
    reduce_row[(rows,)](x_RN, max_R, n, block, True)
    with_row[(rows,)](x_RN, max_R, e_RN, n, block, False)
    reduce_row[(rows,)](e_RN, sum_R, n, block, False)
    with_row[(rows,)](e_RN, sum_R, y_RN, n, block, True)


def softmax_by_one(x_RN, y_RN) -> None:
    """The same by one kernel."""
    rows, n = x_RN.shape
    softmax_fused[(rows,)](x_RN, y_RN, n, _block_of(n))


def _block_of(n: int) -> int:
    """The power of two that a row fits in: Triton's tiles have no other lengths."""
    return 1 << (n - 1).bit_length()


def grid_of(numel: int, block: int) -> tuple[int]:
    """Programs of `block` elements each."""
    return (cdiv(numel, block),)
