"""The one table of transitions: which collective turns one state on the tp axis into another.

Only the forward column is written down. The backward of `source -> target` is the transition of the gradients the other
way round, `gradient of target -> gradient of source`, looked up in the same table. The conjugate operators f and g of
Megatron-LM (Shoeybi et al., arXiv:1909.08053) and g, g-bar of sequence parallelism (Korthikanti et al.,
arXiv:2205.05198) are rows of it.
"""

from dataclasses import dataclass
from enum import StrEnum

from plait.errors import ShardingError
from plait.sharding.placement import Invariant, Partial, Placement, Replicate, Shard, derive_gradient_placement


class Kind(StrEnum):
    """What a transition does: a collective, or a local act that moves nothing."""

    NOTHING = "nothing"
    TAKE_OWN = "take_own"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"

    @property
    def is_collective(self) -> bool:
        """Whether bytes move."""
        return self not in (Kind.NOTHING, Kind.TAKE_OWN)


_FORWARD: dict[tuple[type[Placement], type[Placement]], Kind] = {
    (Invariant, Replicate): Kind.NOTHING,
    (Partial, Invariant): Kind.ALL_REDUCE,
    (Shard, Replicate): Kind.ALL_GATHER,
    (Partial, Shard): Kind.REDUCE_SCATTER,
    (Shard, Invariant): Kind.ALL_GATHER,
    (Invariant, Shard): Kind.TAKE_OWN,
    (Shard, Shard): Kind.ALL_TO_ALL,
}


@dataclass(frozen=True)
class Transition:
    """One row of the table: `source -> target` with its forward and its derived backward."""

    source: Placement
    target: Placement
    forward: Kind
    backward: Kind

    @property
    def conjugate(self) -> "Transition":
        """The transition that the gradient goes through in backward."""
        return derive_transition(derive_gradient_placement(self.target), derive_gradient_placement(self.source))


def derive_transition(source: Placement, target: Placement) -> Transition:
    """Look `source -> target` up and derive its backward.

    Raises:
        ShardingError: the table has no such row.
    """
    return Transition(
        source,
        target,
        _look_up(source, target),
        _look_up(derive_gradient_placement(target), derive_gradient_placement(source)),
    )


def _look_up(source: Placement, target: Placement) -> Kind:
    if source == target:
        return Kind.NOTHING
    kind = _FORWARD.get((type(source), type(target)))
    if kind is None:
        known = ", ".join(f"{a.__name__} -> {b.__name__}" for a, b in _FORWARD)
        raise ShardingError(
            f"no transition from {source} to {target}: its gradient would have no defined state",
            hint=f"known transitions are {known}",
        )
    return kind


def list_transitions() -> list[Transition]:
    """Every row of the table, with dims 0 and 1 standing for any two."""
    example: dict[type[Placement], Placement] = {
        Invariant: Invariant(),
        Replicate: Replicate(),
        Partial: Partial(),
        Shard: Shard(0),
    }
    return [derive_transition(example[a], Shard(1) if (a, b) == (Shard, Shard) else example[b]) for a, b in _FORWARD]
