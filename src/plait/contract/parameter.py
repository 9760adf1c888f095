"""Parameters and, from the role of their module, who owns what of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.contract.plan import (
    Activation,
    AttentionCore,
    Column,
    FeatureNorm,
    HeadLocal,
    HeadRows,
    InnerColumn,
    InRegion,
    Plan,
    Positions,
    Role,
    Row,
    TokenLocal,
    VocabEmbedding,
    VocabHead,
    Whole,
)
from plait.errors import ShardingError
from plait.sharding import Columns, Layout, Ownership, Split


@dataclass(frozen=True)
class Parameter:
    """A parameter, who owns what of it, and the letters of its dims."""

    ownership: Ownership
    dims: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The parameter's layout on tp."""
        own = self.ownership
        return Layout(self.dims, own.shape, own.placement, own.split)


def derive_parameter_ownership(
    name: str, shape: tuple[int, ...], role: Role | None, tp: int, *, sequence_parallel: bool
) -> Ownership:
    """Who owns what of parameter `name`, of global shape `shape`, of a module that plays `role` (None: no role).

    role              weight              bias                gradient summed by the layer over
    Column            [out/tp, in]        [out/tp]            tp/kv, where KV heads are replicated
    Row               [out, in/tp]        [out]
    VocabEmbedding    [V/tp, D]
    VocabHead         [V/tp, D]           [V/tp]
    TokenLocal        whole               whole               tp, under sequence parallelism
    InnerColumn       [out/tp, in]        [out/tp]            tp/kv, as Column
    InRegion          whole               whole               tp
    FeatureNorm       [out/tp]                                tp/kv, as Column
    HeadRows          [N/tp, ..]          [N/tp, ..]          tp/kv, as Column
    """
    try:
        match role:
            case Column(cut) | InnerColumn(cut) | FeatureNorm(cut) | HeadRows(cut):
                split = cut.build_split(shape[0], tp)
                return Ownership(name, shape, 0, split, "tp/kv" if split.is_replicated else None)
            case Row(cut) if len(shape) > 1:
                return Ownership(name, shape, 1, cut.build_split(shape[1], tp))
            case VocabEmbedding() | VocabHead():
                return Ownership(name, shape, 0, build_vocab_split(shape[0], tp))
            case TokenLocal() if sequence_parallel and tp > 1:
                return Ownership(name, shape, reduced_over="tp")
            case InRegion() if tp > 1:
                return Ownership(name, shape, reduced_over="tp")
            case Row() | TokenLocal() | HeadLocal() | Activation() | InRegion() | Whole() | None:
                return Ownership(name, shape)
            case AttentionCore() | Positions():  # neither has any
                return Ownership(name, shape)
    except ShardingError as error:
        raise ShardingError(f"{name} {list(shape)}: {error.message}", hint=error.hint) from error


def build_vocab_split(vocab_size: int, tp: int) -> Split:
    """Cut the true vocabulary over tp ranks, rows of it uneven where they do not divide."""
    return Columns().build_split(vocab_size, tp)


def derive_parameters_ownership(shapes: Mapping[str, tuple[int, ...]], plan: Plan, tp: int) -> dict[str, Ownership]:
    """Who owns what of every parameter of a model whose modules play the roles of `plan`."""
    return {
        name: derive_parameter_ownership(
            name, shape, plan.role_of(name.rpartition(".")[0]), tp, sequence_parallel=plan.sequence_parallel
        )
        for name, shape in shapes.items()
    }
