"""A continuous batch over the model of a directory, on every rank of a mesh."""

from pathlib import Path
from typing import Any

import torch

from plait.comm.agree import together
from plait.comm.group import own_device
from plait.comm.mesh import Mesh, build_mesh
from plait.config.overlap import OverlapConfig, Policy
from plait.generate.batch import ContinuousBatch, Limits
from plait.generate.decoding import cut_for_decoding, replace_packed
from plait.generate.masks import derive_mask_form
from plait.generate.sampling.sample import build_vocab_shard
from plait.generate.source import Source, open_source
from plait.generate.views import Views, share_tensors
from plait.hf.directory.skeleton import build_skeleton
from plait.hf.load import load_pretrained, open_directory
from plait.hf.plan import plan_for
from plait.parallel import match
from plait.sharding import MeshShape


def build_generating_mesh(tp: int, dtype: torch.dtype) -> Mesh:
    """The mesh of ranks that generate with weights of `dtype`: sums of half-precision addends are float32."""
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    return build_mesh(MeshShape(tp=tp), device=own_device(), reduce_dtype=reduce_dtype, shared_memory=True)


def open_batch(
    path: str | Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    overlap: OverlapConfig | Policy = "disabled",
    limits: Limits | None = None,
) -> ContinuousBatch:
    """Load a model and make it ready to generate; every rank of the mesh calls it.

    Raises:
        ConfigError: on every rank: a directory, architecture or degree that cannot be used.
        CheckpointError: on every rank: weights that cannot be read.
    """
    with together(mesh):
        source = open_source(path)
    views = load_views(source.folder, mesh, dtype=dtype, overlap=overlap)
    return build_batch(source, views, mesh, limits)


def load_views(
    folder: Path, mesh: Mesh, *, dtype: torch.dtype | None = None, overlap: OverlapConfig | Policy = "disabled"
) -> Views:
    """The model of a directory, in the view that reads prompts and in the one that decodes."""
    reading = load_pretrained(folder, mesh, dtype=dtype, overlap=overlap)
    decoding = reading
    if mesh.tp.degree > 1:
        decoding = cut_for_decoding(build_skeleton(folder, dtype=dtype), mesh).eval()
        share_tensors(reading, decoding)
    parameter = next(reading.parameters())
    config: Any = reading.config
    mask_form = derive_mask_form(config.get_text_config())
    return Views(reading, decoding, mask_form, parameter.device, parameter.dtype)


def build_batch(source: Source, views: Views, mesh: Mesh, limits: Limits | None = None) -> ContinuousBatch:
    """A batch of a model that is loaded."""
    shard = build_vocab_shard(mesh, source.capacity.vocab_size)
    return ContinuousBatch(views, shard, source.decode, capacity=source.capacity, eos_ids=source.eos_ids, limits=limits)


def check_model(path: str | Path, tp: int) -> None:
    """Refuse a model that has no weights, no plan, or cannot be cut over `tp` ranks; needs no process group.

    Raises:
        ConfigError: it cannot be cut, or nobody knows how.
        CheckpointError: there are no weights, their files are damaged, or they are not those of the model.
    """
    folder = Path(path)
    model = build_skeleton(folder)
    config: Any = model.config
    derive_mask_form(config.get_text_config())
    open_directory(model, folder)
    if tp == 1:
        return
    plan = plan_for(model)
    replace_packed(model, plan)
    roles = plan.build_plan(sequence_parallel=True)
    match.derive_ownership(model, match.match_roles(model, roles), tp, roles)
