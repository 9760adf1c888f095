"""A pass through a linear, read back from the prediction's tree: its GEMMs, what moves beside them, and its program."""

from collections.abc import Iterator
from dataclasses import dataclass

from plait.contract.op import Op
from plait.contract.step import Move, list_moves
from plait.planner.cost import Cost, Kind
from plait.planner.step.circumstance import Circumstance
from plait.schedule.costs import Costs
from plait.schedule.program import build_program
from plait.schedule.simulate import simulate
from plait.schedule.step import Add, Collect, Method, Multiply
from plait.schedule.timeline import Event, Timeline
from plait.schedule.work import Operation, Work, derive_work
from plait.sharding import Kind as Movement
from plait.sharding import Partial, Replicate, derive_transition

_BESIDE = ("x", "dx", "y", "dy")
"""What moves at a linear's boundary."""


@dataclass(frozen=True, slots=True)
class Pass:
    """GEMMs and the collectives beside them.

    Attributes:
        gemms: forward, or dgrad and wgrad, whole.
        moves: by tensor, the collective and how long it takes alone.
        exposed: what communication adds to the GEMMs; its note names the schedule.
    """

    name: str
    work: Work
    gemms: dict[str, Cost]
    moves: dict[str, tuple[Move, float]]
    exposed: Cost
    latency_s: float
    degree: int

    @property
    def is_overlapped(self) -> bool:
        """Whether the prediction chose a schedule that hides something."""
        return self._choice[0] is not Method.NONE

    @property
    def _choice(self) -> tuple[Method, int]:
        """`direct x2` is a method, and into how many pieces each owner's rows are cut."""
        name, _, chunks = self.exposed.note.partition(" x")
        return Method(name), int(chunks or 1)

    @property
    def seconds(self) -> float:
        """As predicted."""
        return self._compute_s + self.exposed.seconds

    @property
    def serial_s(self) -> float:
        """One after the other."""
        return self._compute_s + sum(seconds for _, seconds in self.moves.values())

    @property
    def _compute_s(self) -> float:
        return sum(gemm.seconds for gemm in self.gemms.values())

    def list_in_order(self) -> Iterator[tuple[str, str, float]]:
        """Kind, name and seconds of what a library does without overlap: gathers, each GEMM, sums."""
        gathers = [each for each in self.moves.values() if each[0].collective.kind is Movement.ALL_GATHER]
        sums = [each for each in self.moves.values() if each not in gathers]
        yield from (("gather", f"{self.name}: {move}", seconds) for move, seconds in gathers)
        yield from ((name, f"{self.name}: {name} {gemm.note}", gemm.seconds) for name, gemm in self.gemms.items())
        yield from (("reduce", f"{self.name}: {move}", seconds) for move, seconds in sums)

    def simulate(self) -> Timeline:
        """The chosen program of all ranks on links on which each tensor alone takes as long as its collective."""
        method, chunks = self._choice
        programs = [build_program(self.work, method, chunks, rank) for rank in range(self.degree)]
        return simulate(programs, self._derive_costs())

    def _derive_costs(self) -> Costs:
        row_s = {}
        for flow in self.work.flows:
            passes = 2 if flow.kind is Movement.ALL_REDUCE else 1
            rows = passes * flow.split.size * (self.degree - 1) / self.degree
            row_s[flow.tensor] = max(0.0, self.moves[flow.tensor][1] - passes * self.latency_s) / rows
        num_rows = self.work.num_rows
        gemm_s = {name: lambda rows, gemm=gemm: gemm.seconds * rows / num_rows for name, gemm in self.gemms.items()}
        return Costs(gemm_s, row_s, latency_s=self.latency_s, bytes_per_s=1.0)

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


def build_pass(cost: Cost, op: Op, where: Circumstance) -> Pass | None:
    """The pass whose cost this is; None where nothing moves beside its GEMMs."""
    is_backward = cost.note == "backward"
    moves = {move.tensor: move for move in list_moves(op.backward if is_backward else op.forward)}
    beside = {tensor: move for tensor, move in moves.items() if tensor in _BESIDE}
    if not beside:
        return None
    gemms = {part.name: part for part in cost.parts if part.kind is Kind.GEMM}
    exposed = cost.parts[[part.kind is Kind.GEMM for part in cost.parts].index(True) + len(gemms)]
    alone = {tensor: where.estimate_move(move.collective).seconds for tensor, move in beside.items()}
    share = (exposed.seconds + exposed.hidden_s) / sum(alone.values())
    timed = {tensor: (move, share * alone[tensor]) for tensor, move in beside.items()}
    name = op.name.partition(".0.")[2] or op.name
    return Pass(
        name, _derive_work(op, where, is_backward=is_backward), gemms, timed, exposed, where.latency_s, where.plan.tp
    )


def _derive_work(op: Op, where: Circumstance, *, is_backward: bool) -> Work:
    """As the planner has it: rows are rounded up until every rank has as many."""
    setting = where.contract.setting
    if op.parameters[0].ownership.dim == 1:
        operation = Operation.ROW_BACKWARD if is_backward else Operation.ROW_FORWARD
        transition = derive_transition(Partial(), setting.activation)
    else:
        operation = Operation.COLUMN_BACKWARD if is_backward else Operation.COLUMN_FORWARD
        transition = derive_transition(setting.activation, Replicate())
    return derive_work(operation, transition, -(-setting.num_tokens // setting.tp) * setting.tp, setting.tp)
