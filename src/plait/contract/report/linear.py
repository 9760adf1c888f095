"""One linear `Y[M, N] = X[M, K] @ W[K, N]` at several degrees, cut by columns and by rows, in declared layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from plait.contract.linear import LinearParameters, derive_column_group, derive_row
from plait.contract.op import Op
from plait.contract.parameter import Parameter, derive_parameter_ownership
from plait.contract.plan import Column, Row
from plait.contract.setting import Setting
from plait.dtype import DType
from plait.errors import ShardingError
from plait.sharding import Invariant, Placement, Shard


class Boundary(StrEnum):
    """How an activation is laid out where it enters or leaves a linear."""

    REPLICATED = "replicated"
    TOKEN_SHARDED = "token-sharded"
    FEATURE_SHARDED = "feature-sharded"

    @property
    def placement(self) -> Placement:
        """Its state on tp."""
        match self:
            case Boundary.REPLICATED:
                return Invariant()
            case Boundary.TOKEN_SHARDED:
                return Shard(0)
            case Boundary.FEATURE_SHARDED:
                return Shard(1)


class Cut(StrEnum):
    """Which dim of the weight is cut."""

    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True)
class LinearShape:
    """Global sizes."""

    m: int
    k: int
    n: int


@dataclass(frozen=True)
class LinearCase:
    """A linear cut one way between two layouts at one degree: what each rank does."""

    shape: LinearShape
    cut: Cut
    source: Boundary
    target: Boundary
    settings: tuple[Setting, ...]
    ops: tuple[Op, ...]

    @property
    def tp(self) -> int:
        """The degree."""
        return len(self.ops)


def list_boundaries(cut: Cut, source: Boundary | None, target: Boundary | None) -> list[tuple[Boundary, Boundary]]:
    """Layouts in and out; where one is not declared, those between which a transformer cuts linears this way."""
    outside, inside = (Boundary.REPLICATED, Boundary.TOKEN_SHARDED), (Boundary.FEATURE_SHARDED,)
    sources, targets = (outside, inside) if cut is Cut.COLUMN else (inside, outside)
    return list(product((source,) if source else sources, (target,) if target else targets))


def derive_linear_cases(
    shape: LinearShape, degrees: Sequence[int], cut: Cut, source: Boundary, target: Boundary, dtype: DType
) -> list[LinearCase]:
    """One case per degree.

    Raises:
        ShardingError: a rank would have no part of the weight, or no token.
    """
    cases = []
    for tp in degrees:
        _check_degree(shape, tp, cut, source, target)
        settings = tuple(Setting(1, shape.m, tp, rank, dtype=dtype) for rank in range(tp))
        ops = tuple(_derive_op(shape, setting, cut, source, target) for setting in settings)
        cases.append(LinearCase(shape, cut, source, target, settings, ops))
    return cases


def _check_degree(shape: LinearShape, tp: int, cut: Cut, source: Boundary, target: Boundary) -> None:
    is_cut = {
        "M": (shape.m, Boundary.TOKEN_SHARDED in (source, target)),
        "K": (shape.k, cut is Cut.ROW or source is Boundary.FEATURE_SHARDED),
        "N": (shape.n, cut is Cut.COLUMN or target is Boundary.FEATURE_SHARDED),
    }
    for dim, (size, applies) in is_cut.items():
        if applies and size < tp:
            raise ShardingError(
                f"{cut} parallel, X {source} -> Y {target}: {dim} = {size} cannot be cut over {tp} ranks",
                hint=f"use degrees of at most {size}: a rank would have nothing",
            )


def _derive_op(shape: LinearShape, setting: Setting, cut: Cut, source: Boundary, target: Boundary) -> Op:
    role = Column() if cut is Cut.COLUMN else Row()
    ownership = derive_parameter_ownership("weight", (shape.n, shape.k), role, setting.tp, sequence_parallel=True)
    linear = LinearParameters("linear", Parameter(ownership, ("N", "K")))
    if cut is Cut.COLUMN:
        return derive_column_group(setting, [linear], source=source.placement, target=target.placement)
    return derive_row(setting, linear, source=source.placement, target=target.placement)
