"""One linear `Y[M, N] = X[M, K] @ W[K, N]` at several degrees, cut by columns and by rows, in declared layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING

from plait.config.recipe import Recipe
from plait.contract.linear import LinearParameters, derive_column_group, derive_row
from plait.contract.op import Op
from plait.contract.parameter import Parameter, derive_parameter_ownership
from plait.contract.plan import Column, Row
from plait.contract.setting import Setting
from plait.dtype import DType
from plait.errors import ShardingError
from plait.sharding import Columns, Invariant, Placement, Shard

if TYPE_CHECKING:  # a linear is explained without pydantic, whose import takes longer
    from plait.config.quantization import QuantizationConfig


class DeclaredLayout(StrEnum):
    """How an activation is laid out where it enters or leaves a linear."""

    REPLICATED = "replicated"
    TOKEN_SHARDED = "token-sharded"
    FEATURE_SHARDED = "feature-sharded"

    @property
    def placement(self) -> Placement:
        """Its state on tp."""
        match self:
            case DeclaredLayout.REPLICATED:
                return Invariant()
            case DeclaredLayout.TOKEN_SHARDED:
                return Shard(0)
            case DeclaredLayout.FEATURE_SHARDED:
                return Shard(1)


class LinearKind(StrEnum):
    """Which dim of the weight is cut."""

    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True)
class Declaration:
    """A linear cut one way between two declared layouts."""

    kind: LinearKind
    source: DeclaredLayout
    target: DeclaredLayout

    def __str__(self) -> str:
        return f"{self.kind} parallel, X {self.source} -> Y {self.target}"


@dataclass(frozen=True)
class LinearShape:
    """Global sizes."""

    m: int
    k: int
    n: int


@dataclass(frozen=True)
class LinearCase:
    """A declared linear at one degree: what each rank does."""

    declaration: Declaration
    settings: tuple[Setting, ...]
    ops: tuple[Op, ...]

    @property
    def tp(self) -> int:
        """The degree."""
        return len(self.ops)


def list_declarations(
    kind: LinearKind, source: DeclaredLayout | None, target: DeclaredLayout | None
) -> list[Declaration]:
    """Layouts in and out; where one is not given, those between which a transformer cuts linears this way."""
    outside, inside = (DeclaredLayout.REPLICATED, DeclaredLayout.TOKEN_SHARDED), (DeclaredLayout.FEATURE_SHARDED,)
    sources, targets = (outside, inside) if kind is LinearKind.COLUMN else (inside, outside)
    pairs = product((source,) if source else sources, (target,) if target else targets)
    return [Declaration(kind, *pair) for pair in pairs]


def derive_linear_cases(
    shape: LinearShape,
    degrees: Sequence[int],
    declaration: Declaration,
    dtype: DType,
    quantization: "QuantizationConfig | None" = None,
) -> list[LinearCase]:
    """One case per degree.

    Raises:
        ShardingError: a rank would have no part of the weight, or no token; or there are no whole blocks of a recipe.
    """
    cases = []
    for tp in degrees:
        settings = tuple(Setting(1, shape.m, tp, rank, dtype=dtype, quantization=quantization) for rank in range(tp))
        _check_degree(shape, tp, declaration, settings[0].recipe)
        ops = tuple(_derive_op(shape, setting, declaration) for setting in settings)
        cases.append(LinearCase(declaration, settings, ops))
    return cases


def _check_degree(shape: LinearShape, tp: int, declaration: Declaration, recipe: Recipe | None) -> None:
    tokens, features = (1, 1) if recipe is None else (recipe.token_unit, recipe.feature_unit)
    units = {"M": (shape.m, tokens), "K": (shape.k, features), "N": (shape.n, features)}
    for dim, (size, unit) in units.items():
        if recipe is not None and size % unit:
            raise ShardingError(
                f"{declaration}: {dim} = {size} is no whole number of blocks of {unit} ({recipe.name})",
                hint="use a multiple of it, or a recipe without blocks",
            )
    kind, source, target = declaration.kind, declaration.source, declaration.target
    is_cut = {
        "M": (shape.m, DeclaredLayout.TOKEN_SHARDED in (source, target)),
        "K": (shape.k, kind is LinearKind.ROW or source is DeclaredLayout.FEATURE_SHARDED),
        "N": (shape.n, kind is LinearKind.COLUMN or target is DeclaredLayout.FEATURE_SHARDED),
    }
    for dim, (size, applies) in is_cut.items():
        unit = units[dim][1]
        if applies and size // unit < tp:
            blocks = f" in blocks of {unit}" if unit > 1 else ""
            raise ShardingError(
                f"{declaration}: {dim} = {size} cannot be cut over {tp} ranks{blocks}",
                hint=f"use degrees of at most {size // unit}: a rank would have nothing",
            )


def _derive_op(shape: LinearShape, setting: Setting, declaration: Declaration) -> Op:
    is_column = declaration.kind is LinearKind.COLUMN
    recipe = setting.recipe
    cut = Columns(1 if recipe is None else recipe.feature_unit)
    role = Column(cut) if is_column else Row(cut)
    ownership = derive_parameter_ownership("weight", (shape.n, shape.k), role, setting.tp, sequence_parallel=True)
    linear = LinearParameters("linear", Parameter(ownership, ("N", "K")), recipe=recipe)
    source, target = declaration.source.placement, declaration.target.placement
    if is_column:
        return derive_column_group(setting, [linear], source=source, target=target)
    return derive_row(setting, linear, source=source, target=target)
