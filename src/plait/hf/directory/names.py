"""Under which name of a checkpoint each tensor of a model is, and everything that does not fit."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plait.checkpoint.spec import TensorSpec
from plait.checkpoint.weights import WeightFiles
from plait.errors import CheckpointError

_SHOWN = 4
"""Names of each kind that a message lists."""

_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"attn\.(masked_)?bias$", r"attention\.(masked_)?bias$")
"""What old versions of transformers saved although it is computed."""


@dataclass(frozen=True)
class Naming:
    """What a model says about the names of its checkpoint."""

    prefix: str = ""
    """Of the base model (`transformer.`): the checkpoint of a base model alone lacks it."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """A name that is tied, and the name it is tied to: a checkpoint has one of them, or both with the same values."""
    ignored: tuple[str, ...] = ()
    """Patterns of what a checkpoint may hold beside the model's tensors."""


@dataclass(frozen=True)
class Match:
    """Which tensors of the files are those of the model."""

    names: Mapping[str, str]
    """Name in the files by the name in the model's own checkpoint."""
    twins: tuple[tuple[str, str], ...]
    """Pairs of names in the files that the model ties, so that they must hold the same values."""


def match_tensors(wanted: Mapping[str, tuple[int, ...]], files: WeightFiles, naming: Naming) -> Match:
    """Find each of `wanted`, given by its shape.

    Raises:
        CheckpointError: lists all tensors that are missing, that the model has no place for, and of another shape.
    """
    found = {name: entry.spec for name, entry in files.entries.items()}
    names = {name: _find(name, found, naming) for name in wanted}
    known = {name: held for name, held in names.items() if held is not None}
    twins = tuple(
        (held, other)
        for name, held in known.items()
        for alias in _list_aliases(name, naming)
        if (other := _spell(alias, found, naming)) is not None and other != held
    )
    extra = found.keys() - set(known.values()) - {other for _, other in twins}
    problems = [
        *_describe("missing", sorted(name for name, held in names.items() if held is None)),
        *_describe("unexpected", sorted(name for name in extra if not _is_ignored(name, naming))),
        *_describe("of another shape", sorted(_list_mismatches(wanted, known, found))),
    ]
    if problems:
        raise CheckpointError(
            f"{files.folder}: does not hold the weights of this model{''.join(problems)}",
            hint="check that config.json and the weights belong together",
        )
    return Match(known, twins)


def _find(name: str, found: Mapping[str, TensorSpec], naming: Naming) -> str | None:
    """The name in the files of a tensor of the model; of a tied one also its other names."""
    spelled = (_spell(each, found, naming) for each in (name, *_list_aliases(name, naming)))
    return next((each for each in spelled if each is not None), None)


def _spell(name: str, found: Mapping[str, TensorSpec], naming: Naming) -> str | None:
    """`transformer.wte.weight`, or `wte.weight` in a checkpoint of the base model."""
    bare = name.removeprefix(naming.prefix)
    return next((each for each in (name, bare) if each in found), None)


def _list_aliases(name: str, naming: Naming) -> list[str]:
    source = naming.tied.get(name, name)
    return [each for each in (source, *(t for t, s in naming.tied.items() if s == source)) if each != name]


def _is_ignored(name: str, naming: Naming) -> bool:
    return any(re.search(pattern, name) for pattern in (*naming.ignored, *_COMPUTED))


def _list_mismatches(
    wanted: Mapping[str, tuple[int, ...]], known: Mapping[str, str], found: Mapping[str, TensorSpec]
) -> Iterable[str]:
    for name, held in known.items():
        if found[held].shape != wanted[name]:
            yield f"{held} is {list(found[held].shape)}, and {list(wanted[name])} in the model"


def _describe(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN + 1 else []
    shown = names[: _SHOWN if more else _SHOWN + 1]
    return [f"\n  {len(names)} {what}:" + "".join(f"\n  - {name}" for name in [*shown, *more])]
