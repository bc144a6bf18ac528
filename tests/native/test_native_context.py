"""PyTorch's ring attention: gradients against one process, bytes by sequence sharding and method, what it refuses."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from course_lib import model, training
from course_lib.config import PRESETS, MlaConfig, MoeConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.native import context as native
from course_lib.traffic import ring_all_reduce_bytes

pytestmark = pytest.mark.exhaustive  # the lessons hold PyTorch's own against one process as well

LAYERS, S, ROWS = 2, 16, (2, 1)
LLAMA = dataclasses.replace(PRESETS["toy"], num_layers=LAYERS, num_kv_heads=2)
CASES = {
    "zigzag ring": (LLAMA, "none", "zigzag", "alltoall"),
    "zigzag, gathered": (LLAMA, "none", "zigzag", "allgather"),
    "contiguous ring, full recomputation": (dataclasses.replace(LLAMA, tied=True), "full", "contiguous", "alltoall"),
    "contiguous gpt, gathered": (
        dataclasses.replace(LLAMA, family="gpt", num_kv_heads=8), "none", "contiguous", "allgather"
    ),
}  # fmt: skip


def micro_batches(seq_len=S):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(LLAMA.vocab_size, (2, rows, seq_len), generator=generator).unbind(0) for rows in ROWS]


def one_process(config, recompute="none", dtype=torch.float64):
    whole = model.build(config, dtype=dtype, recompute=recompute)
    total = sum(y_BS.numel() for _, y_BS in micro_batches())
    loss = sum(training.loss_of(whole, x, y) * (y.numel() / total) for x, y in micro_batches())
    loss.backward()
    return whole, loss.detach()


def worst(ours, params):
    """Largest difference of any gradient, as a share of the largest entry of all."""
    expected = {name: param.grad for name, param in params}
    assert ours.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    return max((ours[name] - grad).abs().max().item() for name, grad in expected.items()) / largest


def measure(case, dtype=torch.float64):
    config, recompute, sequence_sharding, rotate_method = case
    engine = native.build(
        model.build(config, dtype=dtype, recompute=recompute), dist.group.WORLD, sequence_sharding, rotate_method
    )
    with ByteMeter() as meter:
        loss = native.accumulate_gradients(engine, micro_batches())
    whole, expected = one_process(config, recompute, dtype)
    apart = worst(native.full_gradients(engine), whole.named_parameters())
    return {
        "loss": abs(loss - expected).item(),
        "apart": apart,
        "bytes": meter.by_collective,
        "numbers": sum(param.numel() for param in engine.parameters()),
    }


def a_clipped_step():
    """Largest difference of a parameter from one process after it, and options left behind."""
    engine = native.build(model.build(LLAMA, dtype=torch.float64), dist.group.WORLD)
    before = dataclasses.astuple(_attention._cp_options)
    native.step(engine, micro_batches(), native.make_optimizer(engine, lr=0.01), clip_norm=0.1)
    whole, _ = one_process(LLAMA)
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.optim.AdamW(whole.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01).step()
    ours = native.full_parameters(engine)
    apart = max((ours[name] - param).abs().max().item() for name, param in whole.named_parameters())
    return (
        apart,
        before == dataclasses.astuple(_attention._cp_options),
        all(p.grad is None for p in engine.parameters()),
    )


def too_short():
    with ByteMeter() as meter, pytest.raises(ValueError) as error:
        native.accumulate_gradients(
            native.build(model.build(LLAMA), dist.group.WORLD), [*micro_batches(), *micro_batches(S + 2)]
        )
    return str(error.value), meter.calls


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def ring_of_the_cpus_kernel(is_backward):
    """What `context_parallel` would call, had it a rule for this kernel, as it has for those of GPUs."""

    def handler(op_call, args, kwargs):
        group, tensors = args[0].device_mesh.get_group(), [local(x) for x in args]
        if is_backward:
            grad, q, k, v, out, lse = tensors[:6]
            results = _attention._templated_ring_attention_backward(
                group, 2, native.FLASH_BACKWARD, grad, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
            )
        else:
            results = _attention._templated_ring_attention(group, 2, native.FLASH, *tensors[:3], is_causal=True)
        return tuple(DTensor.from_local(x, args[0].device_mesh, args[0].placements, run_check=False) for x in results)

    return handler


def as_on_a_gpu(sequence_sharding):
    """The code for GPUs, with the one thing that a CPU lacks; `context_parallel` merges in float32."""
    added = {native.FLASH: ring_of_the_cpus_kernel(False), native.FLASH_BACKWARD: ring_of_the_cpus_kernel(True)}
    engine = native.build(model.build(LLAMA, dtype=torch.float64), dist.group.WORLD, sequence_sharding)
    for block in engine.module.blocks:
        block.attention.core = native.on_a_gpu
    with patch.dict(_attention.custom_ops, added), patch.object(native, "cut_by_hand", native.cut_by_pytorch):
        native.accumulate_gradients(engine, micro_batches())
    whole, _ = one_process(LLAMA)
    return worst(native.full_gradients(engine), whole.named_parameters())


def on_ranks():
    found = {name: measure(case) for name, case in CASES.items()}
    found["float32"] = measure(CASES["zigzag ring"], torch.float32)
    if dist.get_world_size() == 2:
        found["as on a GPU"] = [as_on_a_gpu(sequence_sharding) for sequence_sharding in native.SEQUENCE_SHARDINGS]
    return found | {"step": a_clipped_step(), "too short": too_short()}


@pytest.fixture(scope="module")
def ranks():
    return {size: launch(on_ranks, size, quiet=True) for size in (2, 4)}


@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_equal_one_process(ranks, size):
    for found in ranks[size]:
        for name in CASES:
            assert found[name]["loss"] < 1e-12 and found[name]["apart"] < 1e-10, (name, found[name])
        assert found["float32"]["apart"] < 1e-5


def test_the_way_through_context_parallel_does_too_given_the_cpus_kernel(ranks):
    assert max(max(found["as on a GPU"]) for found in ranks[2]) < 1e-5


@pytest.mark.parametrize("size", [2, 4])
def test_a_clipped_step_equals_one_process_and_leaves_pytorchs_options_as_they_were(ranks, size):
    for apart, same_options, forgotten in (found["step"] for found in ranks[size]):
        assert apart < 1e-9 and same_options and forgotten


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_blocks_go_round_in_both_passes_and_their_gradients_all_the_way_home(ranks, size, name):
    config, recompute, _, rotate_method = CASES[name]
    block = 2 * sum(ROWS) * config.num_kv_heads * (S // size) * config.head_dim * 8  # keys and values, float64
    trips = LAYERS * (size - 1) * block * (3 if recompute == "full" else 2)  # forward, backward, forward again
    home = LAYERS * size * block
    expected = {"alltoall": {"all_to_all": trips + home}, "allgather": {"all_gather": trips, "all_to_all": home}}
    for rank, found in enumerate(ranks[size]):
        sent = dict(found[name]["bytes"])
        sums = ring_all_reduce_bytes(found[name]["numbers"] * 8, size, rank, 8) + ring_all_reduce_bytes(
            8, size, rank, 8
        )
        assert sent.pop("all_reduce") == sums
        assert sent == expected[rotate_method]


def test_a_sequence_that_does_not_divide_is_refused_before_anything_is_sent(ranks):
    for message, calls in (found["too short"] for found in ranks[4]):
        assert message.startswith("seq_len (18) must be a multiple of 2 x cp (8)") and calls == {}


REFUSED = {
    "family is 'xlmr'": (dataclasses.replace(LLAMA, family="xlmr", num_kv_heads=8), {}),
    "dropout is 0.1": (dataclasses.replace(LLAMA, family="gpt", num_kv_heads=8, dropout=0.1), {}),
    "the model has experts": (dataclasses.replace(LLAMA, moe=MoeConfig(num_experts=4, top_k=2, d_expert=8)), {}),
    "the model has latent attention": (
        dataclasses.replace(LLAMA, num_kv_heads=8, head_dim=6, mla=MlaConfig(8, 8, 4, 2, value_dim=3)),
        {},
    ),
    "sequence_sharding is 'striped'; PyTorch has contiguous, zigzag": (LLAMA, {"sequence_sharding": "striped"}),
    "rotate_method is 'ring'; choose from alltoall, allgather": (LLAMA, {"rotate_method": "ring"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_pytorchs_ring_does_not_know_is_refused(message):
    config, options = REFUSED[message]
    options = {"sequence_sharding": "zigzag", "rotate_method": "alltoall"} | options
    with pytest.raises(ValueError) as error:
        native.check_model(model.build(config, device="meta"), **options)
    assert str(error.value).startswith(message)
