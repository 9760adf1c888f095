"""The one wrapper around torch.distributed: every collective of plait is issued here.

Functions take tensors with any strides, return their result and leave their input alone, so that the addend of a rank
can never be mistaken for the sum, as in `all_reduce(x.contiguous()); return x`. Uneven splits are exact: pieces are
padded to the longest one on the wire and cut afterwards. Sums are carried in the declared dtype. Everything issued is
traced. On an axis of degree 1 nothing happens. What is on the CPU goes through the shared memory of the axis, where it
has some and there is enough of it.

They have no backward: which collective the gradient needs depends on the states before and after, so a tensor that
requires grad goes through `plait.comm.autograd.redistribute`.
"""

import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import trace
from plait.comm.mesh import Axis
from plait.contract.collective import ReduceOp
from plait.errors import ShardingError, TransportError, TransportTimeout
from plait.sharding import Kind, Split, build_split

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

_BOILERPLATE = re.compile(r"^\[[^\]]*\] |\. This is typically .*", re.DOTALL)
"""What gloo puts around its errors: its source line, and advice that does not fit here."""

DimSplit = tuple[int, Split]
"""A dim and how it is cut."""


def all_reduce(
    x: Tensor, axis: Axis, *, op: ReduceOp = "sum", dtype: torch.dtype | None = None, label: str = ""
) -> Tensor:
    """Combine the tensors of all ranks, element by element; every rank gets the result.

    A sum is carried in `dtype`, else in the axis's `reduce_dtype`, else in the dtype of `x`, which the result has.
    """
    if axis.degree == 1:
        return x
    _check_detached(x, "all_reduce", label)
    carrier = _carrier(x, axis, dtype) if op == "sum" else x.dtype
    trace.issue(Kind.ALL_REDUCE, axis, x.shape, carrier, 0, op, label)
    total = None
    if axis.shared is not None and x.is_cpu:
        total = axis.shared.collectives.all_reduce(x, op, carrier, label)
    if total is None:
        total = x.to(carrier, memory_format=torch.contiguous_format, copy=True)
        _run(dist.all_reduce, axis, total, _OPS[op])
    return total if carrier is x.dtype else total.to(x.dtype)


def all_gather(x_shard: Tensor, axis: Axis, split: Split, *, dim: int = 0, label: str = "") -> Tensor:
    """Put the shards of all ranks together along `dim`; every rank gets the whole tensor."""
    if axis.degree == 1:
        return x_shard
    _check_detached(x_shard, "all_gather", label)
    _check_length(x_shard, axis, split, dim, split.lengths[axis.rank], label)
    shape = _with_length(x_shard.shape, dim, split.size)
    trace.issue(Kind.ALL_GATHER, axis, shape, x_shard.dtype, dim, "sum", label)
    if axis.shared is not None and x_shard.is_cpu:
        found = axis.shared.collectives.all_gather(x_shard, split, dim, label)
        if found is not None:
            return found
    if dim == 0 and split.is_even:
        x_full = x_shard.new_empty(shape)
        _run(dist.all_gather_single, axis, x_full, x_shard.contiguous())
        return x_full
    pieces = x_shard.new_empty((axis.degree, *_with_length(x_shard.shape, dim, split.longest)))
    _run(dist.all_gather_single, axis, pieces.flatten(0, 1), _pad(x_shard, dim, split.longest))
    owners = [ranks[0] for ranks in split.replica_groups]
    return torch.cat([pieces[rank].narrow(dim, 0, split.lengths[rank]) for rank in owners or [0]], dim)


def all_gather_into(x_full: Tensor, x_shard: Tensor, axis: Axis, *, label: str = "") -> None:
    """Put shards of equal length together in `x_full`, `[p*n]`, of which the own `x_shard`, `[n]`, may be a part."""
    _check_detached(x_shard, "all_gather", label)
    split = build_split(x_full.numel(), axis.degree)
    _check_length(x_shard, axis, split, 0, split.lengths[axis.rank], label)
    trace.issue(Kind.ALL_GATHER, axis, x_full.shape, x_shard.dtype, 0, "sum", label)
    if axis.shared is not None and x_shard.is_cpu:
        found = axis.shared.collectives.all_gather(x_shard, split, 0, label)
        if found is not None:
            x_full.copy_(found)
            return
    _run(dist.all_gather_single, axis, x_full, x_shard)


def reduce_scatter(
    x_partial: Tensor, axis: Axis, split: Split, *, dim: int = 0, dtype: torch.dtype | None = None, label: str = ""
) -> Tensor:
    """Sum the tensors of all ranks, element by element; every rank gets its own interval of `dim`.

    The sum is carried as that of `all_reduce`.
    """
    if axis.degree == 1:
        return x_partial
    _check_detached(x_partial, "reduce_scatter", label)
    _check_length(x_partial, axis, split, dim, split.size, label)
    dtype_in, carrier = x_partial.dtype, _carrier(x_partial, axis, dtype)
    trace.issue(Kind.REDUCE_SCATTER, axis, x_partial.shape, carrier, dim, "sum", label)
    if axis.shared is not None and x_partial.is_cpu:
        found = axis.shared.collectives.reduce_scatter(x_partial, split, dim, carrier, label)
        if found is not None:
            return found.to(dtype_in)
    addends = x_partial if carrier is dtype_in else x_partial.to(carrier)
    x_shard = addends.new_empty(_with_length(x_partial.shape, dim, split.longest))
    if dim == 0 and split.is_even:
        _run(dist.reduce_scatter_single, axis, x_shard, addends.contiguous())
    else:
        pieces = torch.cat([_pad(piece, dim, split.longest) for piece in _cut(addends, dim, split)])
        _run(dist.reduce_scatter_single, axis, x_shard, pieces)
        x_shard = x_shard.narrow(dim, 0, split.lengths[axis.rank]).contiguous()
    return x_shard if carrier is dtype_in else x_shard.to(dtype_in)


def all_to_all(x_shard: Tensor, axis: Axis, *, gather: DimSplit, scatter: DimSplit, label: str = "") -> Tensor:
    """Cut another dim: the shard along `gather` becomes whole there and is cut along `scatter` instead."""
    if axis.degree == 1:
        return x_shard
    (gather_dim, gather_split), (scatter_dim, scatter_split) = gather, scatter
    _check_detached(x_shard, "all_to_all", label)
    _check_length(x_shard, axis, gather_split, gather_dim, gather_split.lengths[axis.rank], label)
    _check_length(x_shard, axis, scatter_split, scatter_dim, scatter_split.size, label)
    whole = _with_length(x_shard.shape, gather_dim, gather_split.size)
    trace.issue(Kind.ALL_TO_ALL, axis, whole, x_shard.dtype, scatter_dim, "sum", label)
    if axis.shared is not None and x_shard.is_cpu:
        found = axis.shared.collectives.all_to_all(x_shard, gather, scatter, label)
        if found is not None:
            return found
    outgoing = [piece.flatten() for piece in _cut(x_shard, scatter_dim, scatter_split)]
    own_shape = _with_length(x_shard.shape, scatter_dim, scatter_split.lengths[axis.rank])
    shapes = [_with_length(own_shape, gather_dim, length) for length in gather_split.lengths]
    sizes = [shape.numel() for shape in shapes]
    received = x_shard.new_empty(sum(sizes))
    _run(dist.all_to_all_single, axis, received, torch.cat(outgoing), sizes, [piece.numel() for piece in outgoing])
    pieces = [piece.view(shape) for piece, shape in zip(received.split(sizes), shapes, strict=True)]
    return torch.cat([pieces[ranks[0]] for ranks in gather_split.replica_groups] or pieces[:1], gather_dim)


def take_own(x: Tensor, axis: Axis, split: Split, *, dim: int = 0) -> Tensor:
    """This rank's interval of `dim`, copied; nothing moves."""
    if axis.degree == 1:
        return x
    _check_detached(x, "take_own", "")
    _check_length(x, axis, split, dim, split.size, "")
    own = split.intervals[axis.rank]
    return x.narrow(dim, own.start, len(own)).clone(memory_format=torch.contiguous_format)


def apply(
    kind: Kind,
    x: Tensor,
    axis: Axis,
    *,
    split: Split | None,
    dim: int = 0,
    scatter: DimSplit | None = None,
    label: str = "",
) -> Tensor:
    """Do what a row of the transition table says; `scatter` is the new cut of an all-to-all."""
    if kind is Kind.NOTHING or axis.degree == 1:
        return x
    if kind is Kind.ALL_REDUCE:
        return all_reduce(x, axis, label=label)
    if split is None:
        raise ShardingError(f"{label or kind}: {kind} over {axis.name} needs to know how dim {dim} is cut")
    match kind:
        case Kind.ALL_GATHER:
            return all_gather(x, axis, split, dim=dim, label=label)
        case Kind.REDUCE_SCATTER:
            return reduce_scatter(x, axis, split, dim=dim, label=label)
        case Kind.TAKE_OWN:
            return take_own(x, axis, split, dim=dim)
    if scatter is None:
        raise ShardingError(
            f"{label or kind}: {kind} over {axis.name} needs to know which dim is cut afterwards, and how"
        )
    return all_to_all(x, axis, gather=(dim, split), scatter=scatter, label=label)


def _run(issue: Callable[..., Any], axis: Axis, *args: Any) -> None:
    """Issue a collective and wait for it. The caller's frame holds every tensor until then."""
    start = time.perf_counter()
    try:
        issue(*args, group=axis.group)
    except RuntimeError as error:
        raise build_transport_error(error) from error
    trace.note_wait(time.perf_counter() - start)


def build_transport_error(error: RuntimeError, message: str = "") -> TransportError:
    """What torch.distributed raised in the latest collective, or in a message that is part of it."""
    kind = TransportTimeout if "timed out" in str(error).lower() else TransportError
    what = f"{message} in {trace.last_collective()}" if message else str(trace.last_collective())
    return kind(f"{trace.identity()}: {what} failed: {_BOILERPLATE.sub('', str(error))}")


def _carrier(x: Tensor, axis: Axis, dtype: torch.dtype | None) -> torch.dtype:
    return (dtype or axis.reduce_dtype or x.dtype) if x.is_floating_point() else x.dtype


def _with_length(shape: torch.Size, dim: int, length: int) -> torch.Size:
    return torch.Size((*shape[:dim], length, *shape[dim + 1 :]))


def _cut(x: Tensor, dim: int, split: Split) -> list[Tensor]:
    return [x.narrow(dim, interval.start, len(interval)) for interval in split.intervals]


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` with zeros behind it along `dim`, contiguous."""
    missing = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(_with_length(x.shape, dim, missing))], dim) if missing else x.contiguous()


def _check_detached(x: Tensor, name: str, label: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ShardingError(
            f"{label or name}: {name} has no backward, and its input {list(x.shape)} requires grad",
            hint="use plait.comm.autograd.redistribute, which derives the collective of the gradient, or detach it",
        )


def _check_length(x: Tensor, axis: Axis, split: Split, dim: int, length: int, label: str) -> None:
    if split.degree != axis.degree:
        raise ShardingError(
            f"{label}: a split over {split.degree} ranks does not fit axis {axis.name!r} of degree {axis.degree}"
        )
    if not 0 <= dim < x.ndim or x.shape[dim] != length:
        raise ShardingError(
            f"{label}: rank {axis.rank} on {axis.name!r} of degree {axis.degree} has {list(x.shape)}, "
            f"but dim {dim} should have {length} of {split.size} elements, "
            f"cut as {', '.join(map(str, split.intervals))}"
        )
