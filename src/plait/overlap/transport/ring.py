"""Point to point over torch.distributed: gloo between CPUs, NCCL between CUDA devices.

In configs it is named "ring". It executes every method; with method none it moves whole shards and waits for them,
which is the same way between the ranks without overlap.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from plait.comm.mesh import Axis
from plait.overlap.transport.base import Capability
from plait.overlap.transport.host import HostLink
from plait.overlap.transport.link import Link
from plait.overlap.transport.piecewise import PiecewiseGather, PiecewiseReduce
from plait.overlap.transport.pool import Pool
from plait.overlap.transport.stream import Stalls, StreamLink
from plait.schedule.step import Flow, Method


class RingTransport:
    """Sends and receives over the process group of an axis of more than one rank.

    `build_link` is for other links than those of torch.distributed to the device of the tensors.
    """

    capability = Capability("ring", frozenset({"cpu", "cuda"}), frozenset(Method))
    keeps_memory = False

    def __init__(self, axis: Axis, build_link: Callable[[Axis], Link] | None = None) -> None:
        self.axis = axis
        self._build_link = build_link
        self._links: dict[torch.device, Link] = {}
        self._pool = Pool()
        self._ahead: str | None = None

    def open_gather(self, flow: Flow, x_shard: Tensor, label: str) -> PiecewiseGather:
        """Begin to gather `x_shard`, the own rows."""
        link = self._link_to(x_shard.device)
        link.check_idle(self._ahead)
        return PiecewiseGather(flow, x_shard, self.axis, link, label)

    def begin_ahead(self, flow: Flow, x_shard: Tensor, label: str) -> PiecewiseGather:
        """Begin to gather what the next run needs, and is given then; until `end_ahead` it may be on its way."""
        gather = self.open_gather(flow, x_shard, label)
        self._ahead = flow.tensor
        return gather

    def leave_ahead(self, device: torch.device) -> None:
        """The run that has begun something is over, and others may send before the next."""
        link = self._link_to(device)
        if isinstance(link, StreamLink):
            link.issue_held()

    def end_ahead(self) -> None:
        """Nothing that was begun ahead is on its way any longer, or it never comes: then it is to be missed."""
        self._ahead = None

    def open_reduce(
        self, flow: Flow, width: int, dtype: torch.dtype, device: torch.device, label: str
    ) -> PiecewiseReduce:
        """Begin to reduce rows of `width` elements in `dtype`."""
        link = self._link_to(device)
        link.check_idle(self._ahead)
        partial = self._pool.take(flow.split.size, width, dtype, device)
        return PiecewiseReduce(flow, partial, self.axis, link, self._pool, label)

    @contextmanager
    def measure_stalls(self, device: torch.device) -> Iterator[Stalls]:
        """Measure inside the block how long the computing stream of a CUDA device stands still."""
        link = self._link_to(device)
        assert isinstance(link, StreamLink), f"{device} computes on its host, whose waits the interpreter measures"
        link.stalls = stalls = Stalls()
        try:
            yield stalls
        finally:
            link.stalls = None

    def _link_to(self, device: torch.device) -> Link:
        if device not in self._links:
            build = self._build_link
            self._links[device] = _build_link(self.axis, device) if build is None else build(self.axis)
        return self._links[device]


def _build_link(axis: Axis, device: torch.device) -> Link:
    return StreamLink(axis, device) if device.type == "cuda" else HostLink(axis)
