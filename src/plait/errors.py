"""The exceptions plait raises.

    PlaitError
      ConfigError          a value that a user wrote cannot work: config, command line, plan, data path
      ShardingError        a layout, interval or transition that cannot exist, or a tensor in another than the declared
      ScheduleError        a schedule that cannot be built, or that would lose, repeat or wait for a piece for ever
      ContractError        a collective or shape that differs from what the contract promised
      TransportError       a collective or a rank failed
        TransportTimeout   a collective was not joined in time
      CheckpointError      a checkpoint that cannot be read or does not fit the model
      VerificationError    a sharded model that is not equal to the unsharded one

Each message says who, what, the values and why it matters; the hint says what to do about it.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


class PlaitError(Exception):
    """Base of everything plait raises on purpose; `hint` is one line on how to go on."""

    exit_status: ClassVar[int] = 2
    """Of a command that ends with it: something given cannot work, and would not if it were started again."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process boundaries (rank to launcher) with their hint."""
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[PlaitError], message: str, hint: str | None) -> PlaitError:
    return kind(message, hint=hint)


class ConfigError(PlaitError, ValueError):
    """A config, command line, plan or data path that cannot work."""

    @classmethod
    def from_problems(cls, what: str, problems: list[str], *, hint: str | None = None) -> "ConfigError":
        """One error that lists every problem found in `what`."""
        if len(problems) == 1:
            return cls(f"{what}: {problems[0]}", hint=hint)
        listed = "".join(f"\n  - {problem}" for problem in problems)
        return cls(f"{what}: {len(problems)} problems{listed}", hint=hint)


class ShardingError(PlaitError, ValueError):
    """A layout, interval or transition that cannot exist."""


class ScheduleError(PlaitError, ValueError):
    """A schedule of a collective GEMM that cannot be built or does not hold."""


class ContractError(PlaitError):
    """What ran differs from what the contract promised."""


class TransportError(PlaitError):
    """A collective or a rank failed."""

    exit_status = 3
    """Whoever started the command may start it again: nothing was wrong with what it was given."""


class TransportTimeout(TransportError):
    """A collective was not joined by every rank in time."""


class CheckpointError(PlaitError):
    """A checkpoint that cannot be read or does not fit."""


class VerificationError(PlaitError):
    """A sharded model that is not equal to the unsharded one."""

    exit_status = 1


def describe_nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """The hint for an unknown name: `did you mean "steps"?`, or the list of what is known.

    Only names that are alike by at least `cutoff` are near, where 1 stands for equal ones.
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=cutoff)
    return f'did you mean "{near[0]}"?' if near else f"known are {', '.join(names)}"
