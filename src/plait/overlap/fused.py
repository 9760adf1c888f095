"""Passes that one operation computes and moves: what the fused operations of CUDA symmetric memory need of a GEMM.

    column forward      gather x into forward
    row backward        gather dy into dgrad, then wgrad
    row forward         forward into scatter y
    column backward     gather x by the library, under dgrad into scatter dx; then wgrad

Nothing in such an operation is ours to time, and what it sends is in no trace but as the collective it amounts to.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Axis
from plait.overlap.execute import Outcome, Rows
from plait.overlap.site import Site
from plait.overlap.transport.symm_mem import all_gather_matmul, matmul_reduce_scatter, why_not_for
from plait.schedule.work import Work
from plait.sharding import Interval


@runtime_checkable
class GatheredProducts(Protocol):
    """A GEMM that is products of the gathered rows."""

    @property
    def factors(self) -> Sequence[Tensor]:
        """What the rows are multiplied by, `[K, N]` each."""

    def put(self, products: Sequence[Tensor]) -> None:
        """Take the products of all rows, `[T, N]` each."""


@runtime_checkable
class ReducedProduct(Protocol):
    """A GEMM whose product is summed over ranks."""

    @property
    def is_product(self) -> bool:
        """Whether the addend of this rank is a product and nothing else."""

    def build_product(self) -> tuple[Tensor, Tensor]:
        """What is multiplied, `[T, K]` and `[K, N]`; made ready by this call, once."""


def find_obstacle(work: Work, gemms: Mapping[str, Rows], site: Site, axis: Axis) -> str | None:
    """Why no fused operation can do `work` with these GEMMs, whatever the machine; None if one can."""
    if site.precision is not None:
        return f"it moves numbers of one dtype, and {site.precision.name} bytes of numbers and scales"
    if (problem := why_not_for(work, getattr(torch, site.dtype), axis)) is not None:
        return problem
    return None if can_fuse(work, gemms) else f"{work.rowwise} is more than a product: others read the gathered input"


def can_fuse(work: Work, gemms: Mapping[str, Rows]) -> bool:
    """Whether the GEMM whose rows move is one that fused operations can compute."""
    assert work.rowwise is not None, work
    gemm = gemms[work.rowwise]
    if work.rowwise_reads_gather:
        return isinstance(gemm, GatheredProducts)
    return isinstance(gemm, ReducedProduct) and gemm.is_product


def run_fused(work: Work, gemms: Mapping[str, Rows], axis: Axis, shard: Tensor | None, label: str) -> Outcome:
    """Do `work` on this rank, of which `find_obstacle` found nothing; all ranks of the axis have to."""
    gemm = gemms[str(work.rowwise)]
    full = total = None
    if isinstance(gemm, GatheredProducts):
        assert shard is not None, label
        # Whether the caller wants the gathered rows as well (for a bias, or to keep them) only it knows.
        full, products = all_gather_matmul(shard, gemm.factors, axis, label=label)
        gemm.put(products)
    else:
        assert isinstance(gemm, ReducedProduct), (label, gemm)
        full, total = _scatter(work, gemm, axis, shard, label)
    if work.summing is not None:
        gemms[work.summing](Interval(0, work.num_rows), full, None, accumulates=False)
    return Outcome(full, is_lent=False, total=total, exposed_s=None)


def _scatter(
    work: Work, gemm: ReducedProduct, axis: Axis, shard: Tensor | None, label: str
) -> tuple[Tensor | None, Tensor]:
    """The fused product, under which the library gathers what the GEMM behind it needs."""
    if work.gather is None or shard is None:
        return None, matmul_reduce_scatter(*gemm.build_product(), axis, label=label)
    streams: Any = torch.get_device_module(shard.device)
    computing, beside = streams.current_stream(), _find_side_stream(shard.device)
    beside.wait_stream(computing)
    with streams.stream(beside):
        full = collectives.all_gather(shard, axis, work.gather.split, label=label)
    total = matmul_reduce_scatter(*gemm.build_product(), axis, label=label)
    # The gathered tensor is memory of the stream beside, which waits for the computing one before it takes it again.
    computing.wait_stream(beside)
    return full, total


@lru_cache
def _find_side_stream(device: torch.device) -> Any:
    """One for each device: memory is kept for every stream apart."""
    return torch.get_device_module(device).Stream()
