"""Two programs, one after the other, of which the first begins the gather of the second."""

from dataclasses import dataclass, replace

from plait.schedule.costs import Costs
from plait.schedule.piece import build_pieces
from plait.schedule.program import build_program, can_be_begun, can_begin
from plait.schedule.step import Ahead, Method, Multiply, Program
from plait.schedule.work import Work

_NEXT = " next"
"""Behind the names of the second program's GEMMs, where both are one."""


@dataclass(frozen=True)
class Half:
    """A work of a pair, and how it is done."""

    work: Work
    method: Method
    chunks: int

    def can_begin(self, other: "Half") -> bool:
        """Whether this, followed by `other`, can begin its gather."""
        return can_begin(self.work, self.method) and can_be_begun(other.work, other.method)


def build_pair(first: Half, second: Half, rank: int) -> tuple[Program, Program]:
    """What `rank` does for both; the rounds of what is begun follow those of the first.

    Raises:
        ScheduleError: the first cannot begin the gather of the second.
    """
    assert first.work.gather is not None, first
    assert second.work.gather is not None, second
    ahead = Ahead(second.work.gather, 1 if second.method is Method.BULK else second.chunks)
    gather = first.work.gather
    first_round = build_pieces(gather.split, first.chunks, gather.unit).num_rounds
    return (
        build_program(first.work, first.method, first.chunks, rank, ahead=ahead),
        build_program(second.work, second.method, second.chunks, rank, first_round=first_round),
    )


def join_pair(first: Program, second: Program) -> Program:
    """Both as one program, to be timed; `name_gemm` tells the GEMMs of the second apart."""
    renamed = [
        replace(step, gemm=name_gemm(step.gemm)) if isinstance(step, Multiply) else step for step in second.steps
    ]
    flows, gemms = (*first.flows, *second.flows), (*first.gemms, *map(name_gemm, second.gemms))
    return replace(first, flows=flows, gemms=gemms, steps=(*first.steps, *renamed), ahead=None)


def join_costs(first: Costs, second: Costs) -> Costs:
    """What the steps of a joined program take on the machine of the first."""
    gemm_s = {**first.gemm_s, **{name_gemm(gemm): seconds for gemm, seconds in second.gemm_s.items()}}
    return replace(first, gemm_s=gemm_s, row_bytes={**first.row_bytes, **second.row_bytes})


def name_gemm(gemm: str) -> str:
    """The name that a GEMM of the second program has in the joined one."""
    return f"{gemm}{_NEXT}"


def find_gemm(name: str) -> str:
    """The GEMM behind a name in a joined program."""
    return name.removesuffix(_NEXT)
