"""Vocabulary-parallel embedding (Shoeybi et al., arXiv:1909.08053, section 3)."""

import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm.autograd import redistribute
from plait.comm.mesh import Mesh
from plait.parallel.tokens import enter_tokens
from plait.parallel.vocab import check_in_vocabulary
from plait.sharding import Partial, Placement, Shard, Split


class VocabParallelEmbedding(nn.Module):
    """Embedding whose vocabulary rows are cut over tp; here the tokens of a forward pass enter the sharded part.

        ids        [T]          the same on all tp ranks
        w_shard    [V/tp, D]    own vocabulary rows
        x_shard    [T/tp, D]    tokens sharded (or whole, in all-reduce mode)

        forward    look own ids up, zero for the others' -> reduce_scatter (or all_reduce) over tp
        backward   all_gather of the gradient (or nothing), then the rows of own ids

    Contract: `contract.embedding.derive_vocab_embedding`.
    """

    def __init__(
        self, weight: nn.Parameter, *, rows: Split, padding_idx: int | None, mesh: Mesh, outside: Placement, name: str
    ) -> None:
        super().__init__()
        self.weight = weight
        self.rows = rows
        self.mesh = mesh
        self.outside = outside
        self.name = name
        self.own = rows.intervals[mesh.tp.rank]
        owns_padding = padding_idx is not None and self.own.start <= padding_idx < self.own.stop
        self.local_padding_idx = padding_idx - self.own.start if padding_idx is not None and owns_padding else None

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape -> `[T/tp, D]`; in all-reduce mode `[*ids.shape, D]`. Named as in nn.Embedding."""
        ids = input
        check_in_vocabulary(ids, self.rows.size, f"{self.name}: id")
        split = None
        if isinstance(self.outside, Shard):
            ids = ids.flatten()
            split = enter_tokens(ids.numel(), self.mesh)
        is_own = (ids >= self.own.start) & (ids < self.own.stop)
        own_ids = (ids - self.own.start).masked_fill(~is_own, 0)
        x_partial = F.embedding(own_ids, self.weight, self.local_padding_idx) * is_own.unsqueeze(-1)
        return redistribute(x_partial, self.mesh.tp, Partial(), self.outside, split=split, label=self.name)

    def extra_repr(self) -> str:
        """Own rows of all."""
        return f"rows {self.own} of {self.rows.size}"
