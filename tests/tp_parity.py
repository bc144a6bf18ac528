"""One training on N ranks that share each layer, and the same in one process; for tests of tensor parallelism."""

import dataclasses

import torch
import torch.distributed as dist
from harness import largest_difference

from course_lib import model
from course_lib.config import PRESETS
from course_lib.measure import ByteMeter
from course_lib.parallel import engine as engines
from course_lib.training import loss_of

LAYERS, ROWS, SEQ_LEN = 2, 3, 8
TOY = dataclasses.replace(PRESETS["toy"], num_layers=LAYERS)  # 8 query heads on 4 key/value heads
CONFIGS = {
    "gqa": TOY,
    "tied, uneven": dataclasses.replace(TOY, tied=True, d_ff=191, vocab_size=255),
    "head norms": dataclasses.replace(TOY, qk_norm=True),
    "gpt": dataclasses.replace(TOY, family="gpt", num_kv_heads=8, d_ff=190, tied=True),
}


def micro_batches(config, seq_len=SEQ_LEN, rows=ROWS):
    """Two, of different sizes: 1 row, and the rest. The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(config.vocab_size, (rows, seq_len + 1), generator=generator)
    x_BS, y_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
    return [(x_BS[:1], y_BS[:1]), (x_BS[1:], y_BS[1:])]


def parity(module, config, recompute="none", seq_len=SEQ_LEN, clip_norm=0.1):
    """Largest differences from one process: of losses, of first gradients, of parameters after 2 clipped steps."""
    reference = model.build(config, dtype=torch.float64, recompute=recompute)
    engine = module.build(model.build(config, dtype=torch.float64, recompute=recompute), dist.group.WORLD)
    optimizer = engines.make_optimizer(engine, lr=0.01)
    other = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    batches = micro_batches(config, seq_len)
    found = {"loss": 0.0}
    for index in range(2):
        if index == 0:  # a step in its parts, to see the gradients before they are clipped
            loss = engines.accumulate_gradients(engine, batches)
            gradients = engines.full_gradients(engine)
            engines.clip_gradients(engine, clip_norm)
            optimizer.step()
            engine.zero_grad()
        else:
            loss = engines.step(engine, batches, optimizer, clip_norm)
        expected_loss = loss_of(reference, *(torch.cat(parts) for parts in zip(*batches, strict=True)))
        expected_loss.backward()
        found["loss"] = max(found["loss"], abs(loss.item() - expected_loss.item()))
        if index == 0:
            found["gradients"] = largest_difference(
                gradients, {name: param.grad for name, param in reference.named_parameters()}
            )
        torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        other.step()
        other.zero_grad()
    parameters = {name: param.detach() for name, param in reference.named_parameters()}
    found["parameters"] = largest_difference(engines.full_parameters(engine), parameters)
    return found


def differences(module, other, config):
    """Between two engines: the difference of their losses, and the largest of their gradients."""
    losses, gradients = [], []
    for each in (module, other):
        engine = each.build(model.build(config, dtype=torch.float64), dist.group.WORLD)
        losses.append(engines.accumulate_gradients(engine, micro_batches(config)).item())
        gradients.append(engines.full_gradients(engine))
    return abs(losses[0] - losses[1]), largest_difference(*gradients)


def wire(module, config, recompute="none", seq_len=SEQ_LEN):
    """What one micro-batch sends: [(collective, numbers in the payload)], and the bytes."""
    engine = module.build(model.build(config, dtype=torch.float64, recompute=recompute), dist.group.WORLD)
    with ByteMeter() as meter:
        engines.accumulate_gradients(engine, micro_batches(config, seq_len)[1:])
    return [(record.collective, record.payload_bytes // 8) for record in meter.records], meter.sent_bytes
