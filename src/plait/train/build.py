"""What a run trains: a model of our own from the start, or the weights of a Hugging Face directory."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait.comm.agree import together
from plait.comm.group import find_memory
from plait.comm.mesh import Mesh
from plait.config.hf.read import load_hf_json
from plait.config.run import FineTuneConfig, RunConfig
from plait.contract.model import derive_ownership, derive_plan
from plait.contract.pipeline.step import select_run_parts
from plait.contract.report.training import build_step_tally
from plait.contract.training import derive_run_model
from plait.errors import ConfigError
from plait.hf.adapters import add_adapters, load_with_adapters
from plait.hf.blocks import list_blocks
from plait.hf.context.check import check_attention
from plait.hf.convert.parts import list_parts
from plait.hf.directory.skeleton import build_skeleton
from plait.hf.load import load_pretrained, open_directory
from plait.hf.plan import plan_for
from plait.models.blocks import prepare_blocks
from plait.models.init import initialize
from plait.models.registry import build_model
from plait.models.stage import keep_parts
from plait.parallel.apply import parallelize
from plait.parallel.block.compile import check_compiler
from plait.parallel.block.recompute import apply_recompute
from plait.parallel.dropout import seed_dropout
from plait.parallel.fsdp.apply import apply_fsdp
from plait.train.optimizer import AdamW, FlatGradients, Gradients, ShardedGradients, StepGradients
from plait.train.pipeline import PipelineTrainer, tie_ends
from plait.train.replicas import ReplicaGradients
from plait.train.step import Trainer, compute_hf_logits, compute_native_logits
from plait.units import format_bytes


def build_trainer(run: RunConfig | FineTuneConfig, mesh: Mesh) -> Trainer:
    """Build this rank's part of the model, with gradients and optimizer; the whole is never in memory.

    Raises:
        PlaitError: on every rank: a directory that cannot be loaded, a degree that cannot be.
    """
    if isinstance(run, RunConfig):
        model = build_native(run, mesh)
        prepare_blocks(model, run.train, mesh)
    else:
        model = load_directory(run, mesh)
        if run.train.recompute == "full":
            for block in list_blocks(model):
                apply_recompute(block, mesh)
    seed_dropout(model, run.seed)
    compute = getattr(torch, run.precision.compute)
    parameters = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = AdamW(parameters, compute, run.train)
    gradients = _build_gradients(run, model, parameters)
    replicas = ReplicaGradients(parameters, model, mesh, find_master_dtype(run))
    if isinstance(run, RunConfig):
        given = (run, mesh, model, gradients, optimizer, compute_native_logits, replicas)
        return Trainer(*given) if mesh.pp.degree == 1 else PipelineTrainer(*given)
    with together(mesh):
        hf_config = load_hf_json(Path(run.model.path) / "config.json")
    return Trainer(run, mesh, model, gradients, optimizer, compute_hf_logits, replicas, list_parts(model), hf_config)


def _build_gradients(
    run: RunConfig | FineTuneConfig, model: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> Gradients:
    if not isinstance(model, FSDPModule):
        return FlatGradients(parameters, find_master_dtype(run))
    return ShardedGradients(model, parameters) if run.parallel.pp == 1 else StepGradients(model, parameters)


def check_model(run: RunConfig | FineTuneConfig) -> None:
    """Check, without other ranks and before any of them waits, that the run's model can be built, or loaded.

    Raises:
        ConfigError: there is nothing to compile it with; a directory has no usable config, or its architecture cannot
            be made parallel, or its attention not be cut over context ranks.
        CheckpointError: it has no weights, damaged ones, or those of another model.
    """
    if run.train.compile:
        check_compiler()
    if isinstance(run, FineTuneConfig):
        skeleton = build_skeleton(Path(run.model.path))
        open_directory(skeleton, Path(run.model.path))
        if run.model.lora is not None:
            add_adapters(skeleton, run.model.lora)
        plan = plan_for(skeleton)
        if run.parallel.cp > 1 or run.masks_documents:
            check_attention(skeleton, plan, run.parallel.cp)


def check_room(run: RunConfig | FineTuneConfig, device: torch.device) -> None:
    """Check that the first rank has memory for what it cannot do without; `plait plan` says how much it takes in all.

    That is parameters, their gradients and moments, and what one micro-batch keeps for backward. The model of a
    directory, which somebody has had in memory before, is not counted.

    Raises:
        ConfigError: the device has less.
    """
    if isinstance(run, FineTuneConfig):
        return
    tally, room_bytes = build_step_tally(run, derive_run_model(run)), find_memory(device)
    saved_bytes = tally.micro_batch.saved_bytes
    if tally.state_bytes + saved_bytes > room_bytes:
        raise ConfigError(
            f"a rank needs {format_bytes(tally.state_bytes)} for its parameters, gradients and moments and "
            f"{format_bytes(saved_bytes)} for one micro-batch of {run.train.micro_batch_size} x {run.seq_len} tokens, "
            f"and there are {format_bytes(room_bytes)} on {device.type}",
            hint='more ranks (plait plan says how), a smaller train.micro_batch_size, or train.recompute = "full"',
        )


def build_native(run: RunConfig, mesh: Mesh, *, is_sharded: bool = True) -> nn.Module:
    """This rank's part of a model of our own, in the format of the masters, as training starts from it.

    `is_sharded` is false for all of what the ranks of dp_shard share out.
    """
    plan = derive_plan(run.model, sequence_parallel=run.parallel.sequence_parallel, quantization=run.quantization)
    whole = build_model(run.model, device="meta", dtype=find_master_dtype(run))
    if mesh.pp.degree > 1:
        _build_subgroups(run, mesh)
        keep_parts(whole, select_run_parts(run, mesh.pp.rank))
        plan = plan.select([name for name, _ in whole.named_modules()], run.model.num_layers)
    model = parallelize(whole, mesh, plan, overlap=run.overlap, quantization=run.quantization, context=run.context)
    if mesh.pp.degree > 1:
        tie_ends(model, run, mesh)
    if is_sharded and run.parallel.dp_shard > 1:
        _apply_fsdp(model, run, mesh)
    else:
        model.to_empty(device=mesh.device)
    initialize(model, run.model, run.seed)
    return model


def _apply_fsdp(model: nn.Module, run: RunConfig | FineTuneConfig, mesh: Mesh) -> None:
    compute = getattr(torch, run.precision.compute)
    apply_fsdp(model, mesh, compute=compute, reshard_after_forward=run.parallel.frees_blocks)


def _build_subgroups(run: RunConfig, mesh: Mesh) -> None:
    """Those of ranks that share KV heads: all ranks have to build them, and a stage may have no attention."""
    for own in derive_ownership(run.model, mesh.tp.degree, sequence_parallel=run.parallel.sequence_parallel).values():
        if own.reduced_over is not None and own.split is not None:
            mesh.build_subgroup(own.reduced_over, own.split.replica_groups)


def find_master_dtype(run: RunConfig | FineTuneConfig) -> torch.dtype:
    """In which format weights and gradients are kept: float32, or float64 in a verification."""
    return torch.promote_types(getattr(torch, run.precision.compute), torch.float32)


def load_directory(run: FineTuneConfig, mesh: Mesh) -> nn.Module:
    """This rank's part of the model of a directory, with adapters where these are trained.

    Raises:
        PlaitError: on every rank: it cannot be loaded, or not be cut like this, or nothing of it is trained.
    """
    load = (
        load_pretrained if run.model.lora is None else partial(load_with_adapters, lora=run.model.lora, seed=run.seed)
    )
    model = load(
        run.model.path,
        mesh,
        dtype=torch.float32,
        overlap=run.overlap,
        quantization=run.quantization,
        context=run.context,
        documents=run.masks_documents,
        sequence_parallel=run.parallel.sequence_parallel,
    )
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(f"{run.model.path}: none of its parameters is trained")
    _round_frozen(model, getattr(torch, run.precision.compute))
    if run.parallel.dp_shard > 1:
        if packed := list_parts(model):
            raise ConfigError(
                f"{run.model.path}: {next(iter(packed))} is several tensors of the directory in one, which "
                f"parallel.dp_shard = {run.parallel.dp_shard} would cut across",
                hint="use parallel.dp_replicate, or train a directory whose linears are apart, as Llama's are",
            )
        _apply_fsdp(model, run, mesh)
    return model


@torch.no_grad()
def _round_frozen(model: nn.Module, compute: torch.dtype) -> None:
    """What is not trained has no master: it is kept in the dtype of the computation."""
    for param in model.parameters():
        if not param.requires_grad and param.is_floating_point() and param.dtype != compute:
            param.data = param.data.to(compute)
