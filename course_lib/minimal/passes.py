"""One line each, for one forward and backward pass: are gradients right, what is kept, what is computed.

`change` alters a model before the pass; `backward(model, x_BS, y_BS)` runs the pass. Both are what a lesson teaches:
the model without the change, with the usual backward, is what they are compared with.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib.config import ModelConfig, preset
from course_lib.measure import MemoryTracker, Timeline
from course_lib.model import build
from course_lib.training import loss_of
from course_lib.training.data import batch, tokens
from course_lib.validate import Size, checked

PASS_CONFIG = replace(preset("mini"), name="mini, as many key/value heads", num_kv_heads=8)
DROPOUT_CONFIG = replace(PASS_CONFIG, name="mini with dropout", family="gpt", dropout=0.1)
PASS_SEQUENCES, PASS_SEQ_LEN = 4, 256


def no_change(model: nn.Module) -> None:
    """Leave the model as it is: standard attention, everything kept."""


def full_batch(model: nn.Module, x_BS: Tensor, y_BS: Tensor) -> None:
    """Run forward and backward of the whole batch at once."""
    loss_of(model, x_BS, y_BS).backward()


def model_and_batch(change: Callable, seq_len: int, config: ModelConfig, dtype=torch.float32):
    """Return the changed model and the batch of a pass."""
    model = build(config, dtype=dtype, attention="standard")
    change(model)
    return model, batch(tokens(100_000), 0, PASS_SEQUENCES, seq_len)


@checked
def gradient_difference(
    change: Callable = no_change, backward: Callable = full_batch, config: ModelConfig = PASS_CONFIG
) -> float:
    """Return the largest difference of any gradient from the unchanged model's, in float64."""
    found = []
    for alter, run in ((no_change, full_batch), (change, backward)):
        model, (x_BS, y_BS) = model_and_batch(alter, PASS_SEQ_LEN // 4, config, torch.float64)
        torch.manual_seed(0)  # dropout draws the same numbers in both
        run(model, x_BS, y_BS)
        found.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    return (found[0] - found[1]).abs().max().item()


@checked
def memory_of_a_pass(
    change: Callable = no_change,
    backward: Callable = full_batch,
    seq_len: Size = PASS_SEQ_LEN,
    config: ModelConfig = PASS_CONFIG,
) -> Timeline:
    """Return which bytes are alive at each moment of forward and backward, in float32."""
    model, (x_BS, y_BS) = model_and_batch(change, seq_len, config)
    with MemoryTracker(model) as tracker:
        backward(model, x_BS, y_BS)
    return tracker.timeline


@checked
def peak_activations(
    change: Callable = no_change,
    backward: Callable = full_batch,
    seq_len: Size = PASS_SEQ_LEN,
    config: ModelConfig = PASS_CONFIG,
) -> int:
    """Return the most bytes of activations alive at once."""
    return max(memory_of_a_pass(change, backward, seq_len, config).bytes_by_kind["activations"])


@checked
def kept_bytes(change: Callable = no_change, seq_len: Size = PASS_SEQ_LEN, config: ModelConfig = PASS_CONFIG) -> int:
    """Return the bytes of activations alive between forward and backward."""
    model, (x_BS, y_BS) = model_and_batch(change, seq_len, config)
    with MemoryTracker(model) as tracker:
        loss = loss_of(model, x_BS, y_BS)
        kept = tracker.current("activations") - loss.nbytes
    return kept


@checked
def flops_of_a_pass(change: Callable = no_change, seq_len: Size = PASS_SEQ_LEN) -> int:
    """Return the FLOPs of all matrix products that forward and backward execute."""
    model, (x_BS, y_BS) = model_and_batch(change, seq_len, PASS_CONFIG)
    with FlopCounterMode(display=False) as counter:
        full_batch(model, x_BS, y_BS)
    return counter.get_total_flops()
