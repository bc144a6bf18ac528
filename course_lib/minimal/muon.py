"""Muon's update under ZeRO-1. It reads whole matrices, so a shard must be whole matrices, or be gathered first.

`w_LDF` is a stack of L matrices of one shape: the same matrix of L blocks. Each way updates it in place.

Source   Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv:2502.16982), section 2.3
"""

from course_lib import comm

LEARNING_RATE, MOMENTUM = 0.02, 0.95


def orthogonal(m):
    """Return the matrix, or stack of matrices, with all singular values near 1: five steps of Newton-Schulz."""
    if m.shape[-2] > m.shape[-1]:
        return orthogonal(m.mT).mT
    x = m / m.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def moved(momentum, grad):
    """Add a gradient to the momentum, and return it."""
    return momentum.mul_(MOMENTUM).add_(grad)


def one_process(w_LDF, grad_LDF, momentum_LDF, group):
    """Update without ranks."""
    w_LDF -= LEARNING_RATE * orthogonal(moved(momentum_LDF, grad_LDF))


def shards_of_rows(w_LDF, grad_LDF, momentum_LDF, group):
    """Update as FSDP2 shards: rows of each matrix. Wrong."""
    rows_first = grad_LDF.transpose(0, 1).contiguous()
    grad_LdF = comm.reduce_scatter(rows_first, group, op="mean").transpose(0, 1)
    momentum_LdF = momentum_LDF.chunk(group.size(), 1)[group.rank()]
    step_dLF = orthogonal(moved(momentum_LdF, grad_LdF)).transpose(0, 1)
    w_LDF -= LEARNING_RATE * comm.all_gather(step_dLF.contiguous(), group).transpose(0, 1)


def whole_matrices(w_LDF, grad_LDF, momentum_LDF, group):
    """Update with shards that are whole matrices: those of L / dp blocks."""
    grad_lDF = comm.reduce_scatter(grad_LDF, group, op="mean")
    momentum_lDF = momentum_LDF.chunk(group.size())[group.rank()]
    step_lDF = orthogonal(moved(momentum_lDF, grad_lDF))
    w_LDF -= LEARNING_RATE * comm.all_gather(step_lDF.contiguous(), group)


def gather_first(w_LDF, grad_LDF, momentum_LDF, group):
    """Update with flat shards of the momentum: gather it, and let every rank compute all."""
    grad_p = comm.reduce_scatter(grad_LDF.view(-1), group, op="mean")
    momentum_p = moved(momentum_LDF.view(-1).chunk(group.size())[group.rank()], grad_p)
    w_LDF -= LEARNING_RATE * orthogonal(comm.all_gather(momentum_p, group).view_as(w_LDF))
