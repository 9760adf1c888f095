"""Over how many ranks a run is spread, and how."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from plait.config.section import Count, Problem, Section
from plait.errors import ConfigError
from plait.sharding import MAX_TP, MeshAxis, MeshShape

NOT_YET: dict[MeshAxis, str] = {
    "dp_shard": "sharding parameters over data-parallel ranks",
}
"""Axes on which nothing runs so far, and what they will be for: an axis that is taken out of here is open."""


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
    cp: Count = 1
    """Context-parallel degree: ranks (tp groups) that share every sequence."""
    dp_shard: Count = 1
    """Data-parallel degree within which the parameters are shared out (FSDP)."""
    dp_replicate: Count = 1
    """Data-parallel degree of whole copies, which share the batch and sum gradients."""
    pp: Count = 1
    """Pipeline degree: stages that the layers are cut into."""
    sequence_parallel: bool = True
    """Shard the activations between the linears over tokens; otherwise every tp rank holds all of them."""

    @property
    def dp(self) -> int:
        """Data-parallel degree: ranks (groups of tp and cp) that read different sequences."""
        return self.mesh_shape.dp

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of these degrees."""
        return MeshShape(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp)


def list_axis_conflicts(parallel: ParallelConfig) -> Iterator[Problem]:
    """Axes that nothing runs on so far."""
    for axis, what in _list_missing(parallel.mesh_shape):
        yield Problem(f"parallel.{axis}", f"{what} does not run yet", f"leave parallel.{axis} at 1")


def check_axes_run(shape: MeshShape) -> None:
    """Check that a model can be parallelized on a mesh.

    Raises:
        ConfigError: the mesh has ranks on axes that nothing runs on so far.
    """
    missing = list(_list_missing(shape))
    if missing:
        what = ", ".join(f"{axis} = {shape.degree(axis)}: {what}" for axis, what in missing)
        raise ConfigError(
            f"mesh {shape}: {what} does not run yet",
            hint='build the mesh of the other axes alone, as of device_mesh["dp_replicate", "tp"]',
        )


def _list_missing(shape: MeshShape) -> Iterator[tuple[MeshAxis, str]]:
    return ((axis, what) for axis, what in NOT_YET.items() if shape.degree(axis) > 1)
