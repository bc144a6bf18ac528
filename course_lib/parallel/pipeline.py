"""Pipeline parallelism from scratch: each rank has some of the layers, and one executor runs any schedule of them.

All ranks bring the same micro-batches. The first stage takes tokens from them, the last one targets, the others only
sizes: micro-batches may differ in them.

On the wire, of d bytes a number: B S D d a micro-batch across each boundary between two ranks, forward and again
backward; once a step the loss (one number), the gradient of tied embeddings whose ends are on two ranks (V D, an
all-reduce between these two) and one number to clip.

What a rank keeps of a micro-batch from F to its B (or I), for each of its stages: what autograd saves there, the
received input included. After B it is freed; after I there is kept until W what weight_gradients.py says. Beside it
there are messages of B S D: one received ahead, the gradient at hand, and outputs that were sent until it is certain
that they have come.

Source   Huang et al. 2019 (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473)
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.conjugate import Group, check_group
from course_lib.parallel.channels import Pair, connect, pairs_of
from course_lib.parallel.engine import Engine, MicroBatches, check_micro_batches
from course_lib.parallel.executor import Executor, StageRunner
from course_lib.parallel.stages import check_stages, cut
from course_lib.parallel.weight_gradients import DelayedWeightGradients
from course_lib.parallel.whole import put_together
from course_lib.schedules import make
from course_lib.schedules.check import check
from course_lib.schedules.instructions import Schedule
from course_lib.schedules.messages import Step, steps_of_rank
from course_lib.training.precision import gradient_of

_AnySchedule = str | Schedule | Callable[[int], Schedule]  # a name, a schedule, or a function of the micro-batches


class Pipeline(nn.Module, Engine):
    """This rank's stages, under the model's names, and what it needs to run them. `build` makes one.
    peak_live, peak_waiting   of the last step: most micro-batches kept at once (F done, B or I not yet), and most that
                              waited for W; each counts once a stage
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        schedule_of: Callable[[int], Schedule],
        first: Schedule,
        layers_of_stage: Sequence[int],
        channels: dict[Pair, Group],
        ahead: int,
    ):
        super().__init__()
        self.config, self.group, self.channels, self.ahead = model.config, group, channels, ahead
        self.schedule_of, self.norm_groups, self.loss_group = schedule_of, (group,), group
        self.rank_of_stage, self.layers_of_stage = first.rank_of_stage, tuple(layers_of_stage)
        self.dtype = next(model.parameters()).dtype
        mine = first.stages_of_rank(group.rank())
        self.stages = nn.ModuleDict({str(stage): cut(model, stage, layers_of_stage) for stage in mine})
        self.delayed: dict[int, DelayedWeightGradients] = {}
        self.plans: dict[int, list[Step]] = {}  # by number of micro-batches
        self.peak_live = self.peak_waiting = 0

    def run(self, micro_batches: MicroBatches) -> Tensor:
        return run_schedule(self, micro_batches)

    def finish(self) -> None:
        sum_tied(self)

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        tied = tied_weight(self)
        return ((param, 2 if param is tied else 1) for param in self.parameters() if param.requires_grad)

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        tensors = {name: tensor_of(param) for name, param in named_parameters(self).items()}
        return put_together(self.config, tensors, {}, self.group)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def tied_ranks(self) -> Pair | None:
        """The ranks of embedding and head, if they are tied and on two ranks: each then has a copy."""
        ends = self.rank_of_stage[0], self.rank_of_stage[-1]
        return ends if self.config.tied and ends[0] != ends[1] else None

    def tie(self) -> None:
        """Makes embedding and head one again where this rank has both (`to_empty` takes them apart)."""
        first, last = "0", str(self.num_stages - 1)
        if self.config.tied and first in self.stages and last in self.stages:
            self.stages[last].head.weight = self.stages[first].embed.weight

    def plan_for(self, num_micro_batches: int) -> list[Step]:
        """This rank's list for that many micro-batches.
        Raises   ValueError if there is no such schedule, if it cannot run, or puts stages on other ranks than `build`
        """
        if num_micro_batches not in self.plans:
            made = self.schedule_of(num_micro_batches)
            if made.rank_of_stage != self.rank_of_stage:
                raise ValueError(
                    f"the schedule of {num_micro_batches} micro-batches puts stages on ranks {made.rank_of_stage}, but "
                    f"the model is cut for {self.rank_of_stage}; a schedule must place stages alike for any number"
                )
            self.plans[num_micro_batches] = steps_of_rank(made, self.group.rank(), self.ahead)
            split = {one.stage for one in made.instructions[self.group.rank()] if one.op == "W"}
            for stage in split - set(self.delayed):
                self.delayed[stage] = DelayedWeightGradients(self.stages[str(stage)])
        return self.plans[num_micro_batches]


def build(
    model: nn.Module,
    group: Group,
    schedule: _AnySchedule = "1f1b",
    v: int = 1,
    layers_of_stage: Sequence[int] | None = None,
    num_micro_batches: int | None = None,
    channels: dict[Pair, Group] | None = None,
    ahead: int = 1,
) -> Pipeline:
    """This rank's stages of the model, ready for any number of micro-batches that the schedule allows.

    Every rank must bring the same weights: `model.build` with one seed. Or a model on the meta device: then fill
    `engine.to_empty(device=...)` and call `engine.tie()`. Forget the model, and what other ranks have is freed.
    schedule            a name of `schedules.SCHEDULES`, a function of the number of micro-batches, or a `Schedule`
    layers_of_stage     how many layers each stage has, in the model's order; evenly by default
    num_micro_batches   what the schedule is tried with here, 2 pp by default
    channels            of an earlier engine on this group (`engine.channels`); otherwise new ones are made
    ahead               how many instructions early receives are posted
    Raises   ValueError for what cannot be, before anything is sent
    """
    pp = check_group(group, "build").size()
    tried = schedule.num_micro_batches if isinstance(schedule, Schedule) else num_micro_batches or 2 * pp
    schedule_of = partial(checked_schedule, schedule, pp, v=v)
    first = schedule_of(tried)
    layers_of_stage = check_stages(model.config, first.num_stages, layers_of_stage)
    if ahead < 0:
        raise ValueError(f"ahead is {ahead}; give 0 (receive when it is needed), 1, or more")
    comm.check_point_to_point(model.embed.weight.device, group, "a pipeline")
    pairs = pairs_of(first)
    ends = (first.rank_of_stage[0], first.rank_of_stage[-1])
    if model.config.tied and ends[0] != ends[1]:
        pairs = sorted({*pairs, ends})
    mine = [pair for pair in pairs if group.rank() in pair]
    if channels is None:
        channels = connect(group, pairs)
    elif missing := [pair for pair in mine if pair not in channels]:
        raise ValueError(f"channels lack the pairs {missing}; leave channels out, or connect(group, {pairs})")
    engine = Pipeline(model, group, schedule_of, first, layers_of_stage, channels, ahead)
    engine.plan_for(tried)
    return engine


def checked_schedule(schedule: _AnySchedule, pp: int, num_micro_batches: int, v: int = 1) -> Schedule:
    """The schedule of that name, or what the function gives, proved to run.
    Raises   ValueError if it is for other sizes, or cannot run: every problem, and where
    """
    if isinstance(schedule, str):
        return make(schedule, pp, num_micro_batches, v)
    made = schedule if isinstance(schedule, Schedule) else schedule(num_micro_batches)
    if not isinstance(made, Schedule):
        raise ValueError(f"schedule gave a {type(made).__name__}; it must give a Schedule: see schedules.from_lists")
    if (made.pp, made.num_micro_batches) != (pp, num_micro_batches):
        raise ValueError(
            f"schedule {made.name!r} is for {made.pp} ranks and {made.num_micro_batches} micro-batches, but there are "
            f"{pp} and {num_micro_batches}; give one for these, or a function of the number of micro-batches"
        )
    check(made)
    return made


def run_schedule(engine: Pipeline, micro_batches: MicroBatches) -> Tensor:
    """Executes the schedule of so many micro-batches; returns this rank's share of the mean loss.

    All ranks bring the same micro-batches. Each one's mean counts by its share of the tokens.
    Raises   ValueError if there is no schedule for so many micro-batches, before anything is sent
    """
    check_micro_batches(engine, micro_batches)
    return execute(engine, micro_batches, StageRunner(engine, sum(y_BS.numel() for _, y_BS in micro_batches)))


def execute(engine: Pipeline, micro_batches: MicroBatches, runner: StageRunner) -> Tensor:
    """Runs this rank's list; `runner` says what is done with a stage. Returns the sum of its shares of the loss."""
    executor = Executor(engine, micro_batches, runner)
    loss = executor.run()
    engine.peak_live, engine.peak_waiting = executor.peak_live, executor.peak_waiting
    return loss


def sum_tied(engine: Pipeline) -> None:
    """Tied embeddings on two ranks: each used its copy for one end; summed gradients keep the copies equal.
    Bytes    an all-reduce of V D between these two
    """
    weight = tied_weight(engine)
    if weight is None or not weight.requires_grad:
        return
    if gradient_of(weight) is None:
        weight.grad = torch.zeros_like(weight)  # the other end may have one, and waits
    comm.all_reduce_(gradient_of(weight), engine.channels[engine.tied_ranks])


def tied_weight(engine: Pipeline) -> nn.Parameter | None:
    """This rank's copy of embeddings that another rank has as well."""
    if engine.tied_ranks is None or engine.group.rank() not in engine.tied_ranks:
        return None
    is_first = engine.group.rank() == engine.rank_of_stage[0]
    return engine.stages["0"].embed.weight if is_first else engine.stages[str(engine.num_stages - 1)].head.weight


def named_parameters(engine: Pipeline) -> dict[str, nn.Parameter]:
    """This rank's parameters by the model's names; a tied head's is the embedding's. Of a FiveD too."""
    named: dict[str, nn.Parameter] = {}
    for stage in engine.stages.values():
        named |= dict(stage.named_parameters())
    if engine.config.tied and "head.weight" in named:
        named["embed.weight"] = named.pop("head.weight")
    return named
