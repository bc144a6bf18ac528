"""What graders ask of a trainer, whatever it shards: the result of one process, and no more bytes than needed."""

from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.core import fail, launched, rank_errors_as_failures, run_ranks
from course_lib.checks.watch import Cost
from course_lib.comm import all_gather
from course_lib.compare import trials
from course_lib.compare.record import Record, Records, on_ranks
from course_lib.model import build
from course_lib.training import loss_of

LR = trials.sgd.keywords["lr"]


def expect_right(trainer: type, world_size: int) -> dict[int, Records]:
    """The trainer's parameters are those of one process; return the runs with 1 and with 3 micro-batches."""
    runs = {}
    for num_micro_batches in (1, 3):
        with rank_errors_as_failures(world_size):
            run = launched(on_ranks, trainer, trials.as_trainer, world_size, num_micro_batches=num_micro_batches)
        difference, runs[num_micro_batches] = run.difference, run
        if not difference < 1e-9:
            why = run_ranks(_what_was_used, world_size, trainer, num_micro_batches)[0]
            fail(
                f"with {micro_batches(num_micro_batches)} on {world_size} ranks a "
                f"parameter differs from one process by {difference:.1e}; {why}"
            )
    return runs


def expect_sent(run: Records, num_micro_batches: int, phases: int, phase_bytes: int) -> None:
    """The trainer sent at most so many phases in a step."""
    sent, enough = run.sent_bytes[0], phases * phase_bytes
    if sent > 1.01 * enough:
        fail(
            f"with {micro_batches(num_micro_batches)} a rank sent {sent:,} bytes, and {phases} phases are "
            f"{enough:,} bytes"
        )


def micro_batches(count: int) -> str:
    """A number of micro-batches in words."""
    return f"{count} micro-batch{'es' * (count > 1)}"


# What a table watches of a trainer, on each rank --------------------------------------------------------------------


def trained(trainer: type, num_micro_batches: int) -> dict:
    """Watch how far parameters are from one process's, after SGD, which shows a wrong factor, and once after AdamW."""
    seen, optimizers = {}, [("one step of SGD", trials.sgd, 1), ("two steps of AdamW", trials.adamw, 2)]
    for what, make_optimizer, steps in optimizers[: 2 if num_micro_batches == 1 else 1]:
        parts = partial(trials.micro_batches_of_rank, num_micro_batches=num_micro_batches, trainer=trainer)
        _, full = trials.trained(trainer, make_optimizer, steps, parts)
        right = _one_process(make_optimizer, steps)
        seen[f"parameters less one process's, after {what} with {micro_batches(num_micro_batches)}"] = {
            name: (param - right[name]).detach() if name in right else param.detach() for name, param in full.items()
        }
    return seen


@cache
def _one_process(make_optimizer, steps: int) -> dict[str, Tensor]:
    return dict(trials.one_process(trials.CONFIG, trials.global_batches(steps), make_optimizer)[1].named_parameters())


def sent_in_a_step(trainer: type, num_micro_batches: int) -> Cost:
    """Watch the bytes that a step sends, with parameters and gradients in bfloat16."""
    record = Record()
    trials.count_bytes(record, trainer, trials.micro_batches_of_rank(0, num_micro_batches, trainer))
    sent = sum(record.sent.values())
    return Cost(sent, 0.01 * sent)


# Which gradient a wrong trainer used: what a step of SGD took away, divided by the learning rate ----------------------


def _what_was_used(trainer: type, num_micro_batches: int) -> str:
    """In a rank: the gradient that the first or second step of SGD used, beside the one that is required."""
    start_P = _flat(dict(build(trials.CONFIG, dtype=torch.float64).named_parameters()))
    first_P, second_P = (_after(trainer, steps, num_micro_batches) for steps in (1, 2))
    found_RMP = _gradients(start_P, 0, num_micro_batches)
    used_P = (start_P - first_P) / LR
    if not _same(used_P, found_RMP.mean((0, 1))):
        return _named(used_P, _of_one_step(found_RMP), found_RMP.mean((0, 1)), "first")
    again_RMP = _gradients(first_P, 1, num_micro_batches)
    used_P, right_P = (first_P - second_P) / LR, again_RMP.mean((0, 1))
    if _same(used_P, right_P):
        return "two steps of SGD are right, and those of AdamW are not; build the optimizer once, for every parameter"
    dropped = "drop gradients after each step: fill them with zeros, or set them to None"
    old = {
        f"the new gradient plus that of the first step; {dropped}": right_P + found_RMP.mean((0, 1)),
        f"the gradient of the first step again; {dropped}": found_RMP.mean((0, 1)),
        "this rank's own gradient, not averaged; the optimizer must read what is sent, and zero_grad() replaces a "
        ".grad that is a view of a bucket by None": again_RMP[dist.get_rank()].mean(0),
    }
    return _named(used_P, old | _of_one_step(again_RMP), right_P, "second")


def _of_one_step(found_RMP: Tensor) -> dict[str, Tensor]:
    """Gradients that a wrong program uses, each with what is required in its place."""
    num_ranks, count, _ = found_RMP.shape
    mean_MP = found_RMP.mean(0)
    mean_P, own_MP = mean_MP.mean(0), found_RMP[dist.get_rank()]
    wrong = {
        "nothing: no parameter changed; update must make the optimizer's step": torch.zeros_like(mean_P),
        f"the sum over the {num_ranks} ranks; take the mean over ranks: divide by their number": num_ranks * mean_P,
        f"the mean over ranks divided by {num_ranks} again; divide by the ranks once": mean_P / num_ranks,
        "this rank's own gradient; take the mean over ranks": own_MP.mean(0),
    }
    if count == 1:
        return wrong
    return wrong | {
        f"the sum over the {count} micro-batches; take the mean over micro-batches: divide each loss by their number": (
            count * mean_P
        ),
        f"the mean over micro-batches divided by {count} again; divide by their number once": mean_P / count,
        "the last micro-batch alone; gradients must add up over the micro-batches": mean_MP[-1],
        "only the last micro-batch's part; gradients must add up over the micro-batches": mean_MP[-1] / count,
        "the mean over ranks of the first micro-batch, and this rank's own gradient of the later ones; average when "
        "the last micro-batch is in": (mean_MP[0] + own_MP[1:].sum(0)) / count,
        "the mean over ranks of the first micro-batch alone; average when the last micro-batch is in": (
            mean_MP[0] / count
        ),
    }


def _named(used_P: Tensor, wrong: dict[str, Tensor], right_P: Tensor, step: str) -> str:
    """Say which of the wrong gradients a step used, or how long its gradient was."""
    for meaning, value_P in wrong.items():
        if _same(used_P, value_P):
            return f"its {step} step used {meaning}"
    return (
        f"its {step} step used a gradient of norm {used_P.norm():.3g}, and the mean over all ranks and micro-batches "
        f"has norm {right_P.norm():.3g}; is every gradient complete before update, and every parameter new after it?"
    )


def _same(a_P: Tensor, b_P: Tensor) -> bool:
    return bool((a_P - b_P).norm() <= 1e-6 * b_P.norm() + 1e-9)


def _after(trainer: type, steps: int, num_micro_batches: int) -> Tensor:
    """All parameters after so many steps of SGD."""
    made = trainer(build(trials.CONFIG, dtype=torch.float64), trials.sgd, dist.group.WORLD)
    for step in range(steps):
        made.backward(trials.micro_batches_of_rank(step, num_micro_batches))
        made.update()
    return _flat(made.full_parameters())


def _gradients(params_P: Tensor, step: int, num_micro_batches: int) -> Tensor:
    """The gradient of each rank and micro-batch at these parameters; R and M count ranks and micro-batches."""
    model = build(trials.CONFIG, dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(params_P, model.parameters())
    parts = trials.micro_batches_of_rank(step, num_micro_batches)
    own = [torch.autograd.grad(loss_of(model, *part), list(model.parameters())) for part in parts]
    own_MP = torch.stack([torch.cat([grad.flatten() for grad in grads]) for grads in own])
    return all_gather(own_MP[None], dist.group.WORLD)


def _flat(params: dict[str, Tensor]) -> Tensor:
    """All parameters end to end, in the order of the model."""
    names = [name for name, _ in build(trials.CONFIG, device="meta").named_parameters()]
    return torch.cat([params[name].detach().flatten() for name in names])
