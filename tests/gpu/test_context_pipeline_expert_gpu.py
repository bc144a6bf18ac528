"""Context, pipeline and expert parallelism on GPUs: gradients equal to one process, by hand and as PyTorch ships them.

Ranks that share a GPU talk through gloo, which takes its tensors in collectives alone: pipelines, which send from rank
to rank, need NCCL and a GPU for each, and say so. The ring's tiles alone run on one GPU here as well.
"""

import dataclasses
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from harness import my_device

from course_lib import model
from course_lib.config import PRESETS, ModelConfig, preset
from course_lib.launch import RankError, launch
from course_lib.layout import SEQUENCE_SHARDINGS
from course_lib.model import standard_attention
from course_lib.native import context as native_context
from course_lib.native import expert as native_expert
from course_lib.native import pipeline as native_pipeline
from course_lib.parallel import context, expert, pipeline, tiles
from course_lib.parallel import engine as engines
from course_lib.parallel.positions import positions
from course_lib.training import loss_of

pytestmark = pytest.mark.gpu

DENSE = dataclasses.replace(PRESETS["toy"], num_layers=4)
EXPERTS = dataclasses.replace(
    preset("toy-moe"), num_layers=2, moe=dataclasses.replace(preset("toy-moe").moe, balancing="bias")
)
COLLECTIVES, SENDS = ("gloo", "nccl"), ("nccl",)


@dataclasses.dataclass(frozen=True)
class Engine:
    """within: by how much gradients may be off, as a share of the largest. Two GPUs each where ranks send."""

    module: ModuleType
    options: dict = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    within: float = 1e-10
    backends: tuple[str, ...] = COLLECTIVES
    config: ModelConfig = DENSE
    own_tokens: bool = False


def by_experts(module, options, **others):
    return Engine(module, options, config=EXPERTS, own_tokens=True, **others)


RING = {"method": "ring"}
ENGINES = {
    "ring": Engine(context, RING),
    "ring, flash kernel": Engine(context, RING, torch.bfloat16, 5e-2),
    "all-gather": Engine(context, {"method": "all_gather"}),
    "all-gather, flash kernel": Engine(context, {"method": "all_gather"}, torch.bfloat16, 5e-2),
    "Ulysses": Engine(context, {"method": "ulysses"}),
    "context_parallel, zigzag": Engine(native_context, {}, torch.float32, 1e-4),
    "1F1B": Engine(pipeline, {}, backends=SENDS),
    "ZBV": Engine(pipeline, {"schedule": "zbv"}, backends=SENDS),
    "PyTorch's 1F1B": Engine(native_pipeline, {}, backends=SENDS),
    "PyTorch's ZBV": Engine(native_pipeline, {"schedule": "zbv"}, backends=SENDS),
    "experts": by_experts(expert, {}),
    "experts, rows sent once": by_experts(expert, {"method": "once_per_rank"}),
    "PyTorch's parts for experts": by_experts(native_expert, {}),
    "PyTorch's parts, grouped_mm": by_experts(native_expert, {}, dtype=torch.float32, within=1e-4),
}


def largest_difference(name):
    """Of the gradients, from those of one process on the same device, as a share of the largest of all."""
    engine, device = ENGINES[name], my_device()
    generator = torch.Generator().manual_seed(0)
    rows = 2 if not engine.own_tokens else 2 * dist.get_world_size()
    batches = [torch.randint(256, (2, rows, 32), generator=generator).to(device).unbind(0) for _ in range(2)]
    reference = model.build(engine.config, dtype=engine.dtype, device=device)
    for x_BS, y_BS in batches:
        (loss_of(reference, x_BS, y_BS) / 2).backward()
    cut = engine.module.build(
        model.build(engine.config, dtype=engine.dtype, device=device), dist.group.WORLD, **engine.options
    )
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2) if engine.own_tokens else slice(None)
    engines.accumulate_gradients(cut, [(x_BS[mine], y_BS[mine]) for x_BS, y_BS in batches])
    ours = engines.full_gradients(cut)
    grads = {n: param.grad for n, param in reference.named_parameters() if param.grad is not None}
    largest = max(grad.abs().max() for grad in grads.values())
    return max(((ours[n] - grad).abs().max() / largest).item() for n, grad in grads.items())


@pytest.mark.parametrize("backend", COLLECTIVES)
@pytest.mark.parametrize("name", ENGINES)
def test_gradients_equal_one_process(name, backend, record):
    if backend not in ENGINES[name].backends:
        pytest.skip("gloo takes tensors on a GPU in collectives alone, and here ranks send to each other")
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL between two ranks needs two GPUs; this machine has {torch.cuda.device_count()}")
    shares = list(launch(largest_difference, 2, name, backend=backend))
    record(engine=name, backend=backend, off_by=shares)
    assert max(shares) < ENGINES[name].within


def test_sending_between_ranks_that_share_a_gpu_is_refused_in_words():
    with pytest.raises(RankError, match="gloo takes tensors on a GPU in collectives alone"):
        launch(largest_difference, 2, "1F1B", backend="gloo")


class Shares(list):
    """Gradients of keys and values as they would go home: kept, by rank."""

    def add(self, key_rank, dkv_BKsU):
        self.append((key_rank, dkv_BKsU))

    def total(self):
        return self


@pytest.mark.parametrize("sequence_sharding", SEQUENCE_SHARDINGS)
def test_all_tiles_of_a_ring_of_four_by_the_flash_kernel(sequence_sharding, record):
    """Four ranks' work one after the other, in bfloat16, beside whole attention in float32."""
    device, size, seq_len = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 4, 512
    generator = torch.Generator().manual_seed(0)
    heads = (torch.randn(2, number, seq_len, 64, generator=generator) for number in (8, 2, 2, 8))
    q_BNSH, k_BKSH, v_BKSH, grad_BNSH = (x.to(device, torch.bfloat16) for x in heads)
    places = [positions(sequence_sharding, seq_len, size, rank).to(device) for rank in range(size)]
    blocks = [torch.cat([k_BKSH, v_BKSH], -1)[..., place, :] for place in places]
    got = {"out": torch.empty_like(q_BNSH), "dq": torch.empty_like(q_BNSH)}
    dkv_BKSU = torch.zeros(*k_BKSH.shape[:-1], 2 * k_BKSH.shape[-1], device=device)
    tiling = tiles.Tiling(sequence_sharding)
    for rank, place in enumerate(places):
        order = [(rank - step) % size for step in range(size)]
        mine = [(other, blocks[other]) for other in order]
        q_BNsH, grad_BNsH, shares = q_BNSH[..., place, :], grad_BNSH[..., place, :], Shares()
        out_BNsH, lse_BNs = tiles.forward_over(q_BNsH, mine, rank, tiling)
        saved = (q_BNsH, out_BNsH.to(q_BNsH.dtype), lse_BNs)
        dq_BNsH, _ = tiles.backward_over(saved, grad_BNsH, mine, rank, tiling, shares)
        got["out"][..., place, :], got["dq"][..., place, :] = out_BNsH.to(q_BNsH.dtype), dq_BNsH.to(q_BNsH.dtype)
        for other, share in shares:
            dkv_BKSU[..., places[other], :] += share
    got |= dict(zip(("dk", "dv"), dkv_BKSU.chunk(2, -1), strict=True))

    whole = [x.float().requires_grad_() for x in (q_BNSH, k_BKSH, v_BKSH)]
    out = standard_attention(*whole)
    wanted = dict(
        zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, whole, grad_BNSH.float())), strict=True)
    )
    off_by = {n: ((got[n].float() - x).abs().max() / x.abs().max()).item() for n, x in wanted.items()}
    record(sequence_sharding=sequence_sharding, off_by=off_by)
    assert max(off_by.values()) < 2e-2
