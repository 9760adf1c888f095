"""Making a model parallel: each module that has a role in the plan is replaced by its twin, ownership is recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm.mesh import Axis, Mesh, build_mesh_from
from plait.config.overlap import OverlapConfig, Policy
from plait.contract.plan import Activation, Column, HeadLocal, Plan, Role, Row, TokenLocal, VocabEmbedding, VocabHead
from plait.dtype import DType
from plait.errors import ConfigError
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.receipt import Receipt
from plait.overlap.site import Region, Site
from plait.parallel import match
from plait.parallel.dropout import AttentionDropout, Dropout
from plait.parallel.embedding import VocabParallelEmbedding
from plait.parallel.gather_group import GatherGroup
from plait.parallel.linear import ColumnParallelLinear, RowParallelLinear
from plait.parallel.region.activation import PointwiseActivation
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.column import ColumnGroup
from plait.parallel.shard import shard_tensor
from plait.parallel.token_local import TokenLocalEmbedding, TokenLocalModule
from plait.sharding import Columns, Ownership

ModelT = TypeVar("ModelT", bound=nn.Module)

_RECORD = "plait_record"
"""The attribute of a parallel model that holds its `Record`."""


@dataclass
class Record:
    """What `parallelize` did to a model."""

    mesh: Mesh
    plan: Plan
    ownership: dict[str, Ownership]
    matmul: CollectiveMatmul | None
    """What runs its collective GEMMs, and keeps the receipt; None on one rank."""


def parallelize(
    model: ModelT, mesh: Mesh | DeviceMesh, plan: Plan, *, overlap: OverlapConfig | Policy = "disabled"
) -> ModelT:
    """Replace the modules named in `plan` by their parallel twins, in place, and return the model.

    Parameters become this rank's own parts, as plain tensors under unchanged names; a tied parameter stays one. Weights
    that are whole on entry (or on the meta device) are cut; nothing is communicated but the making of KV subgroups
    and, where something is overlapped, of shared memory.
    torch's dropouts become those whose mask is the same at every degree, also on a mesh of one rank.

    `overlap` says how collectives are plaited into the GEMMs: `disabled`, `mlp_only`, `full`, `auto` or a config that
    says more; `receipt_of(model)` then tells what runs.

    A DeviceMesh has an axis `tp`, and may have `dp`; `mesh_of(model)` is then the mesh that losses want.

    Raises:
        ConfigError: everything wrong with the plan at once: a path that names no module, a module of the wrong type, a
            degree that cannot be realised, a parameter without a role (its gradient would have no defined state) or a
            dropout without one (its mask would have none).
    """
    if record_of(model) is not None:
        raise ConfigError("parallelize: this model is parallel already", hint="build a fresh model for another plan")
    mesh = mesh if isinstance(mesh, Mesh) else build_mesh_from(mesh)
    roles = match.match_roles(model, plan)
    ownership = match.derive_ownership(model, roles, mesh.tp.degree, plan)
    roles = match.drop_aliases(model, roles)
    _swap(model, _build_dropouts(model, roles))
    matmul = CollectiveMatmul(mesh, OverlapConfig.model_validate(overlap)) if mesh.tp.degree > 1 else None
    if matmul is not None:
        build = _Build(model, mesh, plan, ownership, match.canonical_names(model), matmul)
        _swap(model, {model.get_submodule(name): build.twin(name, role) for name, role in roles.items()})
        build.build_gather_groups(roles)
    setattr(model, _RECORD, Record(mesh, plan, ownership, matmul))
    return model


def record_of(model: nn.Module) -> Record | None:
    """What `parallelize` did to `model`; None for an unsharded one.

    Raises:
        ConfigError: `model` is not parallel but a module in it is; to take it for unsharded would count shards wrong.
    """
    if _RECORD in vars(model):
        record: Record = vars(model)[_RECORD]
        return record
    inside = next((name for name, module in model.named_modules() if _RECORD in vars(module)), None)
    if inside is not None:
        raise ConfigError(
            f"{inside} of this {type(model).__name__} is parallel, the module around it is not",
            hint="give the module that parallelize was given",
        )
    return None


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh `model` was parallelized over; None for an unsharded one."""
    record = record_of(model)
    return record.mesh if record else None


def receipt_of(model: nn.Module) -> Receipt | None:
    """What each collective GEMM of `model` was asked for, runs and costs; None where nothing moves."""
    record = record_of(model)
    return record.matmul.receipt if record and record.matmul else None


def ownership_of(model: nn.Module) -> dict[str, Ownership]:
    """Who owns what of every parameter; everything is whole in an unsharded model."""
    record = record_of(model)
    if record is not None:
        return record.ownership
    return {name: Ownership(name, tuple(param.shape)) for name, param in model.named_parameters()}


def _build_dropouts(model: nn.Module, roles: dict[str, Role]) -> dict[nn.Module, nn.Module]:
    plain = {name: module for name in roles if isinstance(module := model.get_submodule(name), nn.Dropout)}
    return {
        module: AttentionDropout(module.p) if isinstance(roles[name], HeadLocal) else Dropout(module.p)
        for name, module in plain.items()
    }


def _swap(model: nn.Module, twins: dict[nn.Module, nn.Module]) -> None:
    """Put every twin in the place of its module; a module that is used under several names is in several places."""
    places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    for parent, name, module in places:
        if module in twins:
            setattr(parent, name, twins[module].train(module.training))


@dataclass
class _Build:
    model: nn.Module
    mesh: Mesh
    plan: Plan
    ownership: dict[str, Ownership]
    names: dict[str, str]
    """The one name under which a parameter is owned, by each name it has: a tied parameter has two."""
    matmul: CollectiveMatmul
    own: dict[str, nn.Parameter] = field(default_factory=dict)
    """This rank's part of each parameter, made once, so that what was tied stays tied."""

    def twin(self, name: str, role: Role) -> nn.Module:
        """What takes the place of module `name`; itself, where it works in a parallel model as it is."""
        module = self.model.get_submodule(name)
        match role:
            case Column() | VocabHead():
                return self._column(name, module, role)
            case Row():
                exit = Boundary.build_exit(self.mesh, self.plan.activation, self._site(name, role, [name]), self.matmul)
                return RowParallelLinear(self._weight(name, module), self._bias(name, module), exit=exit)
            case VocabEmbedding():
                return self._embedding(name, module)
            case HeadLocal(cut):
                split = cut.build_split(cut.num_heads * cut.head_width, self.mesh.tp.degree)
                module.apply_heads(split, self.mesh.tp.rank)  # type: ignore[operator]
                return module
            case TokenLocal():
                return self._token_local(name, module)
            case Activation():
                return module

    def build_gather_groups(self, roles: dict[str, Role]) -> None:
        for (parent, group), names in match.list_gather_groups(roles).items():
            members = [self.model.get_submodule(name) for name in names]
            site = self._site(f"{parent}.{group}" if parent else group, roles[names[0]], names)
            entry = Boundary.build_entry(self.mesh, self.plan.activation, site, self.matmul)
            shared_over = tuple(self._shared_axis(f"{name}.weight") for name in names)
            activation = self._find_activation(parent, group, roles)
            column_group = ColumnGroup(entry, shared_over, activation)
            gather_group = GatherGroup(self.model.get_submodule(parent), members, column_group)  # type: ignore[arg-type]
            # In all-reduce mode the input is whole anyway.
            if self.plan.sequence_parallel and match.is_region(parent, names, roles):
                gather_group.enter_with_parent()

    def _find_activation(self, parent: str, group: str, roles: dict[str, Role]) -> PointwiseActivation | None:
        name = match.find_activation(parent, group, roles)
        return None if name is None else self.model.get_submodule(name)  # type: ignore[return-value]

    def _column(self, name: str, module: nn.Module, role: Column | VocabHead) -> ColumnParallelLinear:
        weight, bias = self._weight(name, module), self._bias(name, module)
        entry = Boundary.build_entry(self.mesh, self.plan.activation, self._site(name, role, [name]), self.matmul)
        return ColumnParallelLinear(weight, bias, entry=entry, shared_over=self._shared_axis(f"{name}.weight"))

    def _embedding(self, name: str, module: nn.Module) -> VocabParallelEmbedding:
        rows = self._ownership(f"{name}.weight").split
        assert rows is not None, name
        return VocabParallelEmbedding(
            self._weight(name, module),
            rows=rows,
            padding_idx=module.padding_idx,  # type: ignore[arg-type]
            mesh=self.mesh,
            outside=self.plan.activation,
            name=name,
        )

    def _token_local(self, name: str, module: nn.Module) -> nn.Module:
        if not self.plan.sequence_parallel:
            return module
        if isinstance(module, Dropout):
            module.apply_mesh(self.mesh)
            return module
        if not any(True for _ in module.parameters()):
            return module
        twin = TokenLocalEmbedding if isinstance(module, nn.Embedding) else TokenLocalModule
        return twin(module, mesh=self.mesh, name=name)

    def _site(self, label: str, role: Role, names: Sequence[str]) -> Site:
        """Where linears `names`, which move one tensor, sit; the same on every rank, however unevenly they are cut."""
        weights = [self._ownership(f"{name}.weight") for name in names]
        features = sum(weight.split.longest for weight in weights if weight.split is not None)
        dtype = self.model.get_submodule(names[0]).get_parameter("weight").dtype
        # Attention is cut in heads, an MLP in columns.
        is_in_columns = isinstance(role, Column | Row) and isinstance(role.cut, Columns)
        region: Region = "head" if isinstance(role, VocabHead) else "mlp" if is_in_columns else "attention"
        width = weights[0].shape[0 if isinstance(role, Row) else 1]
        return Site(label, region, width, features, _name_dtype(dtype), _name_dtype(self.mesh.tp.reduce_dtype or dtype))

    def _shared_axis(self, name: str) -> Axis | None:
        """The axis of the ranks that hold the same part of parameter `name`, where they are several."""
        ownership = self._ownership(name)
        if ownership.reduced_over is None or ownership.split is None:
            return None
        return self.mesh.build_subgroup(ownership.reduced_over, ownership.split.replica_groups)

    def _weight(self, name: str, module: nn.Module) -> nn.Parameter:
        return self._own(f"{name}.weight", module.get_parameter("weight"))

    def _bias(self, name: str, module: nn.Module) -> nn.Parameter | None:
        bias = dict(module.named_parameters()).get("bias")
        return None if bias is None else self._own(f"{name}.bias", bias)

    def _own(self, name: str, param: nn.Parameter) -> nn.Parameter:
        owner = self.names[name]
        if owner not in self.own:
            ownership = self.ownership[owner]
            piece = param if ownership.dim is None else shard_tensor(param, ownership, self.mesh.tp.rank)
            self.own[owner] = piece if piece is param else nn.Parameter(piece, requires_grad=param.requires_grad)
        return self.own[owner]

    def _ownership(self, name: str) -> Ownership:
        return self.ownership[self.names[name]]


def _name_dtype(dtype: torch.dtype) -> DType:
    return cast(DType, str(dtype).removeprefix("torch."))
