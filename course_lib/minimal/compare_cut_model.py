"""One line each for a model whose parts lie on several ranks: wrong gradients, what a block keeps, equal copies.

`trainer` is a class as in tensor.py and sequence.py: all its ranks bring the same tokens. None stands for one process.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.launch import launch
from course_lib.minimal.compare import CONFIG, SEQ_LEN, adamw, master_adamw, sgd
from course_lib.minimal.compare_parts import my_part, worst_of_ranks
from course_lib.model import build
from course_lib.training import loss_of
from course_lib.training.data import batch, micro_batches, tokens
from course_lib.validate import Size, checked

SEQUENCES = 4  # of a step


@checked
def gradient_errors(trainer: type, world_size: Size = 4, num_micro_batches: Size = 1) -> dict[str, float]:
    """Return the loss's and each gradient's largest relative error on any rank, against one process, in float64.

    Gradients are compared as the optimizer is given them. A class with a `config` trains that model.
    """
    return worst_of_ranks(launch(_errors, world_size, trainer, num_micro_batches))


@checked
def kept_by_a_block(trainer: type | None = None, world_size: Size = 1, seq_len: Size = SEQ_LEN) -> float:
    """Return the bytes per token and feature that one block keeps for backward on one rank, in bfloat16.

    Measured as two blocks less one, so that embedding and head drop out.
    """
    one, two = launch(_kept, world_size, trainer, seq_len)[0]
    return (two - one) / (SEQUENCES * seq_len * CONFIG.d_model)


@checked
def train_on_ranks(trainer: type, steps: Size, world_size: Size = 4) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train with AdamW; return the loss of each step, and of each rank the full model that it would save."""
    found = launch(_train, world_size, trainer, steps)
    return found[0][0], [full for _, full in found]


@checked
def different_copies(models: Sequence[dict[str, Tensor]]) -> int:
    """Return how many different models are among those that the ranks would save."""
    flat = [torch.cat([param.flatten() for param in model.values()]) for model in models]
    return sum(not any(torch.equal(one, other) for other in flat[:index]) for index, one in enumerate(flat))


def _parts(step: int, num_micro_batches: int = 1, seq_len: int = SEQ_LEN) -> list[tuple[Tensor, Tensor]]:
    return micro_batches(*batch(tokens(100_000), step, SEQUENCES, seq_len), num_micro_batches)


def _errors(trainer: type, num_micro_batches: int) -> dict[str, float]:
    config = getattr(trainer, "config", CONFIG)
    whole = build(config, dtype=torch.float64)
    full_loss = loss_of(whole, *_parts(0)[0])
    full_loss.backward()
    made = trainer(build(config, dtype=torch.float64), sgd, dist.group.WORLD)
    parts = _parts(0, num_micro_batches)
    with torch.no_grad():
        loss = sum(made.loss(*part) for part in parts) / len(parts)
    errors = {"loss": abs(loss / full_loss - 1).item()}

    def compare(*_) -> None:
        for (name, param), full in zip(made.model.named_parameters(), whole.parameters(), strict=True):
            expected = my_part(full.grad, param.shape)
            errors[name] = ((param.grad - expected).norm() / expected.norm()).item()

    made.optimizer.register_step_pre_hook(compare)
    made.backward(parts)
    made.update()
    return errors


def _kept(trainer: type | None, seq_len: int) -> list[int]:
    """Bytes that autograd keeps of one block's model and of two blocks', each storage once, without parameters."""
    sizes = []
    for num_layers in (1, 2):
        model = build(replace(CONFIG, num_layers=num_layers), dtype=torch.bfloat16)
        made = trainer(model, master_adamw, dist.group.WORLD) if trainer else None
        storages, alive = {}, [*model.parameters()]
        own = {param.untyped_storage().data_ptr() for param in alive}

        def pack(x: Tensor, storages=storages, alive=alive, own=own) -> Tensor:
            alive.append(x)  # so that no address is used twice
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, nn.Identity()):
            made.loss(*_parts(0, 1, seq_len)[0]) if made else loss_of(model, *_parts(0, 1, seq_len)[0])
        sizes.append(sum(storages.values()))
    return sizes


def _train(trainer: type, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    made, losses = trainer(build(CONFIG), adamw, dist.group.WORLD), []
    loss_of_part = made.loss

    def loss(x_BS: Tensor, y_BS: Tensor) -> Tensor:
        value = loss_of_part(x_BS, y_BS)
        losses.append(value.item())
        return value

    made.loss = loss  # backward calls it
    for step in range(steps):
        made.backward(_parts(step))
        made.update()
    return losses, {name: param.detach().clone() for name, param in made.full_parameters().items()}
