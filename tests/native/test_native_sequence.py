"""PyTorch's sequence parallelism: gradients against one process, what is in pieces along S, what is really sent."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import largest_difference
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from tp_parity import CONFIGS, LAYERS, ROWS, SEQ_LEN, TOY, differences, micro_batches, parity, wire

from course_lib import model
from course_lib.compat import DTENSOR_GATHERS_UNEVEN
from course_lib.launch import RankError, launch
from course_lib.measure import ByteMeter
from course_lib.native import sequence as native
from course_lib.native import tensor
from course_lib.parallel import sequence as parallel
from course_lib.traffic import ring_all_reduce_bytes

pytestmark = pytest.mark.exhaustive  # the lessons hold PyTorch's own against one process as well

D = TOY.d_model
BSD, BS = (ROWS - 1) * SEQ_LEN * D, (ROWS - 1) * SEQ_LEN  # of the metered micro-batch
UNEVEN_S = 7
NUM_NORMS = 2 * LAYERS + 1


def built(config=TOY):
    return native.build(model.build(config, dtype=torch.float64), dist.group.WORLD)


def stream_between_layers():
    """(module, placements, local shape) of what norms, attention, MLP and blocks pass on."""
    engine, seen = built(), {}
    model = engine.module

    def note(name):
        def hook(module, args, out):
            seen[name] = (out.placements, tuple(out.to_local().shape)) if isinstance(out, DTensor) else "whole"

        return hook

    block = model.blocks[0]
    parts = {"embed": model.embed, "norm": model.norm, "block": block, "attention": block.attention, "mlp": block.mlp}
    for name, module in (parts | {"attention_norm": block.attention_norm, "mlp_norm": block.mlp_norm}).items():
        module.register_forward_hook(note(name))
    engine(micro_batches(TOY)[1][0])
    return seen


def gradients_of_norms():
    """(placements, largest error of the local numbers) of a norm's gradient, before `finish` and after it."""
    engine, reference = built(), tensor.build(model.build(TOY, dtype=torch.float64), dist.group.WORLD)
    engine.run(micro_batches(TOY))
    tensor.accumulate_gradients(reference, micro_batches(TOY))
    expected_D, found = reference.module.norm.weight.grad, []
    for finish in (lambda: None, engine.finish):
        finish()
        grad = engine.module.norm.weight.grad
        found.append((grad.placements, (grad.to_local() - expected_D).abs().max().item()))
    return found


def leaves_no_partial_gradient():
    engine = built(CONFIGS["gpt"])
    native.accumulate_gradients(engine, micro_batches(TOY))
    return all(param.grad.placements == param.placements for param in engine.parameters())


def forgotten_sum():
    """All-reduces of AdamW where gradients of norms are left Partial, and where they were summed before."""
    calls = []
    for is_finished in (False, True):
        engine = built()
        optimizer = native.make_optimizer(engine)
        engine.run(micro_batches(TOY)[:1])
        if is_finished:
            engine.finish()
        with ByteMeter() as meter:
            optimizer.step()
        calls.append(meter.calls.get("all_reduce", 0))
    return calls


def wrong_norm_gradients():
    """A step that takes each rank's part of a norm's gradient for the whole."""
    engine, right = built(), built()
    engine.run(micro_batches(TOY))
    native.accumulate_gradients(right, micro_batches(TOY))
    wrong = {
        name: param.grad.to_local() if param.grad.placements == (Partial(),) else param.grad.full_tensor()
        for name, param in engine.named_parameters()
    }
    return largest_difference(wrong, native.full_gradients(right))


def on_ranks():
    uneven_S = parity(native, CONFIGS["tied, uneven"], seq_len=UNEVEN_S) if DTENSOR_GATHERS_UNEVEN else None
    found = {"uneven S": uneven_S}
    if dist.get_world_size() == 2 or not DTENSOR_GATHERS_UNEVEN:  # on four ranks the uneven sequence is enough
        found["tied, uneven"] = parity(native, CONFIGS["tied, uneven"])
    found["placements"] = {
        name: (param.placements, tuple(param.to_local().shape)) for name, param in built().named_parameters()
    }
    found["stream"] = stream_between_layers()
    found["wire"] = wire(native, TOY)
    found["from scratch"] = differences(native, parallel, CONFIGS["tied, uneven"])
    found["wire, from scratch"] = wire(parallel, TOY)
    if DTENSOR_GATHERS_UNEVEN:
        found["wire, uneven S"] = wire(native, TOY, seq_len=UNEVEN_S)
    if dist.get_world_size() == 2:
        found["gqa"] = parity(native, TOY)
        found["head norms"] = parity(native, CONFIGS["head norms"])
        found["gpt"] = parity(native, CONFIGS["gpt"])
        found["gqa, full recomputation"] = parity(native, TOY, "full")
        found["wire, full recomputation"] = wire(native, TOY, "full")
        found["gpt, from scratch"] = differences(native, parallel, CONFIGS["gpt"])
        found["wire, tensor parallel"] = wire(tensor, TOY)
        found["norms"] = gradients_of_norms()
        found["no partial gradient"] = leaves_no_partial_gradient()
        found["forgotten sum"] = forgotten_sum()
        found["wrong norms"] = wrong_norm_gradients()
    return found


@pytest.fixture(scope="module")
def ranks():
    return {size: launch(on_ranks, size, quiet=True) for size in (2, 4)}


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (2, "gqa"),
        (2, "tied, uneven"),
        (4, "uneven S" if DTENSOR_GATHERS_UNEVEN else "tied, uneven"),
        (2, "head norms"),
        (2, "gpt"),
        (2, "gqa, full recomputation"),
    ],
)
def test_losses_gradients_and_clipped_steps_equal_one_process(ranks, size, name):
    for found in ranks[size]:
        assert max(found[name].values()) < 1e-10, found[name]


needs_uneven = pytest.mark.skipif(not DTENSOR_GATHERS_UNEVEN, reason="below torch 2.13 DTensor cannot; see compat.py")


@needs_uneven
@pytest.mark.parametrize("size", [2, 4])
def test_a_sequence_that_does_not_divide_is_padded_on_the_wire_alone(ranks, size):
    padded_S = -(-UNEVEN_S // size) * size
    for found in ranks[size]:
        assert max(found["uneven S"].values()) < 1e-10
        pieces = [numbers for name, numbers in found["wire, uneven S"][0] if name != "all_reduce"]
        assert pieces == [(ROWS - 1) * padded_S * D] * (8 * LAYERS + 4)


@pytest.mark.skipif(DTENSOR_GATHERS_UNEVEN, reason="torch 2.13 can")
def test_a_sequence_that_does_not_divide_is_refused_with_an_older_torch():
    with pytest.raises(RankError, match=r"seq_len \(7\) must be divisible by tp \(2\) with torch"):
        launch(parity, 2, native, TOY, "none", UNEVEN_S, quiet=True)


def test_a_sequence_shorter_than_the_ranks_is_refused():
    with pytest.raises(ValueError, match=r"seq_len \(3\) must be at least tp \(4\)"):
        native.check_sequence(3, 4)


@pytest.mark.parametrize("size", [2, 4])
def test_matrices_are_cut_as_in_tensor_parallelism_and_norms_are_whole(ranks, size):
    found = ranks[size][0]["placements"]
    columns, rows, everywhere = (Shard(0),), (Shard(1),), (Replicate(),)
    block = {name.removeprefix("blocks.0."): value for name, value in found.items() if name.startswith("blocks.0.")}
    assert block == {
        "attention_norm.weight": (everywhere, (D,)),
        "attention.q.weight": (columns, (D // size, D)),
        "attention.k.weight": (columns, (D // 2 // size, D)),
        "attention.v.weight": (columns, (D // 2 // size, D)),
        "attention.o.weight": (rows, (D, D // size)),
        "mlp_norm.weight": (everywhere, (D,)),
        "mlp.gate.weight": (columns, (192 // size, D)),
        "mlp.up.weight": (columns, (192 // size, D)),
        "mlp.down.weight": (rows, (D, 192 // size)),
    }
    assert found["embed.weight"] == found["head.weight"] == (columns, (256 // size, D))


@pytest.mark.parametrize("size", [2, 4])
def test_all_between_attention_and_mlp_holds_its_piece_of_the_sequence(ranks, size):
    piece = ((Shard(1),), (ROWS - 1, SEQ_LEN // size, D))
    for found in ranks[size]:
        assert set(found["stream"]) == {"embed", "norm", "block", "attention", "mlp", "attention_norm", "mlp_norm"}
        assert set(found["stream"].values()) == {piece}


@pytest.mark.parametrize("size", [2, 4])
def test_each_all_reduce_of_tensor_parallelism_became_a_reduce_scatter_and_an_all_gather(ranks, size):
    forward = ["reduce_scatter", "all_gather"] * (2 * LAYERS + 1)
    for found in ranks[size]:
        records, sent_bytes = found["wire"]
        assert records == [
            *((name, BSD) for name in forward),
            *[("all_reduce", BS)] * 3,
            *((name, BSD) for name in forward),  # again: head's gradient scattered, then gathered for down, ...
            *[("all_reduce", D)] * NUM_NORMS,
        ]
        of_norms = NUM_NORMS * ring_all_reduce_bytes(D * 8, size)
        as_tensor_parallel = (4 * LAYERS + 2) * ring_all_reduce_bytes(BSD * 8, size)
        assert sent_bytes == as_tensor_parallel + 3 * ring_all_reduce_bytes(BS * 8, size) + of_norms


@pytest.mark.parametrize("size", [2, 4])
def test_losses_gradients_and_messages_equal_those_from_scratch_which_sums_all_norms_in_one(ranks, size):
    for found in ranks[size]:
        assert max(found["from scratch"]) < 1e-12
        (ours, our_bytes), (scratch, scratch_bytes) = found["wire"], found["wire, from scratch"]
        assert ours[:-NUM_NORMS] == scratch[:-1]
        assert ours[-NUM_NORMS:] == [("all_reduce", D)] * NUM_NORMS and scratch[-1] == ("all_reduce", D * NUM_NORMS)
        assert our_bytes == scratch_bytes
    assert max(ranks[2][0]["gpt, from scratch"]) < 1e-12


def test_the_bytes_are_those_of_tensor_parallelism_but_for_the_norms(ranks):
    found = ranks[2][0]
    assert found["wire"][1] - found["wire, tensor parallel"][1] == NUM_NORMS * ring_all_reduce_bytes(D * 8, 2)


def test_full_recomputation_gathers_twice_and_scatters_once_more_a_layer(ranks):
    plain, _ = ranks[2][0]["wire"]
    recomputed, _ = ranks[2][0]["wire, full recomputation"]
    again = {("all_gather", BSD): 2 * LAYERS, ("reduce_scatter", BSD): LAYERS}
    assert Counter(recomputed) - Counter(plain) == again


def test_gradients_of_norms_are_partial_until_they_are_summed(ranks):
    for found in ranks[2]:
        (before, error), (after, no_error) = found["norms"]
        assert before == (Partial(),) and error > 1e-5
        assert after == (Replicate(),) and no_error < 1e-12
        assert found["no partial gradient"]
        assert found["wrong norms"] > 1e-5


def test_adamw_sums_a_partial_gradient_three_times_and_a_summed_one_not_again(ranks):
    assert ranks[2][0]["forgotten sum"] == [3 * NUM_NORMS, 0]
