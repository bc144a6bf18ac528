"""Data parallelism as PyTorch ships it: DistributedDataParallel. Read beside parallel/data.py."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.parallel.engine import Engine


class DDP(DistributedDataParallel, Engine):
    """DistributedDataParallel, which the course's step can drive.

    DDP waits for its buckets at the end of the backward pass that is outside `no_sync()`: `finish` has nothing to do.
    """

    loss_op = "mean"

    @property
    def loss_group(self) -> dist.ProcessGroup:
        return self.process_group


def build(model: nn.Module, group: dist.ProcessGroup) -> DDP:
    """Makes `model` data parallel over `group`, with gradients that are views of DDP's buckets of 25 MiB.
    Bytes    sent per rank and step: 2 (dp - 1) / dp * P * itemsize; the second step also broadcasts the buckets
    """
    return DDP(model, process_group=group, gradient_as_bucket_view=True)
