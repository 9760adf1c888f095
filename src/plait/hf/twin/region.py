"""Twins of a Hugging Face model's linears: regions see `[B, S, *]`, layers hand on what the batch says they do."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from plait.contract.plan import VocabHead
from plait.hf.twin.batch import WholeBatch
from plait.hf.twin.vocabulary import HeadLinear, Scale, ScaledEmbedding
from plait.parallel.build import Build
from plait.parallel.gather_group import GatherGroup
from plait.parallel.linear import ColumnParallelLinear, RowParallelLinear
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.column import ColumnGroup, Outputs
from plait.sharding import Invariant


class BatchGroup(GatherGroup):
    """The columns of one region, `[1, T/tp, D]` (or whole) -> `[B, S, F/tp]` each."""

    batch: WholeBatch

    def multiply(self, x: Tensor, *, keeps_full: bool) -> Outputs:
        """Gather and multiply."""
        given = super().multiply(self.batch.flatten(x), keeps_full=keeps_full)
        return Outputs(
            None if given.x_full is None else self.batch.inside(given.x_full),
            [self.batch.inside(member) for member in given.members],
            None if given.activated is None else self.batch.inside(given.activated),
        )


class BatchRow(RowParallelLinear):
    """The linear at the end of a region, `[B, S, F/tp]` -> `[1, T/tp, D]` (or whole)."""

    batch: WholeBatch

    def forward(self, input: Tensor) -> Tensor:
        """Multiply and reduce. Named as in nn.Linear."""
        return self.batch.outside(super().forward(self.batch.flatten(input)))


@dataclass
class BatchBuild(Build):
    """Makes the twins of a Hugging Face model on one rank.

    Attributes:
        batch: what all of them share.
    """

    batch: WholeBatch = field(kw_only=True)

    def build_gather_group(
        self, parent: nn.Module, members: Sequence[ColumnParallelLinear], group: ColumnGroup
    ) -> BatchGroup:
        """The columns of the region `parent`."""
        built = BatchGroup(parent, members, group)
        built.batch = self.batch
        return built

    def build_row(self, weight: nn.Parameter, bias: nn.Parameter | None, exit: Boundary) -> BatchRow:
        """The linear at its end."""
        row = BatchRow(weight, bias, exit=exit)
        row.batch = self.batch
        return row

    def build_head(self, name: str, module: nn.Module) -> HeadLinear:
        """The linear to the vocabulary, which sees own tokens or whole ones."""
        cut = self.build_column(name, module, VocabHead())
        quantizer = self.build_entry_quantizer([name], name, Invariant())
        whole = Boundary.build_entry(self.mesh, Invariant(), cut.alone.entry.site, self.matmul, quantizer)
        columns = self.ownership[self.names[f"{name}.weight"]].split
        assert columns is not None, name
        return HeadLinear(cut, whole, columns=columns, batch=self.batch)

    def build_embedding(self, name: str, module: nn.Module) -> ScaledEmbedding:
        """The embedding, which gives whole hidden states in both modes: what reads their shape comes before a layer."""
        rows = self.ownership[self.names[f"{name}.weight"]].split
        assert rows is not None, name
        return ScaledEmbedding(
            self.find_weight(name, module),
            rows=rows,
            padding_idx=module.padding_idx,  # type: ignore[arg-type]
            mesh=self.mesh,
            outside=Invariant(),
            name=name,
            scale=_find_scale(module),
        )


def _find_scale(embedding: nn.Module) -> Scale | None:
    """By what an embedding multiplies; the tensor that it keeps for that may be on the meta device."""
    number = getattr(embedding, "scalar_embed_scale", None)
    return None if number is None else Scale(float(number), embedding.get_buffer("embed_scale").dtype)
