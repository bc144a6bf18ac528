"""Which rank has which experts of a layer, and which sizes are possible.

layout = ExpertLayout(num_experts=64, ep_size=16, ranks_per_node=8)
"""

from dataclasses import dataclass

from course_lib.config import ModelConfig
from course_lib.validate import Size, check_fields

METHODS = ("plain", "once_per_rank", "once_per_node", "padded")  # how rows travel; traffic/routing.py has the bytes


@dataclass(frozen=True)
class ExpertLayout:
    """Which rank has which experts: E / ep neighbours each; ranks_per_node ranks share a node (None: all do)."""

    num_experts: Size
    ep_size: Size = 1
    ranks_per_node: Size | None = None

    def __post_init__(self):
        check_fields(self)
        if self.num_experts % self.ep_size:
            raise ValueError(
                f"num_experts ({self.num_experts}) must be divisible by ep ({self.ep_size}); "
                f"choose ep from {_divisors(self.num_experts)}"
            )
        if self.ranks_per_node is None:
            object.__setattr__(self, "ranks_per_node", self.ep_size)
        if self.ep_size % self.ranks_per_node:
            raise ValueError(
                f"ep ({self.ep_size}) must be divisible by ranks_per_node ({self.ranks_per_node}); "
                f"choose ranks_per_node from {_divisors(self.ep_size)}"
            )

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def num_nodes(self) -> int:
        return self.ep_size // self.ranks_per_node

    def rank_of_expert(self, expert: int) -> int:
        return expert // self.experts_per_rank

    def node_of_rank(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def relay(self, src: int, node: int) -> int:
        """Where rank src's tokens enter a node: at the rank with src's place in its own node."""
        return node * self.ranks_per_node + src % self.ranks_per_node


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def check_ep(dp_size: int, ep_size: int) -> None:
    """Raises ValueError if ep neighbours each do not make up the ranks of dp."""
    if dp_size % ep_size:
        raise ValueError(f"ep ({ep_size}) must divide the {dp_size} ranks of dp; choose ep from {_divisors(dp_size)}")


def check_expert_parallel(
    config: ModelConfig, dp_size: int, ep_size: int, ranks_per_node: int | None = None
) -> ExpertLayout:
    """How the experts of a config lie on dp = ep x expert_dp ranks."""
    if config.moe is None:
        raise ValueError(
            f"{config.name} has no experts (config.moe is None); use data parallelism, or a preset with moe"
        )
    check_ep(dp_size, ep_size)
    return ExpertLayout(config.moe.num_experts, ep_size, ranks_per_node)
