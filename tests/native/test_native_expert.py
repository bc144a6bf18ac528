"""Expert parallelism from PyTorch's own parts: gradients against one process, and against the hand-written engine."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness import one_process

from course_lib import model
from course_lib.config import ModelConfig, MoeConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.model import moe
from course_lib.native import expert as native
from course_lib.parallel import expert as parallel

pytestmark = pytest.mark.exhaustive  # the lessons hold PyTorch's own against one process as well

EXPERTS = MoeConfig(num_experts=8, top_k=2, d_expert=12)
LLAMA = ModelConfig("llama", 2, 16, num_heads=4, num_kv_heads=2, d_ff=27, vocab_size=39, max_seq_len=32, moe=EXPERTS)
ROWS = ((2, 1), (0, 3), (1, 0), (1, 1))
CASES = {
    "loop": (EXPERTS, 4, torch.float64, False),
    "auxiliary loss, shared expert, tied": (
        dataclasses.replace(EXPERTS, balancing="aux_loss", num_shared_experts=1, top_k=3), 4, torch.float64, True,
    ),
    "expert_dp 2": (EXPERTS, 2, torch.float64, False),
    "grouped": (EXPERTS, 2, torch.float32, False),
    "not in whole lines": (dataclasses.replace(EXPERTS, d_expert=9), 4, torch.float32, False),
}  # fmt: skip


def batches_of(rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randint(39, (2, B, 5), generator=generator).unbind(0) for B in of_rank] for of_rank in rows]


def built(experts, dtype, tied):
    whole = model.build(dataclasses.replace(LLAMA, moe=experts, tied=tied), 1, dtype)
    for layer in moe.moe_layers(whole):
        layer.router.weight.data.mul_(20)
    return whole


def joined(batches):
    """What one process gets: each micro-batch that of all ranks, one below the other."""
    return [
        tuple(torch.cat(pieces) for pieces in zip(*of_ranks, strict=True)) for of_ranks in zip(*batches, strict=True)
    ]


def measure(experts, ep_size, dtype, tied):
    whole, batches = built(experts, dtype, tied), batches_of()
    engine = native.build(copy.deepcopy(whole), dist.group.WORLD, ep_size)
    by_hand = parallel.build(copy.deepcopy(whole), dist.group.WORLD, ep_size)
    expected_loss, expected = one_process(whole, joined(batches))
    sent = []
    for module, each in ((native, engine), (parallel, by_hand)):
        with ByteMeter() as meter:
            loss = module.accumulate_gradients(each, batches[dist.get_rank()])
        sent.append(meter.by_collective["all_to_all"])
    gradients, parameters = native.full_gradients(engine), native.full_parameters(engine)
    assert gradients.keys() == expected.keys()
    hand = parallel.full_gradients(by_hand)
    return {
        "apart": max((gradients[name] - expected[name]).abs().max().item() for name in expected),
        "from hand": max((gradients[name] - hand[name]).abs().max().item() for name in expected),
        "size": max(grad.abs().max().item() for grad in expected.values()),
        "loss": abs(loss - expected_loss).item(),
        "same parameters": all(torch.equal(parameters[name], param) for name, param in whole.named_parameters()),
        "sent": sent,
        "grouped": native.can_group(moe.moe_layers(engine)[0].experts.gate),
    }


def trained():
    """Three clipped steps with both, from the same weights: largest difference, and of the two norms."""
    config = dataclasses.replace(EXPERTS, balancing="bias")
    whole, mine = built(config, torch.float64, True), batches_of()[dist.get_rank()]
    engines = [(m, m.build(copy.deepcopy(whole), dist.group.WORLD, 2)) for m in (native, parallel)]
    optimizers = [module.make_optimizer(engine, lr=0.01) for module, engine in engines]
    norms = []
    for _ in range(3):
        for (module, engine), optimizer in zip(engines, optimizers, strict=True):
            module.step(engine, mine, optimizer, clip_norm=0.5)
    for module, engine in engines:
        module.accumulate_gradients(engine, mine)
        norms.append(module.clip_gradients(engine, 1.0).item())
    one, other = (module.full_parameters(engine) for module, engine in engines)
    return max((one[name] - other[name]).abs().max().item() for name in one), abs(norms[0] - norms[1])


def refusals():
    texts = []
    for config, group, ep_size in (
        (LLAMA, dist.group.WORLD, 3),
        (LLAMA, dist.new_group([dist.get_rank()], use_local_synchronization=True), 1),
    ):
        with pytest.raises(ValueError) as error:
            native.build(model.build(config), group, ep_size)
        texts.append(str(error.value))
    return texts


def everything():
    return {name: measure(*case) for name, case in CASES.items()}, trained(), refusals()


@pytest.fixture(scope="module")
def seen():
    return launch(everything, 4)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_one_process_and_bytes_equal_the_hand_written(seen, name):
    bound = 1e-10 if CASES[name][2] == torch.float64 else 1e-6
    for measured, _, _ in seen:
        record = measured[name]
        assert record["same parameters"] and record["size"] > 1e-3
        assert max(record[key] for key in ("apart", "from hand", "loss")) < bound, record
        assert record["sent"][0] == record["sent"][1]
        assert record["grouped"] == (name == "grouped")


def test_three_clipped_steps_equal_the_hand_written(seen):
    for _, (apart, norms), _ in seen:
        assert apart < 1e-8 and norms < 1e-10


def test_sizes_and_groups_that_do_not_fit_are_refused(seen):
    for _, _, (ep, group) in seen:
        assert ep.startswith("ep (3) must divide the 4 ranks of dp") and group.startswith("the group has 1 of 4 ranks")
