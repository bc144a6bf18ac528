"""What graders see of a trainer, whatever it shards, and trainers that are wrong alike."""

from collections.abc import Callable
from functools import cache, partial

import torch.distributed as dist
from torch import Tensor

from course_lib.checks.core import but
from course_lib.checks.watch import Cost
from course_lib.compare import trials
from course_lib.compare.record import Record

STEP = "parameters less one process's, after {} with {}"


def inputs(rng) -> list[tuple[int, int]]:
    """(ranks, micro-batches) of each case."""
    [size] = rng.choices([2, 4])
    return [(size, 1), (size, 3)]


def trained(trainer: type, num_micro_batches: int) -> dict:
    """Watch how far parameters are from one process's, after SGD, which shows a wrong factor, and once after AdamW."""
    seen, optimizers = {}, [("one step of SGD", trials.sgd, 1), ("two steps of AdamW", trials.adamw, 2)]
    for what, make_optimizer, steps in optimizers[: 2 if num_micro_batches == 1 else 1]:
        parts = partial(trials.micro_batches_of_rank, num_micro_batches=num_micro_batches, trainer=trainer)
        (_, full), right = trials.trained(trainer, make_optimizer, steps, parts), _one_process(make_optimizer, steps)
        seen[STEP.format(what, f"{num_micro_batches} micro-batch{'es' * (num_micro_batches > 1)}")] = {
            name: (param - right[name]).detach() if name in right else param.detach() for name, param in full.items()
        }
    return seen


@cache
def _one_process(make_optimizer, steps: int) -> dict[str, Tensor]:
    return dict(trials.one_process(trials.CONFIG, trials.global_batches(steps), make_optimizer)[1].named_parameters())


def counted(trainer: type) -> Record:
    """Watch the bytes that two steps of one micro-batch hold, with parameters and gradients in bfloat16."""
    record = Record()
    trials.as_counted_trainer(record, trainer)
    return record


def sent_in_a_step(trainer: type, num_micro_batches: int) -> Cost:
    """Watch the bytes that a step sends, with parameters and gradients in bfloat16."""
    record = Record()
    trials.count_bytes(record, trainer, trials.micro_batches_of_rank(0, num_micro_batches, trainer))
    sent = sum(record.sent.values())
    return Cost(sent, 0.01 * sent)


def scaled(trainer: type, factor: Callable[[int, int], float], drops: bool = True) -> type:
    """Return the trainer with factor(ranks, micro-batches) times its gradients; `drops`: whether it drops them."""

    class Scaled(trainer):
        def __init__(self, model, make_optimizer, group):
            def make_scaling(params):
                optimizer = make_optimizer(params)
                optimizer.register_step_pre_hook(self.scale)
                if not drops:
                    optimizer.zero_grad = lambda: None
                return optimizer

            super().__init__(model, make_scaling, group)

        def backward(self, micro_batches):
            self.count = len(micro_batches)
            super().backward(micro_batches)

        def scale(self, optimizer, *_):
            for param in optimizer.param_groups[0]["params"]:
                param.grad *= factor(dist.get_world_size(), self.count)

    return Scaled


DROP = "drop gradients after each step: fill them with zeros, or set them to None"


def wrong_means(trainer: type) -> dict[str, type]:
    """Return what is told -> the trainer with another gradient than the mean over ranks and micro-batches."""
    last_alone = but(trainer, backward=lambda self, micro_batches: trainer.backward(self, micro_batches[-1:]))
    return {
        "no parameter changed; update must make the optimizer's step": scaled(trainer, lambda ranks, parts: 0),
        "its steps used the sum over the ranks; take the mean over ranks: divide by their number": scaled(
            trainer, lambda ranks, parts: ranks
        ),
        "its steps used the mean over ranks divided by their number again; divide by the ranks once": scaled(
            trainer, lambda ranks, parts: 1 / ranks
        ),
        "the sum over the micro-batches; take the mean over micro-batches: divide each loss by their number": scaled(
            trainer, lambda ranks, parts: parts
        ),
        "the mean over micro-batches divided by their number again; divide by their number once": scaled(
            trainer, lambda ranks, parts: 1 / parts
        ),
        "the last micro-batch alone; gradients must add up over the micro-batches": last_alone,
        "only the last micro-batch's part; gradients must add up over the micro-batches": scaled(
            last_alone, lambda ranks, parts: 1 / parts
        ),
    }
