"""Numbers by which compiled operators find what they stand for: an operator takes tensors and numbers, nothing else.

A number is given as a tensor, whose value no compiler looks at: it guards no graph.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from plait.errors import ShardingError

_numbers = count(1)
_known: "WeakValueDictionary[int, Handled]" = WeakValueDictionary()


class Handled:
    """Something with a number of its own in this process, as long as it lives; a copy has another.

    Attributes:
        handle: the number, a tensor on the CPU.
    """

    handle: Tensor

    def __post_init__(self) -> None:
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy."""
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        number = next(_numbers)
        object.__setattr__(self, "handle", torch.tensor(number, device="cpu"))
        _known[number] = self


def find_by_handle(handle: Tensor) -> Any:
    """What has this number.

    Raises:
        ShardingError: it is no more.
    """
    number = int(handle)
    found = _known.get(number)
    if found is None:
        raise ShardingError(
            f"a compiled graph runs parallel linear {number}, which is no more",
            hint="keep the model as long as what was compiled of it, also until its backward",
        )
    return found
