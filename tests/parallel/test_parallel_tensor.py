"""Tensor parallelism from scratch: planted bugs, masks, refusals; gradients, bytes: test_parallel_five_d.py."""

import copy
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import distance, one_process
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import model
from course_lib.comm import split
from course_lib.comm.conjugate import InFlight
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.parallel import engine as engines
from course_lib.parallel import linear, tensor, vocabulary

# four heads; d_ff and the vocabulary divide by neither 2 nor 4
LLAMA = ModelConfig("llama", 2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=27, vocab_size=39, max_seq_len=32)
HEAD_NORMS = replace(LLAMA, name="head norms", qk_norm=True)
GPT = replace(LLAMA, name="gpt", family="gpt", num_kv_heads=4)
S = 7


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    recompute: str = "none"
    attention: str = "fused"


def built(case):
    """The same on every rank: weights, biases that are not zero, norms of heads that are not one."""
    whole = model.build(case.config, 1, torch.float64, attention=case.attention, recompute=case.recompute)
    generator = torch.Generator().manual_seed(2)
    for name, param in whole.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            param.data.normal_(generator=generator)
    return whole


def micro_batches(vocab_size, rows=(2, 1), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (2, B, S), generator=generator).unbind(0) for B in rows]


# --- wrong engines: each must be found out


BUGS = {  # owner, name, wrong version
    "forgets the backward sum": (linear.ReplicatedResidual, "start_sum", lambda _, x: InFlight(None, lambda: x)),
    "adds row biases everywhere": (
        linear.RowLinear, "forward", lambda row, x: row.residual.leave(F.linear(x, row.weight, row.bias))
    ),
    "sums no replicas": (tensor, "sum_replicas", lambda engine: None),
}  # fmt: skip


def planted():
    found = {}
    for bug, wrong in BUGS.items():
        for name, config in (("llama", LLAMA), ("head norms", HEAD_NORMS), ("gpt", GPT)):
            whole = built(Case(config))
            reference = copy.deepcopy(whole)
            batches = micro_batches(config.vocab_size)
            with patch.object(*wrong):
                engine = tensor.build(whole, dist.group.WORLD)
                loss = engines.accumulate_gradients(engine, batches)
            found[bug, name] = distance(engines.full_gradients(engine), loss, *one_process(reference, batches))
    return found


@pytest.fixture(scope="module")
def bugs():
    return launch(planted, 4)[0]


def wrong_names(apart):
    return {name for name, value in apart.items() if value > 1e-6}


def test_planted_bugs_are_found_where_they_are(bugs):
    forgot = wrong_names(bugs["forgets the backward sum", "llama"])
    assert {"embed.weight", "blocks.1.attention_norm.weight", "norm.weight"} <= forgot
    assert not forgot & {"loss", "head.weight"}
    assert "loss" in wrong_names(bugs["adds row biases everywhere", "gpt"])
    assert not wrong_names(bugs["adds row biases everywhere", "llama"])  # no bias, no bug
    kv = {f"blocks.{layer}.attention.{name}.weight" for layer in (0, 1) for name in ("k", "v")}
    assert wrong_names(bugs["sums no replicas", "llama"]) == kv
    norms = {f"blocks.{layer}.attention.{name}_norm.weight" for layer in (0, 1) for name in ("q", "k")}
    assert wrong_names(bugs["sums no replicas", "head norms"]) == kv | norms
    assert not wrong_names(bugs["sums no replicas", "gpt"])


# --- dropout


class Masks(TorchDispatchMode):
    """Every dropout mask that is drawn: those of B S D (whole on every rank), and those of B n S S."""

    def __init__(self):
        super().__init__()
        self.drawn = {3: [], 4: []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default:
            self.drawn[out[1].dim()].append(out[1])
        return out


def dropout_run(recompute):
    torch.manual_seed(100 + dist.get_rank())  # ranks begin with different generators
    case = Case(replace(GPT, dropout=0.3), recompute=recompute, attention="standard")
    engine = tensor.build(built(case), dist.group.WORLD)
    with Masks() as masks:
        loss = engines.accumulate_gradients(engine, micro_batches(39, rows=(2,)))
    return loss, engines.full_gradients(engine), masks.drawn


def dropout():
    return {recompute: dropout_run(recompute) for recompute in ("none", "selective", "full")}


@pytest.fixture(scope="module")
def dropped():
    return launch(dropout, 4)


def test_dropout_masks_are_equal_where_all_is_whole_and_differ_between_heads(dropped):
    drawn = [rank["none"][2] for rank in dropped]
    whole, of_heads = [masks[3] for masks in drawn], [masks[4] for masks in drawn]
    assert len(whole[0]) == 1 + 2 * 2 and len(of_heads[0]) == 2
    for rank in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(whole[0], whole[rank], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(of_heads[0], of_heads[rank], strict=True))
    assert not torch.equal(of_heads[0][0], of_heads[0][1])  # layers differ as well


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_draws_the_same_masks_again(dropped, recompute):
    for rank in dropped:
        loss, gradients, drawn = rank[recompute]
        expected_loss, expected, _ = rank["none"]
        assert torch.equal(loss, expected_loss)
        assert all(torch.allclose(gradients[name], expected[name], rtol=0, atol=1e-14) for name in expected)
        first, second, second_again, first_again = drawn[4]  # backward comes to the last layer first
        assert torch.equal(first, first_again) and torch.equal(second, second_again)
        assert not torch.equal(first, second)


# --- steps


def far_from_zero():
    """Errors of loss and gradient where exponentials overflow or vanish, and for bfloat16 logits; the dtype is kept."""
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(0)
    y_BS = torch.randint(39, (2, S), generator=generator)
    seen = []
    for shift, dtype in ((1000.0, torch.float32), (-1000.0, torch.float32), (0.0, torch.bfloat16)):
        whole = (torch.randn(2, S, 39, generator=generator) + shift).to(dtype).requires_grad_()
        part = split(whole.detach(), group, -1).requires_grad_()
        first = 10 * dist.get_rank()
        loss_BS = vocabulary.vocab_cross_entropy(part, y_BS, first, group)
        expected_BS = F.cross_entropy(whole.float().flatten(0, 1), y_BS.flatten(), reduction="none").view(2, S)
        loss_BS.mean().backward()
        expected_BS.mean().backward()
        apart = (loss_BS - expected_BS).abs().max(), (part.grad - split(whole.grad, group, -1)).abs().max()
        seen.append((*(x.item() for x in apart), part.grad.dtype == dtype))
    return seen


def test_the_loss_neither_overflows_nor_vanishes_and_is_float32_of_bfloat16_logits():
    for seen in launch(far_from_zero, 4):
        for loss, gradient, same_dtype in seen:
            assert loss < 1e-4 and gradient < 1e-4 and same_dtype, seen


# --- errors


REFUSED = {
    "num_heads (6) must be divisible by tp (4); choose tp from 1, 2, 3, 6": replace(
        LLAMA, d_model=24, num_heads=6, num_kv_heads=6
    ),
    "num_heads (2) must be divisible by tp (4); choose tp from 1, 2": replace(LLAMA, num_heads=2),
    "num_kv_heads (6) must be divisible by tp (4), or divide it; choose tp from 1, 2, 3, 6, 12": replace(
        LLAMA, d_model=24, num_heads=12, num_kv_heads=6
    ),
    "d_ff (6) leaves a rank of tp (4) with none": replace(LLAMA, d_ff=6),
    "vocab_size (9) leaves a rank of tp (4) with none": replace(LLAMA, vocab_size=9),
    "family is 'xlmr'": replace(LLAMA, family="xlmr", num_kv_heads=4),
}


def refusals():
    group, messages = dist.group.WORLD, []
    untouched = []
    twice = tensor.build(model.build(LLAMA), group).module
    attempts = [(model.build(config), group) for config in REFUSED.values()]
    attempts += [(model.build(LLAMA), None), (twice, group)]
    with ByteMeter() as meter:
        for whole, given in attempts:
            before = [id(p) for p in whole.parameters()]
            with pytest.raises(ValueError) as error:
                tensor.build(whole, given)
            messages.append(str(error.value))
            untouched.append(before == [id(p) for p in whole.parameters()])
    return messages, untouched, meter.calls


def test_what_cannot_be_cut_is_refused_before_anything_is_sent_or_changed():
    for messages, untouched, calls in launch(refusals, 4):
        expected = [*REFUSED, "build got None as its group", "blocks.0.attention.q is a ColumnLinear"]
        assert all(message.startswith(start) for message, start in zip(messages, expected, strict=True)), messages
        assert all(untouched) and calls == {}
