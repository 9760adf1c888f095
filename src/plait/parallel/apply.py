"""Making a model parallel: each module that has a role in the plan is replaced by its twin, ownership is recorded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm.mesh import Axis, Mesh, build_mesh_from
from plait.config.axis.context import ContextConfig
from plait.config.overlap import OverlapConfig, Policy
from plait.contract.context.attention import ContextMethod
from plait.contract.context.mask import AttentionMask
from plait.contract.context.sequences import Sequences
from plait.contract.plan import AttentionCore, HeadLocal, Plan, Positions, Role, Row
from plait.contract.quantization import align_plan
from plait.errors import ConfigError
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.receipt import Receipt
from plait.parallel import match
from plait.parallel.build import Build
from plait.parallel.context.core import CausalAttention, ContextParallelAttention, build_dropout_error
from plait.parallel.context.sequences import ContextPositions, Documents, TokenPositions, build_sequences
from plait.parallel.dropout import AttentionDropout, Dropout, TokenDropout
from plait.parallel.precision.model import (
    ATTRIBUTE,
    ModelPrecision,
    Quantization,
    build_precision,
    build_twins,
    enter_regions,
    read_quantization,
)
from plait.sharding import Interval, Ownership, build_chunks
from plait.sharding.token_order import Order, build_order

ModelT = TypeVar("ModelT", bound=nn.Module)

_RECORD = "plait_record"
"""The attribute of a parallel model that holds its `Record`."""


@dataclass(frozen=True)
class Tied:
    """Parameters of several pipeline stages, by name: the ranks of `axis` hold the same of them, and the first counts.

    The gradient of each has an addend on every one of these ranks, which no layer sums.
    """

    names: frozenset[str]
    axis: Axis


@dataclass
class Record:
    """What `parallelize` did to a model."""

    mesh: Mesh
    plan: Plan
    ownership: dict[str, Ownership]
    matmul: CollectiveMatmul | None
    """What runs its collective GEMMs, and keeps the receipt; None on one rank."""
    context: ContextConfig
    """How sequences are dealt and attended where they are cut."""
    precision: ModelPrecision | None = None
    """Which linears are quantized, and how; None where none is."""
    tied: Tied | None = None
    """What pipeline stages hold in common; None where they have nothing, or there is one."""
    sharded_over: Axis | None = None
    """The axis over which FSDP has cut dim 0 of what tp left; None where data-parallel ranks hold all of it."""


def parallelize(
    model: ModelT,
    mesh: Mesh | DeviceMesh,
    plan: Plan,
    *,
    overlap: OverlapConfig | Policy = "disabled",
    quantization: Quantization = "none",
    context: ContextConfig | None = None,
    build: Callable[..., Build] = Build,
    is_kept: Callable[[str], bool] = lambda _: False,
) -> ModelT:
    """Replace the modules named in `plan` by their parallel twins, in place, and return the model.

    Parameters become this rank's own parts, as plain tensors under unchanged names; a tied parameter stays one. Weights
    that are whole on entry (or on the meta device) are cut; nothing is communicated but the making of KV subgroups
    and, where something is overlapped, of shared memory.
    torch's dropouts become those whose mask is the same at every degree, also on a mesh of one rank.

    `overlap` says how collectives are plaited into the GEMMs: `disabled`, `mlp_only`, `full`, `auto` or a config that
    says more; `receipt_of(model)` then tells what runs.

    `quantization` names a precision recipe, or is a config that says more: input, weight and gradient of linears in the
    blocks are then quantized before they are multiplied, and before what is gathered travels. On one rank such a linear
    becomes a `QuantizedLinear`, which says what the recipe means. Linears for which `is_kept` says so stay as they are.
    The tokens of every model on this mesh are then cut in units that share a scale.

    Over a context axis, `cp`, a model gets its own tokens of each sequence (`plait.enter_sequences`,
    `plait.take_own_tokens`), and `context` says how attention sees the others; for that it has its core in a
    `plait.CausalAttention`, with the role `attention_core`, and asks a `plait.TokenPositions` for positions.

    A DeviceMesh has an axis `tp`, and may have `dp_replicate`; `mesh_of(model)` is then the mesh that losses want.
    `build` makes the twins.

    Raises:
        ConfigError: everything wrong with the plan at once: a path that names no module, a module of the wrong type, a
            degree that cannot be realised, a parameter without a role (its gradient would have no defined state) or a
            dropout without one (its mask would have none). Or with the recipe: nothing that it is for, blocks that are
            torn, a device that emulates it under `strict`.
    """
    if record_of(model) is not None:
        raise ConfigError("parallelize: this model is parallel already", hint="build a fresh model for another plan")
    mesh = mesh if isinstance(mesh, Mesh) else build_mesh_from(mesh)
    quantization = read_quantization(quantization)
    if quantization.resolved is not None:
        plan = align_plan(plan, quantization.resolved)
    roles = match.match_roles(model, plan)
    ownership = match.derive_ownership(model, roles, mesh.tp.degree, plan)
    roles, names = match.drop_aliases(model, roles), match.canonical_names(model)
    weights = {name: ownership[names[f"{name}.weight"]] for name in roles if f"{name}.weight" in names}
    precision = build_precision(quantization, model, mesh, roles, weights, is_kept, plan.num_blocks)
    context = context or ContextConfig()
    _check_context(model, roles, mesh, plan)
    _swap(model, _build_dropouts(model, roles))
    _apply_context(model, roles, mesh, context)
    matmul = CollectiveMatmul(mesh, OverlapConfig.model_validate(overlap)) if mesh.tp.degree > 1 else None
    if matmul is not None:
        twins = build(model, mesh, plan, ownership, names, matmul, precision)
        _swap(model, {model.get_submodule(name): twins.twin(name, role) for name, role in roles.items()})
        twins.build_gather_groups(roles)
    elif precision is not None:
        _swap(model, build_twins(precision, model))
        enter_regions(precision, model, match.list_gather_groups(roles, plan), plan)
    setattr(model, _RECORD, Record(mesh, plan, ownership, matmul, context, precision))
    setattr(model, ATTRIBUTE, precision)
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


def adopt(outer: nn.Module, inner: nn.Module) -> str:
    """Let `outer` be parallel as `inner`, which it holds, is; return the path of that, by which names here begin."""
    record = record_of(inner)
    assert record is not None, type(inner)
    path = next(name for name, module in outer.named_modules() if module is inner)
    plan = Plan(
        {f"{path}.{pattern}": role for pattern, role in record.plan.roles.items()},
        sequence_parallel=record.plan.sequence_parallel,
        regions=tuple(f"{path}.{pattern}" for pattern in record.plan.regions),
    )
    ownership = {f"{path}.{name}": replace(own, name=f"{path}.{own.name}") for name, own in record.ownership.items()}
    setattr(outer, _RECORD, replace(record, plan=plan, ownership=ownership))
    return path


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh `model` was parallelized over; None for an unsharded one."""
    record = record_of(model)
    return record.mesh if record else None


def receipt_of(model: nn.Module) -> Receipt | None:
    """What each collective GEMM of `model` was asked for, runs and costs; None where nothing moves."""
    record = record_of(model)
    return record.matmul.receipt if record and record.matmul else None


def enter_sequences(model: nn.Module, seq_len: int, documents: Documents = ()) -> Sequences:
    """Say, before each forward pass, how long its sequences are, and which documents they are packed from.

    Over a context axis the model then gets `plait.take_own_tokens(tokens, mesh)`. A token sees those of its document
    only, and its position counts from the start of that. `documents` are intervals of positions, in order, for each
    row of the batch, of all rows if there is one entry; what is in none of them is padding, and its output means
    nothing. That holds until something else is said; where no sequence is ever cut or has documents, it need not be.

    Raises:
        ShardingError: documents that overlap, or go beyond `seq_len`.
        ConfigError: documents, and attention that knows of none.
    """
    record = record_of(model)
    if record is not None:
        roles = record.plan.resolved.values()
        if documents and record.plan.num_blocks is None and not any(isinstance(role, AttentionCore) for role in roles):
            raise _build_core_error(model, "tokens would see those of other documents")
        sequences = build_sequences(record.mesh, record.context.order, seq_len, documents)
        record.mesh.sequences = sequences
        return sequences
    sequences = Sequences(build_order(Order.CONTIGUOUS, seq_len, 1), 0, AttentionMask(documents=documents))
    for module in model.modules():
        if isinstance(module, CausalAttention | TokenPositions):
            module.mask = sequences.mask
    return sequences


def ownership_of(model: nn.Module) -> dict[str, Ownership]:
    """Who owns what of every parameter; everything is whole in an unsharded model."""
    record = record_of(model)
    if record is not None:
        return record.ownership
    return {name: Ownership(name, tuple(param.shape)) for name, param in model.named_parameters()}


def intervals_of(model: nn.Module) -> dict[str, tuple[Interval, ...]]:
    """What this rank holds of every parameter: an interval of each dim of the whole one."""
    record = record_of(model)
    rank, axis = (0, None) if record is None else (record.mesh.tp.rank, record.sharded_over)
    own = {name: each.intervals(rank) for name, each in ownership_of(model).items()}
    return own if axis is None else {name: _take_chunk(each, axis) for name, each in own.items()}


def _take_chunk(intervals: tuple[Interval, ...], axis: Axis) -> tuple[Interval, ...]:
    first, *others = intervals
    chunk = build_chunks(len(first), axis.degree).intervals[axis.rank]
    return (Interval(first.start + chunk.start, first.start + chunk.stop), *others)


def tied_in(model: nn.Module) -> Tied | None:
    """What this pipeline stage has in common with another one, on another rank."""
    record = record_of(model)
    return None if record is None or record.tied is None or record.tied.axis.degree == 1 else record.tied


def repeated_in(model: nn.Module) -> frozenset[str]:
    """Parameters of `model` that an earlier pipeline stage, on another rank, holds as well, and counts and writes."""
    tied = tied_in(model)
    return frozenset() if tied is None or tied.axis.rank == 0 else tied.names


def tie(model: nn.Module, tied: Tied) -> None:
    """Say what a parallel model, which is a pipeline stage, has in common with another one."""
    record = record_of(model)
    assert record is not None, type(model)
    record.tied = tied


def _build_dropouts(model: nn.Module, roles: dict[str, Role]) -> dict[nn.Module, nn.Module]:
    plain = {name: module for name in roles if isinstance(module := model.get_submodule(name), nn.Dropout)}
    return {
        module: AttentionDropout(module.p) if isinstance(roles[name], HeadLocal) else Dropout(module.p)
        for name, module in plain.items()
    }


def _build_core_error(model: nn.Module, what: str) -> ConfigError:
    """A model whose attention is none of ours."""
    return ConfigError(
        f"no module of this {type(model).__name__} has the role attention_core, so {what}",
        hint="let a plait.CausalAttention attend, and give it that role in the plan; a model of transformers is made "
        "parallel with documents=True",
    )


def _check_context(model: nn.Module, roles: dict[str, Role], mesh: Mesh, plan: Plan) -> None:
    """Refuse a model whose attention would see its own tokens only, or drop what never exists."""
    if mesh.cp.degree == 1:
        return
    is_only_ends = plan.num_blocks is not None and not any(isinstance(role, Row) for role in roles.values())
    if not is_only_ends and not any(isinstance(role, AttentionCore) for role in roles.values()):
        what = f"over cp of degree {mesh.cp.degree} each token would see those of its own rank only"
        raise _build_core_error(model, what)
    for name, role in roles.items():
        if isinstance(role, HeadLocal) and model.get_submodule(name).p:
            raise build_dropout_error(name, mesh.cp.degree)


def _apply_context(model: nn.Module, roles: dict[str, Role], mesh: Mesh, context: ContextConfig) -> None:
    """Let attention, positions and dropouts follow the tokens that this rank has of each sequence."""
    twins: dict[nn.Module, nn.Module] = {}
    for name, role in roles.items():
        if isinstance(role, AttentionCore):
            core: CausalAttention = model.get_submodule(name)  # type: ignore[assignment]
            twins[core] = ContextParallelAttention(mesh, ContextMethod(context.method), name, core.window)
        elif isinstance(role, Positions):
            twins[model.get_submodule(name)] = ContextPositions(mesh, name)
    _swap(model, twins)
    for module in model.modules():
        if isinstance(module, TokenDropout) and mesh.cp.degree > 1:
            module.apply_context(mesh)


def _swap(model: nn.Module, twins: dict[nn.Module, nn.Module]) -> None:
    """Put every twin in the place of its module; a module that is used under several names is in several places."""
    places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    for parent, name, module in places:
        if module in twins:
            setattr(parent, name, twins[module].train(module.training))
