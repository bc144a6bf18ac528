"""DeepSpeed, stages 0 to 3: gradients and weights against one process, really sharded. Run by `make test-deepspeed`."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from harness import largest_difference

from course_lib import model
from course_lib.config import PRESETS
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.native import deepspeed_zero as native
from course_lib.plan import config_files
from course_lib.traffic import ring_all_reduce_bytes
from course_lib.training import data, loss_of

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed; make test-deepspeed installs it")

# Nothing here divides by 4; the embedding is tied, and a block is frozen.
ODD = dataclasses.replace(
    PRESETS["toy"], tied=True, num_layers=2, d_model=30, num_heads=5, num_kv_heads=1, d_ff=49, vocab_size=251
)
TEXT_T = torch.randint(251, (2_000,), generator=torch.Generator().manual_seed(0))
ITEMSIZE = 4
CLIP_NORM = 0.05
UNSHARDED_NONE = {"stage3_param_persistence_threshold": 0}
RUNS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "sizes": UNSHARDED_NONE},
    "stage 2, states on the host": {"stage": 2, "offload": config_files.OffloadTo(optimizer="cpu")},
    "stage 3, all on the host": {
        "stage": 3,
        "sizes": UNSHARDED_NONE,
        "offload": config_files.OffloadTo(optimizer="cpu", parameters="cpu"),
    },
}


def odd_llama():
    llama = model.build(ODD)
    llama.blocks[0].requires_grad_(False)
    return llama


def trained():
    return [param for param in odd_llama().parameters() if param.requires_grad]


def config_of(choices):
    return config_files.deepspeed(micro_batch_size=1, clip_norm=CLIP_NORM, precision="fp32", **choices)


def share(index):
    """Two micro-batches of this rank; the second has fewer tokens."""
    x_BS, y_BS = data.batch(TEXT_T, index, 12, 8, dp_rank=dist.get_rank(), dp_size=dist.get_world_size())
    return [(x_BS[:-1], y_BS[:-1]), (x_BS[-1:], y_BS[-1:])]


def one_process(steps=2):
    """Losses, gradients of the first step, and weights after some."""
    losses = []
    llama = odd_llama()
    parameters = {name: param for name, param in llama.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    for index in range(steps):
        optimizer.zero_grad()
        loss = loss_of(llama, *data.batch(TEXT_T, index, 12, 8))
        loss.backward()
        losses.append(loss.item())
        if index == 0:
            gradients = {name: param.grad.clone() for name, param in parameters.items()}
        torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP_NORM)
        optimizer.step()
    return losses, gradients, {name: param.detach() for name, param in parameters.items()}


def measure(choices):
    losses, gradients, weights = one_process()
    engine = native.build(odd_llama(), dist.group.WORLD, config_of(choices), lr=1e-2)
    with ByteMeter() as reducing:
        native.accumulate_gradients(engine, share(0))
    gradient_difference = largest_difference(native.full_gradients(engine), gradients)
    with ByteMeter() as updating:
        engine.engine.step()
    loss = native.step(engine, share(1), native.make_optimizer(engine))
    return {
        "gradients": gradient_difference,
        "weights": largest_difference(native.full_parameters(engine), weights),
        "reducing": reducing.by_collective,
        "updating": updating.by_collective,
        "loss": abs(loss.item() - losses[1]),
        "partition": native.partition_numel(engine.engine.optimizer) if choices["stage"] else None,
        "shards": [(param.numel(), param.ds_tensor.numel()) for param in engine.module.parameters()]
        if choices["stage"] == 3
        else None,
        "stage": engine.engine.zero_optimization_stage(),
    }


def measure_all():
    return {name: measure(choices) for name, choices in RUNS.items()}


@pytest.fixture(scope="module")
def results():
    return {size: launch(measure_all, size, quiet=True, timeout=900) for size in (2, 4)}


SIZES = pytest.mark.parametrize("size", [2, 4])


@SIZES
@pytest.mark.parametrize("name", RUNS)
def test_gradients_and_clipped_adamw_steps_equal_one_process(results, size, name):
    for of_rank in results[size]:
        assert of_rank[name]["stage"] == RUNS[name]["stage"]
        assert of_rank[name]["gradients"] < 1e-6 and of_rank[name]["loss"] < 1e-5  # FP32
        assert of_rank[name]["weights"] < 1e-4  # Adam makes much of the last digits; a step is 1e-2


@SIZES
@pytest.mark.parametrize("name", list(RUNS)[1:])
def test_each_rank_holds_its_share_of_masters_and_moments(results, size, name):
    P = sum(param.numel() for param in trained())
    for of_rank in results[size]:
        if RUNS[name]["stage"] == 3:
            assert of_rank[name]["partition"] == sum(math.ceil(param.numel() / size) for param in trained())
        else:
            assert 0 <= of_rank[name]["partition"] * size - P < 2 * size  # padded to an even share


@SIZES
def test_in_stage_3_each_rank_holds_its_share_of_every_parameter(results, size):
    for of_rank in results[size]:
        for (held, part), param in zip(of_rank["stage 3"]["shards"], odd_llama().parameters(), strict=True):
            assert held == 0 and part == math.ceil(param.numel() / size)


@SIZES
def test_stages_1_and_2_all_reduce_and_then_gather_which_costs_three(results, size):
    P = sum(param.numel() for param in trained()) * ITEMSIZE
    for rank, of_rank in enumerate(results[size]):
        once = ring_all_reduce_bytes(P, size, rank, ITEMSIZE)
        of_loss = ring_all_reduce_bytes(ITEMSIZE, size, rank, ITEMSIZE)
        for name, times in (("stage 0", 1), ("stage 1", 1), ("stage 2", 2)):  # stage 2: in every micro-batch
            assert of_rank[name]["reducing"] == {"all_reduce": times * once + of_loss}
        gathered = of_rank["stage 1"]["partition"] * (size - 1) * ITEMSIZE
        assert of_rank["stage 1"]["updating"]["all_gather"] == of_rank["stage 2"]["updating"]["all_gather"] == gathered
        assert "all_gather" not in of_rank["stage 0"]["updating"]


@SIZES
def test_stage_3_scatters_gradients_in_every_micro_batch(results, size):
    padded = sum(math.ceil(param.numel() / size) for param in trained()) * size * ITEMSIZE
    for of_rank in results[size]:
        assert of_rank["stage 3"]["reducing"]["reduce_scatter"] == 2 * padded * (size - 1) // size


# --- zero.Init, Accelerate, and the config as DeepSpeed reads it


def made_in_shards():
    with native.load().zero.Init(config_dict_or_path=config_of(RUNS["stage 3"])):
        layers = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    return [(param.numel(), param.ds_tensor.numel(), math.prod(param.ds_shape)) for param in layers.parameters()]


def accelerated():
    llama = odd_llama()
    optimizer = torch.optim.AdamW(
        [p for p in llama.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01
    )
    accelerator, engine, optimizer = native.build_accelerated(llama, optimizer, config_of(RUNS["stage 3"]))
    accelerator.backward(loss_of(engine, *data.batch(TEXT_T, 0, 12, 8, dp_rank=dist.get_rank(), dp_size=2)))
    optimizer.step()
    optimizer.zero_grad()
    _, _, weights = one_process(steps=1)
    difference = largest_difference(native.full_parameters(native.DeepSpeed(engine)), weights)
    return engine.zero_optimization_stage(), difference, native.partition_numel(engine.optimizer)


def reduced_to_owners():
    config = config_of(RUNS["stage 1"])
    config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
    engine = native.build(odd_llama(), dist.group.WORLD, config)
    with ByteMeter() as meter:
        engine.run(share(0))
    return meter.by_collective


def on_two_ranks():
    return made_in_shards(), reduced_to_owners(), accelerated()


@pytest.fixture(scope="module")
def others():
    return launch(on_two_ranks, 2, quiet=True)


def test_reducing_to_owners_instead_costs_what_a_reduce_scatter_does(others):
    P = sum(param.numel() for param in trained()) * ITEMSIZE
    assert all(set(of_rank[1]) == {"reduce"} for of_rank in others)
    assert sum(of_rank[1]["reduce"] for of_rank in others) == P  # (N - 1) P of all ranks together


def test_zero_init_and_accelerate_shard(others):
    half = sum(math.ceil(param.numel() / 2) for param in trained())
    for shards, _, (stage, difference, partition) in others:
        assert shards == [(0, 18, 35), (0, 3, 5), (0, 8, 15), (0, 2, 3)]
        assert stage == 3 and partition == half
        assert difference < 1e-4


def test_deepspeed_reads_the_config_as_it_was_meant(tmp_path):
    native.load()
    from deepspeed.runtime.config import DeepSpeedConfig

    written = config_files.deepspeed(
        3,
        micro_batch_size=2,
        accumulation_steps=8,
        clip_norm=0.5,
        offload=config_files.OffloadTo("nvme", "cpu", "/disk"),
        sizes={
            "reduce_bucket_size": 1000,
            "stage3_prefetch_bucket_size": 20,
            "stage3_param_persistence_threshold": 30,
        },
    )
    read = DeepSpeedConfig(str(config_files.write(written, tmp_path / "zero3.json")))
    zero = read.zero_config
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (2, 8)
    assert (read.gradient_clipping, read.bfloat16_config.enabled, zero.stage) == (0.5, True, 3)
    assert zero.offload_optimizer.device == "nvme" and str(zero.offload_optimizer.nvme_path) == "/disk"
    assert zero.offload_param.device == "cpu" and zero.offload_param.pin_memory
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold) == (1000, 20, 30)


def test_the_defaults_of_sizes_are_deepspeeds(tmp_path):
    native.load()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    theirs, ours = DeepSpeedZeroConfig(), config_files.deepspeed(3, 1)["zero_optimization"]
    assert ours["reduce_bucket_size"] == theirs.reduce_bucket_size
    assert ours["stage3_prefetch_bucket_size"] == theirs.prefetch_bucket_size
    assert ours["stage3_param_persistence_threshold"] == theirs.param_persistence_threshold
