"""The twin of each module that has a role, on one rank, and the gather groups between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from plait.comm.mesh import Axis, Mesh
from plait.contract.plan import (
    Activation,
    AttentionCore,
    Column,
    FeatureNorm,
    HeadLocal,
    HeadRows,
    InnerColumn,
    InRegion,
    Plan,
    Positions,
    Role,
    Row,
    TokenLocal,
    VocabEmbedding,
    VocabHead,
    Whole,
)
from plait.dtype import DType
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.site import Region, Site
from plait.parallel import match
from plait.parallel.dropout import Dropout
from plait.parallel.embedding import VocabParallelEmbedding
from plait.parallel.gather_group import GatherGroup
from plait.parallel.linear import ColumnParallelLinear, InnerColumnLinear, RowParallelLinear
from plait.parallel.precision.model import ModelPrecision
from plait.parallel.region.activation import PointwiseActivation
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.column import ColumnGroup
from plait.parallel.region.feature_norm import FeatureParallelNorm
from plait.parallel.region.norm import apply_rms_norm
from plait.parallel.region.quantizer import PLAIN, Quantizer
from plait.parallel.shard import shard_tensor
from plait.parallel.token_local import RegionModule, TokenLocalEmbedding, TokenLocalModule
from plait.sharding import Columns, Ownership, Placement


@dataclass
class Build:
    """Makes the twins of one model on one rank.

    Attributes:
        names: the one name under which a parameter is owned, by each name it has: a tied parameter has two.
        precision: which linears are quantized, if any.
        own: this rank's part of each parameter, made once, so that what was tied stays tied.
    """

    model: nn.Module
    mesh: Mesh
    plan: Plan
    ownership: dict[str, Ownership]
    names: dict[str, str]
    matmul: CollectiveMatmul
    precision: ModelPrecision | None = None
    own: dict[str, nn.Parameter] = field(default_factory=dict)

    def twin(self, name: str, role: Role) -> nn.Module:
        """What takes the place of module `name`; itself, where it works in a parallel model as it is."""
        module = self.model.get_submodule(name)
        match role:
            case Column() | VocabHead() | InnerColumn() | Row():
                return self._linear(name, module, role)
            case VocabEmbedding():
                return self.build_embedding(name, module)
            case HeadLocal(cut):
                split = cut.build_split(cut.num_heads * cut.head_width, self.mesh.tp.degree)
                module.apply_heads(split, self.mesh.tp.rank)  # type: ignore[operator]
                return module
            case TokenLocal():
                return self._token_local(name, module)
            case InRegion():
                apply_rms_norm(module)
                return RegionModule(module, axis=self.mesh.tp, name=name) if _has_parameters(module) else module
            case FeatureNorm():
                return self._feature_norm(name, module)
            case HeadRows():
                return self._head_rows(name, module)
            case Activation() | AttentionCore() | Positions() | Whole():
                return module

    def build_gather_groups(self, roles: dict[str, Role]) -> None:
        """Let columns that read one input share its gather."""
        for (parent, group), names in match.list_gather_groups(roles, self.plan).items():
            members = [self.model.get_submodule(name) for name in names]
            site = self._site(f"{parent}.{group}" if parent else group, roles[names[0]], names)
            shared_over = tuple(self._shared_axis(f"{name}.weight") for name in names)
            quantizer = self.build_entry_quantizer(names, site.label, self.plan.activation)
            entry = Boundary.build_entry(self.mesh, self.plan.activation, site, self.matmul, quantizer)
            if quantizer is not PLAIN:
                shared_over = (None,) * len(names)  # it sums before there is anything to share
            activation = self._find_activation(parent, group, roles)
            column_group = ColumnGroup(entry, shared_over, activation)
            gather_group = self.build_gather_group(self.model.get_submodule(parent), members, column_group)  # type: ignore[arg-type]
            is_named = self.plan.find_region(parent) == parent
            # In all-reduce mode the input is whole anyway.
            if is_named or (self.plan.sequence_parallel and match.is_region(parent, names, roles)):
                gather_group.enter_with_parent()

    def build_gather_group(
        self, parent: nn.Module, members: Sequence[ColumnParallelLinear], group: ColumnGroup
    ) -> GatherGroup:
        """The columns under `parent` that read one input."""
        return GatherGroup(parent, members, group)

    def build_row(self, weight: nn.Parameter, bias: nn.Parameter | None, exit: Boundary) -> nn.Module:
        """A linear at the end of a region."""
        return RowParallelLinear(weight, bias, exit=exit)

    def build_head(self, name: str, module: nn.Module) -> nn.Module:
        """The linear to the vocabulary."""
        return self.build_column(name, module, VocabHead())

    def build_column(self, name: str, module: nn.Module, role: Column | VocabHead) -> ColumnParallelLinear:
        """A linear at the beginning of a region."""
        weight, bias = self.find_weight(name, module), self.find_bias(name, module)
        outside, site = self.plan.activation, self._site(name, role, [name])
        quantizer = self.build_entry_quantizer([name], name, outside)
        entry = Boundary.build_entry(self.mesh, outside, site, self.matmul, quantizer)
        shared_over = self._shared_axis(f"{name}.weight") if quantizer is PLAIN else None
        return ColumnParallelLinear(weight, bias, entry=entry, shared_over=shared_over)

    def build_entry_quantizer(self, names: Sequence[str], label: str, outside: Placement) -> Quantizer:
        """What columns read that have one input, which arrives as `outside`: tensors as they are, or quantized ones."""
        if self.precision is None:
            return PLAIN
        shared_over = [self._shared_axis(f"{name}.weight") for name in names]
        return self.precision.build_entry_quantizer(names, label, outside, shared_over)

    def build_embedding(self, name: str, module: nn.Module) -> nn.Module:
        """The embedding of the vocabulary."""
        rows = self._ownership(f"{name}.weight").split
        assert rows is not None, name
        return VocabParallelEmbedding(
            self.find_weight(name, module),
            rows=rows,
            padding_idx=module.padding_idx,  # type: ignore[arg-type]
            mesh=self.mesh,
            outside=self.plan.activation,
            name=name,
        )

    def find_weight(self, name: str, module: nn.Module) -> nn.Parameter:
        """This rank's part of the weight of module `name`."""
        return self._own(f"{name}.weight", module.get_parameter("weight"))

    def find_bias(self, name: str, module: nn.Module) -> nn.Parameter | None:
        """That of its bias, if it has one."""
        bias = dict(module.named_parameters()).get("bias")
        return None if bias is None else self._own(f"{name}.bias", bias)

    def _find_activation(self, parent: str, group: str, roles: dict[str, Role]) -> PointwiseActivation | None:
        name = match.find_activation(parent, group, roles)
        return None if name is None else self.model.get_submodule(name)  # type: ignore[return-value]

    def _linear(self, name: str, module: nn.Module, role: Column | VocabHead | InnerColumn | Row) -> nn.Module:
        match role:
            case Column():
                return self.build_column(name, module, role)
            case VocabHead():
                return self.build_head(name, module)
            case InnerColumn():
                shared_over = self._shared_axis(f"{name}.weight")
                return InnerColumnLinear(
                    self.find_weight(name, module), self.find_bias(name, module), shared_over=shared_over, name=name
                )
            case Row():
                outside, site = self.plan.activation, self._site(name, role, [name])
                precision = self.precision
                quantizer = PLAIN if precision is None else precision.build_exit_quantizer(name, outside)
                exit = Boundary.build_exit(self.mesh, outside, site, self.matmul, quantizer)
                return self.build_row(self.find_weight(name, module), self.find_bias(name, module), exit)

    def _token_local(self, name: str, module: nn.Module) -> nn.Module:
        apply_rms_norm(module)
        if not self.plan.sequence_parallel:
            return module
        if isinstance(module, Dropout):
            module.apply_mesh(self.mesh)
            return module
        if not _has_parameters(module):
            return module
        twin = TokenLocalEmbedding if isinstance(module, nn.Embedding) else TokenLocalModule
        return twin(module, mesh=self.mesh, name=name)

    def _feature_norm(self, name: str, module: nn.Module) -> nn.Module:
        split = self._ownership(f"{name}.weight").split
        assert split is not None, name
        shared_over = self._shared_axis(f"{name}.weight")
        weight = self.find_weight(name, module)
        return FeatureParallelNorm(module, weight, split=split, mesh=self.mesh, shared_over=shared_over, name=name)

    def _head_rows(self, name: str, module: nn.Module) -> nn.Module:
        names = [param for param, _ in module.named_parameters()]
        for param in names:
            module.register_parameter(param, self._own(f"{name}.{param}", module.get_parameter(param)))
        shared_over = self._shared_axis(f"{name}.{names[0]}")
        return module if shared_over is None else RegionModule(module, axis=shared_over, name=name)

    def _site(self, label: str, role: Role, names: Sequence[str]) -> Site:
        """Where linears `names`, which move one tensor, sit; the same on every rank, however unevenly they are cut."""
        weights = [self._ownership(f"{name}.weight") for name in names]
        features = sum(weight.split.longest for weight in weights if weight.split is not None)
        dtype = self.model.get_submodule(names[0]).get_parameter("weight").dtype
        # Attention is cut in heads, an MLP in columns.
        is_in_columns = isinstance(role, Column | Row) and isinstance(role.cut, Columns)
        region: Region = "head" if isinstance(role, VocabHead) else "mlp" if is_in_columns else "attention"
        width = weights[0].shape[0 if isinstance(role, Row) else 1]
        precision = self.precision
        return Site(
            label,
            region,
            width,
            features,
            _name_dtype(dtype),
            None if self.mesh.tp.reduce_dtype is None else _name_dtype(self.mesh.tp.reduce_dtype),
            None if precision is None or names[0] not in precision.linears else precision.describe(),
        )

    def _shared_axis(self, name: str) -> Axis | None:
        """The axis of the ranks that hold the same part of parameter `name`, where they are several."""
        ownership = self._ownership(name)
        if ownership.reduced_over is None or ownership.split is None:
            return None
        return self.mesh.build_subgroup(ownership.reduced_over, ownership.split.replica_groups)

    def _own(self, name: str, param: nn.Parameter) -> nn.Parameter:
        owner = self.names[name]
        if owner not in self.own:
            ownership = self.ownership[owner]
            piece = param if ownership.dim is None else shard_tensor(param, ownership, self.mesh.tp.rank)
            self.own[owner] = piece if piece is param else nn.Parameter(piece, requires_grad=param.requires_grad)
        return self.own[owner]

    def _ownership(self, name: str) -> Ownership:
        return self.ownership[self.names[name]]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _name_dtype(dtype: torch.dtype) -> DType:
    return cast(DType, str(dtype).removeprefix("torch."))
