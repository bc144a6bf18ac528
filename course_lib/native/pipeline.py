"""Pipeline parallelism as PyTorch ships it: stages, and a schedule that runs them. Read beside parallel/pipeline.py.

    stage       a PipelineStage: one module, its number, and the buffers for what it receives
    schedule    ScheduleGPipe, Schedule1F1B, ...: the order of work, as a list of actions for each rank
    step        schedule.step(x_BS) on the rank of the first stage, step(target=y_BS, losses=...) on that of the last

What they are in the from-scratch code:

    afab             ScheduleGPipe                       all_forward_all_backward
    1f1b             Schedule1F1B                        one_f_one_b
    interleaved      ScheduleInterleaved1F1B             interleaved_1f1b: stage s on rank s % pp
    interleaved_zb   ScheduleInterleavedZeroBubble       zb_h1, for any v: backward in two parts
    zbv              ScheduleZBVZeroBubble               zbv: two stages a rank, in a V
    dualpipe_v       ScheduleDualPipeV                   dualpipe_v, likewise

The order of work is that of schedules/builders.py, one by one; `order_of` shows PyTorch's. What differs:

    cutting             left to the user, or traced by torch.export; here the same stages as from scratch
    micro-batches       one tensor, which step cuts along its rows: all of one size
    split backward      autograd's graph is cut between inputs and weights by a walk through its nodes; from scratch
                        each linear layer puts its own weight gradient off
    sends               1f1b waits for a send together with the receive beside it; the others at the end of a phase
    loss                on the rank of the last stage alone; here it is sent to all
    tied embedding      not known: here the two gradients are summed by their two ranks, as from scratch
    dualpipe_v          one forward beside one backward are an action of their own, yet run one after the other

Bytes    a step: m activations of B S D to the next stage and m gradients back across each boundary between ranks; one
         number for the loss; V D of the tied embedding, summed over two ranks
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from course_lib import comm
from course_lib.comm.conjugate import Group, check_group
from course_lib.compat import PIPELINE_WARMS_UP_ON_GLOO
from course_lib.config import ModelConfig
from course_lib.parallel.engine import (
    Engine,
    MicroBatches,
    NamedParameter,
    accumulate_gradients,
    clip_gradients,
    full_gradients,
    full_parameters,
    make_optimizer,
    step,
)
from course_lib.parallel.stages import check_stages, cut

__all__ = [
    "SCHEDULES", "Pipeline", "accumulate_gradients", "build", "check_micro_batches", "check_pipeline", "clip_gradients",
    "full_gradients", "full_parameters", "make_optimizer", "named_parameters", "order_of", "ranks_of_stages", "step",
]  # fmt: skip

SCHEDULES = {
    "afab": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipe_v": pipelining.ScheduleDualPipeV,
}
ONE_STAGE = ("afab", "1f1b")  # a rank
IN_A_V = ("zbv", "dualpipe_v")  # stage s on rank s, then back
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


# --- build


class Pipeline(nn.Module, Engine):
    """This rank's stages, and PyTorch's objects that run them."""

    def __init__(self, model: nn.Module, group: Group, schedule: str, v: int):
        super().__init__()
        self.config, self.group, self.schedule = model.config, group, schedule
        self.device, self.dtype = model.embed.weight.device, model.embed.weight.dtype
        self.rank_of_stage = ranks_of_stages(schedule, group.size(), v)
        layers = check_stages(model.config, len(self.rank_of_stage))
        mine = [stage for stage, rank in enumerate(self.rank_of_stage) if rank == group.rank()]
        self.stages = nn.ModuleDict({str(stage): cut(model, stage, layers) for stage in mine})
        self.ends_group = group_of_ends(group, self.rank_of_stage) if model.config.tied else None
        self.norm_groups = (group,)
        self.runners = {}  # by number and shape of micro-batches

    def run(self, micro_batches: MicroBatches) -> Tensor:
        return run_schedule(self, micro_batches)

    def finish(self) -> None:
        sum_tied(self)

    def mean_loss(self, share: Tensor) -> Tensor:
        return comm.all_reduce(share, self.group)

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        tied = tied_weight(self)
        return ((param, 2 if param is tied else 1) for _, param in named_parameters(self) if param.requires_grad)

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        mine = {name: tensor_of(param) for name, param in named_parameters(self)}
        of_ranks = comm.all_gather_tensors({n: x for n, x in mine.items() if x is not None}, self.group)
        whole = {name: x.to(self.device) for of_rank in of_ranks for name, x in of_rank.items()}
        if self.config.tied:
            whole.pop("head.weight", None)
        return whole

    @property
    def has_first(self) -> bool:
        return self.rank_of_stage[0] == self.group.rank()

    @property
    def has_last(self) -> bool:
        return self.rank_of_stage[-1] == self.group.rank()


def ranks_of_stages(schedule: str, pp_size: int, v: int) -> list[int]:
    """Stage s on rank s % pp, or down and up again in a V."""
    return [*range(pp_size), *reversed(range(pp_size))] if schedule in IN_A_V else [*range(pp_size)] * v


def build(model: nn.Module, group: Group, schedule: str = "1f1b", v: int = 1) -> Pipeline:
    """Keeps this rank's stages of the model; every rank must bring the same weights.

    schedule: one of SCHEDULES; v: stages a rank, a choice of the interleaved ones alone.
    Bytes    none
    Raises   ValueError for an unknown schedule, a v that it does not have, more stages than layers, another family
    """
    check_pipeline(model.config, check_group(group, "build").size(), schedule, v)
    return Pipeline(model, group, schedule, v)


def check_pipeline(config: ModelConfig, pp_size: int, schedule: str, v: int) -> None:
    """Raises ValueError for what cannot be built, before anything is changed."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; choose from {', '.join(SCHEDULES)}")
    if v < 1 or (v > 1 and not schedule.startswith("interleaved")):
        raise ValueError(f"v is {v}; {schedule} takes {'1 or more' if v < 1 else 'no v: leave it out'}")
    check_stages(config, len(ranks_of_stages(schedule, pp_size, v)))


def check_micro_batches(schedule: str, pp_size: int, micro_batches: MicroBatches) -> None:
    """Raises ValueError for what PyTorch's schedule would refuse, before anything is sent."""
    count, shapes = len(micro_batches), {tuple(x_BS.shape) for x_BS, _ in micro_batches}
    if count == 0:
        raise ValueError("there is no micro-batch; bring one or more")
    if len(shapes) > 1:
        raise ValueError(f"micro-batches have shapes {sorted(shapes)}; PyTorch cuts one tensor: bring equal ones")
    least = {"1f1b": pp_size, "dualpipe_v": 2 * pp_size}.get(schedule, 1)
    if count < least:
        raise ValueError(f"micro-batches are {count}, but {schedule} on {pp_size} ranks needs {least}; bring more")
    rounds = max(1, count // pp_size)
    if schedule.startswith("interleaved") and count % rounds:
        fewer = count // pp_size * pp_size
        raise ValueError(
            f"micro-batches are {count}; {schedule} on {pp_size} ranks does {rounds} rounds of equally many: bring a "
            f"multiple of {pp_size}, {fewer} or {fewer + pp_size}"
        )


# --- PyTorch's objects


def runner_of(engine: Pipeline, micro_batches: MicroBatches):
    """The schedule for so many micro-batches of that shape, made once."""
    x_BS, _ = micro_batches[0]
    key = len(micro_batches), tuple(x_BS.shape)
    if key not in engine.runners:
        engine.runners[key] = make_runner(engine, *key)
    return engine.runners[key]


def make_runner(engine: Pipeline, count: int, shape_BS: tuple[int, int]):
    """Loss and gradients of a micro-batch count by its share: PyTorch need not scale them."""
    stages = [make_stage(engine, int(stage), module, shape_BS) for stage, module in engine.stages.items()]

    def share_of_loss(logits_BSV: Tensor, y_BS: Tensor) -> Tensor:
        logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
        return F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten()) / count

    schedule_class = SCHEDULES[engine.schedule]
    one_or_all = stages[0] if engine.schedule in ONE_STAGE else stages
    return schedule_class(one_or_all, count, loss_fn=share_of_loss, scale_grads=False)


class StageWithoutWarmUp(PipelineStage):
    """A stage that sends its neighbours nothing before the first micro-batch: older versions cannot do it on gloo."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def make_stage(engine: Pipeline, number: int, module: nn.Module, shape_BS: tuple[int, int]) -> PipelineStage:
    """Given what goes in and out, as tensors without numbers, PyTorch need not find out by running the model."""
    num_stages = len(engine.rank_of_stage)
    x_BSD = torch.empty(*shape_BS, engine.config.d_model, dtype=engine.dtype, device="meta", requires_grad=True)
    tokens_BS = torch.empty(shape_BS, dtype=torch.int64, device="meta")
    logits_BSV = torch.empty(*shape_BS, engine.config.vocab_size, dtype=engine.dtype, device="meta", requires_grad=True)
    return (PipelineStage if PIPELINE_WARMS_UP_ON_GLOO else StageWithoutWarmUp)(
        module, number, num_stages, engine.device, group=engine.group,
        input_args=tokens_BS if number == 0 else x_BSD,
        output_args=logits_BSV if number == num_stages - 1 else x_BSD,
    )  # fmt: skip


def order_of(engine: Pipeline, count: int) -> str:
    """What PyTorch computes for so many micro-batches, in the course's notation: one line a rank, as str(Schedule).

    Where it differs from the course's: for 1f1b PyTorch's list is only shown, not executed, and on the last rank it
    numbers forwards one too high; interleaved with v=1 starts with more forwards than 1F1B.
    """
    order = make_runner(engine, count, (1, 1)).pipeline_order
    return "\n".join(" ".join(_instructions(order[rank])) for rank in range(engine.group.size()))


def _instructions(actions: list) -> list[str]:
    """Without what idles, communicates, or holds a pair that could run at once (its parts follow one another)."""
    parts = [part for action in actions if action is not None for part in action.sub_actions or (action,)]
    return [
        f"{LETTERS[part.computation_type.name]}{part.microbatch_index}@{part.stage_index}"
        for part in parts
        if part.computation_type.name in LETTERS
    ]


# --- micro-batches, and tied embeddings


def run_schedule(engine: Pipeline, micro_batches: MicroBatches) -> Tensor:
    """Executes PyTorch's schedule; returns the mean loss on the rank of the last stage, 0 on others.

    Raises   ValueError for micro-batches that the schedule cannot take, before anything is sent
    """
    check_micro_batches(engine.schedule, engine.group.size(), micro_batches)
    x_BS, y_BS = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
    losses = []
    inputs = (x_BS,) if engine.has_first else ()
    outputs = {"target": y_BS, "losses": losses} if engine.has_last else {}
    runner_of(engine, micro_batches).step(*inputs, **outputs, return_outputs=False)
    zero = torch.zeros((), dtype=torch.promote_types(engine.dtype, torch.float32), device=engine.device)
    return sum((loss.detach() for loss in losses), zero)


def group_of_ends(group: Group, rank_of_stage: list[int]) -> Group | None:
    """The ranks of the first and the last stage; None on other ranks, or if one rank has both.

    The others make a group too, each alone: torch names groups by how many a rank has made.
    """
    ends, me = {rank_of_stage[0], rank_of_stage[-1]}, group.rank()
    if len(ends) == 1:
        return None
    ranks = [dist.get_global_rank(group, rank) for rank in sorted(ends if me in ends else {me})]
    made = dist.new_group(ranks, use_local_synchronization=True)
    return made if me in ends else None


def sum_tied(engine: Pipeline) -> None:
    """A tied embedding is used at both ends; each has a copy, and needs the gradient of both uses.

    Bytes    sent per rank: V D * itemsize by the ranks of the first and last stage, if they are two
    """
    weight = tied_weight(engine)
    if weight is not None and weight.grad is not None:  # it trains
        comm.all_reduce_(weight.grad, engine.ends_group)


def tied_weight(engine: Pipeline) -> nn.Parameter | None:
    """This rank's copy of an embedding that another rank has as well."""
    if engine.ends_group is None:
        return None
    return dict(named_parameters(engine))["embed.weight" if engine.has_first else "head.weight"]


def named_parameters(engine: Pipeline) -> list[NamedParameter]:
    """This rank's parameters by the model's names, each once."""
    return [(name.split(".", 2)[2], param) for name, param in engine.named_parameters()]
