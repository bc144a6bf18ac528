"""Sequence parallelism: gradients and dropout against one process, forgotten sums found."""

import copy
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import EXHAUSTIVE, LaunchedBySize, one_process

from course_lib import comm, model
from course_lib.config import ModelConfig
from course_lib.model import attention, gpt
from course_lib.parallel import engine as engines
from course_lib.parallel import sequence, tensor

pytestmark = pytest.mark.launches

B = 2
WIDTHS = {"d_model": 16, "num_heads": 4, "d_ff": 22, "vocab_size": 13, "max_seq_len": 16}  # 22 and 13 do not divide
GQA = ModelConfig("gqa", num_layers=2, num_kv_heads=2, **WIDTHS)
TIED = dataclasses.replace(GQA, name="tied", num_kv_heads=4, tied=True)
HEAD_NORMS = dataclasses.replace(GQA, name="head norms", qk_norm=True)
GPT = ModelConfig("gpt", num_layers=2, num_kv_heads=4, family="gpt", tied=True, **WIDTHS)
DROPPING = dataclasses.replace(GPT, dropout=0.3)


# --- gradients and steps against one process

CASES = {  # config, attention, recompute, regather, S of each micro-batch
    "gqa": (GQA, "fused", "none", False, [8]),
    "gqa, uneven": (GQA, "fused", "selective", True, [7, 5, 6]),  # of 5 tokens the last of 4 ranks gets none
    "head norms, uneven": (HEAD_NORMS, "fused", "full", True, [7, 5, 6]),
    "tied, recomputed": (TIED, "standard", "full", True, [5, 7]),
    "gpt": (GPT, "standard", "none", True, [7]),
    "gpt, recomputed": (GPT, "fused", "full", False, [6, 5]),
}


def some_batches(config, lengths):
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(config.vocab_size, (2, B, S), generator=generator)) for S in lengths]


def noisy_model(config, attention="fused", recompute="none"):
    """Norms and biases with values of their own: ones and zeros would hide mistakes."""
    whole = model.build(config, dtype=torch.float64, attention=attention, recompute=recompute)
    generator = torch.Generator().manual_seed(1)
    for parameter in whole.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return whole


def differences(ours, whole, of):
    theirs = {name: of(parameter) for name, parameter in whole.named_parameters()}
    assert set(ours) == set(theirs)
    return {name: (ours[name] - theirs[name]).abs().max().item() for name in theirs}


def of_gradients(config, attention, recompute, regather, lengths):
    """Difference of each gradient, and of the loss, from one process."""
    whole, batches = noisy_model(config, attention, recompute), some_batches(config, lengths)
    engine = sequence.build(copy.deepcopy(whole), dist.group.WORLD, regather)
    loss = engines.accumulate_gradients(engine, batches)
    expected, _ = one_process(whole, batches)
    gradients = differences(engines.full_gradients(engine), whole, lambda parameter: parameter.grad)
    return gradients | {"loss": abs(loss - expected).item()}


def of_evaluation_between_forward_and_backward(regather):
    """Largest difference of a gradient, where text of another length is evaluated in between."""
    whole, (batch, (other_BS, _)) = noisy_model(GQA), some_batches(GQA, [7, 4])
    engine = sequence.build(copy.deepcopy(whole), dist.group.WORLD, regather)
    loss = engine.token_losses(*batch).mean()
    with torch.no_grad():
        engine(other_BS)
    loss.backward()
    tensor.sum_replicas(engine)
    tensor.sum_gradients(sequence.of_my_tokens(engine), dist.group.WORLD)
    one_process(whole, [batch])
    return max(differences(engines.full_gradients(engine), whole, lambda parameter: parameter.grad).values())


# --- a forgotten sum must be found, in the parameters that it concerns


def of_gradients_without_sums():
    with mock.patch.object(sequence, "of_my_tokens", lambda engine: []):
        return of_gradients(GPT, "standard", "none", False, [8, 8])


# --- dropout


def dropped_like_one_process():
    """Masks recorded on every rank, put together (tokens or heads: dimension 1 both times), given to one process."""
    whole, batches = noisy_model(DROPPING, "standard"), some_batches(DROPPING, [8])
    engine = sequence.build(copy.deepcopy(whole), dist.group.WORLD, regather=True)
    mine, joined = [], iter(())

    def recording(x, probability):
        mask = torch.native_dropout(torch.ones_like(x), probability, train=True)[0]
        mine.append(mask)
        return x * mask

    def replaying(x, probability):
        return x * next(joined)

    with mock.patch.object(attention, "drop", recording), mock.patch.object(gpt, "drop", recording):
        engines.accumulate_gradients(engine, batches)
    named = {str(index): mask for index, mask in enumerate(mine)}
    of_rank = [list(gathered.values()) for gathered in comm.all_gather_tensors(named, dist.group.WORLD)]
    joined = iter([torch.cat(masks, dim=1) for masks in zip(*of_rank, strict=True)])
    with mock.patch.object(attention, "drop", replaying), mock.patch.object(gpt, "drop", replaying):
        one_process(whole, batches)
    pieces_differ = all(not torch.equal(of_rank[0][i], of_rank[1][i]) for i in range(len(mine)))
    worst = max(differences(engines.full_gradients(engine), whole, lambda parameter: parameter.grad).values())
    return worst, pieces_differ, len(mine)


def recomputed_with_the_same_masks():
    """Gradients with and without recomputation, and the common generator afterwards."""
    gradients = []
    for recompute in ("none", "selective", "full"):
        torch.manual_seed(7 + dist.get_rank())
        engine = sequence.build(noisy_model(DROPPING, "standard", recompute), dist.group.WORLD)
        engines.accumulate_gradients(engine, some_batches(DROPPING, [8, 6]))
        gradients.append(torch.cat([grad.flatten() for grad in engines.full_gradients(engine).values()]))
        common = torch.rand(4)
    return [(other - gradients[0]).abs().max().item() for other in gradients[1:]], common


# --- on the wire


def refused():
    whole = model.build(GQA)
    with pytest.raises(ValueError) as error:
        sequence.build(whole, group=None)
    return str(error.value), type(whole.embed).__name__


# --- all of it on 2 and on 4 ranks


def everything():
    found = {
        "gradients": {name: of_gradients(*case) for name, case in CASES.items()},
        "dropout": dropped_like_one_process(),
    }
    if dist.get_world_size() == 2:
        found |= {
            "mistakes": of_gradients_without_sums(),
            "evaluation": [of_evaluation_between_forward_and_backward(regather) for regather in (False, True)],
            "recomputed": recomputed_with_the_same_masks(),
            "refused": refused(),
        }
    return found


@pytest.fixture(scope="module")
def of_size():
    return LaunchedBySize(everything)


both_sizes = pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=EXHAUSTIVE)])


@both_sizes
def test_gradients_and_loss_equal_one_process(of_size, tp_size):
    for of_rank in of_size[tp_size]:
        for case, worst in of_rank["gradients"].items():
            assert max(worst.values()) < 1e-10, (case, worst)


def test_an_evaluation_of_another_length_may_come_between_forward_and_backward(of_size):
    assert max(worst for of_rank in of_size[2] for worst in of_rank["evaluation"]) < 1e-10


def test_a_forgotten_gradient_sum_is_found_in_the_parameters_that_it_concerns(of_size):
    matrices = ("q.weight", "k.weight", "v.weight", "o.weight", "up.weight", "down.weight", "embed.weight", "up.bias")
    for of_rank in of_size[2]:
        worst = of_rank["mistakes"]
        for name, difference in worst.items():
            if name.endswith(("norm.weight", "norm.bias", "o.bias", "down.bias", "positions.weight")):
                assert difference > 1e-3, name
        assert max(difference for name, difference in worst.items() if name.endswith(matrices)) < 1e-10
        assert worst["loss"] < 1e-10  # which is why the loss of the first step does not tell


@both_sizes
def test_dropout_equals_one_process_that_is_given_the_masks_of_all_ranks(of_size, tp_size):
    for worst, pieces_differ, num_masks in (of_rank["dropout"] for of_rank in of_size[tp_size]):
        assert worst < 1e-10 and pieces_differ and num_masks == 1 + 3 * DROPPING.num_layers


def test_recomputation_draws_the_same_masks_again_and_leaves_the_common_generator_common(of_size):
    for worst, common in (of_rank["recomputed"] for of_rank in of_size[2]):
        assert max(worst) < 1e-12
        assert torch.equal(common, of_size[2][0]["recomputed"][1])


def test_what_is_no_group_is_refused_before_the_model_is_changed(of_size):
    message, kind = of_size[2][0]["refused"]
    assert "it needs a process group" in message and kind == "Embedding"
