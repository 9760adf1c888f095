"""Who owns which part of a tensor: intervals of global indices, one per rank.

A dim is cut in units that must stay together (a KV group of heads, one ffn column, one vocabulary row, one token).
Splits may be uneven: 8 heads over 3 ranks are 3, 3 and 2. Where there are fewer units than ranks, a unit may be
replicated over a subgroup of consecutive ranks, and then its gradient is summed over that subgroup.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from plait.errors import ShardingError
from plait.sharding.placement import Invariant, Placement, Shard


@dataclass(frozen=True)
class Interval:
    """The indices `start <= i < stop`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ShardingError(f"interval [{self.start}, {self.stop}) is not 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def intersect(self, other: "Interval") -> "Interval":
        """The indices in both; empty (at this interval's nearest edge) when there are none."""
        start = min(max(self.start, other.start), self.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True)
class Split:
    """How one dim of `size` elements is cut over an axis: one interval per rank, in rank order.

    Intervals are disjoint, in order and cover the dim, except that consecutive ranks may hold the same one.
    """

    size: int
    intervals: tuple[Interval, ...]

    def __post_init__(self) -> None:
        distinct = [interval for interval, _ in groupby(self.intervals) if len(interval)]
        edges = [0, *(interval.stop for interval in distinct)]
        if [interval.start for interval in distinct] != edges[:-1] or edges[-1] != self.size:
            listed = ", ".join(map(str, self.intervals))
            raise ShardingError(f"intervals {listed} do not cover 0:{self.size} exactly once")

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return len(self.intervals)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements per rank."""
        return tuple(len(interval) for interval in self.intervals)

    @cached_property
    def is_even(self) -> bool:
        """Whether every rank holds equally many elements, none of them twice."""
        return self.longest * self.degree == self.size

    def find_torn(self, unit: int) -> Interval | None:
        """The first rank's interval that begins or ends within a unit; None where all have whole ones."""
        return next((each for each in self.intervals if each.start % unit or each.stop % unit), None)

    @property
    def longest(self) -> int:
        """Elements of the rank that holds most."""
        return max(self.lengths)

    @cached_property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same non-empty interval, for every interval."""
        groups: dict[Interval, list[int]] = {}
        for rank, interval in enumerate(self.intervals):
            if len(interval):
                groups.setdefault(interval, []).append(rank)
        return tuple(map(tuple, groups.values()))

    @property
    def is_replicated(self) -> bool:
        """Whether some interval is held by more than one rank."""
        return any(len(group) > 1 for group in self.replica_groups)

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold what `rank` holds, `rank` among them."""
        return next((group for group in self.replica_groups if rank in group), (rank,))


@lru_cache(maxsize=4096)
def build_split(size: int, degree: int, unit: int = 1) -> Split:
    """Cut `size` elements over `degree` ranks in whole units, the first ranks taking one more where it does not divide.

    With fewer units than ranks the last ranks hold an empty interval.

    Raises:
        ShardingError: `size` is not a whole number of units.
    """
    if degree < 1 or unit < 1 or size < 0 or size % unit:
        raise ShardingError(f"{size} elements cannot be cut over {degree} ranks in whole units of {unit}")
    base, extra = divmod(size // unit, degree)
    edges = [unit * (rank * base + min(rank, extra)) for rank in range(degree + 1)]
    return Split(size, tuple(map(Interval, edges[:-1], edges[1:])))


@lru_cache(maxsize=4096)
def build_chunks(size: int, degree: int) -> Split:
    """Cut `size` elements as `torch.chunk` does: equal lengths, the last ranks short or empty where it does not divide.

    So is dim 0 of a parameter cut that FSDP shards.
    """
    length = -(-size // degree)
    edges = [min(size, rank * length) for rank in range(degree + 1)]
    return Split(size, tuple(map(Interval, edges[:-1], edges[1:])))


def find_token_unit(num_tokens: int, unit: int) -> int:
    """How many tokens stay on one rank: `unit`, or one where there is no whole number of units.

    What is quantized in blocks of tokens is only read by backward, before which such numbers are refused.
    """
    return 1 if num_tokens % unit else unit


def build_token_split(num_tokens: int, degree: int, unit: int = 1) -> Split:
    """Cut tokens over `degree` ranks, in whole units where there is a whole number of them."""
    return build_split(num_tokens, degree, find_token_unit(num_tokens, unit))


@dataclass(frozen=True)
class HeadSplits:
    """How the features of query and key/value projections are cut: whole KV groups, or heads within one."""

    query: Split
    kv: Split


@lru_cache(maxsize=256)
def build_head_splits(num_heads: int, num_kv_heads: int, head_width: int, degree: int) -> HeadSplits:
    """Cut attention heads over `degree` ranks so that each query head sits with its KV head.

    Up to `num_kv_heads` ranks the unit is a KV group: one KV head and the query heads that read it. Beyond, the ranks
    form `num_kv_heads` subgroups; each holds one KV head on every member and cuts that head's query heads.

    Raises:
        ShardingError: the heads do not form groups, or a rank would have no query head.
    """
    if num_heads % num_kv_heads:
        raise ShardingError(
            f"{num_heads} query heads do not form groups over {num_kv_heads} KV heads",
            hint="the number of query heads must be a multiple of the number of KV heads",
        )
    group = num_heads // num_kv_heads
    if degree <= num_kv_heads:
        return HeadSplits(
            build_split(num_heads * head_width, degree, group * head_width),
            build_split(num_kv_heads * head_width, degree, head_width),
        )
    members = build_split(degree, num_kv_heads)
    if members.longest > group:
        raise ShardingError(
            f"{num_heads} query heads in {num_kv_heads} KV groups of {group} cannot be cut over {degree} ranks: "
            f"{members.longest} ranks would share the {group} query heads of one KV head",
            hint=f"use a degree of at most {num_heads}",
        )
    query: list[Interval] = []
    kv: list[Interval] = []
    for head, ranks in enumerate(members.lengths):
        first = head * group
        for own in build_split(group, ranks).intervals:
            query.append(Interval((first + own.start) * head_width, (first + own.stop) * head_width))
            kv.append(Interval(head * head_width, (head + 1) * head_width))
    return HeadSplits(Split(num_heads * head_width, tuple(query)), Split(num_kv_heads * head_width, tuple(kv)))


@dataclass(frozen=True)
class Ownership:
    """One parameter and who owns what of it; gradients and optimizer state follow it.

    Initialisation, gradient reduction, gradient norm, checkpoints and reports all read this record.
    """

    name: str
    """Fully qualified name in the unsharded model."""
    shape: tuple[int, ...]
    """Global shape."""
    dim: int | None = None
    """The dim that is cut over tp; None where every rank holds all of it."""
    split: Split | None = None
    """How `dim` is cut."""
    reduced_over: str | None = None
    """The axis over which the layer itself has to sum the gradient: `tp`, the subgroup `tp/kv`, or none."""

    def __post_init__(self) -> None:
        if (self.dim is None) != (self.split is None):
            raise ShardingError(f"{self.name}: dim {self.dim} and split {self.split} must be given together")
        if self.dim is not None and self.split is not None and self.shape[self.dim] != self.split.size:
            raise ShardingError(f"{self.name} {list(self.shape)}: dim {self.dim} is cut as if it had {self.split.size}")

    @property
    def placement(self) -> Placement:
        """State of the parameter on tp."""
        return Invariant() if self.dim is None else Shard(self.dim)

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        """What tp rank `rank` holds: an interval for every dim."""
        whole = [Interval(0, size) for size in self.shape]
        if self.dim is not None and self.split is not None:
            whole[self.dim] = self.split.intervals[rank]
        return tuple(whole)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what tp rank `rank` holds."""
        return tuple(len(interval) for interval in self.intervals(rank))

    def is_counted_on(self, rank: int) -> bool:
        """Whether `rank` is the one of those holding its elements that counts (norm) and writes (checkpoint) them."""
        return rank == (0 if self.split is None else self.split.replicas(rank)[0])
