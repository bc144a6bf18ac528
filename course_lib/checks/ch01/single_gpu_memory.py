"""Tables of chapter 01: counts and bytes against real models, and against what autograd really keeps."""

import random
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib.checks import Exercise, Stops, copied, numbers
from course_lib.config import ModelConfig
from course_lib.flops import attention_flops_per_token, flops_per_token, matmul_parameters
from course_lib.minimal.memory import saved_bytes
from course_lib.model import MLP, build
from course_lib.run import RECIPES


def random_llama(rng: random.Random, tied: bool) -> ModelConfig:
    """A small Llama whose head size is not d_model / num_heads, and with fewer key/value heads than query heads."""
    kv_heads, group, d_model = rng.choice([1, 2, 3]), rng.choice([2, 3, 4]), 8 * rng.randrange(5, 12)
    heads = kv_heads * group
    head_dim = rng.choice([h for h in (4, 6, 8, 10, 12) if h * heads != d_model])
    d_ff, vocab_size = d_model * 3 + 4 * rng.randrange(1, 9), rng.randrange(100, 400)
    return ModelConfig("drawn", rng.randrange(2, 5), d_model, heads, kv_heads, d_ff, vocab_size, 128, tied, head_dim)


# ------------------------------------------------------------------------------------ 1. MFU
def _share_of_peak(config, seq_len, tokens_per_s, num_gpus, peak_flops_per_s, **mistake):
    """The FLOPs of linear layers and of attention, over the peak of all GPUs.

    A mistake has other FLOPs a weight, forward passes of attention, or tables of embeddings that count as weights.
    """
    use = {"per_weight": 6, "attention": 3.0, "times": 1.0, "table": 0} | mistake
    weights = matmul_parameters(config) + use["table"] * config.vocab_size * config.d_model
    flops = use["per_weight"] * weights + use["attention"] * attention_flops_per_token(config, seq_len)
    return use["times"] * flops * tokens_per_s / (num_gpus * peak_flops_per_s)


def _logs(rng):
    cases = []
    for tied in (False, True):
        config, num_gpus = random_llama(rng, tied), rng.choice([2, 4, 16])
        peak_flops_per_s = rng.choice([312e12, 989e12])
        tokens_per_s = rng.uniform(0.2, 0.6) * num_gpus * peak_flops_per_s / flops_per_token(config, 96)
        cases.append((config, 96, tokens_per_s, num_gpus, peak_flops_per_s))
    return cases


WRONG_MFU = {
    "the embedding is a table: it multiplies nothing, so its weights do not count": {"table": 1},
    "attention is missing: 12 L N H S FLOPs per token": {"attention": 0},
    "attention counts 12 L N H S FLOPs per token: 4 in forward, 8 in backward": {"attention": 1},
    "attention is halved for the causal mask: here, as in most reports, each token counts all S tokens": (
        {"attention": 1.5}
    ),
    "8 FLOPs per weight count recomputation's second forward: MFU counts what the model needs, 6": {"per_weight": 8},
    "recomputation's second forward counts in HFU; MFU counts three passes and not four": {"times": 4 / 3},
    "these are the FLOPs of forward; backward costs twice as many again": {"times": 1 / 3},
    "this is the peak of one GPU; all of them could have computed": {"num_gpus": 1},
    "return a share, not percent": {"times": 100},
    "return one number": Stops(lambda *case: f"{_share_of_peak(*case):.1%}"),
}
_SAYS_MFU = {"the result": "return one number, a share between 0 and 1"}
check_mfu = Exercise(_share_of_peak, _logs, WRONG_MFU, says=_SAYS_MFU)


# ------------------------------------------------------------------------------------ 2. states
def state_bytes(model, recipe, trained_alone=("gradients", "optimizer"), masters=True, params=nn.Module.parameters):
    """Bytes of parameters, gradients, optimizer states; trained_alone: kinds of which frozen parameters have none."""
    of_one = {"parameters": recipe.param_bytes, "gradients": recipe.grad_bytes, "optimizer": recipe.moment_bytes}
    of_one["optimizer"] += recipe.master_bytes if masters else 0
    return tuple(
        sum(size * p.numel() for p in params(model) if p.requires_grad or kind not in trained_alone)
        for kind, size in of_one.items()
    )


def _watch_states(answer, config, recipe):
    model = build(config, device="meta")
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return {"what you return, with the embedding and the first block frozen,": answer(model, RECIPES[recipe])}


_WRONG_STATES = {
    "a frozen parameter has no gradient and no optimizer state": {"trained_alone": ()},
    "a frozen parameter is still there: forward needs it": {"trained_alone": ("parameters", "gradients", "optimizer")},
    "the optimizer's part lacks the FP32 master parameters": {"masters": False},
    "the tied matrix is counted twice; model.parameters() names it once": {
        "params": lambda model: [param for _, param in model.named_parameters(remove_duplicate=False)]
    },
    "frozen parameters have no gradient, and no optimizer state either": {"trained_alone": ("gradients",)},
    "return three numbers": Stops(lambda model, recipe: sum(state_bytes(model, recipe))),
}
_SAYS_STATES = {
    "what you return, with the embedding and the first block frozen,": (
        "return three numbers: bytes of parameters, gradients, optimizer states"
    )
}
check_state_bytes = Exercise(
    state_bytes,
    lambda rng: [
        (random_llama(rng, tied=True), name)
        for name in rng.sample([name for name, recipe in RECIPES.items() if recipe.master_bytes], 3)
    ],
    _WRONG_STATES,
    _watch_states,
    _SAYS_STATES,
)


# ------------------------------------------------------------------------------------ 3. what an MLP keeps
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def _measured_on_an_mlp(kind, tokens, d_model, d_ff, itemsize):
    """Bytes that a real MLP keeps for backward, without its parameters."""
    middle = nn.ReLU() if kind == "relu" else nn.GELU()
    mlp = nn.Sequential(nn.Linear(d_model, d_ff, bias=False), middle, nn.Linear(d_ff, d_model, bias=False))
    if kind == "swiglu":
        mlp = MLP(ModelConfig("mlp", 1, d_model, 1, 1, d_ff, 8, 8, head_dim=2))
    x_TD = torch.randn(tokens, d_model, dtype=DTYPES[itemsize], requires_grad=True)
    return saved_bytes(mlp.to(DTYPES[itemsize]), x_TD)


def mlp_bytes(kind, tokens, d_model, d_ff, itemsize, narrow=1, weights=0, **wide):
    """The formula; arguments: tensors of width D, of width F by kind, whether weights count."""
    of_weights = weights * (3 if kind == "swiglu" else 2) * d_model * d_ff
    wide = {"relu": 1, "gelu": 2, "swiglu": 4} | wide
    return (tokens * (narrow * d_model + wide[kind] * d_ff) + of_weights) * itemsize


wrong = partial(partial, mlp_bytes)
_WRONG_MLP = {
    "relu needs no input in backward: its output says where it was above 0, and down keeps that anyway": wrong(relu=2),
    "SwiGLU keeps four wide tensors: silu's input, both factors of the product, and the input of down": wrong(swiglu=3),
    "the MLP's own input is missing: gate and up keep it": wrong(narrow=0),
    "the MLP's output is counted, but no derivative inside needs it": wrong(narrow=2),
    "gate and up share one input: one storage, counted once": lambda kind, *case: mlp_bytes(
        kind, *case, narrow=2 if kind == "swiglu" else 1
    ),
    "the weights are counted: they are parameters, there with or without a batch": wrong(weights=1),
    "these are numbers, not bytes": lambda *case: mlp_bytes(*case[:-1], 1),
    "every number is counted with 4 bytes, also in BF16": lambda *case: mlp_bytes(*case[:-1], 4),
}
check_mlp_kept_bytes = Exercise(
    _measured_on_an_mlp,
    lambda rng: [
        (kind, rng.randrange(5, 20), 2 * rng.randrange(8, 20), 2 * rng.randrange(41, 60), itemsize)
        for kind in ("relu", "gelu", "swiglu")
        for itemsize in (2, 4)
    ],
    _WRONG_MLP,
)


# ------------------------------------------------------------------------------------ 4. a thriftier SwiGLU
def _slope(gate, sigmoid):
    return sigmoid * (1 + gate * (1 - sigmoid))


def _function(backward=lambda grad, g, u, s: (grad * u * _slope(g, s), grad * g * s), on_ctx=False) -> Callable:
    """silu(gate) * up as an autograd Function that saves gate and up; s is sigmoid(gate)."""

    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.kept = (gate, up) if on_ctx else None
            ctx.save_for_backward(*(() if on_ctx else (gate, up)))
            return F.silu(gate) * up

        @staticmethod
        def backward(ctx, grad):
            gate, up = ctx.kept or ctx.saved_tensors
            return backward(grad, gate, up, gate.sigmoid())

    return lambda gate, up: SwiGLU.apply(gate, up)


def _watch_swiglu(answer, gate, up, grad):
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        product = answer(gate.requires_grad_(), up.requires_grad_())
    has_graph = isinstance(product, Tensor) and product.grad_fn is not None
    if has_graph and product.shape == grad.shape:
        product.backward(grad)
    return {
        "the product": copied(product, as_results=True),
        "the product has a gradient": has_graph,
        "gate and up got a gradient": [one.grad is not None for one in (gate, up)],
        "the gradient of gate": gate.grad,
        "the gradient of up": up.grad,
        "tensors that autograd keeps": sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / gate.nbytes,
    }


_WRONG_SWIGLU = {
    "this is sigmoid(gate) * up": lambda gate, up: gate.sigmoid() * up,
    "between your inputs and your output the graph is cut": lambda gate, up: F.silu(gate.detach()) * up.detach(),
    "this is the gradient of up: return them in the order of forward's inputs": _function(
        lambda grad, g, u, s: (grad * g * s, grad * u * _slope(g, s))
    ),
    "the slope of silu is not sigmoid(gate): g * sigmoid(g) is a product": _function(
        lambda grad, g, u, s: (grad * u * s, grad * g * s)
    ),
    "the factor up is missing": _function(lambda grad, g, u, s: (grad * _slope(g, s), grad * g * s)),
    "what came from behind (grad_output) is missing": _function(lambda grad, g, u, s: (u * _slope(g, s), g * s)),
    "this is the plain gate, not silu(gate)": _function(lambda grad, g, u, s: (grad * u * _slope(g, s), grad * g)),
    "use ctx.save_for_backward for gate and up, not ctx itself": _function(on_ctx=True),
    "gate and up are enough: compute the others again in backward": lambda gate, up: F.silu(gate) * up,
}
_SAYS_SWIGLU = {
    "gate and up got a gradient": "backward returns one for each input of forward",
    "tensors that autograd keeps": "keep gate and up, and compute the others again in backward",
}
check_swiglu = Exercise(
    _function(),
    lambda rng: [tuple(numbers(rng, 6, 20) for _ in range(3))],
    _WRONG_SWIGLU,
    _watch_swiglu,
    _SAYS_SWIGLU,
    right=lambda gate, up: checkpoint(lambda g, u: F.silu(g) * u, gate, up, use_reentrant=True),
)
