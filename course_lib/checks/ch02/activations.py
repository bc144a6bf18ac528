"""Graders of chapter 02: recomputation where the input needs no gradient, and attention over blocks with a window."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course_lib.checks.core import expect_close, fail, fresh_seed, grader, numbers, observed
from course_lib.measure import MemoryTracker


# ------------------------------------------------------------------------------------ recomputation
class _DroppingBlock(nn.Module):
    def __init__(self, seed: int, width: int, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up, self.down = (
            nn.Parameter(numbers(generator, *shape).to(dtype)) for shape in ((width, 4 * width), (4 * width, width))
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(F.gelu(x @ self.up), 0.5) @ self.down


@grader
def check_recompute(answer, rng):
    """Output, gradients, the input alone kept, random numbers as without; where x is frozen too, and under autocast."""
    seed, draws, width = fresh_seed(rng), fresh_seed(rng), rng.randrange(3, 6)
    x, grad = numbers(rng, 6, width), numbers(rng, 6, width)
    for needs_grad in (True, False):
        x.requires_grad_(needs_grad)
        want = _run_block(lambda block, x: block(x), seed, draws, width, x, grad)
        _expect_recomputed(observed(_run_block, answer, seed, draws, width, x, grad), want, x)
    x = x.detach().float().requires_grad_()  # autocast leaves float64 as it is
    want = _run_block(lambda block, x: block(x), seed, draws, width, x, grad)
    got = observed(_run_block, answer, seed, draws, width, x, grad)
    for name in ("x", "up", "down"):
        if got[name] is None or not torch.equal(got[name], want[name]):
            fail(
                f"under autocast the gradient of {name} is wrong: autocast is off in backward, so the second run is in "
                "float32; store its settings (torch.is_autocast_enabled, torch.get_autocast_dtype) before the first "
                "run, and set them for the second"
            )


def _expect_recomputed(got: dict, want: dict, x: Tensor) -> None:
    expect_close(got["out"], want["out"], "the output")
    if got["calls"] != 2:
        fail(f"the block ran {got['calls']} times; once in forward and once more in backward is right")
    if got["kept_bytes"] > x.nbytes:
        fail(
            f"forward keeps {got['kept_bytes']} bytes for backward, and the input has {x.nbytes}: what is inside the "
            "block must not be recorded in forward"
        )
    if x.requires_grad and got["x"] is None:
        fail("the input got no gradient; backward returns it, after running the block on an input that requires one")
    if got["up"] is None or got["down"] is None:
        fail("the block's parameters got no gradient: the second run must reach them")
    for name in ("x", "up", "down") if x.requires_grad else ("up", "down"):
        if not torch.allclose(got[name], want[name], rtol=1e-8):
            fail(
                f"the gradient of {name} is wrong: did dropout draw other numbers in the second run? Store the state "
                "of the generator (torch.get_rng_state) before the first, and set it before the second"
            )
    if not torch.equal(got["state"], want["state"]):
        fail(
            "after backward the random number generator is elsewhere than without recomputation, so all that "
            "follows changes; put back the state that backward found"
        )


def _run_block(run, seed: int, draws: int, width: int, x: Tensor, grad: Tensor) -> dict:
    """Run forward and backward of a block. A float32 x runs forward under bf16 autocast; a float64 x without."""
    block, x = _DroppingBlock(seed, width, x.dtype), x.detach().clone().requires_grad_(x.requires_grad)
    with torch.random.fork_rng():
        torch.manual_seed(draws)
        with MemoryTracker(block) as tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
                out = run(block, x)
            kept_bytes = tracker.current("activations")
        torch.rand(3)  # something else draws between forward and backward
        if not isinstance(out, Tensor) or not out.requires_grad:
            fail(
                "the output requires no gradient; return what your autograd.Function's apply returns"
                if x.requires_grad
                else "where x needs no gradient, your output needs none either: autograd sees a function of x alone, "
                "and the parameters inside get no gradient"
            )
        out.backward(grad.to(out.dtype))
        state = torch.get_rng_state()
    return {
        "out": out.detach(), "calls": block.calls, "kept_bytes": kept_bytes - out.nbytes, "x": x.grad,
        "up": block.up.grad, "down": block.down.grad, "state": state,
    }  # fmt: skip


# ------------------------------------------------------------------------------------ attention over blocks
class _Largest(TorchDispatchMode):
    """Remembers the bytes of the largest storage that an operator returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return out


def _masked_scores(q: Tensor, k: Tensor, window: int, group: str = "interleave") -> Tensor:
    """Scores of all pairs, -inf where a query does not see the key."""
    times = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(times, 1) if group == "interleave" else k.repeat(1, times, 1, 1)
    positions = torch.arange(q.shape[2])
    distance = positions[:, None] - positions
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill((distance < 0) | (distance >= window), -math.inf)


def _out_of(scores: Tensor, v: Tensor, group: str = "interleave") -> Tensor:
    times = scores.shape[1] // v.shape[1]
    v = v.repeat_interleave(times, 1) if group == "interleave" else v.repeat(1, times, 1, 1)
    return torch.softmax(scores, -1) @ v


@grader
def check_windowed_attention(answer, rng):
    """Causal attention with a window and grouped heads, over blocks: output, log-sum-exp, largest tensor, FLOPs."""
    K, group, H, block = rng.choice([2, 3]), 2, rng.choice([4, 6]), rng.choice([8, 10])
    seq_len, window = rng.randrange(53, 60), rng.randrange(2 * block + 2, 3 * block)
    q, k, v = (numbers(rng, 2, heads, seq_len, H) for heads in (K * group, K, K))
    _expect_attention(answer, q, k, v, window, block)
    _expect_attention(answer, 40 * q, 40 * k, v, window, block)  # exp of such scores overflows
    _expect_attention(answer, q, k, v, seq_len, block)
    _expect_attention(answer, q, k, v, 1, block)


def _expect_attention(answer, q: Tensor, k: Tensor, v: Tensor, window: int, block: int) -> None:
    got, largest_bytes, flops = observed(_attend, answer, q, k, v, window, block)
    if not isinstance(got, tuple | list) or len(got) != 2:
        fail("return two tensors: the output and the log-sum-exp of each row")
    scores = _masked_scores(q, k, window)
    out, lse = _out_of(scores, v), torch.logsumexp(scores, -1, keepdim=True)
    if isinstance(got[0], Tensor) and not got[0].isfinite().all():
        fail(
            "the output is not finite: does exp overflow (take the running maximum off first), or has a row no key in "
            "its first block, so that minus infinity is taken off minus infinity?"
        )
    expect_close(got[0], out, "the output", _misconceptions(q, k, v, window), rtol=1e-8)
    expect_close(
        got[1],
        lse,
        "the log-sum-exp",
        {
            "the largest score of each row: add the logarithm of the sum": scores.amax(-1, keepdim=True),
            "the logarithm of the sum relative to the maximum: add the maximum": lse - scores.amax(-1, keepdim=True),
        },
        rtol=1e-8,
    )
    _expect_small(largest_bytes, q, block)
    limit = _flops_of_tiles(q, window, block)
    if flops > limit:
        fail(
            f"your products take {flops:,} FLOPs, and the blocks in which some query sees some key "
            f"{limit:,}: leave out blocks behind the window and after the diagonal"
        )


def _attend(answer, q: Tensor, k: Tensor, v: Tensor, window: int, block: int) -> tuple[object, int, int]:
    """What the answer returned, the bytes of its largest tensor, and its FLOPs."""
    with _Largest() as largest, FlopCounterMode(display=False) as counter:
        got = answer(q.clone(), k.clone(), v.clone(), window, block)
    return got, largest.nbytes, counter.get_total_flops()


def _misconceptions(q: Tensor, k: Tensor, v: Tensor, window: int) -> dict[str, Tensor]:
    one_more, plain = _masked_scores(q, k, window + 1), _masked_scores(q, k, q.shape[2])
    other_heads = _out_of(_masked_scores(q, k, window, "repeat"), v, "repeat")
    root = math.sqrt(q.shape[-1])
    return {
        "the window is one key too wide: a query sees itself and window - 1 keys before it": _out_of(one_more, v),
        "there is no window: a query sees the last `window` keys only, itself included": _out_of(plain, v),
        "query head n reads key/value head n // (N / K), and yours n % K": other_heads,
        "the scores are not divided by the square root of the head size": _out_of(
            _masked_scores(q * root, k, window), v
        ),
    }


def _expect_small(nbytes: int, q: Tensor, block: int) -> None:
    B, N, _, _ = q.shape
    limit = max(q.nbytes, B * N * block * block * q.itemsize)
    if nbytes > limit:
        fail(
            f"your largest tensor has {nbytes:,} bytes; the queries have {q.nbytes:,} and the scores of one block "
            f"{B * N * block * block * q.itemsize:,}: no tensor may be larger than both"
        )


def _flops_of_tiles(q: Tensor, window: int, block: int) -> int:
    """FLOPs of both products over all blocks in which some query sees some key."""
    B, N, S, H = q.shape
    starts, flops = range(0, S, block), 0
    for query in starts:
        for key in starts:
            queries, keys = min(block, S - query), min(block, S - key)
            if key <= query + queries - 1 and query - (key + keys - 1) < window:
                flops += 4 * B * N * queries * keys * H
    return flops
