"""Numbers by which compiled operators find what they stand for: an operator takes tensors and numbers, nothing else."""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from plait.errors import ShardingError

_numbers = count(1)
_known: "WeakValueDictionary[int, Handled]" = WeakValueDictionary()


class Handled:
    """Something with a number of its own in this process, as long as it lives; a copy has another.

    Attributes:
        handle: the number.
    """

    handle: int

    def __post_init__(self) -> None:
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy."""
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        handle = next(_numbers)
        object.__setattr__(self, "handle", handle)
        _known[handle] = self


def find_by_handle(handle: int) -> Any:
    """What has this number.

    Raises:
        ShardingError: it is no more.
    """
    if handle not in _known:
        raise ShardingError(
            f"a compiled graph runs parallel linear {handle}, which is no more",
            hint="keep the model as long as what was compiled of it, also until its backward",
        )
    return _known[handle]
