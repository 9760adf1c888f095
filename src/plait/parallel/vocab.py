"""The columns of the logits that this rank holds, and what ranks tell each other about theirs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Axis, Mesh
from plait.contract.parameter import build_vocab_split
from plait.errors import ShardingError
from plait.sharding import Interval

CHUNK_BYTES = 64 << 20
"""Bound on the logits that exist at a time in the dtype of the statistics (float32, or float64 for float64 logits)."""

_CACHED_BYTES = 1 << 20
"""Bound on a CPU, where what stays in its cache is read again for nothing: a cross-entropy takes half the time."""


class OwnTargets(NamedTuple):
    """Which targets are among this rank's columns, and in which; column 0 stands for those that are not."""

    column: Tensor
    is_own: Tensor

    def take(self, values: Tensor, rows: slice) -> Tensor:
        """The target's entry in each row of `values`, zero where another rank has it."""
        taken = values.gather(1, self.column[rows].unsqueeze(1)).squeeze(1)
        return taken.masked_fill_(~self.is_own[rows], 0)

    def subtract_(self, values: Tensor, rows: slice, amount: float) -> None:
        """Subtract `amount` from the target's entry in each row of `values`, nothing where another rank has it."""
        amounts = self.is_own[rows].to(values.dtype).mul_(-amount)
        values.scatter_add_(1, self.column[rows].unsqueeze(1), amounts.unsqueeze(1))


@dataclass(frozen=True)
class VocabShard:
    """This rank's interval of a vocabulary of `size`, on the axis that cuts it; a whole vocabulary has no axis."""

    size: int
    own: Interval
    axis: Axis | None

    def check_targets(self, logits_shard: Tensor, targets: Tensor, is_valid: Tensor) -> None:
        """Refuse targets that no rank owns, or of another shape.

        Raises:
            ShardingError: a shape that does not match, or a target outside the vocabulary.
        """
        if targets.shape != logits_shard.shape[:-1]:
            raise ShardingError(f"targets {list(targets.shape)} do not match logits {list(logits_shard.shape)}")
        hint = "give targets that do not count the value of ignore_index"
        check_in_vocabulary(targets.masked_fill(~is_valid, 0), self.size, "target", hint=hint)

    def locate(self, targets_T: Tensor) -> OwnTargets:
        """Find the targets that are among this rank's columns."""
        is_own = (targets_T >= self.own.start) & (targets_T < self.own.stop)
        return OwnTargets((targets_T - self.own.start).masked_fill_(~is_own, 0), is_own)

    def reduce_max(self, logits_TV: Tensor) -> Tensor:
        """The largest logit of each token over the whole vocabulary, `[T]`, in the dtype of the statistics."""
        max_T = logits_TV.amax(-1).to(torch.promote_types(logits_TV.dtype, torch.float32))
        return max_T if self.axis is None else collectives.all_reduce(max_T, self.axis, op="max", label="loss")

    def reduce_sum(self, sums: Tensor) -> Tensor:
        """Sums over own columns -> sums over the whole vocabulary, in their own dtype whatever the axis's is."""
        return sums if self.axis is None else collectives.all_reduce(sums, self.axis, dtype=sums.dtype, label="loss")


def check_in_vocabulary(ids: Tensor, size: int, what: str, *, hint: str | None = None) -> None:
    """Refuse ids that no rank owns: each rank would take them for another's, and the result be silently wrong.

    Raises:
        ShardingError: the ids are no indices, or one is not among `size`; that, so as not to wait for it, is asserted
            by the device on CUDA.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ShardingError(f"{what}s of {ids.dtype} are no indices", hint="give them as int64")
    is_bad = (ids < 0) | (ids >= size)
    if ids.is_cuda or ids.is_meta:
        torch._assert_async(~is_bad.any(), f"a {what} is not in the vocabulary 0:{size}")
    elif is_bad.any():
        raise ShardingError(f"{what} {ids[is_bad][0].item()} is not in the vocabulary 0:{size}", hint=hint)


def build_vocab_shard(logits_shard: Tensor, mesh: Mesh | None, vocab_size: int) -> VocabShard:
    """Derive which columns this rank holds and check that `logits_shard` are those.

    Raises:
        ShardingError: the last dim has another length; whole logits given for a shard would count each column tp times.
    """
    if mesh is None or mesh.tp.degree == 1:
        axis, own = None, Interval(0, vocab_size)
    else:
        axis, own = mesh.tp, build_vocab_split(vocab_size, mesh.tp.degree).intervals[mesh.tp.rank]
    if logits_shard.dim() < 2 or logits_shard.shape[-1] != len(own):
        where = "" if axis is None else f" of tp rank {axis.rank} of {axis.degree}"
        raise ShardingError(
            f"logits {list(logits_shard.shape)} do not end in the {len(own)} columns {own}{where} "
            f"of a vocabulary of {vocab_size}",
            hint="give [T, V/tp] as the vocab_head returns it, not gathered logits, and the true vocab_size",
        )
    return VocabShard(vocab_size, own, axis)


def iterate_shifted(logits_TV: Tensor, shift_T: Tensor, out: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield `logits - shift`, one range of tokens after another, in the dtype of `shift`; in `out` if that has it."""
    chunk_bytes = min(CHUNK_BYTES, _CACHED_BYTES) if logits_TV.is_cpu else CHUNK_BYTES
    num_rows = max(1, chunk_bytes // (shift_T.element_size() * logits_TV.shape[1]))
    is_in_place = out is not None and out.dtype is shift_T.dtype
    for first in range(0, len(shift_T), num_rows):
        rows = slice(first, first + num_rows)
        chunk_out = out[rows] if out is not None and is_in_place else None
        yield rows, torch.sub(logits_TV[rows], shift_T[rows].unsqueeze(1), out=chunk_out)
