"""The view that decodes: all-reduce mode without schedules and without backward, as a step has one token a request.

What a step computes is so little that the host's own time counts. A column linear is then a linear, whose input every
rank has; a row linear is a linear and an all-reduce.
"""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import collectives
from plait.comm.mesh import Axis, Mesh
from plait.contract.plan import Column, VocabHead
from plait.hf.heads import apply_heads
from plait.hf.packed import is_transposed, take_apart
from plait.hf.plan import ModelPlan, plan_for
from plait.hf.twin.batch import WholeBatch
from plait.hf.twin.region import BatchBuild
from plait.parallel import apply
from plait.parallel.region.boundary import Boundary


class OwnColumns(nn.Module):
    """A linear of whose output features this rank has its own: `[B, 1, D]` -> `[B, 1, F/tp]`; nothing moves."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply. Named as in nn.Linear."""
        return F.linear(input, self.weight, self.bias)


class SummedRow(nn.Module):
    """A linear of whose input features this rank has its own: `[B, 1, F/tp]` -> `[B, 1, D]`, summed over tp.

    forward    all_reduce(x @ w_shard.T) + bias
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, axis: Axis, name: str) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.axis = axis
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        """Multiply and sum. Named as in nn.Linear."""
        total = collectives.all_reduce(F.linear(input, self.weight), self.axis, label=self.name)
        return total if self.bias is None else total + self.bias


class DecodingBuild(BatchBuild):
    """Makes the twins of this view; parameters have the names that they have in the other one."""

    def build_gather_groups(self, roles: object) -> None:
        """Nothing is gathered."""

    def build_column(self, name: str, module: nn.Module, role: Column | VocabHead) -> OwnColumns:  # type: ignore[override]
        """A linear at the beginning of a region, or the head."""
        return OwnColumns(self.find_weight(name, module), self.find_bias(name, module))

    def build_head(self, name: str, module: nn.Module) -> OwnColumns:  # type: ignore[override]
        """The linear to the vocabulary."""
        return self.build_column(name, module, VocabHead())

    def build_row(self, weight: nn.Parameter, bias: nn.Parameter | None, exit: Boundary) -> SummedRow:  # type: ignore[override]
        """A linear at the end of a region."""
        return SummedRow(weight, bias, axis=self.mesh.tp, name=exit.name)


def cut_for_decoding(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Make a skeleton of a Hugging Face model the decoding view, in place, and return it.

    Raises:
        ConfigError: everything that `plan_for` finds, or a degree that cannot be realised.
    """
    plan = plan_for(model)
    replace_packed(model, plan)
    build = partial(DecodingBuild, batch=WholeBatch(mesh))
    apply.parallelize(model, mesh, plan.build_plan(sequence_parallel=False), build=build)
    for name, heads in plan.heads.items():
        apply_heads(model.get_submodule(name), heads, heads.per_rank(mesh.tp.degree, mesh.tp.rank))
    return model


def replace_packed(model: nn.Module, plan: ModelPlan) -> None:
    """Replace packed and transposed linears by what they consist of."""
    for name, module in _list_linears(model, plan):
        above, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(above), leaf, take_apart(name, module, plan.parts.get(name, ()))[0])


def _list_linears(model: nn.Module, plan: ModelPlan) -> Sequence[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name in plan.parts or is_transposed(module)]
