"""A parallel model from a Hugging Face directory, of which each rank reads its own part and nothing else."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from plait.checkpoint.weights import WeightFiles
from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.config.axis.context import ContextConfig
from plait.config.overlap import OverlapConfig, Policy
from plait.errors import CheckpointError
from plait.hf.directory.names import Naming, match_tensors
from plait.hf.directory.skeleton import build_skeleton, list_saved_buffers, materialize
from plait.hf.directory.source import DirectorySource, Intervals
from plait.hf.lora.layers import is_adapter
from plait.hf.parallelize import parallelize
from plait.hf.stored import Stored, stored_of
from plait.parallel.apply import ownership_of
from plait.parallel.precision.model import Quantization
from plait.sharding import Interval


def load_pretrained(
    path: str | Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    overlap: OverlapConfig | Policy = "disabled",
    quantization: Quantization = "none",
    context: ContextConfig | None = None,
    documents: bool = False,
    sequence_parallel: bool = True,
) -> nn.Module:
    """The causal language model of a directory, parallel over `mesh`, on every rank of it.

    The model is built without memory, made parallel, and only then filled: a rank holds its own part, and reads its own
    part. `dtype` is that of the config unless given. The model is in evaluation mode, as transformers gives it.

    Raises:
        ConfigError: on every rank: no such directory, no config, an unknown architecture, a degree that cannot be.
        CheckpointError: on every rank: no weights, a damaged file, tensors that are not those of the model.
    """
    folder = Path(path)
    with together(mesh):
        model = build_skeleton(folder, dtype=dtype)
        WeightFiles.from_folder(folder)
    model = parallelize(
        model,
        mesh,
        overlap=overlap,
        quantization=quantization,
        context=context,
        documents=documents,
        sequence_parallel=sequence_parallel,
    )
    load_weights(model, folder, mesh)
    return model


@torch.no_grad()
def load_weights(model: nn.Module, path: str | Path, mesh: Mesh) -> None:
    """Fill a parallel model, on the meta device or not, with this rank's part of the weights in a directory.

    Everything is checked on all ranks before anything is filled. Besides the parameters, no more of the weights is in
    memory than the piece being read, and that only where it has to be converted on its way to another device.

    Raises:
        CheckpointError: on every rank: no weights, a damaged file, tensors that are not those of the model.
    """
    with together(mesh):
        source = open_directory(model, Path(path))
        source.check_twins()
    materialize(model, mesh.device)
    ownership = ownership_of(model)
    with together(mesh):
        for fqn, param in model.named_parameters():
            if fqn not in source.stored:  # of an adapter
                continue
            _fill(source, fqn, param, ownership[fqn].intervals(mesh.tp.rank))
        for fqn, buffer in list_saved_buffers(model):
            _fill(source, fqn, buffer, tuple(Interval(0, size) for size in buffer.shape))


def open_directory(model: nn.Module, folder: Path) -> DirectorySource:
    """The weights in a directory, matched with the tensors of a model.

    Raises:
        CheckpointError: no weights, a damaged file, tensors that are not those of the model.
    """
    return open_stored(folder, list_stored(model), derive_naming(model))


def open_stored(folder: Path, stored: Mapping[str, Stored], naming: Naming) -> DirectorySource:
    """As `open_directory`, the tensors given by where they are stored.

    Raises:
        CheckpointError: no weights, a damaged file, tensors that are not these.
    """
    files = WeightFiles.from_folder(folder)
    wanted = {each.name: each.shape for each in stored.values()}
    return DirectorySource(files, stored, match_tensors(wanted, files, naming))


def list_stored(model: nn.Module) -> dict[str, Stored]:
    """Where each parameter and each saved buffer of a model is in a checkpoint, in the model's order.

    Adapters are in none: they have a directory of their own.
    """
    stored = stored_of(model)
    whole = {fqn: Stored(fqn, tuple(b.shape)) for fqn, b in list_saved_buffers(model)}
    return {fqn: stored[fqn] for fqn, _ in model.named_parameters() if not is_adapter(fqn)} | whole


def derive_naming(model: nn.Module) -> Naming:
    """What a model of transformers says about the names in its checkpoints."""
    prefix = getattr(model, "base_model_prefix", "")
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    is_tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return Naming(
        f"{prefix}." if prefix else "",
        {target: source for target, source in tied.items() if target in is_tied or source in is_tied},
        tuple(sorted(ignored)),
    )


def _fill(source: DirectorySource, fqn: str, target: torch.Tensor, intervals: Intervals) -> None:
    if tuple(target.shape) != tuple(map(len, intervals)):
        raise CheckpointError(f"{fqn}: is {list(target.shape)} on this rank, and should be {list(map(len, intervals))}")
    if target.numel():
        source.copy_into(target, fqn, intervals)
