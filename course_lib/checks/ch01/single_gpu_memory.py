"""Graders of chapter 01: counts and bytes against real models, and against what autograd really keeps."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checks.core import (
    expect_close,
    expect_equal,
    fail,
    fail_by_belief,
    fresh_generator,
    grader,
    numbers,
    observed,
)
from course_lib.config import ModelConfig
from course_lib.flops import attention_flops_per_token, flops_per_token, matmul_parameters
from course_lib.memory.states import RECIPES, Recipe
from course_lib.model import MLP, build


def random_llama(rng: random.Random, tied: bool) -> ModelConfig:
    """A small Llama whose head size is not d_model / num_heads, and with fewer key/value heads than query heads."""
    kv_heads, group, d_model = rng.choice([1, 2, 3]), rng.choice([2, 3, 4]), 8 * rng.randrange(5, 12)
    heads = kv_heads * group
    head_dim = rng.choice([h for h in (4, 6, 8, 10, 12) if h * heads != d_model])
    d_ff, vocab_size = d_model * 3 + 4 * rng.randrange(1, 9), rng.randrange(100, 400)
    return ModelConfig("drawn", rng.randrange(2, 5), d_model, heads, kv_heads, d_ff, vocab_size, 128, tied, head_dim)


# ------------------------------------------------------------------------------------ 1. MFU
MfuCase = tuple[ModelConfig, int, float, int, float]  # config, seq_len, tokens_per_s, num_gpus, peak_flops_per_s


@grader
def check_mfu(answer, rng):
    """MFU from a log: the FLOPs of linear layers and of attention, over the peak of all GPUs, as a share."""
    cases = [_mfu_case(rng, tied) for tied in (False, True)]
    got = [answer(*case) for case in cases]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in got):
        fail(f"it returned {got[0]!r}; return one number, a share between 0 and 1")
    want = [_share(*case, flops_per_token(case[0], case[1])) for case in cases]
    if _all_close(got, want):
        return
    for message, believed in MFU_BELIEFS.items():
        if _all_close(got, [believed(*case) for case in cases]):
            fail(message)
    fail(f"{_mfu_told(*cases[0])}: it returned {got[0]:.6g}, and {want[0]:.6g} is right")


def _mfu_case(rng: random.Random, tied: bool) -> MfuCase:
    config = random_llama(rng, tied)
    num_gpus, peak_flops_per_s = rng.choice([2, 4, 16]), rng.choice([312e12, 989e12])
    tokens_per_s = rng.uniform(0.2, 0.6) * num_gpus * peak_flops_per_s / flops_per_token(config, 96)
    return config, 96, tokens_per_s, num_gpus, peak_flops_per_s


def _mfu_told(config: ModelConfig, seq_len: int, tokens_per_s: float, num_gpus: int, peak_flops_per_s: float) -> str:
    return (
        f"{config}, {seq_len} tokens, {tokens_per_s:.6g} tokens/s on {num_gpus} GPUs of {peak_flops_per_s:.3g} FLOP/s"
    )


def _all_close(got: list[float], want: list[float]) -> bool:
    return all(abs(mine - right) <= 1e-9 * right for mine, right in zip(got, want, strict=True))


def _share(
    config: ModelConfig, seq_len: int, tokens_per_s: float, num_gpus: int, peak_flops_per_s: float, flops: float
) -> float:
    return flops * tokens_per_s / (num_gpus * peak_flops_per_s)


def _with_flops(flops_of: Callable[[ModelConfig, int], float]) -> Callable[..., float]:
    """Somebody's MFU, whose FLOPs per token are others."""
    return lambda config, seq_len, *rest: _share(config, seq_len, *rest, flops_of(config, seq_len))


def _attention_flops(config: ModelConfig, seq_len: int) -> int:
    return 3 * attention_flops_per_token(config, seq_len)


MFU_BELIEFS: dict[str, Callable[..., float]] = {
    "the embedding is a table: it multiplies nothing, so its weights do not count": _with_flops(
        lambda config, s: (
            6 * (matmul_parameters(config) + config.vocab_size * config.d_model) + _attention_flops(config, s)
        )
    ),
    "attention is missing: 12 L N H S FLOPs per token": _with_flops(lambda config, s: 6 * matmul_parameters(config)),
    "attention counts 12 L N H S FLOPs per token: 4 in forward, 8 in backward": _with_flops(
        lambda config, s: 6 * matmul_parameters(config) + _attention_flops(config, s) / 3
    ),
    "attention is halved for the causal mask: here, as in most reports, each token counts all S tokens": _with_flops(
        lambda config, s: 6 * matmul_parameters(config) + _attention_flops(config, s) / 2
    ),
    "8 FLOPs per weight count recomputation's second forward: MFU counts what the model needs, 6": _with_flops(
        lambda config, s: 8 * matmul_parameters(config) + _attention_flops(config, s)
    ),
    "recomputation's second forward counts in HFU; MFU counts three passes and not four": _with_flops(
        lambda config, s: flops_per_token(config, s) * 4 / 3
    ),
    "these are the FLOPs of forward; backward costs twice as many again": _with_flops(
        lambda config, s: flops_per_token(config, s) / 3
    ),
    "this is the peak of one GPU; all of them could have computed": lambda config, s, speed, gpus, peak: _share(
        config, s, speed, 1, peak, flops_per_token(config, s)
    ),
    "return a share, not percent": _with_flops(lambda config, s: 100 * flops_per_token(config, s)),
}


# ------------------------------------------------------------------------------------ 2. states
@grader
def check_state_bytes(answer, rng):
    """Bytes of parameters, gradients and optimizer states where some parameters are frozen."""
    for name in rng.sample([name for name, recipe in RECIPES.items() if recipe.master_bytes], 3):
        recipe = RECIPES[name]
        model = build(random_llama(rng, tied=True), device="meta")
        model.embed.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        got = answer(model, recipe)
        if not isinstance(got, tuple | list) or len(got) != 3:
            fail(f"it returned {got!r}; return three numbers: bytes of parameters, gradients, optimizer states")
        want, wrong = _states(model, recipe), _wrong_states(model, recipe)
        expect_equal(tuple(got), want, f"{name}, with the embedding and the first block frozen: what you return", wrong)


def _states(model: nn.Module, recipe: Recipe) -> tuple[int, int, int]:
    everything = sum(parameter.numel() for parameter in model.parameters())
    return _three(everything, sum(p.numel() for p in model.parameters() if p.requires_grad), recipe)


def _three(resident: int, trained: int, recipe: Recipe) -> tuple[int, int, int]:
    states = recipe.master_bytes + recipe.moment_bytes
    return resident * recipe.param_bytes, trained * recipe.grad_bytes, trained * states


def _wrong_states(model: nn.Module, recipe: Recipe) -> dict[str, tuple[int, int, int]]:
    resident = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    tied = model.embed.weight.numel()
    right = _three(resident, trained, recipe)
    return {
        "a frozen parameter has no gradient and no optimizer state": _three(resident, resident, recipe),
        "a frozen parameter is still there: forward needs it": _three(trained, trained, recipe),
        "the optimizer's part lacks the FP32 master parameters": (*right[:2], trained * recipe.moment_bytes),
        "the tied matrix is counted twice; model.parameters() names it once": _three(resident + tied, trained, recipe),
        "frozen parameters have no gradient, and no optimizer state either": (
            *right[:2],
            resident * (recipe.master_bytes + recipe.moment_bytes),
        ),
    }


# ------------------------------------------------------------------------------------ 3. what an MLP keeps
def kept_bytes(run: Callable[[], Tensor], resident: tuple[Tensor, ...] = ()) -> int:
    """What autograd keeps while `run` runs: each storage once, those of `resident` left out."""
    there = {tensor.untyped_storage()._cdata for tensor in resident}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    del output
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in there)


def _mlp(kind: str, d_model: int, d_ff: int) -> nn.Module:
    if kind == "swiglu":
        return MLP(ModelConfig("mlp", 1, d_model, 1, 1, d_ff, 8, 8, head_dim=2))
    middle = nn.ReLU() if kind == "relu" else nn.GELU()
    return nn.Sequential(nn.Linear(d_model, d_ff, bias=False), middle, nn.Linear(d_ff, d_model, bias=False))


@grader
def check_mlp_kept_bytes(answer, rng):
    """Bytes that an MLP keeps for backward; the truth is measured on a real one."""
    cases, want = [], []
    for kind, dtype in [(k, d) for k in ("relu", "gelu", "swiglu") for d in (torch.bfloat16, torch.float32)]:
        tokens, d_model, d_ff = rng.randrange(5, 20), 2 * rng.randrange(8, 20), 2 * rng.randrange(41, 60)
        mlp = _mlp(kind, d_model, d_ff).to(dtype)
        x_TD = torch.randn(tokens, d_model, dtype=dtype, requires_grad=True)
        want.append(kept_bytes(lambda mlp=mlp, x_TD=x_TD: mlp(x_TD), tuple(mlp.parameters())))
        cases.append((kind, tokens, d_model, d_ff, dtype.itemsize))
    got = [answer(*case) for case in cases]
    fail_by_belief(got, want, cases, MLP_BELIEFS, _mlp_case)


def _mlp_case(kind: str, tokens: int, d_model: int, d_ff: int, itemsize: int) -> str:
    return f"{kind}, {tokens} tokens, d_model {d_model}, d_ff {d_ff}, {itemsize} bytes a number"


def _mlp_belief(widths: dict[str, tuple[int, int]], parameters: bool = False, itemsize: int | None = None) -> Callable:
    """Somebody's formula: for each kind how many tensors of width D and of width F."""

    def believed(kind: str, tokens: int, d_model: int, d_ff: int, true_itemsize: int) -> int:
        wide, narrow = widths[kind][1], widths[kind][0]
        weights = (3 if kind == "swiglu" else 2) * d_model * d_ff if parameters else 0
        return (tokens * (narrow * d_model + wide * d_ff) + weights) * (itemsize or true_itemsize)

    return believed


_RIGHT = {"relu": (1, 1), "gelu": (1, 2), "swiglu": (1, 4)}
MLP_BELIEFS = {
    "relu needs no input in backward: its output says where it was above 0, and down keeps that output anyway": (
        _mlp_belief(_RIGHT | {"relu": (1, 2)})
    ),
    "SwiGLU keeps four wide tensors: the input of silu, both factors of the product, and the input of down": (
        _mlp_belief(_RIGHT | {"swiglu": (1, 3)})
    ),
    "the MLP's own input is missing: gate and up keep it": _mlp_belief({k: (0, f) for k, (_, f) in _RIGHT.items()}),
    "the MLP's output is counted, but no derivative inside needs it": (
        _mlp_belief({k: (2, f) for k, (_, f) in _RIGHT.items()})
    ),
    "gate and up share one input: one storage, counted once": _mlp_belief(_RIGHT | {"swiglu": (2, 4)}),
    "the weights are counted: they are parameters, there with or without a batch": _mlp_belief(_RIGHT, True),
    "these are numbers, not bytes": _mlp_belief(_RIGHT, itemsize=1),
    "every number is counted with 4 bytes, also in BF16": _mlp_belief(_RIGHT, itemsize=4),
}


# ------------------------------------------------------------------------------------ 4. a thriftier SwiGLU
@grader
def check_swiglu(answer, rng):
    """silu(gate) * up with the right gradients, keeping gate and up and nothing else."""
    generator, shape = fresh_generator(rng), (rng.randrange(3, 9), rng.randrange(10, 30))
    gate, up, grad = (numbers(generator, *shape) for _ in range(3))
    product, has_graph, grads, kept = observed(_swiglu, answer, gate, up, grad)
    expect_close(product, F.silu(gate) * up, "the product", {"this is sigmoid(gate) * up": gate.sigmoid() * up})
    if not has_graph:
        fail("the product has no gradient: between your inputs and your output the graph is cut")
    _expect_gradients(grads, gate, up, grad)
    tensors = kept / gate.nbytes
    if tensors < 2:
        fail(f"autograd knows of {tensors:g} kept tensors: use ctx.save_for_backward for gate and up, not ctx itself")
    if tensors > 2:
        fail(f"{tensors:g} tensors are kept, and gate and up are enough: compute the others again in backward")


def _swiglu(answer: Callable, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[object, bool, list, int]:
    """The product, whether it has a graph, the gradients of gate and up, and the bytes kept for backward."""
    mine = [tensor.clone().requires_grad_() for tensor in (gate, up)]
    outputs: list[Tensor] = []
    kept = kept_bytes(lambda: outputs.append(answer(*mine)) or outputs[0])
    product = outputs[0]
    has_graph = isinstance(product, Tensor) and product.grad_fn is not None
    if has_graph and product.shape == grad.shape:
        product.backward(grad)
    return product.detach() if isinstance(product, Tensor) else product, has_graph, [one.grad for one in mine], kept


def _expect_gradients(grads: list[Tensor | None], gate: Tensor, up: Tensor, grad: Tensor) -> None:
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    right = grad * up * slope, grad * gate * sigmoid
    if any(mine is None for mine in grads):
        fail("gate or up got no gradient; backward returns one for each input of forward")
    expect_close(
        grads[0],
        right[0],
        "the gradient of gate",
        {
            "this is the gradient of up: return them in the order of forward's inputs": right[1],
            "the slope of silu is not sigmoid(gate): g * sigmoid(g) is a product": grad * up * sigmoid,
            "the factor up is missing": grad * slope,
            "what came from behind (grad_output) is missing": up * slope,
        },
    )
    expect_close(grads[1], right[1], "the gradient of up", {"this is the plain gate, not silu(gate)": grad * gate})
