"""Over how many ranks a run is spread, and how."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from plait.config.section import Count, Problem, Section
from plait.sharding import MAX_CP, MAX_TP, MeshShape


class ParallelConfig(Section):
    """Degrees of the mesh axes; their product is the number of ranks."""

    renamed: ClassVar[Mapping[str, Problem]] = {
        "dp": Problem(
            "dp",
            "is now two degrees: dp_replicate (ranks that hold the same and sum gradients) times dp_shard (ranks that "
            "also share out the parameters)",
            "parallel.dp_replicate does what parallel.dp did",
        )
    }

    tp: Annotated[int, Field(ge=1, le=MAX_TP)] = 1
    """Tensor-parallel degree: ranks that share every layer."""
    cp: Annotated[int, Field(ge=1, le=MAX_CP)] = 1
    """Context-parallel degree: ranks (tp groups) that share every sequence."""
    dp_shard: Count = 1
    """Data-parallel degree within which the parameters are shared out (FSDP)."""
    dp_replicate: Count = 1
    """Data-parallel degree of whole copies, which share the batch and sum gradients."""
    pp: Count = 1
    """Pipeline degree: stages that the layers are cut into."""
    sequence_parallel: bool = True
    """Shard the activations between the linears over tokens; otherwise every tp rank holds all of them."""
    reshard_after_forward: bool | None = None
    """With dp_shard, free the gathered parameters of a block between its forward and its backward, and gather again;
    unset, as true. With pipeline stages, of which several micro-batches are under way, unset is as false: parameters
    are gathered once a step, and gradients reduced once."""

    @property
    def dp(self) -> int:
        """Data-parallel degree: ranks (groups of tp and cp) that read different sequences."""
        return self.mesh_shape.dp

    @property
    def frees_blocks(self) -> bool:
        """Whether a block of which the parameters are shared out has them whole only while it is computed."""
        return self.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of these degrees."""
        return MeshShape(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp)


def list_axis_conflicts(parallel: ParallelConfig) -> Iterator[Problem]:
    """Micro-batches of a pipeline go back through blocks that others have entered since."""
    if parallel.pp > 1 and parallel.reshard_after_forward:
        text = (
            f"blocks of pipeline stages (parallel.pp = {parallel.pp}) are gathered once a step: each of the "
            "micro-batches under way would gather them anew"
        )
        yield Problem("parallel.reshard_after_forward", text, "leave it out, or set it to false")
