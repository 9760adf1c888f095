"""Collectives in shared memory: every rank writes once, and all read that in place. Sums are taken in rank order.

No rank leaves a turn before all have come to it, so beginning the next one says that this one has ended. Where there
is not enough memory for it, a collective does nothing and gives None, on all ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.comm.shared.arena import NoRoom
from plait.comm.shared.channel import Channel, Plan, Views
from plait.contract.collective import ReduceOp
from plait.sharding import Interval, Split

DimSplit = tuple[int, Split]
"""A dim and how it is cut."""

SLICED_BYTES = 1 << 15
"""From this size on each rank combines a slice for all; below, all of it for itself, which takes one turn less."""

_MAX_PLANS = 1024

_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


def combine(parts: Sequence[Tensor], op: ReduceOp = "sum", out: Tensor | None = None) -> Tensor:
    """Combine two or more tensors of one dtype, element by element, from the first to the last; in `out`, if given."""
    apply = _COMBINE[op]
    total = apply(parts[0], parts[1], out=out)
    for part in parts[2:]:
        apply(total, part, out=total)
    return total


class SharedCollectives:
    """The collectives of one axis. Results are contiguous and the caller's.

    Attributes:
        lack: what memory there was not, if that has happened.
    """

    def __init__(self, channel: Channel) -> None:
        self.lack: str | None = None
        self._channel = channel
        self._rank, self._degree = channel.rank, channel.degree
        # By what is asked for; that of a split by its id, as to hash it would take longer than to do it.
        self._plans: dict[tuple[object, ...], Plan[Any]] = {}

    def all_reduce(self, x: Tensor, op: ReduceOp, carrier: torch.dtype, label: str) -> Tensor | None:
        """Combine the tensors of all ranks, element by element, in `carrier`, which the result has."""
        key = (op, x.shape, carrier, label)
        plan: Plan[list[Tensor]] | None = self._plans.get(key)
        if plan is None:
            text = f"{op} of {list(x.shape)} {carrier} ({label})"
            plan = self._add(key, Plan(text, [x.shape] * self._degree, carrier, list))
        slots = self._take_turn(plan)
        if slots is None:
            return None
        slots[self._rank].copy_(x)
        self._channel.meet()
        if self._degree > 2 and slots[0].nbytes >= SLICED_BYTES:
            return self._combine_slices([slot.view(-1) for slot in slots], op, label).view(x.shape)
        return combine(slots, op)

    def _combine_slices(self, addends: list[Tensor], op: ReduceOp, label: str) -> Tensor:
        """The second half of an all-reduce: each rank combines a slice, and all read the slices in the next turn."""
        shape, dtype = addends[0].shape, addends[0].dtype
        key = ("slices", shape, dtype, label)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._add(key, Plan(f"slices of {list(shape)} {dtype} ({label})", [shape], dtype, list))
        # It needs less memory than the addends had.
        (whole,) = self._channel.take_turn(plan)
        own = slice(self._rank * shape[0] // self._degree, (self._rank + 1) * shape[0] // self._degree)
        combine([addend[own] for addend in addends], op, out=whole[own])
        self._channel.meet()
        return whole.clone()

    def reduce_scatter(self, x: Tensor, split: Split, dim: int, carrier: torch.dtype, label: str) -> Tensor | None:
        """Sum the tensors of all ranks in `carrier`, which the result has: this rank's interval of `dim`."""
        key = (id(split), x.shape, dim, carrier, label)
        plan = self._plans.get(key)
        if plan is None:
            text = f"sum of {list(x.shape)} {carrier}, {_describe(dim, split)} ({label})"
            arrange = partial(_Addends, rank=self._rank, dim=dim, split=split)
            plan = self._add(key, Plan(text, [x.shape] * self._degree, carrier, arrange, split))
        shared = self._take_turn(plan)
        if shared is None:
            return None
        addends = shared.write(x)
        self._channel.meet()
        return combine(addends, out=x.new_empty(addends[0].shape, dtype=carrier))

    def all_gather(self, x_shard: Tensor, split: Split, dim: int, label: str) -> Tensor | None:
        """Put the shards of all ranks together along `dim`."""
        whole = self._share("whole", x_shard, (dim, split), label)
        return None if whole is None else whole.clone()

    def all_to_all(self, x_shard: Tensor, gather: DimSplit, scatter: DimSplit, label: str) -> Tensor | None:
        """Cut along `scatter` what is cut along `gather`: all write the whole tensor, and each takes what it needs."""
        dim, split = scatter
        whole = self._share("parts", x_shard, gather, label)
        if whole is None:
            return None
        return _narrow(whole, dim, split.intervals[self._rank]).clone(memory_format=torch.contiguous_format)

    def _share(self, what: str, x_shard: Tensor, cut: DimSplit, label: str) -> Tensor | None:
        """The whole tensor, in shared memory that the next turn but one overwrites."""
        dim, split = cut
        key = (what, id(split), x_shard.shape, dim, x_shard.dtype, label)
        plan = self._plans.get(key)
        if plan is None:
            shape, dtype = (*x_shard.shape[:dim], split.size, *x_shard.shape[dim + 1 :]), x_shard.dtype
            text = f"{what} of {list(shape)} {dtype}, {_describe(dim, split)} ({label})"
            arrange = partial(_add_part, dim=dim, own=split.intervals[self._rank])
            plan = self._add(key, Plan(text, [shape], dtype, arrange, split))
        turn = self._take_turn(plan)
        if turn is None:
            return None
        whole, own = turn
        # Of ranks that hold the same the first one writes: their bits may differ.
        if not split.is_replicated or self._rank == split.replicas(self._rank)[0]:
            own.copy_(x_shard)
        self._channel.meet()
        return whole

    def _take_turn(self, plan: Plan[Views]) -> Views | None:
        number = self._channel.number
        try:
            return self._channel.take_turn(plan)
        except NoRoom as error:
            self.lack = error.lack
            if self._channel.number > number:
                # It was a turn, if only to find that out.
                self._channel.meet()
            return None

    def _add(self, key: tuple[object, ...], plan: Plan[Any]) -> Plan[Any]:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan


class _Addends:
    """The tensors that are summed, each rank's in its place, and what this rank reads and writes of them."""

    def __init__(self, tensors: list[Tensor], rank: int, dim: int, split: Split) -> None:
        self._rank, self._dim, self._own = rank, dim, split.intervals[rank]
        self._read = [_narrow(tensor, dim, self._own) for tensor in tensors]
        # Where nobody holds the same, nobody else reads this rank's addend of its own interval.
        self._is_whole = split.is_replicated
        parts = (Interval(0, self._own.start), Interval(self._own.stop, split.size))
        written = [Interval(0, split.size)] if self._is_whole else [part for part in parts if len(part)]
        self._written = [(part, _narrow(tensors[rank], dim, part)) for part in written]

    def write(self, x: Tensor) -> list[Tensor]:
        """Write this rank's addend; all addends of its interval."""
        for part, room in self._written:
            room.copy_(_narrow(x, self._dim, part))
        if self._is_whole:
            return self._read
        own = _narrow(x, self._dim, self._own).to(self._read[0].dtype)
        return [*self._read[: self._rank], own, *self._read[self._rank + 1 :]]


def _add_part(tensors: list[Tensor], dim: int, own: Interval) -> tuple[Tensor, Tensor]:
    """A tensor and an interval of it."""
    return tensors[0], _narrow(tensors[0], dim, own)


def _narrow(x: Tensor, dim: int, interval: Interval) -> Tensor:
    return x.narrow(dim, interval.start, len(interval))


def _describe(dim: int, split: Split) -> str:
    return f"dim {dim} cut as {', '.join(map(str, split.intervals))}"
