"""The four states of a tensor on the tp axis, and what each says about its gradient."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Invariant:
    """Every rank holds the same values and uses them the same way; the gradient is the same everywhere too."""

    def __str__(self) -> str:
        return "Invariant"


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the same values and uses them differently; the gradients are addends of the true one."""

    def __str__(self) -> str:
        return "Replicate"


@dataclass(frozen=True)
class Shard:
    """Every rank holds its own interval of `dim`; so it does of the gradient."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds an addend of the value; the gradient is the same everywhere."""

    def __str__(self) -> str:
        return "Partial"


Placement = Invariant | Replicate | Shard | Partial


def derive_gradient_placement(placement: Placement) -> Placement:
    """The state of a tensor's gradient, fixed by the state of the tensor."""
    match placement:
        case Replicate():
            return Partial()
        case Partial():
            return Replicate()
        case _:
            return placement
