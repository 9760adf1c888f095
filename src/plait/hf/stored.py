"""Where the parameters of a parallel Hugging Face model are in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from plait.parallel.apply import ownership_of
from plait.sharding import Interval

ATTRIBUTE = "plait_stored"
"""The attribute of a model that holds what `stored_of` adds to the identity."""


@dataclass(frozen=True)
class Stored:
    """Where the whole of one parameter is in a checkpoint.

    Attributes:
        name: of the tensor there.
        shape: of that tensor.
        dim: of that tensor, along which the parameter is only a part of it; None where it is all of it.
        interval: along that dim, what is the parameter.
        is_transposed: whether the parameter is that part, transposed.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    interval: Interval | None = None
    is_transposed: bool = False


def stored_of(model: nn.Module) -> dict[str, Stored]:
    """For each parameter of `model`, parallel or not, by its name, where a checkpoint has the whole of it."""
    special: Mapping[str, Stored] = getattr(model, ATTRIBUTE, {})
    return {name: special.get(name, Stored(name, ownership.shape)) for name, ownership in ownership_of(model).items()}
