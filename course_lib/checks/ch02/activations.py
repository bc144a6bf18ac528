"""Tables of chapter 02: recomputation where the input needs no gradient, and attention over blocks with a window."""

import math
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_lib.checks import Cost, Exercise, Stops, copied, fresh_seed, numbers
from course_lib.checks.ch02.techniques import output_and_lse
from course_lib.measure import MemoryTracker
from course_lib.minimal.memory import Tracker
from course_lib.minimal.recompute import autocast_as_now


# ------------------------------------------------------------------------------------ recomputation
class _Recomputed(torch.autograd.Function):
    """The parameters are inputs too, so autograd sees that there is something to do; an option is a mistake."""

    @staticmethod
    def forward(ctx, how, block, x, *params):
        ctx.how, ctx.block, ctx.params = how, block, params
        ctx.state, ctx.autocast = torch.get_rng_state(), autocast_as_now(x)
        ctx.save_for_backward(x, *([x.repeat(4, 1)] if "keeps more" in how else []))
        if "twice" in how:
            block(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x, found = ctx.saved_tensors[0].detach().requires_grad_(), torch.get_rng_state()
        if "draws anew" not in ctx.how:
            torch.set_rng_state(ctx.state)
        with torch.enable_grad(), nullcontext() if "no autocast" in ctx.how else ctx.autocast:
            out = ctx.block(x)
        if "leaves the generator" not in ctx.how:
            torch.set_rng_state(found)
        if not ctx.params:
            torch.autograd.backward(out, grad)
            return None, None, x.grad
        of_x, *of_params = torch.autograd.grad(out, (x, *ctx.params), grad)
        of_params = [None if "no parameters" in ctx.how else one for one in of_params]
        return None, None, None if "no input" in ctx.how else of_x, *of_params


def recompute(block, x, how=()):
    """Output and gradients of a block that keeps its input alone and runs again in backward."""
    return _Recomputed.apply(how, block, x, *block.parameters())


def _inputs_of_a_block(rng):
    """An input that needs a gradient, one that needs none, and one in float32, which runs under bf16 autocast."""
    seed, draws, x, grad = fresh_seed(rng), fresh_seed(rng), numbers(rng, 6, 5), numbers(rng, 6, 5)
    of_x = (x.clone().requires_grad_(), x, x.float().requires_grad_())  # autocast leaves float64 as it is
    return [(seed, draws, one, grad) for one in of_x]


def _watch_block(answer, seed, draws, x, grad):
    calls = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Linear(5, 20), nn.GELU(), nn.Dropout(0.5), nn.Linear(20, 5)
        block = nn.Sequential(*layers).to(x.dtype)
        block.register_forward_pre_hook(lambda *_: calls.append(1))
        torch.manual_seed(draws)
        with MemoryTracker(block) as tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
                out = answer(block, x)
            kept_bytes = tracker.current("activations")
        torch.rand(3)  # something else draws between forward and backward
        has_graph = isinstance(out, Tensor) and out.requires_grad
        if has_graph:
            out.backward(grad.to(out.dtype))
        state = torch.get_rng_state()
    under = " under autocast" if x.dtype == torch.float32 else ""
    of_kept = kept_bytes - out.nbytes - x.nbytes if isinstance(out, Tensor) else 0
    return {
        "where x needs a gradient, the output has one" if x.requires_grad else "the output has a gradient": has_graph,
        "the output": copied(out, as_results=True),
        "times that the block ran": len(calls),
        "bytes kept for backward beside the input": Cost(max(0, of_kept)),
        "the input got a gradient": x.grad is not None,
        "the parameters got gradients": [param.grad is not None for param in block.parameters()],
        f"the gradients of x, up and down{under}": [x.grad, *(param.grad for param in block.parameters())],
        "the random number generator after backward": state,
    }


_WRONG_TWICE = {
    "the output requires no gradient; return what your autograd.Function's apply returns": torch.no_grad()(
        lambda block, x: block(x)
    ),
    "where x needs no gradient, your output needs none either: autograd sees a function of x alone, and the "
    "parameters inside get no gradient": lambda block, x: _Recomputed.apply((), block, x),
    "once in forward and once more in backward is right": lambda block, x: block(x),
    "what is inside the block must not be recorded in forward": [{"how": "keeps more"}],
    "the input got no gradient; backward returns it, after running the block on an input that requires one": (
        {"how": "no input"}
    ),
    "the block's parameters got no gradient: the second run must reach them": {"how": "no parameters"},
    "did dropout draw other numbers in the second run? Store the state of the generator (torch.get_rng_state) "
    "before the first, and set it before the second": {"how": "draws anew"},
    "autocast is off in backward, so the second run is in float32; store its settings (torch.is_autocast_enabled, "
    "torch.get_autocast_dtype) before the first run, and set them for the second": {"how": "no autocast"},
    "after backward the random number generator is elsewhere than without recomputation, so all that follows "
    "changes; put back the state that backward found": {"how": "leaves the generator"},
    "the block ran twice in forward, so dropout drew twice; it must run once": {"how": "twice"},
}
_SAYS_TWICE = {
    "times that the block ran": "once in forward and once more in backward is right",
    "bytes kept for backward beside the input": "what is inside the block must not be recorded in forward",
}
check_recompute = Exercise(
    recompute,
    _inputs_of_a_block,
    _WRONG_TWICE,
    _watch_block,
    _SAYS_TWICE,
    right=partial(checkpoint, use_reentrant=False),
)


# ------------------------------------------------------------------------------------ attention over blocks
class _Largest(Tracker):
    nbytes = 0

    def see(self, tensor):
        self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())


def _windowed_attention(q, k, v, window, block, wrong=""):
    """Causal attention with a window and grouped heads, over blocks; the diagonal first: every row sees a key."""
    B, N, S, H = q.shape
    times = N // k.shape[1]
    k, v = (x.repeat(1, times, 1, 1) if wrong == "heads" else x.repeat_interleave(times, 1) for x in (k, v))
    window = S if wrong == "no window" else window + (wrong == "one more")
    out, lse = torch.empty_like(q), q.new_empty(B, N, S, 1)
    for start in range(0, S, block):
        rows = q[:, :, start : start + block] / (1 if wrong == "root" else math.sqrt(H))
        m, total, o = q.new_full((*rows.shape[:3], 1), -math.inf), 0, 0
        first = 0 if wrong == "all blocks" else max(0, start - window + 1) // block
        tiles = range(first, start // block + 1)
        for tile in tiles if wrong == "oldest first" else reversed(tiles):
            keys = slice(tile * block, (tile + 1) * block)
            gap = torch.arange(start, min(start + block, S))[:, None] - torch.arange(S)[keys]
            scores = (rows @ k[:, :, keys].mT).masked_fill((gap < 0) | (gap >= window), -math.inf)
            larger = torch.maximum(m, scores.amax(-1, keepdim=True))
            shrink = 1 if wrong == "never shrunk" else (m - larger).exp()
            weights = (scores - larger).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            o = o * shrink + weights @ v[:, :, keys]
            m = larger
        out[:, :, start : start + block] = o / total
        of_m, of_total = m * (wrong != "relative"), total.log() * (wrong != "only the maximum")
        lse[:, :, start : start + block] = of_m + of_total
    return out, lse


def _whole_matrix(q, k, v, window, block):
    N, S = q.shape[1:3]
    k, v = (x.repeat_interleave(N // x.shape[1], 1) for x in (k, v))
    gap = torch.arange(S)[:, None] - torch.arange(S)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill((gap < 0) | (gap >= window), -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1, keepdim=True)


def _windows(rng):
    """A window of some blocks, scores whose exp overflows, no window, and one of a single key."""
    K, group, H, block = rng.choice([2, 3]), 2, rng.choice([4, 6]), rng.choice([8, 10])
    seq_len, window = rng.randrange(53, 60), rng.randrange(2 * block + 2, 3 * block)
    q, k, v = (numbers(rng, 2, heads, seq_len, H) for heads in (K * group, K, K))
    cases = ((q, k, window), (40 * q, 40 * k, window), (q, k, seq_len), (q, k, 1))
    return [(q, k, v, width, block) for q, k, width in cases]


def _watch_attention(answer, q, k, v, window, block):
    with _Largest() as largest, FlopCounterMode(display=False) as counter:
        seen = output_and_lse(answer, q, k, v, window, block)
    return seen | {
        "bytes of the largest tensor": Cost(largest.nbytes),
        "FLOPs of the products": Cost(counter.get_total_flops()),
    }


_WRONG_WINDOW = {
    "the window is one key too wide: a query sees itself and window - 1 keys before it": {"wrong": "one more"},
    "there is no window: a query sees the last `window` keys only, itself included": {"wrong": "no window"},
    "query head n reads key/value head n // (N / K), and yours n % K": {"wrong": "heads"},
    "the scores are not divided by the square root of the head size": {"wrong": "root"},
    "what was summed before a larger maximum came must shrink by exp(old maximum - new maximum)": {
        "wrong": "never shrunk"
    },
    "the output is not finite: does exp overflow (take the running maximum off first), or has a row no key in its "
    "first block, so that minus infinity is taken off minus infinity?": {"wrong": "oldest first"},
    "the largest score of each row: add the logarithm of the sum": {"wrong": "only the maximum"},
    "the logarithm of the sum relative to the maximum: add the maximum": {"wrong": "relative"},
    "no tensor may be larger than both the queries and the scores of one block": _whole_matrix,
    "leave out blocks behind the window and after the diagonal": {"wrong": "all blocks"},
    "return two tensors": Stops(lambda *given: _windowed_attention(*given)[0]),
}
_SAYS_WINDOW = {
    "the log-sum-exp": "return two tensors: the output and the log-sum-exp of each row",
    "bytes of the largest tensor": "no tensor may be larger than both the queries and the scores of one block",
    "FLOPs of the products": "leave out blocks behind the window and after the diagonal",
}
check_windowed_attention = Exercise(_windowed_attention, _windows, _WRONG_WINDOW, _watch_attention, _SAYS_WINDOW)
