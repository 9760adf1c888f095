"""A pass through a linear as bars: what the planner timed, serially and by the program it chose."""

from collections.abc import Iterator
from dataclasses import dataclass

from plait.contract.op import Op
from plait.planner.cost import Cost, Kind
from plait.planner.step.circumstance import Circumstance
from plait.planner.step.linear import Direction, LinearPass, build_pass
from plait.schedule.program import build_program
from plait.schedule.simulate import simulate
from plait.schedule.step import Add, Collect, Method, Multiply
from plait.schedule.timeline import Event, Timeline
from plait.sharding import Kind as Movement


@dataclass(frozen=True, slots=True)
class DrawnPass:
    """GEMMs and the collectives beside them.

    Attributes:
        timed: both, alone and together.
        parts: the costs of both in the prediction's tree: the GEMMs, and what communication adds to them.
    """

    name: str
    timed: LinearPass
    parts: tuple[Cost, ...]

    @property
    def is_overlapped(self) -> bool:
        """Whether the prediction chose a schedule that hides something."""
        return self.timed.overlapped.method is not Method.NONE

    @property
    def seconds(self) -> float:
        """As predicted."""
        return sum(part.seconds for part in self.parts)

    @property
    def serial_s(self) -> float:
        """One after the other."""
        return self.timed.together.serial_s

    def list_in_order(self) -> Iterator[tuple[str, str, float]]:
        """Kind, name and seconds of what a library does without overlap: gathers, each GEMM, sums."""
        moves = self.timed.moves.values()
        gathers = [each for each in moves if each[0].collective.kind is Movement.ALL_GATHER]
        sums = [each for each in moves if each not in gathers]
        yield from (("gather", f"{self.name}: {move}", estimate.seconds) for move, estimate in gathers)
        for part in self.parts:
            if part.kind is Kind.GEMM:
                yield part.name, f"{self.name}: {part.name} {part.note}", part.seconds
        yield from (("reduce", f"{self.name}: {move}", estimate.seconds) for move, estimate in sums)

    def simulate(self) -> Timeline:
        """The chosen program of all ranks, on the links and with the GEMMs it was timed with."""
        one, chosen = self.timed.together, self.timed.overlapped
        programs = [build_program(one.work, chosen.method, chosen.chunks, rank) for rank in range(one.degree)]
        return simulate(programs, one.derive_costs())

    def name_kind(self, event: Event) -> str:
        """The kind of its bar."""
        match event.what:
            case Multiply(gemm):
                return gemm
            case Add():
                return "add"
            case Collect():
                return "collective"
            case message:
                return "reduce" if message.tensor in ("y", "dx") else "gather"


def build_drawn_pass(cost: Cost, op: Op, where: Circumstance) -> DrawnPass | None:
    """The pass whose cost this is; None where nothing moves beside its GEMMs."""
    direction: Direction = "backward" if cost.note == "backward" else "forward"
    timed = build_pass(op, direction, where)
    if not timed.moves:
        return None
    issued = tuple(move.collective for move, _ in timed.moves.values())
    parts = tuple(part for part in cost.parts if part.kind is Kind.GEMM or part.collectives == issued)
    return DrawnPass(op.name.partition(".0.")[2] or op.name, timed, parts)
