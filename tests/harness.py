"""What tests share: one process that sees all tokens, an odd model, how far results are apart, a sample of cases."""

import math
import os
import random
import re
import socket

import pytest
import torch
from torch import nn

from course_lib import training
from course_lib.launch import RankError, launch
from course_lib.training.data import batch

EXHAUSTIVE = pytest.mark.exhaustive
VOCAB = 11


class OddModel(nn.Module):
    """Sizes that no number of ranks divides, an embedding tied to the head, a frozen layer, a strided parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.up = nn.Linear(7, 13)
        self.up.weight = nn.Parameter(torch.randn(7, 13).t())
        self.frozen = nn.Linear(13, 7).requires_grad_(False)
        self.head = nn.Linear(7, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x_BS):
        return self.head(self.frozen(torch.tanh(self.up(self.embed(x_BS)))))


class Branches(nn.Module):
    """Uses one of two layers; a third is never used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleDict({str(index): nn.Linear(8, VOCAB) for index in range(3)})
        self.layer = 0

    def forward(self, x_BS):
        return self.layers[str(self.layer)](self.embed(x_BS))


def some_batches(count, seed=0):
    text_T = torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(seed))
    return [batch(text_T, index, 2, seq_len=5) for index in range(count)]


class LaunchedBySize(dict):
    """What a launch on so many ranks returned; it runs when it is first asked for."""

    def __init__(self, function, *arguments):
        super().__init__()
        self.call = (function, arguments)

    def __missing__(self, size):
        function, arguments = self.call
        self[size] = launch(function, size, *arguments)
        return self[size]


def hang_text(function, world_size, *told, **options):
    """The error of a launch that hangs. On a busy machine ranks come late to where they hang: then with more time."""
    for timeout in (2, 10, 60):
        with pytest.raises(RankError, match=r"\Atime limit") as error:
            launch(function, world_size, timeout=timeout, **options)
        text = str(error.value)
        if all(re.search(one, " ".join(text.split())) for one in told):
            return text
    raise AssertionError(f"not all of {told} in:\n{text}")


def message_of(function, *args, **kwargs):
    """What it says when it refuses."""
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def one_process(whole, batches):
    """The mean loss of all tokens, and the gradients by name, of a model in one process."""
    num_tokens = sum(y_BS.numel() for _, y_BS in batches)
    loss = sum(training.loss_of(whole, x_BS, y_BS) * (y_BS.numel() / num_tokens) for x_BS, y_BS in batches)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}


def largest_difference(found, wanted):
    """The largest difference between two dictionaries of tensors; infinite where names differ."""
    if found.keys() != wanted.keys():
        return math.inf
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def distance(gradients, loss, expected_loss, expected):
    """The difference from one process, of the loss and of each gradient; infinite where names differ."""
    if gradients.keys() != expected.keys():
        return {"names": math.inf}
    apart = {name: (gradients[name] - expected[name]).abs().max().item() for name in expected}
    return apart | {"loss": abs(loss - expected_loss).item()}


def sampled(cases, count, seed=0):
    """Cases for `parametrize`: `count` of them, drawn with `seed`, run always; the others in make test-exhaustive."""
    always = random.Random(seed).sample(range(len(cases)), count)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if index in always else EXHAUSTIVE)
        for index, case in enumerate(cases)
    ]


def free_port():
    """A port of the loopback that is free now, as text; below those that the machine gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randint(20000, 32000)
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)) != 0:
                return str(port)


def my_device() -> torch.device:
    """The GPU of this rank, which ranks share where there are more; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
