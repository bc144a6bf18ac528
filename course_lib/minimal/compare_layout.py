"""One line each for several axes at once: wrong gradients under a rule of sums, losses, bytes sent along each axis.

`axes_of` is a rule as in axes.py: axes_of(kind, layout) returns names of groups ("data", "tp", "expert_dp", "world").
Layouts are given as text. The ranks are real; the engine of parallel/five_d.py cuts the model, and the rule does all
sums of gradients.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure import ByteMeter
from course_lib.minimal.compare import one_process
from course_lib.model import MoE
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d, pipeline, sums
from course_lib.run import Run
from course_lib.traffic import sent
from course_lib.training.data import batch, tokens
from course_lib.validate import Size, checked

_MOE = preset("toy-moe")
CONFIG = replace(
    _MOE,
    name="small-moe",
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    moe=replace(_MOE.moe, d_expert=16),
)
SEQ_LEN = 32
Rule = Callable[[str, Layout], list[str]]


@checked
def errors_by_kind(axes_of: Rule, layout: str) -> dict[str, float]:
    """Return for each kind of parameter the largest relative error of a gradient, against one process, in float64.

    Raises   ValueError for a layout that ZeRO shards: the rule sums full gradients
    """
    parsed = _without_zero(layout)
    got, kinds = launch(_gradients, parsed.world_size, axes_of, layout)[0]
    expected, errors = _one_process(parsed), dict.fromkeys(("matrices", "norms", "experts"), 0.0)
    for name, grad in expected.items():
        error = ((got[name] - grad).norm() / grad.norm()).item()
        errors[kinds[name]] = max(errors[kinds[name]], error)
    return errors


@checked
def losses_under(axes_of: Rule, layout: str, steps: Size = 40) -> list[float]:
    """Return the mean loss of each step of training with AdamW."""
    return launch(_train, _without_zero(layout).world_size, axes_of, layout, steps)[0]


@checked
def sent_by_axis(layout: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that rank 0 sends along each axis in a step: counted, and by formula.

    The engine does all sums itself, so the layout may have ZeRO.
    """
    parsed = Layout.parse(layout)
    of_ranks = launch(_sent, parsed.world_size, layout)
    counted, _ = of_ranks[0]
    members = parsed.members(0)["ep"]
    routings = list(zip(*(of_ranks[rank][1] for rank in members), strict=True))
    formula = sent(Run(CONFIG, parsed, SEQ_LEN, "fp32"), 0, routings=routings)
    return ({axis: size for axis, size in one.items() if size} for one in (counted, formula))


def _without_zero(text: str) -> Layout:
    layout = Layout.parse(text)
    if layout.zero_stage:
        raise ValueError(
            f"zero_stage is {layout.zero_stage} in {text!r}; the rule sums full gradients, so leave it out"
        )
    return layout


def _micro_batches(layout: Layout, dp_rank: int, step: int = 0) -> list[tuple[Tensor, Tensor]]:
    """This dp rank's micro-batches of one sequence; the global batch is the same for every layout of as many."""
    rows = [layout.dp * index + dp_rank for index in range(layout.micro_batches)]
    x_BS, y_BS = _global_batch(layout, step)
    return [(x_BS[row : row + 1], y_BS[row : row + 1]) for row in rows]


def _global_batch(layout: Layout, step: int = 0) -> tuple[Tensor, Tensor]:
    return batch(tokens(100_000), step, layout.sequences_per_step, SEQ_LEN)


def _one_process(layout: Layout) -> dict[str, Tensor]:
    """Gradients of the mean over the global batch; the balancing loss is that of each micro-batch, as in the engine."""
    of_ranks = zip(*(_micro_batches(layout, dp_rank) for dp_rank in range(layout.dp)), strict=True)
    return one_process(CONFIG, [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in of_ranks])


class _Unsummed(five_d.CutStageRunner):
    """A backward that leaves each rank its own gradients: the rule does all sums."""

    def before_backward(self, stage: int, is_last: bool) -> None:
        """Start no sum."""


def _step(engine: five_d.FiveD, axes_of: Rule, step: int) -> Tensor:
    """Forward, backward, and the sums of the rule; return the mean loss."""
    layout, kind_of = engine.layout, sums.kind_function(engine)
    micro_batches = _micro_batches(layout, engine.groups.coordinates["dp"], step)
    runner = _Unsummed(engine, layout.dp * sum(y_BS.numel() for _, y_BS in micro_batches))
    share = pipeline.execute(engine.pipeline, micro_batches, runner)
    for param in engine.pipeline.parameters():
        for axis in axes_of(kind_of(param), layout):
            comm.all_reduce_(param.grad, _group(engine, axis))
    return engine.mean_loss(share)


def _group(engine: five_d.FiveD, axis: str) -> dist.ProcessGroup:
    groups = {"world": dist.group.WORLD} | engine.groups.by_axis
    if axis not in groups:
        raise ValueError(f"axes_of names {axis!r}; choose from {', '.join(sorted(groups))}")
    return groups[axis]


def _gradients(axes_of: Rule, text: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    engine = five_d.build(CONFIG, Layout.parse(text), dtype=torch.float64)
    _step(engine, axes_of, 0)
    kinds = {name: _kind(name, engine.layout) for name in engines.full_gradients(engine)}
    return engines.full_gradients(engine), kinds


def _kind(name: str, layout: Layout) -> str:
    if ".experts." in name:
        return "experts"
    return "norms" if layout.tp > 1 and ("norm" in name or "router" in name) else "matrices"


def _train(axes_of: Rule, text: str, steps: int) -> list[float]:
    engine = five_d.build(CONFIG, Layout.parse(text), dtype=torch.float64)
    optimizer, losses = torch.optim.AdamW(engine.pipeline.parameters(), lr=3e-3), []
    for step in range(steps):
        losses.append(_step(engine, axes_of, step).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _sent(text: str) -> tuple[dict[str, int], list[Tensor]]:
    """Bytes by axis in one step, and whom this rank's tokens chose."""
    layout, chosen = Layout.parse(text), []
    engine = five_d.build(CONFIG, layout)
    optimizer = engines.make_optimizer(engine)
    for module in engine.modules():
        if isinstance(module, MoE):
            module.router.register_forward_hook(lambda _module, _args, out: chosen.append(out.expert_Tk))
    with ByteMeter(axes=engine.axes) as meter:
        engines.step(engine, _micro_batches(layout, engine.groups.coordinates["dp"]), optimizer)
    return meter.by_axis, chosen
