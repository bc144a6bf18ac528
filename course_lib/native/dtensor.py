"""What engines share whose parameters are DTensors: which part of a gradient counts, and whole tensors."""

import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from course_lib.parallel.engine import ModelEngine, trainable


class DTensorEngine(ModelEngine):
    """A model with parameters that are DTensors on one mesh; those that are none are the same on all its ranks."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module)
        self.mesh, self.norm_groups = mesh, tuple(mesh.get_all_groups())

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        return ((param, self.copies(param)) for _, param in trainable(self.module))

    def copies(self, param: nn.Parameter) -> int:
        """How many ranks of the mesh hold the same part of a parameter."""
        if not isinstance(param, DTensor):
            return self.mesh.size()
        axes = zip(self.mesh.shape, param.placements, strict=True)
        return math.prod(size for size, placement in axes if placement.is_replicate())

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        found = super().whole(tensor_of)
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
