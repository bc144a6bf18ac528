"""A model cut into stages: runs of consecutive layers, the embedding on the first, final norm and head on the last.

A stage is an `nn.Module` made of the model's own modules under the model's own names, so `blocks.2.mlp.up.weight` is
called so wherever it is. A model on the meta device can be cut as well: then no rank ever holds more than its stages;
`skeleton` makes one that has only the layers of some stages.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib.config import ModelConfig
from course_lib.layout.check import FAMILIES
from course_lib.layout.partition import even_layers
from course_lib.model import CLASSES, rope_tables
from course_lib.validate import one_of

LossOf = Callable[[Tensor, Tensor], Tensor]


class Layers(nn.ModuleDict):
    """Consecutive layers by their numbers in the whole model."""

    run_in_order = True


class Stage(nn.Module):
    """Some layers of a model. The first stage takes tokens, the last gives logits, what lies between is x_BSD.

    With `loss_of` the last gives what it makes of (x_BSD behind the norm, the head's weight): losses without logits.
    Shapes   tokens_BS or x_BSD -> x_BSD or logits_BSV
    """

    def __init__(self, model: nn.Module, layers: range, is_first: bool, is_last: bool):
        super().__init__()
        self.config, self.recompute = model.config, model.recompute
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.embed = model.embed
            if self.config.family == "gpt":
                self.positions, self.dropout = model.positions, model.dropout
        self.blocks = Layers({str(layer): model.blocks[layer] for layer in layers})
        if is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, positions_S: Tensor | None = None, loss_of: LossOf | None = None) -> Tensor:
        if positions_S is None:
            positions_S = torch.arange(x.shape[1], device=x.device)
        if self.is_first:
            x = self.embed_tokens(x, positions_S)
        tables = rope_tables(self.config, positions_S, x.dtype) if self.config.family == "llama" else ()
        for block in self.blocks.values():
            if self.recompute == "full":
                x = checkpoint(block, x, *tables, use_reentrant=False)
            else:
                x = block(x, *tables)
        if not self.is_last:
            return x
        return self.head(self.norm(x)) if loss_of is None else loss_of(self.norm(x), self.head.weight)

    def embed_tokens(self, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
        if self.config.family == "gpt":
            return self.dropout(self.embed(tokens_BS) + self.positions(positions_S))
        return self.embed(tokens_BS)


def layers_in(stage: int, layers_of_stage: Sequence[int]) -> range:
    first_layer = sum(layers_of_stage[:stage])
    return range(first_layer, first_layer + layers_of_stage[stage])


def skeleton(
    config: ModelConfig, stages: Sequence[int], layers_of_stage: Sequence[int], attention: str, recompute: str
) -> nn.Module:
    """A model without numbers that has the layers of these stages alone: as cheap to make as they are many."""
    layers = {layer for stage in stages for layer in layers_in(stage, layers_of_stage)}
    with torch.device("meta"):
        return CLASSES[config.family](config, attention, recompute, layers)


def cut(model: nn.Module, stage: int, layers_of_stage: Sequence[int]) -> Stage:
    """One stage, of the model's own modules: forget the model, and what is in no stage here is freed."""
    is_last = stage == len(layers_of_stage) - 1
    return Stage(model, layers_in(stage, layers_of_stage), is_first=stage == 0, is_last=is_last)


def check_stages(config: ModelConfig, num_stages: int, layers_of_stage: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of each stage, as given, or evenly.
    Raises   ValueError if the model cannot be cut so, naming what would do
    """
    one_of("family", config.family, FAMILIES)
    if num_stages > config.num_layers:
        raise ValueError(
            f"num_stages ({num_stages}) must not exceed num_layers ({config.num_layers}): each stage needs a layer; "
            "use fewer ranks, or fewer stages a rank (v)"
        )
    if layers_of_stage is None:
        return tuple(even_layers(config.num_layers, num_stages))
    layers_of_stage = tuple(layers_of_stage)
    wanted = f"one number of at least 1 for each of {num_stages} stages, {config.num_layers} together"
    if (
        len(layers_of_stage) != num_stages
        or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in layers_of_stage)
        or sum(layers_of_stage) != config.num_layers
    ):
        raise ValueError(
            f"layers_of_stage is {list(layers_of_stage)}; it must be {wanted}, such as "
            f"{even_layers(config.num_layers, num_stages)}"
        )
    return layers_of_stage
