"""What goes with the tokens: each rank's own entries of positions, labels and loss weights, and putting them back.

Labels are shifted before they are cut: the label of the last token of a chunk is a token of another rank. A mean over
tokens is a sum on each rank, summed over the axis, divided by the number of all tokens that count.
"""

from itertools import pairwise

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Axis
from plait.contract.context.mask import AttentionMask
from plait.errors import ShardingError
from plait.sharding import Interval
from plait.sharding.token_order import TokenOrder


def take_own(x: Tensor, order: TokenOrder, rank: int, *, dim: int = 1) -> Tensor:
    """The entries of `x`, `[B, S, ...]` on every rank, that go with the tokens of `rank`; nothing moves.

    x          [B, S, ...]       the same on all ranks of the axis
    x_shard    [B, S/cp, ...]

    Raises:
        ShardingError: `x` has another number of tokens.
    """
    _check_length(x, order.size, dim, "take_own", order)
    return _join(x, order.chunks[rank], dim)


def put_back(x_shards: Tensor, order: TokenOrder, *, dim: int = 1) -> Tensor:
    """The shards of all ranks, one behind the other along `dim`, in the order of the sequence; differentiable.

    Raises:
        ShardingError: they have another number of tokens together.
    """
    _check_length(x_shards, order.size, dim, "put_back", order)
    return x_shards if order.is_restored else _join(x_shards, order.restoring, dim)


def store(x: Tensor, order: TokenOrder, *, dim: int = 1) -> Tensor:
    """The inverse of `put_back`: a whole sequence as ranks store it, one rank behind the other; differentiable."""
    _check_length(x, order.size, dim, "store", order)
    return x if order.is_restored else _join(x, order.stored, dim)


def gather(x_shard: Tensor, axis: Axis, order: TokenOrder, *, dim: int = 1, label: str = "gather") -> Tensor:
    """Entries of all tokens in the order of the sequence, on every rank: one all-gather, without a gradient.

    x_shard    [B, S/cp, ...]
    x          [B, S, ...]
    """
    full = collectives.all_gather(x_shard.detach(), axis, order.split, dim=dim, label=label)
    return put_back(full, order, dim=dim)


def list_positions(order: TokenOrder, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """The positions `[S/cp]` in the sequence of the tokens of `rank`."""
    own = [torch.arange(chunk.start, chunk.stop, device=device) for chunk in order.chunks[rank]]
    return torch.cat(own) if own else torch.empty(0, dtype=torch.int64, device=device)


def list_document_positions(
    mask: AttentionMask, batch: int, order: TokenOrder, rank: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The positions `[B, S/cp]` of the tokens of `rank`, counted from the start of each document; 0 for padding.

    Raises:
        ShardingError: the documents do not fit the batch or the sequence.
    """
    mask.check_fits(batch, order.size)
    positions = torch.arange(order.size, device=device).expand(batch, -1).clone()
    for rows, row in mask.group_rows(batch) if mask.documents else ():
        own = positions[rows.start : rows.stop]
        own.zero_()
        for document in mask.documents[row]:
            own[:, document.start : document.stop] = torch.arange(len(document), device=device)
    return take_own(positions, order, rank)


def find_documents(ids_BS: Tensor) -> tuple[tuple[Interval, ...], ...]:
    """The documents of each row: tokens with the same id, side by side; a negative id is padding.

    Raises:
        ShardingError: the ids are not `[B, S]` integers.
    """
    if ids_BS.ndim != 2 or ids_BS.is_floating_point():
        raise ShardingError(
            f"document ids are [B, S] integers, not {list(ids_BS.shape)} {ids_BS.dtype}",
            hint="give each token the number of its document, -1 for padding",
        )
    rows = []
    for ids in ids_BS.cpu():
        changes = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
        edges = [0, *changes.tolist(), len(ids)] if len(ids) else []
        parts = (Interval(start, stop) for start, stop in pairwise(edges))
        rows.append(tuple(part for part in parts if ids[part.start] >= 0))
    return tuple(rows)


def _join(x: Tensor, chunks: tuple[Interval, ...], dim: int) -> Tensor:
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def _check_length(x: Tensor, size: int, dim: int, where: str, order: TokenOrder) -> None:
    if not 0 <= dim < x.ndim or x.shape[dim] != size:
        raise ShardingError(
            f"{where}: {list(x.shape)} should have the {size} tokens of a sequence in dim {dim}, "
            f"which {order.degree} ranks share"
        )
