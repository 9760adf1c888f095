"""A plan says which module of a model plays which role; it is data, applied by `plait.parallelize`.

| role             | module            | in -> out on tp (sequence parallel / all-reduce mode)          |
|------------------|-------------------|----------------------------------------------------------------|
| `Column`         | Linear            | Shard(tokens) or Invariant -> Shard(features)                  |
| `Row`            | Linear            | Shard(features) -> Shard(tokens) or Invariant                  |
| `VocabEmbedding` | Embedding         | ids -> Shard(tokens) or Invariant                              |
| `VocabHead`      | Linear            | Shard(tokens) or Invariant -> Shard(vocabulary)                |
| `TokenLocal`     | norm, dropout, .. | Shard(tokens) -> same; it sums its weight gradients over tp    |
| `HeadLocal`      | attention dropout | own heads -> same                                              |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from plait.errors import ConfigError
from plait.sharding import Columns, Cut, Invariant, Placement, QueryHeads, Shard


@dataclass(frozen=True)
class Column:
    """Linear whose output features are cut; members of one `group` under one parent read the same input."""

    cut: Cut = Columns()
    group: str | None = None


@dataclass(frozen=True)
class Row:
    """Linear whose input features are cut as the column before it cuts its outputs."""

    cut: Cut = Columns()


@dataclass(frozen=True)
class VocabEmbedding:
    """Embedding whose vocabulary rows are cut."""


@dataclass(frozen=True)
class VocabHead:
    """Linear from model width to vocabulary whose output rows are cut."""


@dataclass(frozen=True)
class TokenLocal:
    """Module that treats every token alone."""


@dataclass(frozen=True)
class HeadLocal:
    """Module that treats every attention head alone."""

    cut: QueryHeads


Role = Column | Row | VocabEmbedding | VocabHead | TokenLocal | HeadLocal

_BY_NAME: dict[str, Role] = {
    "column": Column(),
    "row": Row(),
    "vocab_embedding": VocabEmbedding(),
    "vocab_head": VocabHead(),
    "token_local": TokenLocal(),
}


@dataclass(frozen=True)
class Plan:
    """Roles by module path; `*` stands for one path component (`layers.*.mlp.w_up`).

    A role may be given by its name (`"column"`) where it needs no arguments.

    Raises:
        ConfigError: an unknown role name.
    """

    roles: Mapping[str, Role | str]
    sequence_parallel: bool = True
    resolved: Mapping[str, Role] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolved", {path: _resolve(path, role) for path, role in self.roles.items()})

    @property
    def activation(self) -> Placement:
        """State on tp of the activations between the parallel regions."""
        return Shard(0) if self.sequence_parallel else Invariant()


def _resolve(path: str, role: Role | str) -> Role:
    if not isinstance(role, str):
        return role
    if role not in _BY_NAME:
        near = get_close_matches(role, _BY_NAME, n=1)
        raise ConfigError(
            f"plan: {path!r} has unknown role {role!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"roles are {', '.join(_BY_NAME)}",
        )
    return _BY_NAME[role]
