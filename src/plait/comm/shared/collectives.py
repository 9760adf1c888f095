"""Collectives in shared memory: every rank writes once, and all read that in place. Sums are taken in rank order.

No rank leaves a turn before all have come to it, so beginning the next one says that this one has ended.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.comm.shared.channel import Channel, Plan
from plait.contract.collective import ReduceOp
from plait.sharding import Split

DimSplit = tuple[int, Split]
"""A dim and how it is cut."""

_SLICED_BYTES = 1 << 15
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
    """The collectives of one axis. Results are contiguous and the caller's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rank, self._degree = channel.rank, channel.degree
        self._plans: dict[tuple[object, ...], Plan[list[Tensor]]] = {}

    def all_reduce(self, x: Tensor, op: ReduceOp, carrier: torch.dtype, label: str) -> Tensor:
        """Combine the tensors of all ranks, element by element, in `carrier`, which the result has."""
        key = (op, x.shape, carrier, label)
        plan = self._plans.get(key) or self._plan(key, f"{op} of all ({label})", x.shape, carrier, self._degree)
        slots = self._channel.take_turn(plan)
        slots[self._rank].copy_(x)
        self._channel.meet()
        if self._degree > 2 and slots[0].nbytes >= _SLICED_BYTES:
            return self._combine_slices([slot.view(-1) for slot in slots], op, label).view(x.shape)
        return combine(slots, op)

    def _combine_slices(self, addends: list[Tensor], op: ReduceOp, label: str) -> Tensor:
        """The second half of an all-reduce: each rank combines a slice, and all read the slices in the next turn."""
        shape, dtype = addends[0].shape, addends[0].dtype
        key = ("slices", shape, dtype, label)
        plan = self._plans.get(key) or self._plan(key, f"slices of all ({label})", shape, dtype, 1)
        (whole,) = self._channel.take_turn(plan)
        own = slice(self._rank * shape[0] // self._degree, (self._rank + 1) * shape[0] // self._degree)
        combine([addend[own] for addend in addends], op, out=whole[own])
        self._channel.meet()
        return whole.clone()

    def reduce_scatter(self, x: Tensor, split: Split, dim: int, carrier: torch.dtype, label: str) -> Tensor:
        """Sum the tensors of all ranks in `carrier`, which the result has: this rank's interval of `dim`."""
        key = (id(split), x.shape, dim, carrier, label)
        plan = self._plans.get(key) or self._plan(
            key, f"sum of each {_describe(dim, split)} ({label})", x.shape, carrier, self._degree, split
        )
        slots, own = self._channel.take_turn(plan), split.intervals[self._rank]
        addends = [slot.narrow(dim, own.start, len(own)) for slot in slots]
        if split.is_replicated:
            slots[self._rank].copy_(x)
        else:
            # Nobody else reads this rank's addend of its own interval.
            addends[self._rank] = x.narrow(dim, own.start, len(own)).to(carrier)
            for start, stop in ((0, own.start), (own.stop, split.size)):
                if start < stop:
                    slots[self._rank].narrow(dim, start, stop - start).copy_(x.narrow(dim, start, stop - start))
        self._channel.meet()
        return combine(addends, out=x.new_empty(addends[0].shape, dtype=carrier))

    def all_gather(self, x_shard: Tensor, split: Split, dim: int, label: str) -> Tensor:
        """Put the shards of all ranks together along `dim`."""
        return self._share("all of", x_shard, (dim, split), label).clone()

    def all_to_all(self, x_shard: Tensor, gather: DimSplit, scatter: DimSplit, label: str) -> Tensor:
        """Cut along `scatter` what is cut along `gather`: all write the whole tensor, and each takes what it needs."""
        dim, split = scatter
        whole, own = self._share("each of", x_shard, gather, label), split.intervals[self._rank]
        return whole.narrow(dim, own.start, len(own)).clone(memory_format=torch.contiguous_format)

    def _share(self, verb: str, x_shard: Tensor, cut: DimSplit, label: str) -> Tensor:
        """The whole tensor, in shared memory that the next turn but one overwrites."""
        dim, split = cut
        key = (verb, id(split), x_shard.shape, dim, x_shard.dtype, label)
        plan = self._plans.get(key)
        if plan is None:
            shape = torch.Size((*x_shard.shape[:dim], split.size, *x_shard.shape[dim + 1 :]))
            plan = self._plan(key, f"{verb} {_describe(dim, split)} ({label})", shape, x_shard.dtype, 1, split)
        (whole,) = self._channel.take_turn(plan)
        own = split.intervals[self._rank]
        # Of ranks that hold the same the first one writes: their bits may differ.
        if self._rank == split.replicas(self._rank)[0]:
            whole.narrow(dim, own.start, len(own)).copy_(x_shard)
        self._channel.meet()
        return whole

    def _plan(
        self,
        key: tuple[object, ...],
        what: str,
        shape: torch.Size,
        dtype: torch.dtype,
        count: int,
        split: Split | None = None,
    ) -> Plan[list[Tensor]]:
        """A turn of `count` tensors of one shape; `split` is given where its id is in the key."""
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan = Plan(f"{what}: {list(shape)} {dtype}", [shape] * count, dtype, list, split)
        return plan


def _describe(dim: int, split: Split) -> str:
    return f"dim {dim} cut as {', '.join(map(str, split.intervals))}"
