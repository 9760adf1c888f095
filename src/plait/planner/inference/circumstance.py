"""Where a server's forward runs: at steady clocks, its collectives launched from a graph or by the host."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from plait.contract.collective import Collective
from plait.contract.linear import AMAX
from plait.contract.step import Move
from plait.planner.cluster import Cluster
from plait.planner.cost import Cost
from plait.planner.hardware import Hardware
from plait.planner.inference.server import ServerConfig
from plait.planner.laws import Estimate, estimate_collective
from plait.planner.laws.collective import Launch
from plait.planner.planned import PlannedModel
from plait.planner.step.circumstance import COLLECTIVE_LAWS, Circumstance


@dataclass(frozen=True, slots=True)
class ServingCircumstance(Circumstance):
    """A server's forward on a cluster.

    Attributes:
        launch: who launches collectives.
    """

    launch: Launch = "graph"

    def build_moves(self, moves: Iterable[Move]) -> list[Cost]:
        """A server knows its scales: those of weights do not change, and those of inputs were measured before."""
        return Circumstance.build_moves(self, [move for move in moves if move.tensor != AMAX])

    def estimate_move(self, collective: Collective) -> Estimate:
        """How long a collective over tp takes."""
        return estimate_collective(
            self.hardware,
            COLLECTIVE_LAWS[collective.kind],
            collective.payload_bytes,
            collective.degree,
            placement=self.place("tp"),
            launch=self.launch,
        )


def build_serving(
    cluster: Cluster, server: ServerConfig, contract: PlannedModel, launch: Launch
) -> ServingCircumstance:
    """The circumstance of one forward of `server` by its contract."""
    setting = contract.setting
    plan = server.build_plan(setting.batch, sequence_parallel=setting.sequence_parallel)
    serving = replace(cluster, hardware=derive_serving_hardware(cluster.hardware))
    return ServingCircumstance(serving, plan, contract, launch)


@lru_cache(maxsize=64)
def derive_serving_hardware(hardware: Hardware) -> Hardware:
    """The device as a server sees it: no stragglers, checkpoints or optimizer, so GEMMs run at its steady clock.

    The planner's layers ask for the share of the burst rate that a training run keeps; here that is the sustained one.
    """
    return replace(hardware, derate=replace(hardware.derate, training=hardware.derate.sustained))
