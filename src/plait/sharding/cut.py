"""In which units a features dim may be cut: columns of a width, or attention heads."""

from dataclasses import dataclass

from plait.errors import ShardingError
from plait.sharding.ownership import Split, build_head_splits, build_split


@dataclass(frozen=True)
class Columns:
    """Any whole number of columns, `unit` of them staying together."""

    unit: int = 1

    def build_split(self, size: int, degree: int) -> Split:
        """Cut `size` features over `degree` ranks, none of them left empty."""
        if size // self.unit < degree:
            raise ShardingError(
                f"{size} features in units of {self.unit} cannot be cut over {degree} ranks: a rank would have none",
                hint=f"use a degree of at most {max(1, size // self.unit)}",
            )
        return build_split(size, degree, self.unit)


@dataclass(frozen=True)
class QueryHeads:
    """Query heads `[N*H]`, each with the KV head it reads."""

    num_heads: int
    num_kv_heads: int
    head_width: int

    def build_split(self, size: int, degree: int) -> Split:
        """Cut the query features."""
        _check_size(self, size, self.num_heads)
        return build_head_splits(self.num_heads, self.num_kv_heads, self.head_width, degree).query


@dataclass(frozen=True)
class KeyValueHeads:
    """Key or value heads `[K*H]`, replicated over subgroups where there are fewer heads than ranks."""

    num_heads: int
    num_kv_heads: int
    head_width: int

    def build_split(self, size: int, degree: int) -> Split:
        """Cut the key or value features."""
        _check_size(self, size, self.num_kv_heads)
        return build_head_splits(self.num_heads, self.num_kv_heads, self.head_width, degree).kv


Cut = Columns | QueryHeads | KeyValueHeads


def _check_size(cut: QueryHeads | KeyValueHeads, size: int, heads: int) -> None:
    if size != heads * cut.head_width:
        raise ShardingError(f"{size} features are not {heads} heads of width {cut.head_width} ({cut})")
