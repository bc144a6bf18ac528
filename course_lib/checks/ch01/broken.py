"""Table of chapter 01, exercise 8: a broken program, whose log keeps a graph of each step alive."""

import torch
import torch.nn.functional as F

from course_lib.checks import Cost, Exercise, fresh_seed, numbers
from course_lib.compare.trials import sgd
from course_lib.config import ModelConfig
from course_lib.minimal.memory import Tracker
from course_lib.model import build

_STEPS = 5
_SMALL = ModelConfig("small", 1, 16, num_heads=2, num_kv_heads=2, d_ff=32, vocab_size=256, max_seq_len=16)


class LoggedRun:
    """Trains on one device; logs each loss, and how sure the model is of its guess."""

    def __init__(self, model, make_optimizer):
        self.model = model
        self.optimizer = make_optimizer(model.parameters())
        self.losses, self.sureness = [], []

    def log(self, loss, logits_BSV):
        """Keep two numbers of this step."""
        self.losses.append(loss)
        self.sureness.append(logits_BSV.softmax(-1).amax(-1).mean())

    def step(self, x_BS, y_BS):
        """Make one step."""
        logits_BSV = self.model(x_BS)
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten())
        loss.backward()
        self.log(loss, logits_BSV)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _logging(number_of, keeps=lambda logits_BSV: None, entries=None) -> type:
    """Return the program that logs number_of a tensor, keeps a tensor of each step, or the last entries alone."""

    class Logging(LoggedRun):
        def log(self, loss, logits_BSV):
            with torch.no_grad():
                sure = number_of(logits_BSV.softmax(-1).amax(-1).mean())
            self.losses = [*self.losses, number_of(loss.detach())][entries:]
            self.sureness = [*self.sureness, sure][entries:]
            self.kept = [*getattr(self, "kept", []), keeps(logits_BSV)]

    return Logging


class _SureOfTheScore(_logging(float)):
    def log(self, loss, logits_BSV):
        super().log(loss, 2 * logits_BSV)


def _watch(answer, rows, seed):
    model = build(_SMALL)
    made, now = answer(model, sgd), []
    text_BS = (100 * numbers(seed, rows, _STEPS * 16 + 1)).long() % 256
    with Tracker(list(model.parameters())) as tracker:
        for start in range(0, _STEPS * 16, 16):
            part_BS = text_BS[:, start : start + 17]
            made.step(part_BS[:, :-1], part_BS[:, 1:])
            now.append(tracker.now_bytes)
    return {
        "bytes that a step leaves": Cost(max(0, now[-1] - now[1]) // (_STEPS - 2), 1_000),
        "losses": [float(torch.as_tensor(loss).detach()) for loss in made.losses],
        "how sure the model was": [float(torch.as_tensor(sure).detach()) for sure in made.sureness],
    }


WRONG = {
    "memory still grows with every step, by a tensor of the size of the logits": [
        LoggedRun,
        _logging(float, torch.Tensor.detach),
    ],
    "the log has less than one entry for each step": _logging(float, entries=-1),
    "how sure the model was is another number than before": _SureOfTheScore,
}
check_logged_run = Exercise(
    _logging(torch.Tensor.detach),
    lambda rng: [(rng.randrange(4, 9), fresh_seed(rng))],
    WRONG,
    _watch,
    right=_logging(float),
)
