"""Table of chapter 05, exercise 7: a tensor-parallel Llama from an empty cell, judged by what the lesson measures."""

from course_lib.checks import Cost, Exercise
from course_lib.checks.trainers import counted, inputs, scaled, sent_in_a_step, trained
from course_lib.minimal.sequence import sum_norm_gradients
from course_lib.minimal.tensor import ColumnParallelLinear, TensorParallel, copy_in, put_before, sum_out
from course_lib.parallel import tensor as engine_of
from course_lib.parallel.engine import full_parameters
from course_lib.training import loss_of


class ByTheEngine(TensorParallel):
    """Right: the engine of the course, whose all-reduce of f runs beside the weight gradients."""

    def __init__(self, model, make_optimizer, group):
        self.engine = engine_of.build(model, group)
        self.model = self.engine.module
        self.optimizer = make_optimizer(self.model.parameters())

    def loss(self, x_BS, y_BS):
        return self.engine.token_losses(x_BS, y_BS).mean()

    def full_parameters(self):
        return full_parameters(self.engine)


NOTHING_SENT = staticmethod(lambda x, group: x)  # in place of f or g


def loss_with_targets_of_other_ranks(trainer, x_BS, y_BS):
    """Each rank adds a logit for every target, also where the target is another rank's."""
    z_BSv = trainer.model(x_BS)
    v = z_BSv.shape[-1]
    place_BS = (y_BS - trainer.group.rank() * v).clamp(0, v - 1)
    target_BS = sum_out(z_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1), trainer.group)
    return (sum_out(z_BSv.exp().sum(-1), trainer.group).log() - target_BS).mean()


class HeadStaysFull(TensorParallel):
    """Right, but the head is on every rank in full."""

    def __init__(self, model, make_optimizer, group):
        head = model.head
        super().__init__(model, make_optimizer, group)
        model.head = head
        self.optimizer = make_optimizer(model.parameters())

    def loss(self, x_BS, y_BS):
        return loss_of(self.model, x_BS, y_BS)


class FBeforeEachColumn(TensorParallel):
    """Right, but it sends more."""

    enter = NOTHING_SENT

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for layer in model.modules():
            if isinstance(layer, ColumnParallelLinear):
                put_before(layer, copy_in, group)


def watch(answer, num_micro_batches):
    seen = {"same_tokens": getattr(answer, "same_tokens", False)} | trained(answer, num_micro_batches)
    if num_micro_batches == 1:
        held, kinds = counted(answer).held, ("parameters", "gradients", "optimizer")
        seen["bytes held at the end of backward"] = {kind: Cost(held[kind], 0.02 * held[kind]) for kind in kinds}
    return seen | {"bytes sent": sent_in_a_step(answer, num_micro_batches)}


STEP = "parameters less one process's, after one step of SGD with {}"
DIVIDED = "is each loss divided by the number of micro-batches?"
PARTS = "cut every matrix, the embedding and the head as well, and let the full ones go"
ENOUGH = "one f for all layers that share an input, no all-reduce in update, and logits that stay in parts"
FULL = "is there an f in front of all columns, a g behind all rows, and nothing summed that is full already?"
WRONG = {
    "the class needs `same_tokens = True`: without it the check gives every rank other sequences": {
        "same_tokens": False
    },
    "there is no f in front of the columns: each rank has only its own columns' part of x's gradient": {
        "enter": NOTHING_SENT
    },
    "there is no g behind the rows: what goes on is a partial sum": {"leave": NOTHING_SENT},
    "the norms' gradients were summed, but every rank has the whole one, since f summed it": {
        "update": lambda self: (sum_norm_gradients(self.model, self.group), TensorParallel.update(self))
    },
    "the loss is wrong: a rank counts a target's logit only where the target is its own": {
        "loss": loss_with_targets_of_other_ranks
    },
    DIVIDED: scaled(TensorParallel, lambda ranks, parts: parts),
    PARTS: HeadStaysFull,
    ENOUGH: FBeforeEachColumn,
}
SAYS = {
    STEP.format("1 micro-batch"): f"backward reaches the last of them first; {FULL}",
    STEP.format("3 micro-batches"): DIVIDED,
    "bytes held at the end of backward": PARTS,
    "bytes sent": ENOUGH,
}
check_tensor_parallel = Exercise(
    TensorParallel, inputs, WRONG, watch, SAYS, right=ByTheEngine, ranks=True, seconds=60.0
)
