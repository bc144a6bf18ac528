"""Every difference between the supported torch versions (2.11 to 2.15), in one file.

Each entry names the version that changed something. tests/test_compat.py fails as soon as the oldest supported
version in pyproject.toml has the new behaviour, so no entry outlives its reason.
"""

import torch
import torch.distributed as dist

# torch 2.13 renamed all_gather_into_tensor to all_gather_single: the old name warns there, the new is absent before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# torch 2.13 renamed reduce_scatter_tensor to reduce_scatter_single, likewise.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch 2.13 gathers a DTensor's uneven pieces into a contiguous tensor; before it is strided, and a linear layer fails.
DTENSOR_GATHERS_UNEVEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)

# torch 2.13 opens the connections of a pipeline one pair after the other; before it in one batch, which aborts on gloo.
PIPELINE_WARMS_UP_ON_GLOO = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
