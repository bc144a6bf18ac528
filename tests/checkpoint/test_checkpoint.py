"""Saved under one layout, loaded under others; complete or refused; nothing in a file is executed."""

import json
import os
import pickle
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from course_lib import comm
from course_lib.checkpoint import files as checkpoint_files
from course_lib.checkpoint import latest
from course_lib.checkpoint import state as checkpoint
from course_lib.checkpoint import storage as checkpoint_pieces
from course_lib.checkpoint.files import name_of
from course_lib.config import ModelConfig, MoeConfig
from course_lib.launch import RankError, launch
from course_lib.layout import Layout
from course_lib.measure import MemoryTracker
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.parallel.engine import full_parameters
from course_lib.parallel.shards import flatten_and_pad, my_shard
from course_lib.weights.pieces import Piece

DENSE = ModelConfig("dense", 4, 32, 4, 2, 52, 97, 64, tied=True)  # 97 and 52 / 4 do not divide; 2 heads on tp 4
GPT = ModelConfig("gpt", 2, 32, 4, 4, 64, 97, 64, family="gpt", dropout=0.1)
MOE = ModelConfig("moe", 2, 32, 4, 2, 52, 97, 64,
                  moe=MoeConfig(4, 2, 24, num_shared_experts=1, score="sigmoid", balancing="bias"))  # fmt: skip
TIED_MOE = replace(MOE, tied=True)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
STATES = ("exp_avg", "exp_avg_sq", "master")

# name: (model, dtype, layout that saves)
SOURCES = {
    "alone": (DENSE, F32, "dp=1"),
    "zero1": (DENSE, F32, "dp=2,tp=2,zero_stage=1"),
    "bf16": (DENSE, BF16, "tp=4"),
    "head norms": (replace(DENSE, qk_norm=True), F32, "tp=4,micro_batches=2"),
    "tied": (DENSE, F32, "pp=2,dp=2,micro_batches=4"),
    "gpt": (GPT, F32, "dp=2,tp=2,sequence_parallel=true,zero_stage=3"),
    "moe": (MOE, F32, "dp=2,tp=2,ep=2,sequence_parallel=true,zero_stage=2"),
    "folded": (MOE, F32, "tp=4,ep=2,expert_tp=1,sequence_parallel=true"),
    "folded, sharded": (MOE, F32, "dp=2,tp=2,ep=2,expert_tp=1,sequence_parallel=true,zero_stage=2"),
    "replicas": (MOE, F32, "dp=4,ep=2,zero_stage=3,dp_replicate=2"),
}
# (saved by, layout that loads)
PAIRS = [
    ("alone", "tp=2,pp=2,micro_batches=2"),
    ("zero1", "pp=4,micro_batches=4"),
    ("zero1", "tp=4"),
    ("zero1", "dp=4,zero_stage=3"),
    ("bf16", "dp=2,tp=2,zero_stage=3"),
    ("head norms", "dp=2,tp=2,zero_stage=1"),
    ("head norms", "pp=4,micro_batches=4"),
    ("tied", "dp=2,cp=2,zero_stage=2"),
    ("gpt", "dp=4,zero_stage=1"),
    ("moe", "dp=2,pp=2,ep=2,micro_batches=2,zero_stage=1"),
    ("replicas", "dp=2,tp=2,zero_stage=2,dp_replicate=2"),
    ("moe", "dp=2,tp=2,ep=4,sequence_parallel=true,zero_stage=3"),
    ("folded", "dp=2,tp=2,ep=2,sequence_parallel=true,zero_stage=1"),
    ("folded, sharded", "tp=4,ep=4,sequence_parallel=true"),
    ("folded", "tp=2,ep=2,sequence_parallel=true"),
    ("folded, sharded", "dp=1"),
    ("zero1", "dp=2,zero_stage=2"),
    ("bf16", "pp=2,micro_batches=2"),
    ("gpt", "tp=2,sequence_parallel=true"),
    ("moe", "dp=2,ep=2"),
    ("zero1", "dp=1"),
    ("bf16", "dp=1,zero_stage=1"),
    ("head norms", "dp=1"),
    ("tied", "dp=1"),
    ("gpt", "dp=1,zero_stage=2"),
    ("moe", "dp=1"),
]
ON_FOUR = [pair for pair in PAIRS if Layout.parse(pair[1]).world_size == 4]
# (saved by, layout that loads, in which precision)
CONVERSIONS = [
    ("bf16", "pp=4,micro_batches=4", F32),
    ("bf16", "dp=4,zero_stage=3", F32),
    ("zero1", "dp=2,tp=2,zero_stage=1", BF16),
    ("tied", "pp=2,tp=2,micro_batches=4", BF16),
    ("moe", "dp=2,pp=2,ep=2,micro_batches=2", BF16),
    ("bf16", "tp=2", F32),
    ("moe", "dp=2,ep=2,zero_stage=2", BF16),
    ("bf16", "dp=1,zero_stage=1", F32),
    ("bf16", "dp=1", F64),
    ("alone", "dp=1", BF16),
    ("alone", "dp=1,zero_stage=1", F64),
]


# --- on ranks


def built(config, text, dtype=F32, seed=0):
    engine = five_d.build(config, Layout.parse(text), seed, dtype)
    return engine, engines.make_optimizer(engine)


def micro_batches(engine, step):
    layout = engine.layout
    chance = torch.Generator().manual_seed(100 * step + engine.groups.coordinates["dp"])
    tokens = torch.randint(97, (layout.micro_batches, 2, 1, 16), generator=chance)
    return list(tokens.unbind(0))


def train(engine, optimizer, steps):
    """Losses of these steps, with a learning rate that falls."""
    losses = []
    for step in steps:
        for options in optimizer.param_groups:
            options["lr"] = 3e-3 / (1 + step)
        losses.append(engines.step(engine, micro_batches(engine, step), optimizer).item())
    return losses


def held_by(engine):
    """(what the optimizer updates, its names in the whole model, over whom it is sharded if it is a flat)."""
    if not engine.layout.zero_stage:
        return [(param, [name], None) for name, param in five_d.named_parameters(engine).items()]
    flats = [flat for sharded in engine.data_engines.values() for flat in sharded.flats]
    tied = {"head.weight": "embed.weight"} if engine.config.tied else {}
    return [(flat.shard_p, [tied.get(name, name) for name in flat.names], flat.group) for flat in flats]


def states_of(optimizer, param):
    return {key: optimizer.state[param][key] for key in STATES if key in optimizer.state[param]}


def rest_of(engine, optimizer):
    """Counts of steps, options, and the balancing biases of this rank's stages."""
    groups = optimizer.param_groups
    counts = {int(optimizer.state[param].get("step", groups[0].get("step"))) for param, _, _ in held_by(engine)}
    biases = {name: x for stage in engine.stages.values() for name, x in stage.named_buffers() if "bias_steps" in name}
    return counts, [{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} for group in groups], biases


def whole_state(engine, optimizer):
    """Everything whole, gathered by the engine's own means: each state takes the parameters' place for a moment."""
    whole = {f"model.{name}": x.clone() for name, x in full_parameters(engine).items()}
    held = [param for param, _, _ in held_by(engine)]
    before = [param.data for param in held]
    for key in states_of(optimizer, held[0]):
        for param in held:
            param.data = optimizer.state[param][key]
        whole |= {f"{key}.{name}": x.clone() for name, x in full_parameters(engine).items()}
    for param, numbers in zip(held, before, strict=True):
        param.data = numbers
    return whole


def assert_holds(engine, optimizer, whole):
    """Each rank has its part of the whole tensors: what `Cut.part` and `flatten_and_pad` say, not boxes."""
    cuts, tp_rank = five_d.cuts_of(engine), engine.groups.tp.rank()

    def part(key):
        name = key.partition(".")[2]
        return cuts[name].part(whole[key], tp_rank) if name in cuts else whole[key]

    for param, names, group in held_by(engine):
        for key, x in {"model": param, **states_of(optimizer, param)}.items():
            parts = [part(f"{key}.{name}") for name in names]
            wanted = parts[0] if group is None else my_shard(flatten_and_pad(parts, group.size()), group)
            assert x.dtype == wanted.dtype and torch.equal(x, wanted), (key, names)
    assert {key.partition(".")[0] for key in whole} == {"model", *states_of(optimizer, param)}
    if engine.layout.zero_stage < 3:  # whole on each rank, besides the shards
        for name, param in five_d.named_parameters(engine).items():
            assert torch.equal(param, part(f"model.{name}")), name


def save_some(folder, names):
    """Trains two steps and saves, beside what the engine itself says that its state is."""
    for name in names:
        config, dtype, text = SOURCES[name]
        engine, optimizer = built(config, text, dtype)
        train(engine, optimizer, range(2))
        checkpoint.save(engine, optimizer, folder / name, 2, {"model": name})
        counts, options, biases = rest_of(engine, optimizer)
        everybodys = comm.all_gather_tensors(biases, engine.groups.pp)
        biases = {name: x for of_rank in everybodys for name, x in of_rank.items()}
        whole = whole_state(engine, optimizer)
        if torch.distributed.get_rank() == 0:
            torch.save((whole, (counts, options, biases)), folder / f"{name}.pt")
    torch.distributed.barrier()


def load_some(folder, pairs):
    for name, text in pairs:
        config, dtype, saved_as = SOURCES[name]
        engine, optimizer = built(config, text, dtype, seed=1)
        if "zero_stage" not in text:
            train(engine, optimizer, range(1))  # what was there before leaves no trace
        restored = checkpoint.load(engine, optimizer, folder / name)
        assert (restored.step, restored.about, restored.same_mesh) == (2, {"model": name}, text == saved_as)
        whole, (counts, options, biases) = torch.load(folder / f"{name}.pt", weights_only=True)
        assert_holds(engine, optimizer, whole)
        found = rest_of(engine, optimizer)
        assert found[:2] == (counts, options)
        assert found[2].keys() <= biases.keys() and (found[2] or not biases)
        assert all(torch.equal(x, biases[name]) for name, x in found[2].items())


def converted(whole, dtype):
    """What a checkpoint is in another precision, tensor by tensor: the master weights, or what is its own master,
    decide.
    """
    wide = {name: whole.get(f"master.{name}", whole[f"model.{name}"]) for name in of(whole, "model")}
    found = {f"model.{name}": x.float().to(dtype) if dtype == BF16 else x.to(dtype) for name, x in wide.items()}
    if dtype == BF16:
        found |= {f"master.{name}": x.float() for name, x in wide.items()}
    moments = [f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq") for name in wide]
    return found | {name: whole[name].to(torch.promote_types(dtype, F32)) for name in moments if name in whole}


def of(whole, state):
    return [name.removeprefix(f"{state}.") for name in whole if name.startswith(f"{state}.")]


def convert_some(folder, conversions):
    """Refused on every rank unless it is asked for."""
    for name, text, dtype in conversions:
        config, saved_dtype, _ = SOURCES[name]
        engine, optimizer = built(config, text, dtype, seed=1)
        said = rf"another precision: parameters in {saved_dtype} \(here {dtype}\).*load\(\.\.\., convert=True\)"
        with pytest.raises(ValueError, match=said):
            checkpoint.load(engine, optimizer, folder / name)
        checkpoint.load(engine, optimizer, folder / name, convert=True)
        whole, (counts, options, _) = torch.load(folder / f"{name}.pt", weights_only=True)
        assert_holds(engine, optimizer, converted(whole, dtype))
        assert rest_of(engine, optimizer)[:2] == (counts, options)


def there_and_back(folder, config, text, through):
    """From bf16 to fp32 under another layout and back: bit for bit as if nothing had been."""
    engine, optimizer = built(config, text, BF16)
    train(engine, optimizer, range(2))
    whole = whole_state(engine, optimizer)
    checkpoint.save(engine, optimizer, folder / "there", 2)
    wide = built(config, through, F32, seed=1)
    checkpoint.load(*wide, folder / "there", convert=True)
    assert_holds(*wide, converted(whole, F32))
    checkpoint.save(*wide, folder / "back", 2)
    again = built(config, text, BF16, seed=2)
    checkpoint.load(*again, folder / "back", convert=True)
    assert_holds(*again, whole)
    assert train(*again, [2]) == train(engine, optimizer, [2])
    assert_holds(*again, whole_state(engine, optimizer))


def go_on(folder, config, text, dtype=F32):
    """Bit for bit the same whether training was interrupted or not."""
    folder = folder / f"{config.name} {text}"
    engine, optimizer = built(config, text, dtype)
    train(engine, optimizer, range(2))
    checkpoint.save(engine, optimizer, folder, 2)
    rng = torch.get_rng_state()
    wanted = train(engine, optimizer, range(2, 4))

    other, its_optimizer = built(config, text, dtype, seed=3)
    torch.manual_seed(99)
    restored = checkpoint.load(other, its_optimizer, folder)
    assert restored.same_mesh
    assert torch.equal(torch.get_rng_state(), rng)
    assert train(other, its_optimizer, range(2, 4)) == wanted
    for (param, _, _), (again, _, _) in zip(held_by(engine), held_by(other), strict=True):
        found, states = states_of(its_optimizer, again), states_of(optimizer, param)
        assert torch.equal(param, again) and found.keys() == states.keys()
        assert all(torch.equal(found[key], x) for key, x in states.items())
    (*rest, biases), (*rest_again, biases_again) = rest_of(engine, optimizer), rest_of(other, its_optimizer)
    assert rest == rest_again and all(torch.equal(x, biases_again[name]) for name, x in biases.items())


def on_four_ranks(folder):
    save_some(folder, [name for name in SOURCES if name != "alone"])
    load_some(folder, ON_FOUR[::8])
    go_on(folder, MOE, "dp=2,pp=2,ep=2,micro_batches=2")


def others_on_four_ranks(folder):
    load_some(folder, [pair for pair in ON_FOUR if pair not in ON_FOUR[::8]])
    convert_some(folder, [one for one in CONVERSIONS if Layout.parse(one[1]).world_size == 4])
    there_and_back(folder / "dense", DENSE, "dp=2,tp=2,zero_stage=1", "pp=4,micro_batches=4")
    there_and_back(folder / "experts", TIED_MOE, "pp=2,dp=2,ep=2,micro_batches=2", "dp=2,tp=2,ep=2,zero_stage=3")
    go_on(folder, GPT, "dp=2,tp=2,zero_stage=1")
    go_on(folder, replace(GPT, tied=True), "pp=2,dp=2,zero_stage=2,micro_batches=2")


def on_two_ranks(folder):
    load_some(folder, [pair for pair in PAIRS if Layout.parse(pair[1]).world_size == 2])
    convert_some(folder, [one for one in CONVERSIONS if Layout.parse(one[1]).world_size == 2])
    go_on(folder, DENSE, "dp=2,zero_stage=3", BF16)
    saved_meanwhile(folder / "meanwhile")
    failing(folder / "failing")


def saved_meanwhile(folder):
    """Files are written after two further steps: they hold what was there when save_async was called."""
    engine, optimizer = built(DENSE, "dp=2,zero_stage=1")
    train(engine, optimizer, range(1))
    wanted, may_write, write = whole_state(engine, optimizer), threading.Event(), checkpoint_pieces.write

    def write_later(*arguments):
        may_write.wait()
        write(*arguments)

    checkpoint_pieces.write = write_later
    saving = checkpoint.save_async(engine, optimizer, folder, 1)
    train(engine, optimizer, range(1, 3))
    assert not saving.done and latest(folder) is None
    may_write.set()
    second = checkpoint.save_async(engine, optimizer, folder, 3)  # one at a time: waits for the first
    assert saving.done and saving.path == folder / name_of(1)
    second.wait()
    assert [path.name for path in checkpoint_files.complete(folder)] == [name_of(1), name_of(3)]
    checkpoint_pieces.write = write
    other = built(DENSE, "tp=2", seed=1)
    checkpoint.load(*other, folder / name_of(1))
    assert_holds(*other, wanted)


def failing(folder):
    """A rank that cannot write: all ranks hear of it at the next call, and go on saving."""
    engine, optimizer = built(DENSE, "dp=2")
    train(engine, optimizer, range(1))
    checkpoint.save(engine, optimizer, folder, 1)
    write_tensor = checkpoint_pieces.write_tensor

    def full(*arguments):
        raise OSError(28, "No space left on device")

    if engine.groups.world.rank() == 1:
        checkpoint_pieces.write_tensor = full
    checkpoint.save_async(engine, optimizer, folder, 2)
    with pytest.raises(RuntimeError, match=r"rank 1: OSError.*No space left.*the checkpoints before are as they were"):
        checkpoint.save(engine, optimizer, folder, 3)
    checkpoint_pieces.write_tensor = write_tensor
    sync = checkpoint_files.sync_folder
    checkpoint_files.sync_folder = full  # called by the rank that writes the manifest
    with pytest.raises(
        checkpoint_files.CannotWrite, match=r"No space left.*Make room on its disk.*same run then goes on"
    ):
        checkpoint.save(engine, optimizer, folder, 3)
    checkpoint_files.sync_folder = sync
    assert latest(folder).name == name_of(1)
    for step in (4, 5):
        checkpoint.save(engine, optimizer, folder, step, keep=2)
        torch.distributed.barrier()
    assert sorted(path.name for path in folder.iterdir()) == [name_of(4), name_of(5)]
    with pytest.raises(ValueError, match="has step-00000005 already, and step-00000005 is not after it"):
        checkpoint.save(engine, optimizer, folder, 5)
    with pytest.raises(ValueError, match="about cannot be said"):
        checkpoint.save(engine, optimizer, folder, 6, {"x": torch} if engine.groups.world.rank() else None)
    rank = engine.groups.world.rank()
    fails = patch.object(checkpoint, "rng_states", full if rank == 1 else checkpoint.rng_states)
    with fails, pytest.raises((OSError, RuntimeError), match="No space left"):
        checkpoint.save_async(engine, optimizer, folder, 6)
    for step, place in ((6 + rank, folder), (6, folder / str(rank))):  # another step, a disk that others do not see
        with pytest.raises(ValueError, match="__1_0.distcp was written, but not to .*must save the same step"):
            checkpoint.save(engine, optimizer, place, step, keep=1)
    assert latest(folder).name == name_of(5) and latest(folder / "0") is None


def on_one_rank(folder):
    load_some(folder, [pair for pair in PAIRS if Layout.parse(pair[1]).world_size == 1])
    convert_some(folder, [one for one in CONVERSIONS if Layout.parse(one[1]).world_size == 1])
    engine, optimizer = built(DENSE, "dp=1")
    for wrong, said in [
        ({"step": -1}, "step is -1"),
        ({"step": 7, "keep": 0}, "keep is 0"),
        ({"step": 7, "about": {"x": torch}}, "about cannot be said in JSON"),
    ]:
        with pytest.raises(ValueError, match=said):
            checkpoint.save(engine, optimizer, folder / "none", **wrong)
    with pytest.raises(ValueError, match=r"none holds no complete checkpoint"):
        checkpoint.load(engine, optimizer, folder / "none")
    with pytest.raises(ValueError, match=r"of another model: num_layers 2 \(here 4\)"):
        checkpoint.load(engine, optimizer, folder / "moe")
    checkpoint.save(engine, optimizer, folder / "keys", 1, about={10: "ten", 2: "two"})
    assert checkpoint.load(engine, optimizer, folder / "keys").about == {"10": "ten", "2": "two"}
    before_the_first_step(folder / "new")
    other_optimizers(folder)
    what_is_frozen_now_has_no_state(folder)
    few_bytes_at_a_time(folder)


def before_the_first_step(folder):
    """Without moments too, master weights have what rounding would lose; what is rounded twice is rounded alike."""
    engine, optimizer = built(DENSE, "dp=1", F64)
    engine.stages["0"].embed.weight.data.fill_(1 + 2**-8 + 2**-40)  # in FP32 between two numbers of bf16, here above
    whole = whole_state(engine, optimizer)
    checkpoint.save(engine, optimizer, folder, 0)
    for text in ("dp=1", "dp=1,zero_stage=1"):
        other, its_optimizer = built(DENSE, text, BF16, seed=1)
        checkpoint.load(other, its_optimizer, folder, convert=True)
        zeros = {f"{key}.{name}": torch.zeros_like(whole[f"model.{name}"]) for key in STATES[:2]
                 for name in of(whole, "model")}  # fmt: skip
        assert_holds(other, its_optimizer, converted(whole | zeros, BF16))
        engines.step(other, micro_batches(other, 0), its_optimizer)

    engine, optimizer = built(DENSE, "dp=1", BF16)  # and where one parameter has taken no step, its master is itself
    train(engine, optimizer, range(1))
    wanted, embedding = whole_state(engine, optimizer), engine.stages["0"].embed.weight
    wanted |= {f"{key}.embed.weight": torch.zeros_like(embedding, dtype=F32) for key in STATES[:2]}
    wanted["master.embed.weight"] = embedding.detach().float()
    del optimizer.state[embedding]
    checkpoint.save(engine, optimizer, folder, 1)
    other = built(DENSE, "dp=1,zero_stage=1", BF16, seed=1)
    checkpoint.load(*other, folder)
    assert_holds(*other, wanted)


def other_optimizers(folder):
    """What does not fit is refused before a number is changed."""
    engine, optimizer = built(DENSE, "dp=1")
    train(engine, optimizer, range(1))
    next(iter(optimizer.state.values()))["step"] += 1
    checkpoint.save(engine, optimizer, folder / "counts", 1)
    other, its_optimizer = built(DENSE, "dp=1,zero_stage=1", seed=1)
    train(other, its_optimizer, range(1))
    before = whole_state(other, its_optimizer)
    with pytest.raises(ValueError, match=r"parameters have taken \[1, 2\] steps each"):
        checkpoint.load(other, its_optimizer, folder / "counts")
    assert_holds(other, its_optimizer, before)

    engine, _ = built(DENSE, "dp=1", BF16)
    without_masters = torch.optim.AdamW(engine.parameters())
    with pytest.raises(ValueError, match=r"precision: moments in torch.float32 \(here torch.bfloat16\)"):
        checkpoint.load(engine, without_masters, folder / "bf16")
    train(engine, without_masters, range(1))
    whole = whole_state(engine, without_masters)
    checkpoint.save(engine, without_masters, folder / "without", 1)
    other = built(DENSE, "dp=1,zero_stage=1", BF16, seed=1)
    checkpoint.load(*other, folder / "without", convert=True)
    assert_holds(*other, converted(whole, BF16))


def what_is_frozen_now_has_no_state(folder):
    """A run that trained everything goes on with some parameters frozen, and saves again."""
    for dtype in (F32, BF16):
        engine, _ = built(DENSE, "dp=1", dtype)
        five_d.named_parameters(engine)["embed.weight"].requires_grad_(False)
        optimizer = engines.make_optimizer(engine)
        checkpoint.load(engine, optimizer, folder / "alone", convert=True)
        assert {param for group in optimizer.param_groups for param in group["params"]} == set(optimizer.state)
        train(engine, optimizer, range(1))
        checkpoint.save(engine, optimizer, folder / f"frozen {dtype}", 9)


def few_bytes_at_a_time(folder):
    """Beside the engine's own, a rank holds a piece or two, never the model, though pieces of flats must be copied."""
    engine, optimizer = built(DENSE, "dp=1,zero_stage=1")
    train(engine, optimizer, range(1))
    largest, flat = DENSE.vocab_size * DENSE.d_model * 4, sum(param.nbytes for param in engine.pipeline.parameters())
    plan = 45_000  # 150 pieces told as JSON: it does not grow with the model's width
    with MemoryTracker(engine, optimizer) as tracker:
        checkpoint.save(engine, optimizer, folder / "small", 1)
    assert largest < tracker.peak_bytes - tracker.timeline.total_bytes[0] < largest + plan
    optimizer.state.clear()
    with MemoryTracker(engine, optimizer) as tracker:
        checkpoint.load(engine, optimizer, folder / "small")
    states = 2 * flat
    assert states < tracker.peak_bytes - tracker.timeline.total_bytes[0] < states + 2 * largest
    engine, optimizer = built(DENSE, "dp=1,zero_stage=1", BF16)
    with MemoryTracker(engine, optimizer) as tracker:
        checkpoint.load(engine, optimizer, folder / "small", convert=True)
    states = 3 * flat
    assert states < tracker.peak_bytes - tracker.timeline.total_bytes[0] < states + 2 * largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    launch(save_some, 1, folder, ["alone"])
    launch(on_four_ranks, 4, folder)
    return folder


def test_saved_under_any_layout_and_loaded_under_another_on_four_ranks(folder):
    assert {path.name for path in folder.iterdir()} >= set(SOURCES)  # what was asserted, the ranks asserted


@pytest.mark.exhaustive
def test_the_other_pairs_of_layouts_and_conversions_on_four_ranks(folder):
    launch(others_on_four_ranks, 4, folder)


def test_on_two_ranks_also_while_training_goes_on_and_when_a_rank_cannot_write(folder):
    launch(on_two_ranks, 2, folder)


def test_on_one_rank_and_what_does_not_fit_is_refused(folder):
    launch(on_one_rank, 1, folder)


# --- files that are torn, or made by somebody else


@pytest.fixture
def copy(folder, tmp_path):
    """A checkpoint that a test may spoil, with an earlier one beside it."""
    for step in (1, 2):
        shutil.copytree(folder / "zero1" / name_of(2), tmp_path / name_of(step))
    return tmp_path / name_of(2)


def read_alone(path):
    """All of a checkpoint in this process, without ranks."""
    manifest = checkpoint_files.read_manifest(path)
    checkpoint_files.verify(path, manifest)
    found = {
        name: torch.empty(stored["shape"], dtype=checkpoint_pieces.DTYPES[stored["dtype"]])
        for name, stored in manifest["tensors"].items()
    }
    checkpoint_pieces.read(
        path, manifest, [Piece(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in found.items()]
    )
    return found


def test_pytorch_reads_it_too_and_each_number_is_written_once(folder):
    path = folder / "zero1" / name_of(2)
    whole = torch.load(folder / "zero1.pt", weights_only=True)[0]
    alone = read_alone(path)
    theirs = {name: torch.zeros_like(alone[name]) for name in whole}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(theirs, checkpoint_id=path)
    for name, x in whole.items():
        assert torch.equal(alone[name], x) and torch.equal(theirs[name], x), name
    with pytest.raises(ValueError, match=r"is float32 \(32,\); required: torch.int64 \(32,\)"):
        whole_numbers = Piece("model.norm.weight", (32,), (0,), torch.zeros(32, dtype=torch.int64))
        checkpoint_pieces.read(path, checkpoint_files.read_manifest(path), [whole_numbers])
    boxes = [box for stored in checkpoint_files.read_manifest(path)["tensors"].values() for box in stored["boxes"]]
    data = sum(x.nbytes for x in alone.values())
    assert data < sum(on_disk(path)) < data + 2000 * len(boxes)
    for shared_out in (path, folder / "tied" / name_of(2)):  # with ZeRO, and without
        sizes = on_disk(shared_out)
        assert len(sizes) == 4 and min(sizes) > 0.1 * sum(sizes), sizes


def on_disk(path):
    return [file.stat().st_size for file in sorted(path.glob("*.distcp"))]


def test_torn_checkpoints_are_refused_with_the_file_and_what_to_do(copy):
    chance = random.Random(0)
    instead = rf"remove {copy} and load {copy.with_name(name_of(1))}"
    for file in sorted(copy.iterdir()):
        whole = file.read_bytes()
        place = chance.randrange(len(whole))
        changed = bytes([whole[place] ^ (1 << chance.randrange(8))])
        for spoilt in (whole[: len(whole) // 2], whole[:-1], b"", whole[:place] + changed + whole[place + 1 :], None):
            file.unlink() if spoilt is None else file.write_bytes(spoilt)
            with pytest.raises(ValueError, match=instead) as refusal:
                read_alone(copy)
            assert file.name in str(refusal.value)
            file.write_bytes(whole)
    read_alone(copy)


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def forge(path, change=lambda manifest: None):
    """What somebody would do who knows how the checksums are made."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    change(manifest)
    manifest["files"] = {
        file.name: checkpoint_files.file_entry(file) for file in path.iterdir() if file.suffix != ".json"
    }
    manifest["sha256"] = checkpoint_files.digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_no_code_is_run_from_a_file(copy, tmp_path):
    ran = tmp_path / "ran"
    payload = pickle.dumps(Evil(ran), protocol=2)
    pickle.loads(payload)
    assert ran.is_dir(), "the payload works"
    ran.rmdir()

    wanted, whole = read_alone(copy), checkpoint_files.read_manifest(copy)
    (copy / ".metadata").write_bytes(payload)
    with pytest.raises(ValueError, match=r"\.metadata has \d+ bytes"):
        read_alone(copy)
    forge(copy)
    assert torch.equal(read_alone(copy)["model.norm.weight"], wanted["model.norm.weight"])  # .metadata is not opened

    torch.save(Evil(ran), copy / "zip.distcp")
    (copy / "raw.distcp").write_bytes(payload)
    torch.save([torch.zeros(32)], copy / "list.distcp")
    torch.save(torch.zeros(33), copy / "large.distcp")
    torch.save(torch.zeros(32, dtype=F64), copy / "wide.distcp")
    said = "something at byte 0 that is no tensor, and is not read"
    for file, error in [
        ("zip", said),
        ("raw", said),
        ("list", "holds a list at byte 0"),
        ("large", r"holds a tensor \(33,\) of torch.float32 at byte 0, no tensor \(32,\)"),
        ("wide", r"holds a tensor \(32,\) of torch.float64 at byte 0, no tensor \(32,\) of torch.float32"),
        ("../none", "no file of it"),
    ]:

        def point_there(manifest, file=file):
            box = manifest["tensors"]["model.norm.weight"]["boxes"][0]
            box[2:] = [f"{file}.distcp", 0, 10_000]

        forge(copy, point_there)
        with pytest.raises(ValueError, match=error) as refusal:
            read_alone(copy)
        assert "weights_only" not in "".join(traceback.format_exception(refusal.value)[-1:])
        assert refusal.value.__cause__ is None  # torch's error advises to run the file
    assert not ran.exists()

    forge(copy, lambda manifest: manifest.pop("format"))
    with pytest.raises(ValueError, match="has format None"):
        read_alone(copy)
    manifest = whole | {"files": {"../step-00000001/manifest.json": {"bytes": 1, "sha256": ""}}}
    (copy / "manifest.json").write_text(json.dumps(manifest | {"sha256": checkpoint_files.digest(manifest)}))
    with pytest.raises(ValueError, match="names files that are not in its folder"):
        read_alone(copy)
    (copy / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        read_alone(copy)


# --- killed


def synced_in_order(folder):
    """Of one save by one rank: what was forced onto the disk, with its bytes then, and what was renamed, in order."""
    happened, sync, rename = [], os.fsync, os.rename

    def noted_sync(handle):
        what = os.fstat(handle)
        happened.append(("sync", what.st_ino, what.st_size if stat.S_ISREG(what.st_mode) else None))
        sync(handle)

    def noted_rename(old, new):
        happened.append(("rename", os.stat(old).st_ino, None))
        rename(old, new)

    engine, optimizer = built(DENSE, "dp=1")
    train(engine, optimizer, [0])
    with patch.object(os, "fsync", noted_sync), patch.object(os, "rename", noted_rename):
        checkpoint.save(engine, optimizer, folder, 1)
    return happened


@pytest.mark.launches
def test_a_save_is_on_the_disk_before_it_counts_as_complete(tmp_path):
    """Else a power cut could leave a checkpoint's name without its contents. An inode keeps its number in a rename."""
    (happened,) = launch(synced_in_order, 1, str(tmp_path))
    final = tmp_path / name_of(1)
    of_inode = {path.stat().st_ino: path.name for path in [tmp_path, final, *final.iterdir()]}
    assert [(act, of_inode[inode]) for act, inode, _ in happened] == [
        ("sync", "__0_0.distcp"),
        ("sync", ".metadata"),
        ("sync", "manifest.json"),
        ("sync", final.name),
        ("rename", final.name),
        ("sync", tmp_path.name),
    ]
    synced = {of_inode[inode]: size for _, inode, size in happened if size is not None}
    assert synced == {path.name: path.stat().st_size for path in final.iterdir()}, "all bytes were there by then"


def save_until_killed(folder, seed, by_event):
    """Saves again and again. One rank, or both, die at a random moment: a file operation, or any."""
    engine, optimizer = built(DENSE, "dp=1" if by_event else "dp=2,zero_stage=1")
    train(engine, optimizer, range(1))
    chance, rank = random.Random(seed), torch.distributed.get_rank()
    if by_event:
        left = chance.randrange(1, 60)

        def count(event, arguments):
            nonlocal left
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.scandir"):
                left -= str(folder) in str(arguments[0])
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
    else:
        started = time.monotonic()
        checkpoint.save(engine, optimizer, folder, 1)
        saves_s = 8 * (time.monotonic() - started)  # a busy machine saves slowly, too
        if rank == 0 or seed % 2:
            subprocess.Popen(["sh", "-c", f"sleep {saves_s * chance.random()}; kill -9 {os.getpid()}"])
    for step in range(2, 1000):
        checkpoint.save(engine, optimizer, folder, step, keep=1)


@pytest.mark.parametrize("by_event", [True, False], ids=["at a file operation", "at any moment"])
def test_killed_at_any_moment_the_last_complete_one_is_found(tmp_path, by_event):
    partial, steps = 0, []
    for seed in range(8 if by_event else 4):
        folder = tmp_path / str(seed)
        with pytest.raises(RankError):
            launch(save_until_killed, 1 if by_event else 2, folder, seed, by_event, quiet=True)
        found = checkpoint_files.complete(folder)
        partial += any(path.name.endswith(".partial") for path in folder.iterdir()) if folder.is_dir() else 0
        for path in found:
            assert read_alone(path)["model.norm.weight"].shape == (32,)
        steps.append(checkpoint_files.step_of(found[-1]) if found else 0)
        assert len(found) <= 2 and (found or by_event)
    assert max(steps) > 1 and (partial or not by_event), "some were killed in the middle of a save"
