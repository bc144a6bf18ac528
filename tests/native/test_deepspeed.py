"""DeepSpeed, stages 1 to 3: weights of one process, shards held, bytes sent. Run by `make test-deepspeed`."""

import dataclasses
import math
import os

import pytest
import torch
import torch.distributed as dist
from harness import largest_difference

from course_lib import model
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.plan import config_files
from course_lib.run import Offload
from course_lib.traffic import ring_all_reduce_bytes
from course_lib.training import data, loss_of

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # read when it is imported
deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed; make test-deepspeed installs it")

ODD = dataclasses.replace(preset("toy"), num_layers=2, d_model=30, num_heads=5, num_kv_heads=1, d_ff=49, vocab_size=251)
TEXT_T = torch.randint(251, (2_000,), generator=torch.Generator().manual_seed(0))
RANKS, CLIP_NORM = 2, 0.05
P = sum(param.numel() for param in model.build(ODD).parameters())
PIECES = sum(math.ceil(param.numel() / RANKS) for param in model.build(ODD).parameters())  # of each parameter a half
UNSHARDED_NONE = {"stage3_param_persistence_threshold": 0}
RUNS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "sizes": UNSHARDED_NONE},
    "stage 3, all on the host": {"stage": 3, "sizes": UNSHARDED_NONE, "offload": Offload("host", "host")},
}


def adamw(params):
    return torch.optim.AdamW(list(params), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)


def one_process():
    """The weights after two clipped steps."""
    llama = model.build(ODD)
    optimizer = adamw(llama.parameters())
    for index in range(2):
        optimizer.zero_grad()
        loss_of(llama, *data.batch(TEXT_T, index, 12, 8)).backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), CLIP_NORM)
        optimizer.step()
    return {name: param.detach() for name, param in llama.named_parameters()}


def engine_of(choices, **changes):
    """DeepSpeed's engine around a model and torch's AdamW: its own would have to be compiled."""
    config = config_files.deepspeed(micro_batch_size=1, clip_norm=CLIP_NORM, precision="fp32", **choices)
    config["zero_optimization"] |= changes
    llama = model.build(ODD)
    config |= {"zero_force_ds_cpu_optimizer": False}
    return deepspeed.initialize(model=llama, optimizer=adamw(llama.parameters()), config=config)[0]


def backward(engine, index):
    """Two micro-batches of this rank; the second has fewer tokens."""
    x_BS, y_BS = data.batch(TEXT_T, index, 12, 8, dp_rank=dist.get_rank(), dp_size=RANKS)
    for rows in (slice(None, -1), slice(-1, None)):
        engine.set_gradient_accumulation_boundary(rows.stop is None)
        share = y_BS[rows].numel() / y_BS.numel()
        engine.backward(loss_of(engine, x_BS[rows], y_BS[rows]) * share, scale_wrt_gas=False)


def train(choices):
    from deepspeed.utils import safe_get_full_fp32_param

    engine = engine_of(choices)
    with ByteMeter() as reducing:
        backward(engine, 0)
    with ByteMeter() as updating:
        engine.step()
    backward(engine, 1)
    engine.step()
    weights = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    flat = "fp32_partitioned_groups_flat" if choices["stage"] == 3 else "single_partition_of_fp32_groups"
    held = sum(partition.numel() for partition in getattr(engine.optimizer, flat))
    return largest_difference(weights, one_process()), held, reducing.by_collective, updating.by_collective


def on_every_rank():
    runs = {name: train(choices) for name, choices in RUNS.items()}
    engine = engine_of(RUNS["stage 1"], use_multi_rank_bucket_allreduce=False)
    with ByteMeter() as to_owners:
        backward(engine, 0)
    with deepspeed.zero.Init(config_dict_or_path=config_files.deepspeed(3, 1, sizes=UNSHARDED_NONE)):
        layer = torch.nn.Linear(7, 5)
    return runs, to_owners.by_collective, [(param.numel(), param.ds_tensor.numel()) for param in layer.parameters()]


@pytest.fixture(scope="module")
def ranks():
    return launch(on_every_rank, RANKS, quiet=True, timeout=900)


@pytest.mark.parametrize("name", RUNS)
def test_clipped_adamw_steps_equal_one_process_and_a_rank_holds_its_share_of_masters(ranks, name):
    for runs, *_ in ranks:
        difference, held, *_ = runs[name]
        assert difference < 1e-4  # Adam makes much of the last digits; a step is 1e-2
        assert held == PIECES if RUNS[name]["stage"] == 3 else 0 <= RANKS * held - P < 2 * RANKS  # padded


def test_stages_1_and_2_all_reduce_and_then_gather_and_stage_3_scatters(ranks):
    for rank, (runs, *_) in enumerate(ranks):
        once = ring_all_reduce_bytes(4 * P, RANKS, rank, 4)
        for name, times in (("stage 1", 1), ("stage 2", 2)):  # stage 2: in every micro-batch
            _, held, reducing, updating = runs[name]
            assert reducing == {"all_reduce": times * once} and updating["all_gather"] == 4 * held * (RANKS - 1)
        assert runs["stage 3"][2]["reduce_scatter"] == 2 * 4 * PIECES * (RANKS - 1)


def test_reducing_to_owners_instead_costs_what_a_reduce_scatter_does_and_zero_init_shards(ranks):
    assert all(set(to_owners) == {"reduce"} for _, to_owners, _ in ranks)
    assert sum(to_owners["reduce"] for _, to_owners, _ in ranks) == 4 * P  # (N - 1) P of all ranks together
    assert all(shards == [(0, 18), (0, 3)] for *_, shards in ranks)


def test_deepspeed_reads_the_config_as_it_was_meant(tmp_path):
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    offload = Offload("disk", "host")
    sizes = {"reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 20, "stage3_param_persistence_threshold": 30}
    written = config_files.deepspeed(
        3, 2, accumulation_steps=8, clip_norm=0.5, offload=offload, nvme_path="/disk", sizes=sizes
    )
    read = DeepSpeedConfig(str(config_files.write(written, tmp_path / "zero3.json")))
    zero = read.zero_config
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (2, 8)
    assert (read.gradient_clipping, read.bfloat16_config.enabled, zero.stage) == (0.5, True, 3)
    assert zero.offload_optimizer.device == "nvme" and str(zero.offload_optimizer.nvme_path) == "/disk"
    assert zero.offload_param.device == "cpu" and zero.offload_param.pin_memory
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold) == (1000, 20, 30)
    theirs, ours = DeepSpeedZeroConfig(), config_files.deepspeed(3, 1)["zero_optimization"]
    assert ours["reduce_bucket_size"] == theirs.reduce_bucket_size
    assert ours["stage3_prefetch_bucket_size"] == theirs.prefetch_bucket_size
    assert ours["stage3_param_persistence_threshold"] == theirs.param_persistence_threshold
