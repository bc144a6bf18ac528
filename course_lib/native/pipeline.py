"""Pipeline parallelism as PyTorch ships it: stages, and a schedule that runs them. Read beside parallel/pipeline.py.

    stage       a PipelineStage: one module, its number, and the buffers for what it receives
    schedule    ScheduleGPipe, Schedule1F1B, ...: the order of work, as a list of actions for each rank
    step        schedule.step(x_BS) on the rank of the first stage, step(target=y_BS, losses=...) on that of the last

Cut as from scratch. The order of work is that of schedules/builders.py; `order_of` shows PyTorch's. Micro-batches are
one tensor, which step cuts along its rows: all of one size. A tied embedding is not known.

Bytes    a step: m activations of B S D to the next stage and m gradients back across each boundary between ranks; one
         number for the loss
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from course_lib.comm.conjugate import Group, check_group
from course_lib.compat import PIPELINE_WARMS_UP_ON_GLOO
from course_lib.parallel.engine import Engine, MicroBatches, NamedParameter, cross_entropy, share_of
from course_lib.parallel.stages import check_stages, cut
from course_lib.parallel.whole import put_together

SCHEDULES = {
    "afab": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipe_v": pipelining.ScheduleDualPipeV,
}
_ONE_STAGE = ("afab", "1f1b")  # a rank
_IN_A_V = ("zbv", "dualpipe_v")  # stage s on rank s, then back
_LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Pipeline(nn.Module, Engine):
    """This rank's stages, and PyTorch's objects that run them."""

    def __init__(self, model: nn.Module, group: Group, schedule: str, v: int):
        super().__init__()
        self.config, self.group, self.schedule = model.config, group, schedule
        self.device, self.dtype = model.embed.weight.device, model.embed.weight.dtype
        self.rank_of_stage = _ranks_of_stages(schedule, group.size(), v)
        layers = check_stages(model.config, len(self.rank_of_stage))
        mine = [stage for stage, rank in enumerate(self.rank_of_stage) if rank == group.rank()]
        self.stages = nn.ModuleDict({str(stage): cut(model, stage, layers) for stage in mine})
        self.norm_groups, self.loss_group = (group,), group
        self.runners = {}  # by number and shape of micro-batches

    def run(self, micro_batches: MicroBatches) -> Tensor:
        """Executes PyTorch's schedule; returns the mean loss on the rank of the last stage, 0 on others.
        Raises   what PyTorch raises for micro-batches of different shapes, or too few
        """
        x_BS, y_BS = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
        losses = []
        inputs = (x_BS,) if "0" in self.stages else ()
        outputs = {"target": y_BS, "losses": losses} if str(len(self.rank_of_stage) - 1) in self.stages else {}
        key = len(micro_batches), tuple(micro_batches[0][0].shape)
        if key not in self.runners:
            self.runners[key] = _make_runner(self, *key)
        self.runners[key].step(*inputs, **outputs, return_outputs=False)
        zero = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        return sum((loss.detach() for loss in losses), zero)

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        return ((param, 1) for _, param in named_parameters(self) if param.requires_grad)

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        mine = {name: tensor_of(param) for name, param in named_parameters(self)}
        return put_together(self.config, mine, {}, self.group)


def _ranks_of_stages(schedule: str, pp_size: int, v: int) -> list[int]:
    return [*range(pp_size), *reversed(range(pp_size))] if schedule in _IN_A_V else [*range(pp_size)] * v


def build(model: nn.Module, group: Group, schedule: str = "1f1b", v: int = 1) -> Pipeline:
    """Keeps this rank's stages of the model; every rank must bring the same weights.

    schedule: one of SCHEDULES; v: stages a rank, a choice of the interleaved ones alone.
    Bytes    none
    Raises   ValueError for an unknown schedule, more stages than layers, a tied embedding, another family
    """
    check_group(group, "build")
    if schedule not in SCHEDULES or model.config.tied:
        raise ValueError(f"schedule is {schedule!r}; choose from {', '.join(SCHEDULES)}, and a model that is not tied")
    check_stages(model.config, len(_ranks_of_stages(schedule, group.size(), v)))
    return Pipeline(model, group, schedule, v)


def _make_runner(engine: Pipeline, count: int, shape_BS: tuple[int, int]):
    """Loss and gradients of a micro-batch count by its share: PyTorch need not scale them."""
    stages = [_make_stage(engine, int(stage), module, shape_BS) for stage, module in engine.stages.items()]

    def share_of_loss(logits_BSV: Tensor, y_BS: Tensor) -> Tensor:
        return share_of(cross_entropy(logits_BSV, y_BS), count * y_BS.numel())

    schedule_class = SCHEDULES[engine.schedule]
    one_or_all = stages[0] if engine.schedule in _ONE_STAGE else stages
    return schedule_class(one_or_all, count, loss_fn=share_of_loss, scale_grads=False)


class StageWithoutWarmUp(PipelineStage):
    """A stage that sends its neighbours nothing before the first micro-batch: older versions cannot do it on gloo."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def _make_stage(engine: Pipeline, number: int, module: nn.Module, shape_BS: tuple[int, int]) -> PipelineStage:
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

    For 1f1b PyTorch's list is only shown, not executed, and on the last rank it numbers forwards one too high.
    """
    order, lines = _make_runner(engine, count, (1, 1)).pipeline_order, []
    for rank in range(engine.group.size()):  # what idles or communicates is left out; parts of a pair follow each other
        parts = [part for action in order[rank] if action is not None for part in action.sub_actions or (action,)]
        named = [(_LETTERS.get(part.computation_type.name), part) for part in parts]
        lines.append(" ".join(f"{op}{part.microbatch_index}@{part.stage_index}" for op, part in named if op))
    return "\n".join(lines)


def named_parameters(engine: Pipeline) -> list[NamedParameter]:
    """This rank's parameters by the model's names, each once."""
    return [(name.split(".", 2)[2], param) for name, param in engine.named_parameters()]
