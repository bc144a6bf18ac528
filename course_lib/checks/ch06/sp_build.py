"""Table of chapter 06, exercise 7: tensor and sequence parallelism of a Llama, judged by what the lesson measures."""

import torch
import torch.distributed as dist

from course_lib.checks import Cost, Exercise, but
from course_lib.checks.ch06.broken import HookedSequenceParallel, Sums
from course_lib.checks.trainers import inputs, sent_in_a_step, trained
from course_lib.comm import all_gather, all_reduce, gather_in, join, scatter_sum, split, sum_out
from course_lib.compare import trials
from course_lib.compare.record import Record
from course_lib.minimal.sequence import TensorSequenceParallel, norms_of
from course_lib.minimal.tensor import TensorParallel, cut_dim
from course_lib.model import build
from course_lib.training import loss_of


class FromItsParts(TensorParallel):
    """The package's gather; norms are marked when the model is built, and summed by the update."""

    enter = staticmethod(lambda x_BsD, group: gather_in(x_BsD, group, 1))
    leave = staticmethod(lambda x_BSD, group: scatter_sum(x_BSD, group, 1))

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        self.marked = [param for param in self.model.parameters() if param.dim() == 1]

    def update(self):
        summed = all_reduce(torch.stack([param.grad for param in self.marked]), self.group)
        for param, grad in zip(self.marked, summed, strict=True):
            param.grad = grad.clone()
        super().update()


class WithoutTheSum(TensorSequenceParallel):
    """With the sum of other parameters than the norms."""

    summed = staticmethod(lambda model: [])

    def backward(self, micro_batches):
        TensorParallel.backward(self, micro_batches)
        for param in self.summed(self.model):
            param.grad = all_reduce(param.grad, self.group)


def watch(answer, num_micro_batches):
    if num_micro_batches > 1:
        return trained(answer, num_micro_batches)
    group, D = dist.group.WORLD, trials.CONFIG.d_model
    seen = _gradients(answer) | trained(answer, 1)
    params_P = torch.cat([param.flatten() for param in list(seen.values())[-1].values()])  # equal where copies are
    seen["different models that the ranks would save"] = len(all_gather(params_P[None], group).unique(dim=0))
    record = Record()
    trials.as_block(record, answer)
    kept = record.kept
    seen["bytes that a block saves for backward, per token and feature"] = Cost(kept, 0.01 * kept)
    sent = sent_in_a_step(answer, 1)
    regathers = kept <= 1.01 * (38 + 8 / D + 4 * trials.CONFIG.num_heads / D) / group.size()
    tokens = trials.SEQUENCES * trials.SEQ_LEN
    phases = 2 * trials.CONFIG.num_layers + 1 if regathers else 0  # the inputs of columns are gathered again
    again = phases * 2 * tokens * D * (group.size() - 1) // group.size()
    return seen | {"bytes sent": Cost(sent.value - again, sent.slack)}


def _gradients(answer):
    """Watch the tokens of the first norm, the loss, and the gradients as the optimizer is given them."""
    made, normed, seen = answer(build(trials.CONFIG, dtype=torch.float64), trials.sgd, dist.group.WORLD), [], {}
    made.model.blocks[0].attention_norm.register_forward_pre_hook(lambda _, args: normed.append(tuple(args[0].shape)))
    [part] = trials.micro_batches_of_rank(0, 1, trainer=answer)
    whole = build(trials.CONFIG, dtype=torch.float64)
    full_loss = loss_of(whole, *part)
    full_loss.backward()
    full = {name: param.grad for name, param in whole.named_parameters()}
    with torch.no_grad():
        loss = made.loss(*part) - full_loss.detach()

    def note(*_) -> None:
        off = {"norms": {}, "matrices": {}}
        for name, param in made.model.named_parameters():
            dim = cut_dim(param.shape, full[name].shape)
            mine = full[name] if dim is None else split(full[name], dist.group.WORLD, dim)
            off["norms" if "norm" in name else "matrices"][name] = param.grad - mine
        seen.update({f"gradients of {kind} less one process's": of_kind for kind, of_kind in off.items()})

    made.optimizer.register_step_pre_hook(note)
    made.backward([part])
    made.update()
    return {"tokens that the first norm is given": normed[:1], "the loss less one process's": loss} | seen


SUM = (
    "the loss is right, and the gradient of every norm is not: a rank has its own tokens' part of it, so add the parts "
    "of all ranks, once per step; all_reduce does not change its argument: use the value it returns"
)
_GATHER = (
    "the loss is right, and gradients are not: the backward of a gather sums over the ranks, and the backward of a "
    "reduce-scatter gathers"
)
ENOUGH = (
    "an all-reduce followed by a slice sends twice what a reduce-scatter sends, and of the gradients only those of "
    "norms are sent"
)
WRONG = {
    "the first norm was given all tokens; after leave() a rank has its own": TensorParallel,
    "the first norm was given some of the sequences; cut the tokens, dimension 1, not the batch": {
        "enter": staticmethod(lambda x_bSD, group: gather_in(x_bSD, group, 0)),
        "leave": staticmethod(lambda x_BSD, group: scatter_sum(x_BSD, group, 0)),
    },
    SUM: WithoutTheSum,
    "the gradients of 1 of 9 norms are not summed: that of the last, behind the blocks": but(
        WithoutTheSum, summed=staticmethod(lambda model: norms_of(model.blocks))
    ),
    "on tp ranks the gradients of norms are tp times too small: averaged; add the ranks' parts": but(Sums, op="mean"),
    "a part of a matrix has its full gradient already; only what is replicated is to be summed": but(
        WithoutTheSum, summed=staticmethod(lambda model: list(model.parameters()))
    ),
    "sum once, after the last micro-batch: a second sum counts the first micro-batches again": HookedSequenceParallel,
    _GATHER: {"enter": staticmethod(lambda x_BsD, group: join(x_BsD, group, 1))},
    ENOUGH: {"leave": staticmethod(lambda x_BSD, group: split(sum_out(x_BSD, group), group, 1))},
}
SAYS = {
    "tokens that the first norm is given": "after leave() a rank has its own tokens of every sequence",
    "the loss less one process's": "leave() must sum the ranks' partial sums",
    "gradients of norms less one process's": SUM,
    "gradients of matrices less one process's": _GATHER,
    "bytes that a block saves for backward, per token and feature": "norms and residual sums should have this "
    "rank's tokens only",
    "bytes sent": ENOUGH,
}
check_sequence_parallel = Exercise(
    TensorSequenceParallel, inputs, WRONG, watch, SAYS, right=FromItsParts, ranks=True, seconds=60.0
)
