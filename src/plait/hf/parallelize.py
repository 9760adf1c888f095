"""Making a Hugging Face causal language model parallel."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm.mesh import Mesh, build_mesh_from
from plait.config.axis.context import ContextConfig
from plait.config.overlap import OverlapConfig, Policy
from plait.contract.plan import Plan, Role
from plait.errors import ConfigError, ShardingError
from plait.hf.context.calls import OwnTokens
from plait.hf.context.check import check_attention
from plait.hf.context.core import put_cores
from plait.hf.finding import generic
from plait.hf.heads import apply_heads
from plait.hf.lora import twins as adapters
from plait.hf.lora.layers import is_adapter, unwrap
from plait.hf.packed import is_transposed, take_apart
from plait.hf.plan import ModelPlan, plan_for
from plait.hf.stored import ATTRIBUTE, Stored
from plait.hf.twin.batch import CutBatch, WholeBatch
from plait.hf.twin.calls import Calls
from plait.hf.twin.loss import CausalLoss
from plait.hf.twin.region import BatchBuild
from plait.parallel import apply
from plait.parallel.precision.model import Quantization, read_quantization

ModelT = TypeVar("ModelT", bound=nn.Module)


def parallelize(
    model: ModelT,
    mesh: Mesh | DeviceMesh,
    plan: Plan | ModelPlan | None = None,
    *,
    overlap: OverlapConfig | Policy = "disabled",
    quantization: Quantization = "none",
    context: ContextConfig | None = None,
    documents: bool = False,
    sequence_parallel: bool = True,
) -> ModelT:
    """Make a model tensor- and, unless told otherwise, sequence-parallel, in place, and return it.

    With a `Plan` (which says by itself whether it is sequence-parallel) any model: its modules become their parallel
    twins, as `plait.parallel.apply.parallelize` tells, and `context` says how it attends over `cp`. Without, a causal
    language model of transformers, by `plan_for(model)`, which may also be given. Then

    * parameters become this rank's own parts, under their own names; a packed linear becomes its parts, below its name;
    * `logits` are this rank's columns, `[B, S, V/tp]`; `model(..., gather_logits=True)` gives them whole;
    * `loss`, where labels are given, is that of transformers, without gathering logits, the same on every rank;
    * `model.generate` works as before;
    * activations between the layers are those of own tokens, under sequence parallelism;
    * over a context axis it takes own tokens, `model(plait.take_own_tokens(ids, mesh))` behind `plait.enter_sequences`,
      and places them by itself; `context` says how they meet the others. Labels are then shifted before they are taken,
      and gradients are addends, to be summed over cp as over dp;
    * with `documents` it is called in the same way at every degree, and attention stays within the documents that
      `plait.enter_sequences` tells of, each of which counts positions from 0;
    * every gradient is that of the unsharded model, or this rank's part of it;
    * with a recipe as `quantization` linears in the layers are quantized, but for those of adapters; what else reads
      the input of a quantized attention or MLP sees it as those do. Delayed scales look back at the steps after each of
      which `plait.update_amax_history(model)` was called; stochastic rounding wants `plait.seed_dropout`.

    Weights that are whole on entry, or on the meta device, are cut; nothing is read nor communicated but what
    `plait.parallel.apply.parallelize` says.

    Raises:
        ConfigError: everything that `plan_for` finds, or a degree that cannot be realised; attention that cannot be cut
            over a context axis or kept within documents: with softcapping, sinks, dropout, or not through transformers'
            interface.
    """
    how: dict[str, Any] = {"overlap": overlap, "quantization": read_quantization(quantization), "context": context}
    if isinstance(plan, Plan):
        return apply.parallelize(model, mesh, plan, **how)
    if apply.record_of(model) is not None:
        raise ConfigError("parallelize: this model is parallel already", hint="build a fresh model for another plan")
    inner: nn.Module = unwrap(model)
    mesh = mesh if isinstance(mesh, Mesh) else build_mesh_from(mesh)
    batch = CutBatch(mesh) if sequence_parallel and mesh.tp.degree > 1 else WholeBatch(mesh)
    plan = plan_for(inner) if plan is None else plan
    _check_degree(plan, mesh.tp.degree)
    cores: dict[str, Role] = {}
    if mesh.cp.degree > 1 or documents:
        check_attention(inner, plan, mesh.cp.degree)
        cores = put_cores(inner, plan.heads)
    if mesh.tp.degree == 1 and how["quantization"].resolved is None:
        setattr(inner, ATTRIBUTE, adapters.locate(inner, {}))
        roles = _build_lone_plan(inner, cores, sequence_parallel=sequence_parallel)
        apply.parallelize(inner, mesh, roles, **how)
    else:
        # On one rank too, as the scales of a packed linear's parts are those of parts at every degree.
        setattr(inner, ATTRIBUTE, take_apart_model(inner, plan))
        roles = plan.build_plan(sequence_parallel=sequence_parallel)
        _cut(inner, batch, plan, replace(roles, roles={**roles.roles, **cores}), **how)
    adapters.finish(inner)
    inner.loss_function = CausalLoss(batch)  # type: ignore[assignment]
    Calls(batch).install(inner, plan, OwnTokens(mesh, type(inner).__name__) if cores else None)
    if inner is not model:
        adapters.adopt(model, inner)
    return model


def _check_degree(plan: ModelPlan, degree: int) -> None:
    """Refuse a degree at which heads cannot be cut, as long as the model is what it was."""
    problems: dict[str, None] = {}
    for name, heads in plan.heads.items():
        try:
            heads.per_rank(degree, 0)
        except ShardingError as error:
            problems[f"{generic(name)}: {error.message} ({error.hint})"] = None
    if problems:
        raise ConfigError.from_problems("parallelize", list(problems))


def _cut(model: nn.Module, batch: WholeBatch, plan: ModelPlan, roles: Plan, **how: Any) -> None:
    """Let every module have this rank's part; `how` is as `apply.parallelize` has it."""
    mesh = batch.mesh
    adapters.prepare(model, roles, mesh)
    apply.parallelize(model, mesh, roles, build=partial(BatchBuild, batch=batch), is_kept=is_adapter, **how)
    for name, heads in plan.heads.items():
        apply_heads(model.get_submodule(name), heads, heads.per_rank(mesh.tp.degree, mesh.tp.rank))


def take_apart_model(model: nn.Module, plan: ModelPlan) -> dict[str, Stored]:
    """Replace packed and transposed linears by what they consist of; where all of that is stored."""
    stored: dict[str, Stored] = {}
    for name, module in list(model.named_modules()):
        if name in plan.parts or is_transposed(module):
            twin, places = take_apart(name, module, plan.parts.get(name, ()))
            above, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(above), leaf, twin)
            stored |= places
    return adapters.locate(model, stored)


def _build_lone_plan(model: nn.Module, cores: Mapping[str, Role], *, sequence_parallel: bool) -> Plan:
    """On one rank all is whole, and linears stay as they are, packed or not."""
    owners = {name for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    owners |= {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    roles: dict[str, Role | str] = dict.fromkeys(sorted(map(generic, owners)), "whole")
    return Plan({**roles, **cores}, sequence_parallel=sequence_parallel)
