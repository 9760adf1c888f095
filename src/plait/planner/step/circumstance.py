"""Where a block runs: what all laws are asked with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Unpack

from plait.contract.collective import Collective
from plait.contract.step import Move
from plait.planner.cluster import Cluster
from plait.planner.cost import Cost, Kind, Rest, build_leaf
from plait.planner.hardware import Hardware, Placement
from plait.planner.laws import Estimate, estimate_collective, estimate_memory_bound
from plait.planner.laws.collective import CollectiveKind
from plait.planner.plan_config import Axis, PlanConfig
from plait.planner.planned import PlannedModel
from plait.sharding import Kind as Movement

COLLECTIVE_LAWS: dict[Movement, CollectiveKind] = {
    Movement.ALL_GATHER: "all_gather",
    Movement.REDUCE_SCATTER: "reduce_scatter",
    Movement.ALL_REDUCE: "all_reduce",
    Movement.ALL_TO_ALL: "all_to_all",
}
"""By which law the collective of a contract is timed."""


@dataclass(frozen=True, slots=True)
class Circumstance:
    """A plan on a cluster, and what one rank does by contract."""

    cluster: Cluster
    plan: PlanConfig
    contract: PlannedModel

    @property
    def hardware(self) -> Hardware:
        """The devices."""
        return self.cluster.hardware

    @property
    def gemm_dtype(self) -> str:
        """In which format linears inside blocks multiply."""
        return self.plan.gemm_dtype

    def place(self, axis: Axis) -> Placement:
        """Where the ranks of an axis lie."""
        degree = getattr(self.plan, axis)
        return self.hardware.topology.place(degree, self.plan.stride(axis), num_devices=self.plan.num_devices)

    def estimate_move(self, collective: Collective) -> Estimate:
        """How long a collective over tp takes."""
        return self._estimate(collective.kind, collective.payload_bytes, collective.degree)

    def _estimate(self, kind: Movement, payload_bytes: float, degree: int) -> Estimate:
        return estimate_collective(
            self.hardware, COLLECTIVE_LAWS[kind], payload_bytes, degree, placement=self.place("tp")
        )

    @property
    def latency_s(self) -> float:
        """Of the smallest message over tp."""
        return self._estimate(Movement.ALL_GATHER, 1.0, self.plan.tp).seconds

    def build_moves(self, moves: Iterable[Move]) -> list[Cost]:
        """Collectives beside which nothing is computed."""
        return [
            build_cost(
                str(move),
                Kind.COMMUNICATION,
                self.estimate_move(move.collective),
                collectives=(move.collective,),
            )
            for move in moves
        ]

    def build_kernel(self, name: str, num_bytes: float, kernels: int = 1) -> Cost:
        """Kernels that read and write so many bytes."""
        return build_cost(name, Kind.MEMORY_BOUND, estimate_memory_bound(self.hardware, num_bytes, kernels=kernels))


def build_cost(name: str, kind: Kind, estimate: Estimate, **rest: Unpack[Rest]) -> Cost:
    """A law's answer as a leaf."""
    return build_leaf(name, kind, estimate.seconds, estimate.uncertainty, estimate.constants, **rest)
