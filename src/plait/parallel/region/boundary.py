"""Where activations enter or leave a parallel region."""

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from plait.comm.handle import Handled
from plait.comm.mesh import Mesh
from plait.dtype import DType
from plait.errors import ShardingError
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.site import Pass, Site
from plait.parallel.region.quantizer import PLAIN, Quantizer
from plait.parallel.tokens import current_tokens
from plait.schedule.work import Operation
from plait.sharding import Partial, Placement, Replicate, Shard, Transition, derive_transition

_MAX_PASSES = 1024
"""Batches of ever new sizes are not to fill the memory."""


@dataclass(frozen=True)
class Boundary(Handled):
    """Where activations enter or leave a parallel region: the transition there, and what runs it.

    Attributes:
        site: as it was made parallel; trainers cast models later.
        quantizer: what the linears here read of their tensors.
    """

    mesh: Mesh
    transition: Transition
    site: Site
    matmul: CollectiveMatmul
    quantizer: Quantizer = field(default=PLAIN)
    _passes: dict[tuple[object, ...], Pass] = field(default_factory=dict, compare=False, repr=False)
    """By all that tells them apart here."""

    @classmethod
    def build_entry(
        cls, mesh: Mesh, outside: Placement, site: Site, matmul: CollectiveMatmul, quantizer: Quantizer = PLAIN
    ) -> "Boundary":
        """The boundary in front of column linears."""
        return cls(mesh, derive_transition(outside, Replicate()), site, matmul, quantizer)

    @classmethod
    def build_exit(
        cls, mesh: Mesh, outside: Placement, site: Site, matmul: CollectiveMatmul, quantizer: Quantizer = PLAIN
    ) -> "Boundary":
        """The boundary behind a row linear."""
        return cls(mesh, derive_transition(Partial(), outside), site, matmul, quantizer)

    @property
    def name(self) -> str:
        """Its name in traces."""
        return self.site.label

    @property
    def is_sharded(self) -> bool:
        """Whether the tokens outside are sharded."""
        return isinstance(self.transition.source, Shard) or isinstance(self.transition.target, Shard)

    def count_rows(self, x: Tensor, *, is_inside: bool) -> int:
        """T: the tokens of the forward pass under way, of which `x` has all inside and the own ones outside.

        Raises:
            ShardingError: `x` has another number of tokens.
        """
        if not self.is_sharded:
            return x.shape[0] if x.dim() == 2 else x.shape[:-1].numel()
        split = current_tokens(self.mesh, self.name)
        rows = split.size if is_inside else len(split.intervals[self.mesh.tp.rank])
        if x.dim() != 2 or x.shape[0] != rows:
            raise ShardingError(
                f"{self.name}: rank {self.mesh.tp.rank} on 'tp' of degree {self.mesh.tp.degree} has {list(x.shape)}, "
                f"but dim 0 should have {rows} of {split.size} elements, cut as {', '.join(map(str, split.intervals))}",
                hint="tokens are flattened, [T, D], while they are sharded",
            )
        return split.size

    def check_dtype(self, x: Tensor, *params: Tensor | None) -> None:
        """Refuse operands of two dtypes before anything is sent.

        Raises:
            ShardingError: they differ.
        """
        for param in params:
            if param is not None and param.dtype != x.dtype:
                what = "weight" if param.dim() > 1 else "bias"
                raise ShardingError(
                    f"{self.name}: input {list(x.shape)} is {x.dtype}, the {what} {list(param.shape)} is {param.dtype}",
                    hint="cast the input, or the model: parallel linears do not cast",
                )

    def count_outside(self, num_rows: int) -> int:
        """Of `num_rows` tokens those that this rank has outside."""
        return len(current_tokens(self.mesh, self.name).intervals[self.mesh.tp.rank]) if self.is_sharded else num_rows

    def build_pass(
        self, operation: Operation, num_rows: int, dtype: torch.dtype, needs: tuple[bool, bool] = (True, True)
    ) -> Pass:
        """A pass of the linears here over `dtype` tensors; `needs` says whether a backward computes dgrad and wgrad.

        The same one each time: it decides what rows weigh and cost, and is looked up whenever the linears run.
        """
        key = (operation._value_, num_rows, dtype, needs, self.mesh.token_unit)
        known = self._passes.get(key)
        if known is None:
            if len(self._passes) >= _MAX_PASSES:
                self._passes.clear()
            site = replace(self.site, dtype=cast(DType, str(dtype).removeprefix("torch.")))
            known = Pass(operation, site, self.transition, num_rows, *needs, unit=self.mesh.token_unit)
            self._passes[key] = known
        return known
