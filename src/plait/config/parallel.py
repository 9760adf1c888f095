"""Over how many ranks a run is spread, and how."""

from typing import Annotated

from pydantic import Field

from plait.config.section import Count, Section
from plait.sharding import MAX_TP, MeshShape


class ParallelConfig(Section):
    """Degrees of the mesh axes."""

    tp: Annotated[int, Field(ge=1, le=MAX_TP)] = 1
    """Tensor-parallel degree: ranks that share every layer."""
    dp: Count = 1
    """Data-parallel degree: ranks (tp groups) that share the batch."""
    sequence_parallel: bool = True
    """Shard the activations between the linears over tokens; otherwise every tp rank holds all of them."""

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of these degrees."""
        return MeshShape(dp=self.dp, tp=self.tp)
