"""The two ends of a Hugging Face model, each cut over its vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm.autograd import redistribute
from plait.comm.mesh import Mesh
from plait.hf.twin.batch import WholeBatch
from plait.parallel.embedding import VocabParallelEmbedding
from plait.parallel.linear import ColumnParallelLinear, run_column_group
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.column import ColumnGroup
from plait.sharding import Invariant, Placement, Shard, Split


@dataclass(frozen=True)
class Scale:
    """A number, and the dtype in which transformers keeps it: it is rounded to that first."""

    number: float
    dtype: torch.dtype


class ScaledEmbedding(VocabParallelEmbedding):
    """A vocabulary-parallel embedding that multiplies what it looks up by a number, if there is one (Gemma 3)."""

    def __init__(
        self,
        weight: nn.Parameter,
        *,
        rows: Split,
        padding_idx: int | None,
        mesh: Mesh,
        outside: Placement,
        name: str,
        scale: Scale | None,
    ) -> None:
        super().__init__(weight, rows=rows, padding_idx=padding_idx, mesh=mesh, outside=outside, name=name)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Ids `[B, S]` -> `[B, S, D]`. Named as in nn.Embedding."""
        x = super().forward(input)
        if self.scale is None:
            return x
        number = torch.tensor(self.scale.number, dtype=self.scale.dtype, device=x.device)
        return x * number.to(x.dtype)


class HeadLinear(nn.Module):
    """The head, whose rows are cut over the vocabulary.

        x          [1, T/tp, D] own tokens, or [B, n, D] whole ones
        logits     [B, S, V/tp], or [B, n, V/tp]; [.., V] on every rank where the caller of the model wants that

        forward    all_gather of x over tp where its tokens are cut; of the logits only where they are asked for
        backward   the derived ones

    Attributes:
        out_features: all of them, as sources read it for the size of the vocabulary.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, cut: ColumnParallelLinear, whole: Boundary, *, columns: Split, batch: WholeBatch) -> None:
        super().__init__()
        self.register_parameter("weight", cut.weight)
        self.register_parameter("bias", cut.bias)
        self.cut, self.whole = cut.alone, ColumnGroup(whole, cut.alone.shared_over)
        self.columns = columns
        self.out_features = columns.size
        self.batch = batch

    def forward(self, input: Tensor) -> Tensor:
        """Multiply. Named as in nn.Linear."""
        if self.batch.is_cut:
            logits = self._multiply(self.batch.flatten(input), self.cut)
            logits = self.batch.inside(logits)
        else:
            logits = self._multiply(input, self.whole)
        if not self.batch.gathers_logits:
            return logits
        last = logits.dim() - 1
        axis = self.whole.entry.mesh.tp
        return redistribute(logits, axis, Shard(last), Invariant(), split=self.columns, label=self.whole.entry.name)

    def _multiply(self, x: Tensor, group: ColumnGroup) -> Tensor:
        return run_column_group(x, group, [self]).members[0]

    def extra_repr(self) -> str:
        """Local shape."""
        return str(list(self.weight.shape))
