"""PyTorch's tensor parallelism: gradients against one process, what is really sharded, what is really sent."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from tp_parity import CONFIGS, LAYERS, ROWS, SEQ_LEN, TOY, differences, micro_batches, parity, wire

from course_lib import model
from course_lib.config import MlaConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.native import tensor as native
from course_lib.parallel import tensor as parallel
from course_lib.traffic import ring_all_reduce_bytes

pytestmark = pytest.mark.exhaustive  # the lessons hold PyTorch's own against one process as well

D, V = TOY.d_model, TOY.vocab_size
BSD, BS = (ROWS - 1) * SEQ_LEN * D, (ROWS - 1) * SEQ_LEN  # of the metered micro-batch


def built(config=TOY):
    return native.build(model.build(config, dtype=torch.float64), dist.group.WORLD)


def placements_and_shapes(config):
    return {
        name: (param.placements, tuple(param.to_local().shape)) if isinstance(param, DTensor) else "whole"
        for name, param in built(config).named_parameters()
    }


def embedding_gradients():
    """Placement of the embedding's gradient as DTensor computes it, and as it is kept."""
    engine, raw = built(), []
    engine.module.embed.weight.register_hook(lambda grad: raw.append((grad.placements, tuple(grad.to_local().shape))))
    native.accumulate_gradients(engine, micro_batches(TOY)[:1])
    grad = engine.module.embed.weight.grad
    return raw, (grad.placements, tuple(grad.to_local().shape))


def build_without_shared_inputs(llama, group):
    plan = native.tensor_plan(llama)
    for index in range(LAYERS):
        del plan[f"blocks.{index}.attention"], plan[f"blocks.{index}.mlp"]
    return native.TensorParallel(llama, group, plan)


WITHOUT_SHARED_INPUTS = SimpleNamespace(
    build=build_without_shared_inputs, accumulate_gradients=native.accumulate_gradients
)


def plan_that_forgets_up():
    llama = model.build(TOY)
    plan = native.tensor_plan(llama)
    del plan["blocks.1.mlp.up"]
    try:
        native.TensorParallel(llama, dist.group.WORLD, plan)
    except RuntimeError as error:
        return str(error)
    return "no error"


def clipping_and_building():
    """Collectives of clipping, and bytes of building."""
    with ByteMeter() as building:
        engine = built()
    native.accumulate_gradients(engine, micro_batches(TOY))
    before = native.full_gradients(engine)
    with ByteMeter() as clipping:
        norm = native.clip_gradients(engine, 0.1)
    after = native.full_gradients(engine)
    whole_norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before.values()]))
    clipped_norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in after.values()]))
    return building.calls, clipping.calls, (norm - whole_norm).abs().item(), clipped_norm.item()


def on_ranks():
    found = {"tied, uneven": parity(native, CONFIGS["tied, uneven"])}
    found["shapes"] = placements_and_shapes(CONFIGS["tied, uneven"])
    found["wire"] = {name: wire(native, config) for name, config in CONFIGS.items()}
    found["from scratch"] = {"tied, uneven": differences(native, parallel, CONFIGS["tied, uneven"])}
    found["wire, from scratch"] = wire(parallel, TOY)
    if dist.get_world_size() == 2:
        found["from scratch"]["gpt"] = differences(native, parallel, CONFIGS["gpt"])
        found["wire, from scratch, full recomputation"] = wire(parallel, TOY, "full")
        found["gqa"] = parity(native, TOY)
        found["head norms"] = parity(native, CONFIGS["head norms"])
        found["gpt"] = parity(native, CONFIGS["gpt"])
        found["gqa, full recomputation"] = parity(native, TOY, "full")
        found["wire, full recomputation"] = wire(native, TOY, "full")
        found["embedding"] = embedding_gradients()
        found["wire, no shared inputs"] = wire(WITHOUT_SHARED_INPUTS, TOY)
        found["forgets up"] = plan_that_forgets_up()
        found["clipping"] = clipping_and_building()
    return found


@pytest.fixture(scope="module")
def ranks():
    return {size: launch(on_ranks, size, quiet=True) for size in (2, 4)}


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (2, "gqa"),
        (2, "tied, uneven"),
        (4, "tied, uneven"),
        (2, "head norms"),
        (2, "gpt"),
        (2, "gqa, full recomputation"),
    ],
)
def test_losses_gradients_and_clipped_steps_equal_one_process(ranks, size, name):
    for found in ranks[size]:
        assert max(found[name].values()) < 1e-10, found[name]


@pytest.mark.parametrize("size", [2, 4])
def test_each_matrix_is_cut_along_the_dimension_of_its_place(ranks, size):
    last = size - 1
    short = {"f": 191 - last * -(-191 // size), "v": 255 - last * -(-255 // size)}  # the last rank's, as chunk cuts
    shapes = ranks[size][last]["shapes"]
    columns, rows = (Shard(0),), (Shard(1),)
    assert shapes["embed.weight"] == (columns, (short["v"], D))
    assert "head.weight" not in shapes  # tied: one parameter
    block = {name.removeprefix("blocks.1."): found for name, found in shapes.items() if name.startswith("blocks.1.")}
    assert block == {
        "attention_norm.weight": "whole",
        "attention.q.weight": (columns, (D // size, D)),
        "attention.k.weight": (columns, (D // 2 // size, D)),
        "attention.v.weight": (columns, (D // 2 // size, D)),
        "attention.o.weight": (rows, (D, D // size)),
        "mlp_norm.weight": "whole",
        "mlp.gate.weight": (columns, (short["f"], D)),
        "mlp.up.weight": (columns, (short["f"], D)),
        "mlp.down.weight": (rows, (D, short["f"])),
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_two_all_reduces_a_layer_each_way_and_one_each_for_embedding_and_head(ranks, size, name):
    expected = ["embed", *["o", "down"] * LAYERS], ["loss"] * 3, ["head", *["mlp", "attention"] * LAYERS]
    sent_bytes = (4 * LAYERS + 2) * ring_all_reduce_bytes(BSD * 8, size) + 3 * ring_all_reduce_bytes(BS * 8, size)
    of_heads = 2 * LAYERS if CONFIGS[name].qk_norm else 0  # norms, each an all-reduce of H
    sent_bytes += of_heads * ring_all_reduce_bytes(CONFIGS[name].head_dim * 8, size)
    for found in ranks[size]:
        records, found_bytes = found["wire"][name]
        sums = [("all_reduce", BS if part == "loss" else BSD) for parts in expected for part in parts]
        assert records == sums + [("all_reduce", CONFIGS[name].head_dim)] * of_heads
        assert found_bytes == sent_bytes


@pytest.mark.parametrize("size", [2, 4])
def test_losses_gradients_and_messages_equal_those_from_scratch(ranks, size):
    for found in ranks[size]:
        assert all(max(pair) < 1e-12 for pair in found["from scratch"].values()), found["from scratch"]
        assert found["wire"]["gqa"] == found["wire, from scratch"]
    assert ranks[2][0]["wire, full recomputation"] == ranks[2][0]["wire, from scratch, full recomputation"]


def test_full_recomputation_repeats_the_sum_after_attention_and_not_the_one_after_the_mlp(ranks):
    """Nothing of backward needs the MLP's output: recomputation stops before its sum."""
    plain, _ = ranks[2][0]["wire"]["gqa"]
    recomputed, _ = ranks[2][0]["wire, full recomputation"]
    assert Counter(recomputed) - Counter(plain) == {("all_reduce", BSD): LAYERS}


def test_columns_that_wrap_the_input_for_themselves_sum_its_gradient_five_times_a_layer(ranks):
    records, _ = ranks[2][0]["wire, no shared inputs"]
    assert records.count(("all_reduce", BSD)) == (2 + 5) * LAYERS + 2


def test_the_gradient_of_the_embedding_is_computed_whole_and_kept_in_part(ranks):
    raw, kept = ranks[2][0]["embedding"]
    assert raw == [((Replicate(),), (V, D))]
    assert kept == ((Shard(0),), (V // 2, D))


def test_building_sends_nothing_and_clipping_one_all_reduce(ranks):
    for building, clipping, difference, clipped_norm in (found["clipping"] for found in ranks[2]):
        assert (building, clipping) == ({}, {"all_reduce": 1})
        assert difference < 1e-12 and clipped_norm == pytest.approx(0.1, rel=1e-4)


def test_a_linear_layer_that_the_plan_forgot_is_an_error(ranks):
    assert "blocks.1.mlp.up.weight was not sharded over 2 ranks" in ranks[2][0]["forgets up"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, r"num_heads \(6\) must be divisible by tp \(4\); choose tp from 1, 2, 3"),
        ({"num_kv_heads": 2}, r"num_kv_heads \(2\) must be divisible by tp \(4\); choose tp from 1, 2$"),
        ({"family": "gpt", "num_kv_heads": 8, "dropout": 0.1}, "dropout is 0.1"),
        ({"family": "xlmr", "num_kv_heads": 8}, "knows llama and gpt"),
        ({"num_kv_heads": 8, "mla": MlaConfig(8, 8, 6, 2, value_dim=3)}, "toy has latent attention .mla., which"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_changes(change, message):
    with pytest.raises(ValueError, match=message):
        native.check_shardable(dataclasses.replace(TOY, head_dim=8, **change), 4)
