"""Devices of one kind, how many, and in which order the axes of the mesh are laid over them."""

from dataclasses import dataclass
from typing import Literal

from plait.planner.hardware.device import Hardware
from plait.planner.plan_config import PlanConfig

Axis = Literal["tp", "cp", "dp_shard", "dp_replicate", "pp"]

ORDER: tuple[Axis, ...] = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""From neighbours to farthest apart: the axis that moves most is the one whose ranks are closest."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """So many devices of one kind.

    Attributes:
        order: the axes from the one whose ranks are neighbours to the one whose ranks are farthest apart.
    """

    hardware: Hardware
    num_devices: int
    order: tuple[Axis, ...] = ORDER

    def stride(self, axis: Axis, plan: PlanConfig) -> int:
        """How many devices lie between neighbours on `axis`."""
        stride = 1
        for other in self.order:
            if other == axis:
                break
            stride *= getattr(plan, other)
        return stride
