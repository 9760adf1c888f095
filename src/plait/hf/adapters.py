"""Adapters on a model without weights, and what they begin with."""

import copy
import warnings
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.checkpoint.weights import WeightFiles
from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.config.hf.lora import LoraConfig
from plait.errors import ConfigError
from plait.hf.directory.skeleton import build_skeleton
from plait.hf.library import import_library
from plait.hf.load import load_weights
from plait.hf.lora.files import NAME, load_adapter
from plait.hf.lora.layers import is_adapter, list_adapted
from plait.hf.packed import is_transposed
from plait.hf.parallelize import parallelize
from plait.parallel.apply import mesh_of, ownership_of
from plait.parallel.rng import derive_key, uniform_


def load_with_adapters(
    path: str | Path,
    mesh: Mesh,
    lora: LoraConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    **how: Any,
) -> nn.Module:
    """As `load_pretrained`, with adapters, which alone are trained: fresh ones by `seed`, or those of `lora.path`.

    `how` is as `parallelize` takes it.

    Raises:
        ConfigError: on every rank: as there, or no linear is meant, or one that cannot have adapters.
        CheckpointError: on every rank: as there, or the adapters are not those of this model.
    """
    folder = Path(path)
    with together(mesh):
        model = build_skeleton(folder, dtype=dtype)
        WeightFiles.from_folder(folder)
        add_adapters(model, lora)
    model = parallelize(model, mesh, **how)
    load_weights(model, folder, mesh)
    if lora.path is None:
        initialize_adapters(model, seed)
    else:
        load_adapter(model, lora.path, mesh)
    return model


def add_adapters(model: nn.Module, lora: LoraConfig) -> None:
    """Put adapters, on the meta device, around linears of a model, in place; nothing else is trained any more.

    Raises:
        ConfigError: peft is not installed, or finds nothing that it could put them around.
    """
    try:
        _inject(model, build_peft_config(model, lora), NAME)
    except ValueError as error:
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.lora: peft does not take it: {said}", hint="set model.lora.target_modules") from error


def copy_adapters(source: nn.Module, model: nn.Module) -> None:
    """Put the adapters that `source` has, on the meta device, around the same linears of `model`, in place."""
    configs: Mapping[str, Any] = getattr(source, "peft_config", {})
    for name, config in configs.items():
        _inject(model, copy.deepcopy(config), name)


def _inject(model: nn.Module, config: Any, name: str) -> None:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_library("peft").inject_adapter_in_model(config, model, adapter_name=name)
    for _, layer in list_adapted(model):
        dtype = next(layer.base_layer.parameters()).dtype
        layer.lora_A.to(dtype)
        layer.lora_B.to(dtype)


def build_peft_config(model: nn.Module, lora: LoraConfig) -> Any:
    """The same adapters as peft says it."""
    return import_library("peft").LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if lora.target_modules is None else list(lora.target_modules),
        fan_in_fan_out=any(is_transposed(module) for module in model.modules()),
        task_type="CAUSAL_LM",
    )


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Fill the adapters of a parallel model: `A` uniform as peft has it, `B` zeros; the same at every degree.

    `A [r, D]` lies between the two `1/sqrt(D)`: `kaiming_uniform_` with `a = sqrt(5)`. It is a function of `seed`, the
    name of the parameter and the global index of each element.
    """
    mesh, ownership = mesh_of(model), ownership_of(model)
    rank = 0 if mesh is None else mesh.tp.rank
    for name, param in model.named_parameters():
        if not is_adapter(name):
            continue
        own = ownership[name]
        if "lora_A" in name.split("."):
            bound = 1 / sqrt(own.shape[1])
            uniform_(param, derive_key(seed, "init", name), own.intervals(rank), own.shape, low=-bound, high=bound)
        else:
            param.zero_()
