"""Table of chapter 11, exercise 6: a broken program, whose batch arithmetic forgets an axis."""

import random

from course_lib.checks import Exercise, but


class BatchPlan:
    """What a launcher is told of a batch of so many tokens, and what its log says of a step."""

    def __init__(self, gpus, tp, pp, cp, seq_len, batch_tokens):
        self.gpus, self.tp, self.pp, self.cp = gpus, tp, pp, cp
        self.seq_len, self.batch_tokens = seq_len, batch_tokens

    def dp(self):
        """Return how many copies of the model read sequences of their own."""
        return self.gpus // (self.tp * self.pp)

    def accumulation(self):
        """Return how many sequences, one after the other, each copy reads in a step."""
        sequences = self.batch_tokens // self.seq_len
        if sequences % self.dp():
            raise ValueError(f"{sequences} sequences do not divide by dp {self.dp()}")
        return sequences // self.dp()

    def tokens_of_a_step(self):
        """Return the tokens of all copies in one step."""
        return self.accumulation() * self.dp() * self.seq_len

    def tokens_of_a_gpu(self, step_s):
        """Return what the log calls tokens/s/GPU."""
        return self.tokens_of_a_step() / step_s / self.gpus


def machine_step_s(plan, flops_per_token, peak=989e12, share=0.4):
    """Return the seconds of a step of GPUs that reach a share of their peak, for the tokens that they really read."""
    return _tokens_read(plan, plan.accumulation()) * flops_per_token / (plan.gpus * peak * share)


def _tokens_read(plan, accumulation):
    """Return the tokens of a step: a copy of the model is tp pp cp GPUs, whatever the plan believes."""
    return _copies(plan) * accumulation * plan.seq_len


def _copies(plan):
    return plan.gpus // (plan.tp * plan.pp * plan.cp)


def _plans(rng: random.Random) -> list[tuple]:
    plans = []
    for cp in (1, 2, rng.choice([4, 8])):
        tp, pp, dp, count = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([2, 4]), 8 * rng.randrange(1, 5)
        seq_len = 1024 * rng.randrange(2, 9)
        plans.append((tp * pp * cp * dp, tp, pp, cp, seq_len, seq_len * dp * count, rng.uniform(1, 20)))
    return plans


def _watch(answer, gpus, tp, pp, cp, seq_len, batch_tokens, step_s):
    made = answer(gpus, tp, pp, cp, seq_len, batch_tokens)
    return {
        "tokens that the GPUs really read in a step": _tokens_read(made, made.accumulation()),
        "tokens of a step that the log counts": made.tokens_of_a_step(),
        "tokens/s/GPU": made.tokens_of_a_gpu(step_s),
        "copies of the model, dp": made.dp(),
    }


WRONG = {
    "the GPUs still read fewer tokens in a step than the batch has": BatchPlan,
    "now the GPUs read more tokens in a step than the batch has": {"dp": lambda plan: max(1, _copies(plan) // plan.cp)},
    "now dp leaves out another axis, pp or tp": [
        {"dp": lambda plan: plan.gpus // (plan.tp * plan.cp)},
        {"dp": lambda plan: plan.gpus // (plan.pp * plan.cp)},
    ],
    "the GPUs read the batch, but the log counts other tokens": {
        "tokens_of_a_step": lambda plan: plan.accumulation() * plan.seq_len * plan.gpus // (plan.tp * plan.pp)
    },
}
check_batch_plan = Exercise(but(BatchPlan, dp=_copies), _plans, WRONG, _watch)
