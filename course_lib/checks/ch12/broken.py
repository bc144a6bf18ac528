"""Table of chapter 12, exercise 8: a broken program, which repeats rows after it was resumed."""

import io
from pickle import UnpicklingError

import torch
from torch import nn

from course_lib.checks import CheckFailed, Exercise, fresh_seed, numbers

_ROWS = 24


class ResumableRun:
    """Trains on every row once in each epoch, in a new random order; can be saved after any step."""

    def __init__(self, model, rows_ND, batch_size):
        self.model, self.rows_ND, self.batch_size = model, rows_ND, batch_size
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        self.numbers = torch.Generator().manual_seed(0)
        self.steps, self.losses, self.waiting = 0, [], []

    def next_rows(self):
        """Return the rows of the next step; draw a new order when all are used."""
        if not self.waiting:
            order_N = torch.randperm(len(self.rows_ND), generator=self.numbers)
            self.waiting = order_N.tolist()
        mine = [self.waiting.pop() for _ in range(self.batch_size)]
        return self.rows_ND[mine]

    def train(self, until):
        """Train up to a number of steps: each row tells its last element."""
        while self.steps < until:
            rows_BD = self.next_rows()
            error_B1 = self.model(rows_BD[:, :-1]) - rows_BD[:, -1:]
            loss = error_B1.square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.steps += 1

    def state(self):
        """Return all that a checkpoint has."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load(self, state):
        """Go on from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


class _Saves(ResumableRun):
    """Also saves the rows that wait, and the state of the generator."""

    parts = ("waiting", "numbers")

    def state(self):
        mine = {"waiting": list(self.waiting), "numbers": self.numbers.get_state()}
        return super().state() | {part: mine[part] for part in self.parts}

    def load(self, state):
        super().load(state)
        self.waiting = list(state.get("waiting", []))
        self.numbers.set_state(state.get("numbers", self.numbers.get_state()))


class _DrawsAgain(ResumableRun):
    """Right: goes through the rows of all steps that were made, without training."""

    def load(self, state):
        super().load(state)
        for _ in range(self.steps):
            self.next_rows()


def _run(answer, rows_ND, stops):
    """Return the rows that a run took, and the weights at its end; at each stop it is saved, built anew, and loaded."""
    taken, state = [], None
    for stop in stops:
        model = nn.Linear(rows_ND.shape[1] - 1, 1, dtype=torch.float64)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        model.register_forward_pre_hook(lambda _, args: taken.extend(args[0][:, 0].long().tolist()))
        made = answer(model, rows_ND, 4)
        if state is not None:
            made.load(state)
        made.train(stop)
        file = io.BytesIO()
        torch.save(made.state(), file)
        try:
            state = torch.load(io.BytesIO(file.getvalue()))
        except UnpicklingError:
            raise CheckFailed(
                "a checkpoint holds tensors, numbers, texts, and lists and dicts of them; `state()` also has another "
                "object, which would run code when it is loaded. A generator's `get_state()` is a tensor"
            ) from None
    return taken, model.weight.detach()


def _watch(answer, killed_at, seed):
    """A row begins with its number."""
    rows_ND, end = torch.cat([torch.arange(_ROWS)[:, None], numbers(seed, _ROWS, 3)], dim=1), 3 * _ROWS // 4
    (right, weights), (taken, got) = (_run(answer, rows_ND, stops) for stops in ([end], [killed_at, end]))
    times = [taken.count(row) for row in range(_ROWS)]
    return {
        "times that rows are taken in 3 epochs, fewest and most": [min(times), max(times)],
        "epochs have different orders": right[:_ROWS] != right[_ROWS : 2 * _ROWS],
        "rows come in the order of the run that was not stopped": taken == right,
        "weights are those of the run that was not stopped": torch.equal(got, weights),
    }


WRONG = {
    "after it was resumed, the run takes some rows too often and others too seldom": [
        ResumableRun,
        {"parts": ["numbers"]},
    ],
    "every row is taken as often as it should, but in another order than without the stop": {"parts": ["waiting"]},
    "the rows are right, and the weights are not those of the run that was not stopped": {
        "load": lambda self, state: _Saves.load(self, state | {"optimizer": self.optimizer.state_dict()})
    },
}
check_resumable = Exercise(
    _Saves,
    lambda rng: [(killed_at, fresh_seed(rng)) for killed_at in (rng.randrange(1, 6), rng.randrange(7, 12))],
    WRONG,
    _watch,
    right=_DrawsAgain,
)
