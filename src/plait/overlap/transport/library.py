"""The collectives of torch.distributed, whole: what everything overlapped is compared with."""

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Axis
from plait.errors import ScheduleError
from plait.overlap.transport.base import Capability
from plait.schedule.piece import Piece
from plait.schedule.step import Flow, Message, Method
from plait.sharding import Kind


class LibraryTransport:
    """Issues each collective from its first to its last byte; the library says where its result is."""

    capability = Capability("library", frozenset({"cpu", "cuda"}), frozenset({Method.NONE}))
    keeps_memory = False

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def open_gather(self, flow: Flow, x_shard: Tensor, label: str) -> "_Gather":
        """Begin to gather `x_shard`, the own rows."""
        return _Gather(flow, x_shard, self.axis, label)

    def open_reduce(self, flow: Flow, width: int, dtype: torch.dtype, device: torch.device, label: str) -> "_Reduce":
        """Begin to reduce rows of `width` elements in `dtype`."""
        return _Reduce(flow, torch.empty(flow.split.size, width, dtype=dtype, device=device), self.axis, label)


class _Whole:
    """A tensor that is not cut into messages."""

    def __init__(self, flow: Flow, axis: Axis, label: str) -> None:
        self._flow = flow
        self._axis = axis
        self._label = label

    def recv(self, message: Message) -> None:
        raise self._refuse(message)

    def send(self, message: Message) -> None:
        raise self._refuse(message)

    def wait(self, message: Message) -> None:
        raise self._refuse(message)

    def flush(self) -> None:
        """Nothing is left when a collective returns."""

    def _refuse(self, message: Message) -> ScheduleError:
        return ScheduleError(f"{self._label}: {message}: the library takes no messages", hint="its method is none")


class _Gather(_Whole):
    """Attributes: full is there when it has been collected."""

    full: Tensor

    def __init__(self, flow: Flow, x_shard: Tensor, axis: Axis, label: str) -> None:
        super().__init__(flow, axis, label)
        self._x_shard = x_shard

    def collect(self) -> None:
        self.full = collectives.all_gather(self._x_shard, self._axis, self._flow.split, label=self._label)


class _Reduce(_Whole):
    """Attributes: total is there when it has been collected."""

    total: Tensor

    def __init__(self, flow: Flow, partial: Tensor, axis: Axis, label: str) -> None:
        super().__init__(flow, axis, label)
        self.partial = partial

    def collect(self) -> None:
        if self._flow.kind is Kind.ALL_REDUCE:
            self.total = collectives.all_reduce(self.partial, self._axis, label=self._label)
        else:
            self.total = collectives.reduce_scatter(self.partial, self._axis, self._flow.split, label=self._label)

    def add(self, piece: Piece, ranks: tuple[int, ...]) -> None:
        raise ScheduleError(f"{self._label}: {self._flow.tensor}[{piece}] of {ranks}: the library adds by itself")
