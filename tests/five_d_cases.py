"""Layouts, tiny models, and one process beside them: what tests of the five-dimensional trainer share."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from course_lib import model
from course_lib.config import PRESETS, MlaConfig, MoeConfig
from course_lib.layout import Layout
from course_lib.measure import ByteMeter
from course_lib.model import moe_layers, with_moe
from course_lib.model.moe import balance_after_step, recomputing
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.training import loss_of
from course_lib.training.precision import gradient_of

SEQ_LEN = 16
SMALL = replace(
    PRESETS["toy"], num_layers=4, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=50, vocab_size=61
)  # features and vocabulary do not divide by 4
EXPERTS = MoeConfig(8, 2, 24, num_shared_experts=1, balancing="aux_loss", first_dense_layers=1)
LATENT = replace(SMALL, num_kv_heads=4, head_dim=None, mla=MlaConfig(20, 12, 6, 4, 8))  # keys of 10, values of 8
CONFIGS = {
    "llama": SMALL,
    "head norms": replace(SMALL, qk_norm=True),
    "tied head norms": replace(SMALL, qk_norm=True, tied=True, moe=EXPERTS),
    "latent": LATENT,
    "latent experts": replace(LATENT, tied=True, moe=EXPERTS),
    "tied": replace(SMALL, tied=True),
    "gpt": replace(SMALL, family="gpt", num_kv_heads=4, tied=True),
    "experts": replace(SMALL, moe=EXPERTS),
    "tied experts": replace(SMALL, tied=True, moe=EXPERTS),
}
CONFIGS["biased experts"] = with_moe(CONFIGS["experts"], balancing="bias", score="sigmoid", bias_speed=0.1)


def micro_batches(layout, dp_rank, config, step=0):
    """What one dp rank brings to a step."""
    made = []
    for index in range(layout.micro_batches):
        generator = torch.Generator().manual_seed(1000 * step + 100 * dp_rank + index)
        tokens_BS = torch.randint(config.vocab_size, (layout.micro_batch, SEQ_LEN + 1), generator=generator)
        made.append((tokens_BS[:, :-1], tokens_BS[:, 1:]))
    return made


@lru_cache
def one_process(name, dp, micro_batch, num_micro_batches, steps=2, clip_norm=0.1):
    """Losses and norms of some clipped steps, the first gradients and the last parameters, of all dp ranks' batches."""
    config, layout = CONFIGS[name], Layout(dp=dp, micro_batch=micro_batch, micro_batches=num_micro_batches)
    reference = model.build(config, dtype=torch.float64)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    losses, norms, first = [], [], {}
    for step in range(steps):
        of_ranks = [micro_batches(layout, rank, config, step) for rank in range(dp)]
        loss = 0.0
        for index in range(num_micro_batches):
            x_BS, y_BS = (torch.cat([batches[index][which] for batches in of_ranks]) for which in (0, 1))
            share = loss_of(reference, x_BS, y_BS) / num_micro_batches
            share.backward()
            loss += share.item()
        first = first or {name: param.grad.clone() for name, param in reference.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        balance_after_step(reference)
        losses.append(loss)
    return losses, norms, first, {name: param.detach() for name, param in reference.named_parameters()}


@dataclass
class Found:
    """What one rank saw under a layout."""

    losses: list
    norms: list
    first: dict | None  # gradients, whole; of rank 0 alone, for all ranks put together the same
    last: dict | None  # parameters, whole; likewise
    apart: float  # how far this rank's own gradients are from the whole ones
    shapes: dict
    sent: dict  # bytes of the second step, by axis
    routings: list  # whom the tokens of that step chose, by layer and micro-batch


def on_ranks(name, text, steps=2, clip_norm=0.1, loss_chunks=1):
    """The same under a layout, as one rank sees it."""
    config, layout = CONFIGS[name], Layout.parse(text)
    engine = five_d.build(config, layout, dtype=torch.float64)
    engine.loss_chunks = loss_chunks
    optimizer = engines.make_optimizer(engine, lr=0.01)
    losses, norms, routings = [], [], []
    meter = ByteMeter(axes=engine.axes)
    for step in range(steps):
        batches = micro_batches(layout, engine.groups.coordinates["dp"], config, step)
        if step == 0:  # a step in its parts, to see the gradients before they are clipped
            losses.append(engines.accumulate_gradients(engine, batches).item())
            first, apart = engines.full_gradients(engine), 0.0
            if layout.zero_stage == 0:
                apart = distance_of_mine(engine, first)
            norms.append(engines.clip_gradients(engine, clip_norm).item())
            engines.update(engine, optimizer)
        else:
            with meter, listening(engine, routings):
                losses.append(engines.step(engine, batches, optimizer, clip_norm).item())
    shapes = {name: tuple(param.shape) for name, param in five_d.named_parameters(engine).items()}
    last = engines.full_parameters(engine)
    if engine.groups.world.rank() > 0:
        first = last = None
    return Found(losses, norms, first, last, apart, shapes, meter.by_axis, routings)


@contextmanager
def listening(engine, routings):
    """Notes the choices of every router, once a micro-batch: those of a forward that is run again are the same."""

    def note(router, inputs, routing):
        if not recomputing():
            routings.append(torch.where(routing.kept_Tk, routing.expert_Tk, -1))

    handles = [moe.router.register_forward_hook(note) for moe in moe_layers(engine)]
    yield
    for handle in handles:
        handle.remove()


def distance_of_mine(engine, gradients):
    """Where several ranks have the same numbers, each must have those that were put together."""
    cuts, tp_rank = five_d.cuts_of(engine), engine.groups.tp.rank()
    return max(
        (gradient_of(param) - (cuts[name].part(gradients[name], tp_rank) if name in cuts else gradients[name]))
        .abs()
        .max()
        .item()
        for name, param in five_d.named_parameters(engine).items()
    )


def distances(found, expected):
    """Largest differences: of losses, norms, and on rank 0 of first gradients and last parameters."""
    losses, norms, first, last = expected
    far = {
        "loss": max(abs(a - b) for a, b in zip(found.losses, losses, strict=True)),
        "norm": max(abs(a - b) for a, b in zip(found.norms, norms, strict=False)),  # not of every step
    }
    if found.first is None:
        return far
    assert first.keys() == found.first.keys() and last.keys() == found.last.keys()
    return far | {
        "gradients": max((found.first[name] - first[name]).abs().max().item() for name in first),
        "parameters": max((found.last[name] - last[name]).abs().max().item() for name in last),
    }
