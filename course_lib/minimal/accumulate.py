"""Gradient accumulation without options: one micro-batch after the other, one gradient."""

from course_lib.training import loss_of
from course_lib.training.data import micro_batches


def accumulate(model, x_BS, y_BS, num_micro_batches):
    """Add up the gradient of the batch's mean loss; every part needs a target."""
    targets = (y_BS != -100).sum().item()  # cross-entropy ignores -100, as in padding
    for x_part, y_part in micro_batches(x_BS, y_BS, num_micro_batches):
        share = (y_part != -100).sum().item() / targets
        (loss_of(model, x_part, y_part) * share).backward()
