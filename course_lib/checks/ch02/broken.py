"""Table of chapter 02, exercise 9: a broken program, whose recomputation takes another way through the model."""

import random

import torch
from torch import nn

from course_lib.checks import Exercise, fresh_seed, numbers
from course_lib.config import ModelConfig
from course_lib.minimal.recompute import recompute
from course_lib.model import build
from course_lib.training import loss_of

_STEPS = 6
_SMALL = ModelConfig("small", 4, 16, num_heads=2, num_kv_heads=2, d_ff=32, vocab_size=256, max_seq_len=16)


class SometimesBlock(nn.Module):
    """A block that is left out in a random half of the steps, and recomputed."""

    def __init__(self, block, seed):
        super().__init__()
        self.block, self.random = block, random.Random(seed)

    def run(self, x_BSD, *tables):
        """Go through the block, or around it."""
        if self.random.random() < 0.5:
            return x_BSD
        return self.block(x_BSD, *tables)

    def forward(self, x_BSD, *tables):
        """Keep the input alone; the rest is computed again in backward."""
        return recompute(self.run, x_BSD, *tables)


class _Draws(SometimesBlock):
    step, recomputed = -1, True

    def around(self):
        return self.random.random() < 0.5

    def forward(self, x_BSD, *tables):
        self.step += 1
        if self.around():
            return x_BSD
        return recompute(self.block, x_BSD, *tables) if self.recomputed else self.block(x_BSD, *tables)


class _Remembers(SometimesBlock):
    """Draws before it recomputes, and remembers it where the next forward pass overwrites it."""

    def run(self, x_BSD, *tables):
        return x_BSD if self.around else self.block(x_BSD, *tables)

    def forward(self, x_BSD, *tables):
        self.around = self.random.random() < 0.5
        return recompute(self.run, x_BSD, *tables)


class _DrawsFromTorch(SometimesBlock):
    """Right: recomputation puts the state of torch's generator back."""

    def run(self, x_BSD, *tables):
        return x_BSD if torch.rand(()) < 0.5 else self.block(x_BSD, *tables)


def _watch(answer, seed):
    """Beside the model, the same blocks without recomputation take the ways that it took forward."""
    model, runs = build(_SMALL, dtype=torch.float64), []
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    mine, params = nn.ModuleList(answer(block, seed + n) for n, block in enumerate(blocks)), list(model.parameters())

    def ways_and_gradients(passes):
        """All forward passes, then backward through all of them: pipelines do so."""
        runs.clear()
        losses, ways = [], []
        for of, text_BS in passes:
            before, model.blocks = len(runs), nn.ModuleList(of)
            losses.append(loss_of(model, text_BS[:, :-1], text_BS[:, 1:]))
            ways.append(runs[before:])
        forward = len(runs)
        sum(losses).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        for param in params:
            param.grad = None
        return ways, len(runs) > forward, torch.nn.utils.parameters_to_vector(grads)

    off, recomputed, ways = {1: 0, 2: 0}, 0, []
    for step in range(_STEPS):
        for count in off:
            texts = [(100 * numbers(seed + 2 * step + n, 2, 9)).long() % 256 for n in range(count)]
            taken, again, got = ways_and_gradients([(mine, text_BS) for text_BS in texts])
            plain = [([blocks[number] for number in way], text_BS) for way, text_BS in zip(taken, texts, strict=True)]
            off[count] += not torch.allclose(got, ways_and_gradients(plain)[2])
            recomputed, ways = recomputed + (again or not any(taken)), ways + taken
    return {
        "steps whose gradients are not those of their forward pass": off[1],
        "steps of two forward passes, then backward, whose gradients are not those of both": off[2],
        "steps that recompute what they ran": recomputed,
        "steps take different ways": len({tuple(way) for way in ways}) > 1,
        "the share of blocks that ran is near a half": 0.05 < sum(map(len, ways)) / (len(ways) * len(blocks)) < 0.95,
    }


WRONG = {
    "gradients are still those of another way than forward took": SometimesBlock,
    "with two forward passes before backward, the first is recomputed the way of the second": _Remembers,
    "gradients are right, but every step leaves out the same blocks": {"around": lambda self: self.step < 0},
    "gradients are right, but nothing is recomputed any more": {"recomputed": False},
}
check_sometimes_block = Exercise(_Draws, lambda rng: [(fresh_seed(rng),)], WRONG, _watch, right=_DrawsFromTorch)
