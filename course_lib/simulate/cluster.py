"""One rank of thousands, simulated: the code of parallel/ runs as it stands, in a world where nobody else exists.

Nothing here knows how a layout works: the engine of parallel/five_d.py is built and takes a step, in the midst of
training, and the memory tracker and the byte meter watch it. fake_world.py says what is real in it, tape.py why many
micro-batches cost no more than three. What is built is this rank's stages alone, so cost grows with their layers and
not with the number of ranks. Tensors are fake ones of the CPU, but attention runs the flash kernel of a GPU. Experts
are chosen by a plan, since without numbers no router can: balanced, or with a given share on the first expert.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.config import MoeConfig
from course_lib.measure.meter import ByteMeter
from course_lib.measure.storages import replaced
from course_lib.model import moe
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.parallel.executor import Executor
from course_lib.run import Offload, Run
from course_lib.simulate.fake_world import fake_world
from course_lib.simulate.tape import FlopMeter, Tape, TapeTracker
from course_lib.training.precision import engine_dtypes, zero_gradients

_MOST_PASSES = 20_000  # minutes
STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class SimulatedRank:
    """What one step of one rank took."""

    rank: int
    coordinates: dict[str, int]
    stages: tuple[int, ...]
    layers: int
    peak_bytes: int
    peak_by_kind: dict[str, int]
    states: dict[str, int]  # parameters, gradients, optimizer: the most bytes of each at any time
    sent_by_axis: dict[str, int]  # as a ByteMeter with `engine.axes` counts them
    flops: int  # of matrix products and attention, recomputation included (tape.FlopMeter)
    replayed: int  # instructions that were taken from tape
    seconds: float


def simulate_ranks(run: Run, stages: Iterable[int] | None = None, skew: float = 0.0) -> list[SimulatedRank]:
    """One step of the ranks that hold these stages, or all: in order, at the first place along dp, cp and tp.

    skew    share of all assignments that fall on the first expert, instead of being spread evenly
    Raises  ValueError if a stage does not exist, no engine takes the run, or this process is a rank already
    """
    layout = run.layout
    stages = list(range(layout.num_stages) if stages is None else stages)
    if wrong := [stage for stage in stages if stage not in range(layout.num_stages)]:
        raise ValueError(f"stages {wrong} do not exist: the layout has stages 0..{layout.num_stages - 1}")
    pp_ranks = sorted({layout.rank_of_stage[stage] for stage in stages})  # of which one may hold several
    num_stages = layout.stages_per_rank * len(pp_ranks)
    if (passes := 2 * layout.micro_batches * num_stages) > _MOST_PASSES:  # before any of them is listed
        raise ValueError(
            f"micro_batches ({layout.micro_batches:,}) give {passes:,} forward and backward passes on {num_stages} "
            f"stage{'s' * (num_stages > 1)}, of which at most {_MOST_PASSES:,} are simulated; choose fewer "
            "micro_batches or stages: those of the steady state are alike"
        )
    return [simulate_rank(run, layout.mesh.rank(pp=pp_rank, dp=0, cp=0, tp=0), skew) for pp_rank in pp_ranks]


def simulate_rank(run: Run, rank: int, skew: float = 0.0, replay: bool = True) -> SimulatedRank:
    """One step of any rank of the run's layout. Tensors are fake ones of the CPU, whatever the run's device.

    replay   False: run every micro-batch, none from tape
    Raises   ValueError as `simulate_ranks`
    """
    start_s = time.perf_counter()
    check_engine(run)
    config, layout, (dtype, grad_dtype) = run.config, run.layout, SIMULATED.get(run.recipe) or engine_dtypes(run.recipe)
    with (
        fake_world(rank, layout.world_size),
        replaced(moe, "choose", partial(plan_assignments, skew=skew)),
        replaced(F, "scaled_dot_product_attention", lambda _: _flash_attention),
    ):
        options = {"dtype": dtype, "grad_dtype": grad_dtype, "device": "cpu", "attention": run.attention}
        engine = five_d.build(config, layout, fill=_fill_with_nothing, **options)
        engine.loss_chunks = run.loss_chunks
        optimizer = engines.make_optimizer(engine)
        if run.recipe == "bf16":  # moments in BF16, no FP32 copy
            optimizer = torch.optim.AdamW(optimizer.param_groups)
        for group in optimizer.param_groups:
            group |= {"foreach": run.implementation == "foreach", "fused": run.implementation == "fused"}
        start_optimizer(optimizer)
        tokens_BS = torch.zeros(layout.micro_batch, run.seq_len, dtype=torch.int64)
        micro_batches = [(tokens_BS, tokens_BS)] * layout.micro_batches
        with TapeTracker(engine, optimizer) as tracker, ByteMeter(axes=engine.axes) as meter, FlopMeter() as flop_meter:
            tape = Tape(tracker, meter, flop_meter)
            with replaced(Executor, "compute", tape.wrap) if replay else nullcontext():
                engines.step(engine, micro_batches, optimizer, clip_norm=1.0)
        timeline = tracker.timeline
    return SimulatedRank(
        rank=rank,
        coordinates=layout.mesh.coordinates(rank),
        stages=tuple(int(name) for name in engine.stages),
        layers=sum(len(stage.blocks) for stage in engine.stages.values()),
        peak_bytes=timeline.peak_bytes,
        peak_by_kind=timeline.peak_by_kind,
        states={kind: max(timeline.bytes_by_kind[kind]) for kind in STATES},
        sent_by_axis={axis: sent for axis, sent in meter.by_axis.items() if sent},
        flops=flop_meter.flops,
        replayed=tape.replayed,
        seconds=time.perf_counter() - start_s,
    )


def check_engine(run: Run) -> None:
    """Raises ValueError for what the engines of parallel/ do not have; `course plan` and `predict` estimate it."""
    asked = {
        "adapters (finetune)": run.lora is not None,
        f"optimizer {run.optimizer}": run.optimizer != "adamw",
        "offload": run.offload != Offload(),
        "FP8": run.fp8,
        "recomputation of operators": run.operators,
    }
    if differs := [word for word, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"the simulator runs the course's engines, which have no {', no '.join(differs)}: they train all weights "
            "by AdamW on their device; ask course plan or predict"
        )


# Dtypes of parameters, and of gradients where it is another, of recipes whose numbers need more than bytes: FP16 needs
# a loss scale, and pure BF16 loses small updates; what is held is the same.
SIMULATED = {"fp16-master-fp32-grads": (torch.float16, torch.float32), "bf16": (torch.bfloat16, None)}


def _fill_with_nothing(engine: five_d.FiveD, seed: int) -> None:
    """In place of weights: there are none. Counts start at zero, as always."""
    for count in engine.buffers():
        count.zero_()


@torch.no_grad()
def start_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's states, as a first step would."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if not hasattr(param, "main_grad"):
            param.grad = torch.zeros_like(param)
    optimizer.step()
    zero_gradients(params)


def _flash_attention(q, k, v, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor:
    """In place of `scaled_dot_product_attention`, which on a CPU has no flash kernel with dropout: that of CUDA.

    Bytes    saved for backward: q, k, v, the output, one FP32 number per row, the random numbers' seed and offset
    """
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]


def plan_assignments(choose: Callable, skew: float = 0.0) -> Callable:
    """What takes the place of `moe.choose`: the router's own work, and then the plan's answer."""

    def planned(score_TE: Tensor, bias_E: Tensor | None, config: MoeConfig) -> Tensor:
        choose(score_TE, bias_E, config)  # its memory counts
        return planned_assignment(len(score_TE), config, skew).to(score_TE.device)

    return planned


def planned_assignment(num_tokens: int, config: MoeConfig, skew: float = 0.0) -> Tensor:
    """Experts for each token, all different, spread over as many groups as a token may reach; every expert its share.

    skew    so great a share of the tokens have the first expert among theirs, in place of their first assignment
    Shapes  -> expert_Tk
    """
    E, G, M, k = config.num_experts, config.num_groups, config.max_groups, config.top_k
    token_T1, choice_1k = torch.arange(num_tokens)[:, None], torch.arange(k)[None]
    group_Tk = (token_T1 + choice_1k % M * (G // M)) % G
    in_group = E // G
    stride = in_group // -(-k // M)
    expert_Tk = group_Tk * in_group + (token_T1 // G + choice_1k // M * stride) % in_group
    if skew > 0:
        has_first_T = (expert_Tk == 0).any(1)
        hot_T = (torch.arange(num_tokens) < round(skew * num_tokens)) & ~has_first_T
        expert_Tk[:, 0] = torch.where(hot_T, 0, expert_Tk[:, 0])
    return expert_Tk
