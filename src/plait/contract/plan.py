"""A plan says which module of a model plays which role; it is data, applied by `plait.parallelize`.

| role             | module            | in -> out on tp (sequence parallel / all-reduce mode)          |
|------------------|-------------------|----------------------------------------------------------------|
| `Column`         | Linear            | Shard(tokens) or Invariant -> Shard(features)                  |
| `Row`            | Linear            | Shard(features) -> Shard(tokens) or Invariant                  |
| `VocabEmbedding` | Embedding         | ids -> Shard(tokens) or Invariant                              |
| `VocabHead`      | Linear            | Shard(tokens) or Invariant -> Shard(vocabulary)                |
| `TokenLocal`     | norm, dropout, .. | Shard(tokens) -> same; it sums its weight gradients over tp    |
| `HeadLocal`      | attention dropout | own heads -> same                                              |
| `Activation`     | SwiGLU, Gelu      | Shard(features), of every column of a group -> same            |
| `InnerColumn`    | Linear            | Replicate, of an entered region -> Shard(features)             |
| `InRegion`       | norm, Linear, ..  | Replicate or Shard -> same; it sums its gradients over tp      |
| `FeatureNorm`    | RMSNorm           | Shard(features) -> same; it sums squares over tp               |
| `HeadRows`       | norm of each head | Shard(heads) -> same; its parameters have a row for each head  |
| `AttentionCore`  | CausalAttention   | own heads -> same; brings tokens together over cp              |
| `Positions`      | TokenPositions    | positions of own tokens of cp                                  |
| `Whole`          | embedding, norm   | Invariant -> same; all ranks do and learn the same             |
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from plait.errors import ConfigError, describe_nearest
from plait.sharding import Columns, Cut, Invariant, KeyValueHeads, Placement, QueryHeads, Shard


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


@dataclass(frozen=True)
class Activation:
    """Module that reads the outputs of the columns of `group` under its parent, in their order, element by element.

    It is applied to rows when they are complete, not to the whole when all have come.
    """

    group: str


@dataclass(frozen=True)
class InnerColumn:
    """Linear of an entered region whose output features are cut and whose input every rank has whole already."""

    cut: Cut = Columns()


@dataclass(frozen=True)
class InRegion:
    """Module of an entered region that every rank holds whole and uses on its own heads, features or addends."""


@dataclass(frozen=True)
class FeatureNorm:
    """RMSNorm over features that are cut, its weight with them."""

    cut: Cut = Columns()


@dataclass(frozen=True)
class HeadRows:
    """Module of an entered region whose parameters have a row for each head, cut with them."""

    cut: QueryHeads | KeyValueHeads


@dataclass(frozen=True)
class AttentionCore:
    """Module that lets queries meet keys, which over a context axis are those of other ranks, too."""


@dataclass(frozen=True)
class Positions:
    """Module that tells the positions of the tokens that a model gets."""


@dataclass(frozen=True)
class Whole:
    """Module that every rank holds and uses alike, before the activations are cut or in between."""


Role = (
    Column
    | Row
    | VocabEmbedding
    | VocabHead
    | TokenLocal
    | HeadLocal
    | Activation
    | InnerColumn
    | InRegion
    | FeatureNorm
    | HeadRows
    | AttentionCore
    | Positions
    | Whole
)

_BY_NAME: dict[str, Role] = {
    "column": Column(),
    "row": Row(),
    "vocab_embedding": VocabEmbedding(),
    "vocab_head": VocabHead(),
    "token_local": TokenLocal(),
    "inner_column": InnerColumn(),
    "in_region": InRegion(),
    "feature_norm": FeatureNorm(),
    "attention_core": AttentionCore(),
    "positions": Positions(),
    "whole": Whole(),
}
ROLE_NAMES: dict[type[Role], str] = {type(role): name for name, role in _BY_NAME.items()} | {
    HeadLocal: "head_local",
    HeadRows: "head_rows",
    Activation: "activation",
}


@dataclass(frozen=True)
class Plan:
    """Roles by module path; `*` stands for anything without a dot (`layers.*.mlp.w_up`).

    A role may be given by its name (`"column"`) where it needs no arguments. `regions` are modules that are entered as
    a whole: their input is gathered once (in all-reduce mode: is used by each rank for itself from there on), all
    columns below that have a group multiply it then, and the rest of the module sees it whole. `num_blocks` is how many
    blocks the whole model has, where the plan is for a part of it.

    Raises:
        ConfigError: something that is no role.
    """

    roles: Mapping[str, Role | str]
    sequence_parallel: bool = True
    regions: tuple[str, ...] = ()
    num_blocks: int | None = None
    resolved: Mapping[str, Role] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolved", {path: _resolve(path, role) for path, role in self.roles.items()})

    def role_of(self, path: str) -> Role | None:
        """The role of the module at `path`, that of the first pattern if several name it."""
        return next((role for pattern, role in self.resolved.items() if is_match(pattern, path)), None)

    def find_region(self, path: str) -> str | None:
        """The path of the region that the module at `path` is in, itself included; the innermost."""
        parts = path.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((place for place in above if any(is_match(pattern, place) for pattern in self.regions)), None)

    def select(self, names: Collection[str], num_blocks: int) -> "Plan":
        """The same for modules `names`, a part of a model of `num_blocks` blocks: without what is not there."""
        roles = {pattern: role for pattern, role in self.roles.items() if any(is_match(pattern, n) for n in names)}
        regions = tuple(pattern for pattern in self.regions if any(is_match(pattern, name) for name in names))
        return replace(self, roles=roles, regions=regions, num_blocks=num_blocks)

    @property
    def activation(self) -> Placement:
        """State on tp of the activations between the parallel regions."""
        return derive_activation_placement(sequence_parallel=self.sequence_parallel)


def derive_activation_placement(*, sequence_parallel: bool) -> Placement:
    """State on tp of the activations `[T, D]` between the parallel regions: tokens sharded, or the same everywhere."""
    return Shard(0) if sequence_parallel else Invariant()


def name_role(role: Role) -> str:
    """`vocab_head`: a role as plans and messages name it."""
    return ROLE_NAMES[type(role)]


def is_match(pattern: str, path: str) -> bool:
    """Whether `pattern` names the module at `path`."""
    return _compile(pattern).fullmatch(path) is not None


@lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile("[^.]+".join(map(re.escape, pattern.split("*"))))


def _resolve(path: str, role: Role | str) -> Role:
    if isinstance(role, Role):
        return role
    if not isinstance(role, str):
        raise ConfigError(f"plan: {path!r} has role {role!r}, which is not one", hint=f"as in {Column()!r}, or by name")
    if role in (ROLE_NAMES[HeadLocal], ROLE_NAMES[HeadRows]):
        kind = "HeadLocal" if role == ROLE_NAMES[HeadLocal] else "HeadRows"
        example = f"plait.{kind}(plait.QueryHeads(num_heads=8, num_kv_heads=4, head_width=64))"
        raise ConfigError(f"plan: {path!r} has role {role!r}, which has to know the heads", hint=f"as in {example}")
    if role == ROLE_NAMES[Activation]:
        example = 'plait.Activation(group="gate_up")'
        raise ConfigError(f"plan: {path!r} has role {role!r}, which has to name its group", hint=f"as in {example}")
    if role not in _BY_NAME:
        raise ConfigError(f"plan: {path!r} has unknown role {role!r}", hint=describe_nearest(role, _BY_NAME))
    return _BY_NAME[role]
