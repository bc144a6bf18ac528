"""Which share of each part of a model a rank of a layout holds: a row a rank, a column a part."""

from dataclasses import dataclass
from fractions import Fraction

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.memory.budget import states_of
from course_lib.memory.flats import layers_of
from course_lib.palette import RANK_COLORS, mix
from course_lib.plots.style import key, labelled_box, picture_axes, write
from course_lib.run import Run
from course_lib.tensors import count_parameters
from course_lib.units import three_digits
from course_lib.validate import checked

MOST_RANKS, MOST_LAYERS = 16, 8
_PALE = 0.62  # of white in the colour of parameters
WHOLE = Fraction(0), Fraction(1)


@dataclass(frozen=True)
class ModelPart:
    """A column: a part of the model, which is whole on one stage of the pipeline."""

    block: str  # "embed", "layer 3", "head"
    name: str  # "embed", "attn", "MLP", "MoE", "head"
    stage: int


@dataclass(frozen=True)
class Share:
    """What one rank has of one part: from `left` to `right` cut by tp and ep, from top to bottom by ZeRO (0 to 1)."""

    rank: int
    part: ModelPart
    left: Fraction
    right: Fraction
    parameters: tuple[Fraction, Fraction]
    states: tuple[Fraction, Fraction]  # of the optimizer; with ZeRO-2 and 3 gradients lie with them

    @property
    def of_parameters(self) -> Fraction:
        return (self.right - self.left) * (self.parameters[1] - self.parameters[0])

    @property
    def of_states(self) -> Fraction:
        return (self.right - self.left) * (self.states[1] - self.states[0])


def parts_of(config: ModelConfig, layout: Layout) -> list[ModelPart]:
    """The columns: embedding, attention and MLP of each layer, head."""
    stages = [stage for stage, count in enumerate(layers_of(config, layout)) for _ in range(count)]
    parts = [ModelPart("embed", "embed", 0)]
    for layer, stage in enumerate(stages):
        has_experts = config.moe_layers_before(layer + 1) > config.moe_layers_before(layer)
        parts += [ModelPart(f"layer {layer}", name, stage) for name in ("attn", "MoE" if has_experts else "MLP")]
    return [*parts, ModelPart("head", "head", stages[-1])]


def shares_of(layout: Layout, parts: list[ModelPart], rank: int) -> list[Share]:
    """Say what a rank holds; matrices alone are drawn as cut, norms and routers are whole on each rank of tp."""
    here, members = layout.mesh.coordinates(rank), layout.members(rank)
    shares = []
    for part in parts:
        if part.stage not in layout.stages_of_rank(here["pp"]):
            continue
        left, width = Fraction(here["tp"], layout.tp), Fraction(1, layout.tp)
        if part.name == "MoE":  # first to the ranks of ep, then each expert over tp, unless it is whole
            left, width = (Fraction(0), Fraction(1)) if layout.folded else (left, width)
            left, width = (members["ep"].index(rank) + left) / layout.ep, width / layout.ep
        over = members[layout.shard_axes[part.name == "MoE"]]
        shard = (Fraction(over.index(rank), len(over)), Fraction(over.index(rank) + 1, len(over)))
        cut = [shard if layout.zero_stage >= stage else WHOLE for stage in (3, 1)]
        shares.append(Share(rank, part, left, left + width, *cut))
    return shares


def of_model(config: ModelConfig, layout: Layout, rank: int) -> tuple[float, float]:
    """Shares of the model that a rank has (parameters, optimizer), to the byte: with norms, padding and copies."""
    here, numel = layout.mesh.coordinates(rank), count_parameters(config)
    states = states_of(Run(config, layout, config.max_seq_len, "fp32"), here["pp"], here["tp"])
    return states.parameters / (4 * numel), states.optimizer / (8 * numel)


def strong_in_pale(shares: list[Share]) -> str:
    """Which share of the parameters that a rank holds its optimizer states are for: 1/data, of experts 1/expert_dp."""
    of_pale = {share.part.name == "MoE": share.of_states / share.of_parameters for share in shares}
    if len(set(of_pale.values())) == 1:
        return str(of_pale[False])
    return f"{of_pale[True]} of experts, {of_pale[False]} of the rest"


def _edges(parts: list[ModelPart]) -> dict[ModelPart, tuple[float, float]]:
    """Left and right of each column, 1 for all together; a gap between blocks."""
    blocks = len({part.block for part in parts})
    width = 1 / (len(parts) + 0.25 * (blocks - 1))
    edges, x, before = {}, 0.0, parts[0]
    for part in parts:
        x += 0.25 * width if part.block != before.block else 0.0
        edges[part] = (x, x + width)
        x, before = x + width, part
    return edges


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if share < 0.01 else three_digits(100 * share)


@checked
def show_holdings(config: ModelConfig, layout: Layout) -> None:
    """Show each rank's share of each part: parameters pale, optimizer states strong; raises ValueError without room."""
    layout.check_model(config)
    if layout.world_size > MOST_RANKS or config.num_layers > MOST_LAYERS:
        size = f"{layout.world_size} ranks and {config.num_layers} layers"
        raise ValueError(f"{size}; the picture has room for {MOST_RANKS} and {MOST_LAYERS}, the pattern is the same")
    parts, all_ranks = parts_of(config, layout), range(layout.world_size)
    edges, held = _edges(parts), [of_model(config, layout, rank) for rank in all_ranks]
    shares = [share for rank in all_ranks for share in shares_of(layout, parts, rank)]
    with picture_axes(1.25 + 0.26 * layout.world_size) as axes:
        for rank in all_ranks:
            for left, right in edges.values():
                frame = {"edgecolor": "#D5D5D5", "linewidth": 0.6}
                labelled_box(axes, (left, rank + 0.1), (right - left, 0.8), "#FFFFFF", **frame)
            for x, value in zip((1.1, 1.2), held[rank], strict=True):
                write(axes, x, rank + 0.5, _percent(value), "right", 8)
        for share in shares:
            left, right = edges[share.part]
            x, width = left + float(share.left) * (right - left), float(share.right - share.left) * (right - left)
            color = RANK_COLORS[layout.mesh.coordinates(share.rank)["pp"] % len(RANK_COLORS)]
            for (top, bottom), paint in ((share.parameters, mix(color, "#FFFFFF", _PALE)), (share.states, color)):
                height = max(0.8 * float(bottom - top), 0.06)
                y = min(share.rank + 0.1 + 0.8 * float(top), share.rank + 0.9 - height)
                labelled_box(axes, (x, y), (width, height), paint, linewidth=0)
        _label(axes, edges, layout)
        _legend(axes, layout, shares)
        parameters, states = (max(values) for values in zip(*held, strict=True))
        said = f"{_percent(parameters)} % of the parameters, {_percent(states)} % of the optimizer's states"
        axes.set_title(f"A rank holds at most {said}", pad=28)


def _label(axes, edges: dict[ModelPart, tuple[float, float]], layout: Layout) -> None:
    """Names of blocks and of their parts above, of ranks with their places along axes at the left."""
    for part, (left, right) in edges.items():
        write(axes, (left + right) / 2, -0.12, part.name, fontsize=7.5, va="bottom")
        if part.name == "attn":
            write(axes, right, -0.52, part.block, fontsize=8, va="bottom")
    for x, name in ((1.1, "param. %"), (1.2, "optim. %")):
        write(axes, x, -0.12, name, "right", 7, va="bottom")
    names = []
    for rank in range(layout.world_size):
        here = layout.mesh.coordinates(rank)
        named = " ".join(f"{axis}{here[axis]}" for axis in layout.order if getattr(layout, axis) > 1)
        names.append(f"rank {rank}" + (f": {named}" if named else ""))
    axes.set_yticks([rank + 0.5 for rank in range(layout.world_size)], names)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set(xlim=(-0.005, 1.2), ylim=(layout.world_size + 0.02, -0.05), xticks=[])
    axes.spines[:].set_visible(False)


def _legend(axes, layout: Layout, shares: list[Share]) -> None:
    color, stage = RANK_COLORS[0], layout.zero_stage
    if stage in (0, 3):
        handles = [key(color, "parameters, gradients, optimizer states")]
    else:
        what = "optimizer states" if stage == 1 else "gradients, optimizer states"
        strong = key(color, f"of these with {what}: {strong_in_pale(shares)}")
        handles = [key(mix(color, "#FFFFFF", _PALE), "parameters"), strong]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 0.4, "ncol": len(handles)}
    axes.legend(handles=handles, fontsize=8.5, handlelength=1.4, columnspacing=1.4, **place)
