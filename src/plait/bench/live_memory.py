"""How much memory tensors take while something runs, to the byte, on any device: of those that operations make."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the memory of tensors that were made since it was entered, each storage once, as long as it lives.

    Attributes:
        now_bytes: of those that live.
        peak_bytes: the most there were at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count what it makes."""
        made = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), given)
        return made

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        number, num_bytes = storage._cdata, storage.nbytes()
        if number in given or number in self._known or not num_bytes:
            return
        self._known.add(number)
        self.now_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._forget, number, num_bytes)

    def _forget(self, number: int, num_bytes: int) -> None:
        self._known.discard(number)
        self.now_bytes -= num_bytes
