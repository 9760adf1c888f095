"""What a linear's forward or backward has to compute and move, before anything is said about the order."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from plait.schedule.step import Flow
from plait.sharding import Kind, Transition, build_token_split, find_token_unit


class Operation(StrEnum):
    """A pass through a parallel linear."""

    COLUMN_FORWARD = "column forward"
    COLUMN_BACKWARD = "column backward"
    ROW_FORWARD = "row forward"
    ROW_BACKWARD = "row backward"


@dataclass(frozen=True)
class Work:
    """GEMMs over `num_rows` tokens and the tensors that move beside them.

    Attributes:
        gather: what is brought together, if anything.
        reduce: what becomes of the rows of `rowwise`, if more than to stay where they are.
        rowwise: the GEMM whose rows are independent: forward or dgrad.
        summing: the GEMM that sums over rows, wgrad, if wanted.
        rowwise_reads_gather: whether `rowwise` multiplies the gathered rows; `summing` always does.
    """

    num_rows: int
    gather: Flow | None = None
    reduce: Flow | None = None
    rowwise: str | None = None
    summing: str | None = None
    rowwise_reads_gather: bool = False

    @property
    def gemms(self) -> tuple[str, ...]:
        """The GEMMs there are."""
        return tuple(name for name in (self.rowwise, self.summing) if name is not None)

    @property
    def flows(self) -> tuple[Flow, ...]:
        """The tensors that move."""
        return tuple(flow for flow in (self.gather, self.reduce) if flow is not None)


def derive_column_forward(entry: Transition, num_rows: int, degree: int, unit: int = 1) -> Work:
    """`y_shard = gather(x_shard) @ w_shard.T`."""
    return Work(
        num_rows,
        gather=_derive_flow("x", entry.forward, num_rows, degree, unit),
        rowwise="forward",
        rowwise_reads_gather=True,
    )


def derive_column_backward(
    entry: Transition,
    num_rows: int,
    degree: int,
    unit: int = 1,
    *,
    needs_dgrad: bool = True,
    needs_wgrad: bool = True,
) -> Work:
    """`dx_shard = scatter(dy_shard @ w_shard)` and `dw_shard = dy_shard.T @ gather(x_shard)`, gathered again."""
    return Work(
        num_rows,
        gather=_derive_flow("x", entry.forward, num_rows, degree, unit) if needs_wgrad else None,
        reduce=_derive_flow("dx", entry.backward, num_rows, degree, unit) if needs_dgrad else None,
        rowwise="dgrad" if needs_dgrad else None,
        summing="wgrad" if needs_wgrad else None,
    )


def derive_row_forward(exit: Transition, num_rows: int, degree: int, unit: int = 1) -> Work:
    """`y_shard = scatter(x_shard @ w_shard.T)`."""
    return Work(num_rows, reduce=_derive_flow("y", exit.forward, num_rows, degree, unit), rowwise="forward")


def derive_row_backward(
    exit: Transition,
    num_rows: int,
    degree: int,
    unit: int = 1,
    *,
    needs_dgrad: bool = True,
    needs_wgrad: bool = True,
) -> Work:
    """`dx_shard = gather(dy_shard) @ w_shard` and `dw_shard = gather(dy_shard).T @ x_shard`."""
    return Work(
        num_rows,
        gather=_derive_flow("dy", exit.backward, num_rows, degree, unit),
        rowwise="dgrad" if needs_dgrad else None,
        summing="wgrad" if needs_wgrad else None,
        rowwise_reads_gather=True,
    )


def _derive_flow(tensor: str, kind: Kind, num_rows: int, degree: int, unit: int) -> Flow | None:
    if not kind.is_collective or degree == 1:
        return None
    return Flow(tensor, kind, build_token_split(num_rows, degree, unit), find_token_unit(num_rows, unit))


@lru_cache(maxsize=1024)
def derive_work(
    operation: Operation,
    transition: Transition,
    num_rows: int,
    degree: int,
    unit: int = 1,
    *,
    needs_dgrad: bool = True,
    needs_wgrad: bool = True,
) -> Work:
    """The work of a pass; `transition` is that of the linear's boundary, and a backward computes what is needed.

    Rows are owned and travel in whole units, in single ones where there is no whole number of units.
    """
    match operation:
        case Operation.COLUMN_FORWARD:
            return derive_column_forward(transition, num_rows, degree, unit)
        case Operation.ROW_FORWARD:
            return derive_row_forward(transition, num_rows, degree, unit)
        case Operation.COLUMN_BACKWARD:
            derive_backward: Callable[..., Work] = derive_column_backward
        case Operation.ROW_BACKWARD:
            derive_backward = derive_row_backward
    return derive_backward(transition, num_rows, degree, unit, needs_dgrad=needs_dgrad, needs_wgrad=needs_wgrad)
