"""Over how many ranks a run is spread, and how."""

from plait.config.section import Count, Section
from plait.sharding import MeshShape


class ParallelConfig(Section):
    """Degrees of the mesh axes."""

    tp: Count = 1
    """Tensor-parallel degree: ranks that share every layer."""
    dp: Count = 1
    """Data-parallel degree: ranks (tp groups) that share the batch."""
    sequence_parallel: bool = True
    """Shard the activations between the linears over tokens; otherwise every tp rank holds all of them."""

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of these degrees."""
        return MeshShape(dp=self.dp, tp=self.tp)
