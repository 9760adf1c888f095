"""The ways to run one workload that are compared, each a step that can be repeated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.bench.alone import build_lone_mesh
from plait.bench.workload import Workload
from plait.comm.mesh import build_mesh
from plait.config.overlap import OverlapConfig
from plait.config.quantization import QuantizationConfig
from plait.contract.plan import Plan
from plait.errors import ConfigError
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.receipt import Receipt
from plait.parallel.apply import parallelize, record_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.tokens import enter_tokens
from plait.sharding import MeshShape


@dataclass(frozen=True)
class Variant:
    """One way.

    Attributes:
        moves: whether anything is communicated; without, it is the local work alone.
    """

    name: str
    overlap: OverlapConfig
    moves: bool = True


LIBRARY = Variant("library", OverlapConfig())
"""Nothing overlapped, with the library's collectives."""

POINT_TO_POINT = Variant("point to point", OverlapConfig(policy="full", method="none", transport="ring"))
"""Nothing overlapped, with sends and receives of no more bytes than needed."""

COMPUTE = Variant("compute only", OverlapConfig(), moves=False)
"""The same local work with nothing moved."""


class Step:
    """Forward and backward of a workload, run as a variant says; the gradients of the last time are dropped.

    Every rank of the world has to make it, and to run it as often as the others.
    """

    def __init__(self, workload: Workload, variant: Variant, tp: int) -> None:
        self.workload = workload
        self.variant = variant
        shares = variant.moves and variant.overlap.may_share_memory
        self.mesh = build_mesh(MeshShape(tp=tp), reduce_dtype=workload.reduce_dtype, shared_memory=shares)
        if not variant.moves:
            self.mesh = build_lone_mesh(self.mesh)
        plan = Plan(workload.roles, workload.sequence_parallel)
        self.module = parallelize(
            workload.build(),
            self.mesh,
            plan,
            overlap=variant.overlap,
            quantization=workload.quantization or QuantizationConfig(),
        )
        seed_dropout(self.module, 0)
        x_full = workload.draw_input()
        if workload.width is None:
            self.x, self.grad_y = x_full, torch.ones(())
        else:
            self.x = self._take_own(x_full).clone().requires_grad_()
            self.grad_y = self._take_own(x_full.flip(0)).clone()
        self.leaves = [self.x, *self.module.parameters()]
        self.y = self.x.detach()

    def __call__(self) -> None:
        """Run once."""
        for leaf in self.leaves:
            leaf.grad = None
        enter_tokens(self.workload.num_tokens, self.mesh)
        set_dropout_offset(self.module, 0)
        self.y = self.workload.run(self.module, self.x, self.mesh)
        self.y.backward(self.grad_y)

    @property
    def matmul(self) -> CollectiveMatmul:
        """What runs its collective GEMMs.

        Raises:
            ConfigError: there are none on one rank.
        """
        record = record_of(self.module)
        if record is None or record.matmul is None:
            raise ConfigError("bench overlap: nothing moves on one rank", hint="--tp 2")
        return record.matmul

    @property
    def receipt(self) -> Receipt:
        """What ran."""
        return self.matmul.receipt

    def _take_own(self, x_full: Tensor) -> Tensor:
        if not self.workload.sequence_parallel:
            return x_full
        own = enter_tokens(x_full.shape[0], self.mesh).intervals[self.mesh.tp.rank]
        return x_full[own.start : own.stop]
